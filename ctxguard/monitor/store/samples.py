"""Samples on their way: written with their writers' counts, claimed for judging, finished.

A writer's report is added in the transaction that stores its samples. What a process held when it
last reported is pending in that hour and the next, and unaccounted for then: one that lives has
reported again, unless it cannot reach the store. Samples wait for the judge in the order of their
ids, so that no change of a clock puts one before another.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import sqlalchemy as sa

from ctxguard.errors import ConfigurationError, StoreError
from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import AHEAD_SECONDS, Store
from ctxguard.monitor.store.transactions import Transaction, chunks, insertion, reads, writes
from ctxguard.monitor.store.types import (
    HOUR_SECONDS,
    Accounts,
    Claimed,
    Entry,
    Finished,
    FinishResult,
    LostReason,
    State,
    StoredShares,
    WorkerCounts,
)

_PENDING_HOURS = 1
_SINGLE_HOURS = 48
"""Older hours are kept as one row of all processes."""
_ALL = ""
"""The worker id of these rows."""
_LOOKED_AT = 1_000

_accounts = schema.accounts
_own = _accounts.c
_samples = schema.samples.c
_LOST = {reason: _own[f"lost_{reason.value}"] for reason in LostReason}
_COUNTED = (_own.sampled, _own.stored, *_LOST.values())
_UNCLAIMED = {"claimant": None, "leased_at": None, "leased_until": None}
_FRESH = {
    "is_counted": True,
    "route": "",
    "is_graded": False,
    "disagreements": 0,
    "last_label_id": -1,
    **dict.fromkeys(["profile_id", "session", "question", "recall_loss", "harm"]),
    **dict.fromkeys(["probability", "recall_probability"]),
}
"""What is known of a sample that was just judged: no grade of people, and no loss."""


@writes
def append(
    db: Transaction,
    worker_id: str,
    entries: Sequence[Entry],
    counts: WorkerCounts,
    *,
    batch: int | None = None,
) -> bool:
    """Store samples together with their writer's counts: all of it or nothing.

    Args:
        worker_id: The id of one process, for as long as it lives.
        entries: The samples; may be empty, to store the counts alone.
        counts: What the process has counted since its last batch.
        batch: Number of the batch, higher than those before. One that the store holds already
            changes nothing, so that a batch may be sent again where the answer was lost; None
            for one that is never sent again.

    Returns:
        Whether it was stored now; False where the store held it already.
    """
    present = math.floor(db.store.clock() / HOUR_SECONDS) if counts.hour is None else counts.hour
    stored = Counter([math.floor(entry.time_seconds / HOUR_SECONDS) for entry in entries])
    lost = {column.name: counts.lost.get(reason, 0) for reason, column in _LOST.items()}
    row: dict[str, Any] = {
        **lost,
        "worker_id": worker_id,
        "hour": present,
        "sampled": counts.sampled,
        "stored": stored.pop(present, 0),
        "pending": counts.pending,
        "batch": batch or 0,
    }
    report = _report(is_sqlite=db.is_sqlite)
    if not db.execute(report, row, execution_options={"preserve_rowcount": True}).rowcount:
        return False
    none = {**row, **dict.fromkeys([*lost, "pending", "batch"], 0)}
    of_earlier = [
        {**none, "hour": hour, "sampled": counts.earlier.get(hour, 0), "stored": stored[hour]}
        for hour in sorted(stored.keys() | counts.earlier.keys())
    ]
    if of_earlier:
        db.execute(report, of_earlier)
    if entries:
        _insert(db, entries)
    return True


@reads
def accounts(db: Transaction, *, worker_id: str | None = None) -> Accounts:
    """Return the counts of the writing processes, as last reported.

    Args:
        worker_id: Only those of one process; None for all. Processes are told apart for two
            days.
    """
    query = sa.select(
        *[sa.func.coalesce(sa.func.sum(each), 0) for each in (*_COUNTED, _waiting(db))]
    )
    if worker_id is not None:
        query = query.where(_own.worker_id == worker_id)
    sampled, stored, *lost, waiting = map(int, db.execute(query).one())
    return Accounts(sampled, stored, waiting, dict(zip(LostReason, lost, strict=True)))


@reads
def stored_shares(db: Transaction) -> StoredShares:
    """Return the share of each hour's samples that was stored; not what is in memory."""
    waiting = sa.func.sum(_waiting(db))
    rows = db.execute(
        sa.select(_own.hour, sa.func.sum(_own.sampled), sa.func.sum(_own.stored), waiting)
        .group_by(_own.hour)
        .having(sa.func.sum(_own.stored) > 0, sa.func.sum(_own.sampled) > sa.func.sum(_own.stored))
    )
    shares = {
        hour: float(stored) / float(sampled - pending)
        for hour, sampled, stored, pending in rows
        if sampled - pending > stored
    }
    return StoredShares(shares)


