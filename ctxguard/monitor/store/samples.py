"""Samples on their way: written with their writers' counts, waiting for the judge, finished.

A writer's report is added in the transaction that stores its samples. Samples that a process held
at its last report are pending in that hour and the next, then unaccounted for: a living process
would have reported again, unless it cannot reach the store. Samples wait for the judge in the order
of their ids, so that no change of a clock puts one before another.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import sqlalchemy as sa

from ctxguard.errors import ConfigurationError, StoreError
from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import Store
from ctxguard.monitor.store.transactions import Transaction, insertion, reads, writes
from ctxguard.monitor.store.types import (
    HOUR_SECONDS,
    Accounts,
    Counts,
    Entry,
    Finished,
    LostReason,
    State,
    StoredShares,
    WorkerCounts,
)

_PENDING_HOURS = 1
_SINGLE_HOURS = 48
"""Older hours keep a single row for all processes."""
_ALL = ""
"""Their worker id."""
_LOOKED_AT = 1_000

_accounts = schema.accounts
_own = _accounts.c
_samples = schema.samples.c
_LOST = {reason: _own[f"lost_{reason.value}"] for reason in LostReason}
_COUNTED = (_own.sampled, _own.stored, *_LOST.values())
_grades = schema.grades.c
_UNFINISHED = (State.PENDING.value, State.INCOMPLETE.value)
_NOTHING: Mapping[Any, Any] = {}
_FRESH = {
    "is_counted": True,
    "route": "",
    "is_graded": False,
    "disagreements": 0,
    "last_label_id": -1,
    **dict.fromkeys(["profile_id", "session", "question", "recall_loss", "harm"]),
    **dict.fromkeys(["probability", "recall_probability"]),
}
"""The columns of a sample that was just judged: no people's grades, and no loss."""


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
        counts: The process's counts since its last batch.
        batch: Number of the batch, higher than all before. One that the store holds already
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
    """Merge the processes' rows of each hour two days old; return how many were merged."""
    oldest = math.floor(db.store.clock() / HOUR_SECONDS) - _SINGLE_HOURS
    old = sa.delete(_accounts).where(_own.hour < oldest, _own.worker_id != _ALL)
    rows = db.execute(old.returning(_own.hour, *_COUNTED)).all()
    none = {"worker_id": _ALL, "pending": 0, "batch": 0}
    if rows:
        # Each is added to the row of its hour.
        db.execute(_report(is_sqlite=db.is_sqlite), [{**none, **row._mapping} for row in rows])
    return len(rows)


def _waiting(db: Transaction) -> sa.ColumnElement[int]:
    """Count samples in a process's memory at its last report, if that is recent."""
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
        row = {"sample_id": sample_id, **asdict(entry)}
        payloads.append({"sample_id": sample_id, "payload": row.pop("payload")})
        samples.append({**row, "payload_bytes": len(entry.payload), "state": state.value})
    db.insert(schema.samples, samples)
    db.insert(schema.payloads, payloads)


@cache
def _report(*, is_sqlite: bool) -> Any:
    """Adds to the row of a worker and an hour, unless it already includes the batch."""
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


@reads
def waiting(db: Transaction, limit: int) -> dict[int, bytes]:
    """Return the samples that have waited longest for a judge, with their payloads.

    Args:
        limit: The most samples to return, ≥ 1.
    """
    if limit < 1:
        raise ConfigurationError(f"limit {limit!r} must be at least 1")
    oldest = sa.select(_samples.sample_id).where(_samples.state == State.PENDING.value)
    ids = db.scalars(oldest.order_by(_samples.sample_id).limit(limit))
    payload_of = _payloads(db, ids)
    return {each: payload_of[each] for each in ids}


@reads
def failed(db: Transaction, series: str) -> list[int]:
    """Return the samples that a series judged first, and on which calls of the judge failed.

    Only those whose text is kept, oldest first: the judge can be asked about them again.
    """
    payload = schema.payloads.c.sample_id
    query = (
        sa.select(_grades.sample_id)
        .join(schema.samples, _samples.sample_id == _grades.sample_id)
        .join(schema.payloads, payload == _grades.sample_id)
        .where(_samples.state == State.INCOMPLETE.value, *_has_failed(db, series))
    )
    return db.scalars(query.order_by(_grades.sample_id))


@reads
def n_failed(db: Transaction, series: str) -> tuple[int, int]:
    """Count the passages on which calls of the judge failed, and their requests.

    Returns:
        Requests and passages.
    """
    counted = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(_grades.n_failed), 0))
    requests, passages = db.execute(counted.where(*_has_failed(db, series))).one()
    return requests, int(passages)


def _has_failed(db: Transaction, series: str) -> tuple[sa.ColumnElement[bool], ...]:
    # Worded as in the index, or it is not used.
    return _grades.series_id == db.series_id(series), sa.literal_column("n_failed > 0", sa.Boolean)


