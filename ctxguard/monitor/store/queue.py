"""The queue of samples: claimed for judging, finished or given back.

Samples wait in the order of their ids, so that no change of a clock puts one before another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from ctxguard.errors import ConfigurationError, StoreError
from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import AHEAD_SECONDS
from ctxguard.monitor.store.transactions import Store, Transaction, chunks, reads, writes
from ctxguard.monitor.store.types import Claimed, Finished, FinishResult, State

_samples = schema.samples.c

_LOOKED_AT = 1_000
_FRESH = {
    "is_counted": True,
    "route": "",
    "is_graded": False,
    "disagreements": 0,
    "last_label_id": -1,
}
"""What people graded of a sample that was just judged."""


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
    return [
        Claimed(*[*row[:5], payload_of[row.sample_id], attempts[row.sample_id]]) for row in rows
    ]


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
    accepted, refused = set[int](), dict[int, Exception]()
    for one in finished:
        try:
            accepted.update(_finish(store, series, [one]))
        except Exception as error:
            refused[one.sample_id] = error
    return FinishResult(frozenset(accepted), refused)


@writes
def _finish(db: Transaction, series: str, finished: Sequence[Finished]) -> list[int]:
    """Store results; return the samples that were not finished before."""
    last = {one.sample_id: one for one in reversed(finished)}
    # Locked until the transaction ends.
    unfinished = (
        sa.select(_samples.sample_id, _samples.label_order)
        .where(_samples.state.in_(schema.UNFINISHED))
        .order_by(_samples.sample_id)
        .with_for_update()
    )
    label_orders: dict[int, float] = db.by_sample(unfinished, sorted(last))
    accepted = [one for one in last.values() if one.sample_id in label_orders]
    if not accepted:
        return []
    series_id = _begun(db, series)
    db.execute(
        sa.update(schema.samples)
        .where(_samples.sample_id == sa.bindparam("finished_id"))
        .values(state=sa.bindparam("outcome"), claimant=None, leased_at=None, leased_until=None),
        [{"finished_id": one.sample_id, "outcome": one.state.value} for one in accepted],
    )
    judged, losses, verdicts, rejected = [], [], [], []
    for one in accepted:
        own = {"sample_id": one.sample_id, "series_id": series_id}
        if one.state is State.JUDGED:
            row = {"time_seconds": one.time_seconds, "block": one.block, **_FRESH}
            judged.append({**own, **row, "label_order": label_orders[one.sample_id]})
        if one.loss:
            losses.append({**asdict(one.loss), **own})
        if one.verdicts:
            verdicts.append({**own, "verdicts": one.verdicts})
        for texts in one.rejected:
            named = dict(zip(("passage_id", "reason", "reply"), texts, strict=True))
            rejected.append({"sample_id": one.sample_id, **named})
    db.insert(schema.judged, judged)
    db.insert(schema.losses, losses)
    db.insert(schema.verdicts, verdicts)
    db.insert(schema.rejected, rejected)
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
    for some in chunks(sorted(set(sample_ids))):
        claimed = sa.and_(
            _samples.sample_id.in_(some), _samples.state == State.CLAIMED.value, is_own
        )
        tried = 0 if max_attempts is None else 1
        is_last = sa.false() if max_attempts is None else _samples.attempts + 1 >= max_attempts
        last = db.execute(
            sa.select(_samples.sample_id).where(claimed, is_last).with_for_update()
        ).scalars()
        reason = {"passage_id": "", "reason": "judge_failed", "reply": why}
        reasons = [{"sample_id": each, **reason} for each in last]
        db.insert(schema.rejected, reasons)
        failed += len(reasons)
        db.execute(
            sa.update(schema.samples)
            .where(claimed)
            .values(
                state=sa.case((is_last, State.FAILED.value), else_=State.PENDING.value),
                attempts=_samples.attempts + tried,
                claimant=None,
                leased_at=None,
                leased_until=None,
            )
        )
    return failed


@writes
def renew(db: Transaction, claimant: str, *, lease_seconds: float) -> int:
    """Keep what a claimant has claimed, for so long from now; the number of samples."""
    now = db.lease_now()
    own = sa.and_(_samples.state == State.CLAIMED.value, _samples.claimant == claimant)
    n: int = db.execute(
        sa.update(schema.samples).where(own).values(leased_at=now, leased_until=now + lease_seconds)
    ).rowcount
    return n


@reads
def states(db: Transaction) -> dict[State, int]:
    """Count samples by state; ``PENDING`` is the judges' queue."""
    rows = db.execute(
        sa.select(_samples.state, sa.func.count().label("n")).group_by(_samples.state)
    )
    counted = {row.state: row.n for row in rows}
    return {state: counted.get(state.value, 0) for state in State}


@reads
def oldest_pending_seconds(db: Transaction) -> float | None:
    """Return the age of the first sample in the queue, ≥ 0; None where none waits."""
    answered = db.execute(
        sa.select(_samples.time_seconds)
        .where(_samples.state == State.PENDING.value)
        .order_by(_samples.sample_id)
        .limit(1)
    ).scalar()
    return None if answered is None else max(0.0, db.store.clock() - answered)


@reads
def is_unfinished(db: Transaction, *, before: float) -> bool:
    """Tell whether a sample of a request answered before a time waits for its judge.

    Samples wait in about the order of their times, so only the first of them are looked at.
    """
    for state in schema.UNFINISHED:
        first = (
            sa.select(_samples.time_seconds)
            .where(_samples.state == state)
            .order_by(_samples.sample_id)
            .limit(_LOOKED_AT)
            .subquery()
        )
        oldest = db.execute(sa.select(sa.func.min(first.c.time_seconds))).scalar()
        if oldest is not None and oldest < before:
            return True
    return False


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
            _samples.request_id,
            _samples.time_seconds,
            _samples.probability,
            _samples.session_id,
            _samples.state,
            _samples.attempts,
        )
        .where(*conditions)
        .order_by(_samples.sample_id)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