@writes
def fold_accounts(db: Transaction) -> int:
    """Add up the processes of each hour that is two days old; how many rows were added up."""
    oldest = math.floor(db.store.clock() / HOUR_SECONDS) - _SINGLE_HOURS
    old = sa.delete(_accounts).where(_own.hour < oldest, _own.worker_id != _ALL)
    rows = db.execute(old.returning(_own.hour, *_COUNTED)).all()
    none = {"worker_id": _ALL, "pending": 0, "batch": 0}
    if rows:
        # Each is added to the row of its hour.
        db.execute(_report(is_sqlite=db.is_sqlite), [{**none, **row._mapping} for row in rows])
    return len(rows)


def _waiting(db: Transaction) -> sa.ColumnElement[int]:
    """Count samples in the memory of a process when it reported last, if not long ago."""
    oldest = math.floor(db.store.clock() / HOUR_SECONDS) - _PENDING_HOURS
    later = _accounts.alias().c
    is_last = ~sa.exists().where(later.worker_id == _own.worker_id, later.hour > _own.hour)
    return sa.case((sa.and_(_own.hour >= oldest, is_last), _own.pending), else_=0)


def _insert(db: Transaction, entries: Sequence[Entry]) -> None:
    """Insert samples; those of probability 0 as forced."""
    ids = db.new_sample_ids(len(entries))
    samples, payloads = [], []
    for sample_id, entry in zip(ids, entries, strict=True):
        state = State.PENDING if entry.probability > 0.0 else State.FORCED
        samples.append(
            {
                "sample_id": sample_id,
                "request_id": entry.request_id,
                "time_seconds": entry.time_seconds,
                "probability": entry.probability,
                "label_order": entry.label_order,
                "payload_bytes": len(entry.payload),
                "state": state.value,
                "attempts": 0,
            }
        )
        payloads.append({"sample_id": sample_id, "payload": entry.payload})
    db.insert(schema.samples, samples)
    db.insert(schema.payloads, payloads)


@cache
def _report(*, is_sqlite: bool) -> Any:
    """Adds to the row of a worker and an hour, but for a batch that is in it already."""
    insert = insertion(_accounts, is_sqlite=is_sqlite)
    new = insert.excluded
    return insert.on_conflict_do_update(
        index_elements=[_own.worker_id, _own.hour],
        set_={
            **{each.name: each + new[each.name] for each in _COUNTED},
            "pending": new.pending,
            "batch": sa.case((new.batch > 0, new.batch), else_=_own.batch),
        },
        where=sa.or_(new.batch == 0, new.batch > _own.batch),
    )