def finish(
    store: Store,
    series: str,
    finished: Sequence[Finished],
    counts: Counts = _NOTHING,
    values: Mapping[str, str] = _NOTHING,
) -> dict[int, Exception]:
    """Store the results of samples, each whatever the others hold, and what they count with them.

    One transaction for all of them, or one for each where something in them cannot be stored.

    Args:
        series: The judge's pinned name and version.
        finished: The results; samples that are finished already stay as they are, unless a call
            of the judge had failed, and so do those that were deleted or forced.
        counts: The monitor's other counts, to add to those of the series.
        values: Values to keep, by key.

    Returns:
        By sample, why a result could not be stored.

    Raises:
        StoreError: nothing can be stored at present, and nothing was.
    """
    if not (finished or counts or values):
        return {}
    try:
        _finish(store, series, finished, counts, values)
        return {}
    except StoreError:
        raise
    except Exception as error:
        if not finished:
            raise
        finish(store, series, [], counts, values)
        if len(finished) == 1:
            return {finished[0].sample_id: error}
    refused: dict[int, Exception] = {}
    for one in finished:
        refused |= finish(store, series, [one])
    return refused


@writes
def _finish(
    db: Transaction,
    series: str,
    finished: Sequence[Finished],
    counts: Counts,
    values: Mapping[str, str],
) -> None:
    """Store the results of samples that were not finished before."""
    last = {one.sample_id: one for one in reversed(finished)}
    unfinished = sa.select(_samples.sample_id, _samples.time_seconds).where(
        _samples.state.in_(_UNFINISHED)
    )
    time_of: dict[int, float] = db.by_sample(unfinished, sorted(last))
    accepted = [last[sample_id] for sample_id in time_of]
    _add_counts(db, series, [counts, *[one.counts for one in accepted]])
    for key, value in values.items():
        db.set_state(key, value)
    if not accepted:
        return
    series_id = _begun(db, series)
    db.execute(
        sa.update(schema.samples)
        .where(_samples.sample_id == sa.bindparam("finished_id"))
        .values(state=sa.bindparam("outcome"), rejected=sa.bindparam("replies")),
        [
            {
                "finished_id": one.sample_id,
                "outcome": one.state.value,
                "replies": json.dumps(one.rejected) if one.rejected else None,
            }
            for one in accepted
        ],
    )
    judged, grades = [], []
    for one in accepted:
        own = {"sample_id": one.sample_id, "series_id": series_id}
        if one.block:
            loss = {} if one.loss is None else asdict(one.loss)
            row = {"time_seconds": time_of[one.sample_id], "block": one.block}
            judged.append({**_FRESH, **loss, **row, **own})
        if one.grades:
            grades.append({**own, "grades": one.grades, "n_failed": one.n_failed})
    # People's grades are added to a new block anew.
    db.replace(schema.judged, judged)
    db.replace(schema.grades, grades)


def _add_counts(db: Transaction, series: str, more: Iterable[Counts]) -> None:
    """Add to the counts of a series, which never fall."""
    added = Counter[tuple[str, ...]]()
    for counts in more:
        for name, n in counts.items():
            added[tuple(map(str, name))] += n  # type: ignore[assignment]
    if any(added.values()):
        totals = Counter(_counts(db, series))
        totals.update(added)
        db.set_state(_key_of_counts(series), json.dumps([[*name, n] for name, n in totals.items()]))


def _counts(db: Transaction, series: str) -> dict[tuple[str, ...], float]:
    """Return the counts since a series began, by name and label values."""
    kept = json.loads(db.state(_key_of_counts(series)) or "[]")
    return {tuple(name): n for *name, n in kept}


counts = reads(_counts)


def _key_of_counts(series: str) -> str:
    return f"counts {series}"


@writes
def save_again(db: Transaction, series: str, sample_id: int, grades: str, n_failed: int) -> None:
    """Store the grades of a series on a sample that another series judged first.

    Nothing is stored where its text was deleted.
    """
    key = {"series_id": _begun(db, series)}
    if _payloads(db, [sample_id]):
        row = {**key, "sample_id": sample_id, "grades": grades, "n_failed": n_failed}
        db.replace(schema.grades, [row])


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
    """Return the answer time of the oldest request waiting for its judge; None without one.

    Samples wait in about the order of their times, so only the first of them are looked at.
    """
    first = (
        sa.select(_samples.time_seconds)
        .where(_samples.state == State.PENDING.value)
        .order_by(_samples.sample_id)
        .limit(_LOOKED_AT)
        .subquery()
    )
    oldest: float | None = db.execute(sa.select(sa.func.min(first.c.time_seconds))).scalar()
    return oldest


def _payloads(db: Transaction, sample_ids: Sequence[int]) -> dict[int, bytes]:
    """Return payloads by sample, without those that were deleted."""
    table = schema.payloads.c
    return db.by_sample(sa.select(table.sample_id, table.payload), sample_ids)


payloads = reads(_payloads)


def _begun(db: Transaction, series: str) -> int:
    """Return the id of a series, which begins with its first grades."""
    db.upsert(schema.series, {"name": series}, changes=None)
    return db.series_id(series)