@writes
def claim(db: Transaction, claimant: str, limit: int, *, lease_seconds: float) -> list[Claimed]:
    """Take the samples that have waited longest, until the lease ends.

    No other claimant gets them before the lease ends; then they wait again. Leases use a
    clock that no change of the wall clock moves.

    Args:
        limit: How many at most, ≥ 1.
        lease_seconds: Longer than judging them takes.
    """
    if limit < 1:
        raise ConfigurationError(f"limit {limit!r} must be at least 1")
    now = db.lease_now()
    # A lease counts only between its two ends: one from before a restart or a change of the
    # server's clock seems to begin far ahead, and must not bind until then.
    has_ended = sa.or_(_samples.leased_until <= now, _samples.leased_at > now + AHEAD_SECONDS)
    # One state at a time, which an index holds in order: a long queue costs no more than a
    # short one.
    rows = _oldest(db, _samples.state == State.CLAIMED.value, has_ended, limit=limit)
    if len(rows) < limit:
        waits = _samples.state == State.PENDING.value
        rows = [*rows, *_oldest(db, waits, limit=limit - len(rows))]
    if not rows:
        return []
    attempts = {row.sample_id: row.attempts + (row.state == State.CLAIMED.value) for row in rows}
    db.execute(
        sa.update(schema.samples)
        .where(_samples.sample_id == sa.bindparam("claimed_id"))
        .values(
            state=State.CLAIMED.value,
            claimant=claimant,
            leased_at=now,
            leased_until=now + lease_seconds,
            attempts=sa.bindparam("tried"),
        ),
        [{"claimed_id": sample_id, "tried": tried} for sample_id, tried in attempts.items()],
    )
    payload_of = _payloads(db, list(attempts))
    return [Claimed(each, payload_of[each], tried) for each, tried in attempts.items()]


def finish(store: Store, series: str, finished: Sequence[Finished]) -> FinishResult:
    """Store the results of claimed samples, each whatever the others hold.

    One transaction for all of them, or one for each where something in them cannot be stored.

    Args:
        series: The judge's pinned name and version.
        finished: The results; samples that are finished already stay as they are.

    Raises:
        StoreError: nothing can be stored at present, and nothing was.
    """
    if not finished:
        return FinishResult(frozenset(), {})
    try:
        return FinishResult(frozenset(_finish(store, series, finished)), {})
    except StoreError:
        raise
    except Exception as error:
        if len(finished) == 1:
            return FinishResult(frozenset(), {finished[0].sample_id: error})
    accepted, refused = frozenset[int](), dict[int, Exception]()
    for one in finished:
        own = finish(store, series, [one])
        accepted |= own.accepted
        refused |= own.refused
    return FinishResult(accepted, refused)


@writes
def _finish(db: Transaction, series: str, finished: Sequence[Finished]) -> list[int]:
    """Store results; return the samples that were not finished before."""
    last = {one.sample_id: one for one in reversed(finished)}
    # Locked until the transaction ends.
    unfinished = (
        sa.select(_samples.sample_id, _samples.time_seconds)
        .where(_samples.state.in_(schema.UNFINISHED))
        .order_by(_samples.sample_id)
        .with_for_update()
    )
    time_of: dict[int, float] = db.by_sample(unfinished, sorted(last))
    accepted = [last[sample_id] for sample_id in time_of]
    if not accepted:
        return []
    series_id = _begun(db, series)
    db.execute(
        sa.update(schema.samples)
        .where(_samples.sample_id == sa.bindparam("finished_id"))
        .values(state=sa.bindparam("outcome"), rejected=sa.bindparam("replies"), **_UNCLAIMED),
        [
            {
                "finished_id": one.sample_id,
                "outcome": one.state.value,
                "replies": json.dumps(one.rejected) if one.rejected else None,
            }
            for one in accepted
        ],
    )
    judged, verdicts = [], []
    for one in accepted:
        own = {"sample_id": one.sample_id, "series_id": series_id}
        if one.state is State.JUDGED:
            loss = {} if one.loss is None else asdict(one.loss)
            row = {"time_seconds": time_of[one.sample_id], "block": one.block}
            judged.append({**_FRESH, **loss, **row, **own})
        if one.verdicts:
            verdicts.append({**own, "verdicts": one.verdicts})
    db.insert(schema.judged, judged)
    db.insert(schema.verdicts, verdicts)
    return [one.sample_id for one in accepted]


@writes
def save_again(db: Transaction, series: str, verdicts: Mapping[int, str]) -> None:
    """Store verdicts, by sample, of a series on samples that another series judged first.

    Those that are there already, or whose text was deleted, stay as they are.
    """
    key = {"series_id": _begun(db, series)}
    for sample_id in _payloads(db, list(verdicts)):
        row = {**key, "sample_id": sample_id, "verdicts": verdicts[sample_id]}
        db.upsert(schema.verdicts, row, changes=None)


@writes
def give_back(
    db: Transaction,
    sample_ids: Sequence[int],
    *,
    max_attempts: int | None,
    claimant: str | None = None,
    why: str = "",
) -> int:
    """Let claimed samples wait again, because they could not be judged now.

    Args:
        sample_ids: Those that are no longer claimed stay as they are.
        max_attempts: Samples that were tried this often fail instead, ≥ 1; None for samples
            that were not tried at all.
        claimant: Leave those alone that another has claimed meanwhile; None for whoever has
            them.
        why: Kept as the reason of those that fail.

    Returns:
        How many failed.
    """
    failed = 0
    is_own = sa.true() if claimant is None else _samples.claimant == claimant
    again = sa.update(schema.samples).where(_samples.state == State.CLAIMED.value, is_own)
    for some in chunks(sorted(set(sample_ids))):
        these = again.where(_samples.sample_id.in_(some))
        attempts: sa.ColumnElement[int] = _samples.attempts
        if max_attempts is not None:
            attempts = attempts + 1
            reason = json.dumps([("", "judge_failed", why)])
            lost = {"state": State.FAILED.value, "rejected": reason, "attempts": attempts}
            last = these.where(attempts >= max_attempts).values(**lost, **_UNCLAIMED)
            failed += db.execute(last).rowcount
        db.execute(these.values(state=State.PENDING.value, attempts=attempts, **_UNCLAIMED))
    return failed


@reads
def states(db: Transaction) -> dict[State, int]:
    """Count samples by state; ``PENDING`` is the judges' queue."""
    rows = db.execute(
        sa.select(_samples.state, sa.func.count().label("n")).group_by(_samples.state)
    )
    counted = {row.state: row.n for row in rows}
    return {state: counted.get(state.value, 0) for state in State}


@reads
def oldest_waiting(db: Transaction) -> float | None:
    """Return when the oldest request was answered that waits for its judge; None without one.

    Samples wait in about the order of their times, so only the first of them are looked at.
    """
    times = []
    for state in schema.UNFINISHED:
        first = (
            sa.select(_samples.time_seconds)
            .where(_samples.state == state)
            .order_by(_samples.sample_id)
            .limit(_LOOKED_AT)
            .subquery()
        )
        times.append(db.execute(sa.select(sa.func.min(first.c.time_seconds))).scalar())
    return min([time for time in times if time is not None], default=None)


def _payloads(db: Transaction, sample_ids: Sequence[int]) -> dict[int, bytes]:
    """Return payloads by sample, without those that were deleted."""
    table = schema.payloads.c
    return db.by_sample(sa.select(table.sample_id, table.payload), sample_ids)


payloads = reads(_payloads)


def _begun(db: Transaction, series: str) -> int:
    """Return the id of a series, which begins with its first verdicts."""
    db.upsert(schema.series, {"name": series}, changes=None)
    return db.series_id(series)


def _oldest(db: Transaction, *conditions: sa.ColumnElement[bool], limit: int) -> Sequence[Any]:
    """Lock the samples of lowest id; skip those that another transaction holds."""
    return db.execute(
        sa.select(
            _samples.sample_id,
            _samples.state,
            _samples.attempts,
        )
        .where(*conditions)
        .order_by(_samples.sample_id)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
