"""What writing processes report: samples, and what they sampled, stored and lost, by hour.

A report is added in the transaction that stores its samples. What a process held when it last
reported is pending in that hour and the next, and unaccounted for then: one that lives has reported
again, unless it cannot reach the store.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa

from ctxguard.monitor.store import schema
from ctxguard.monitor.store.schema import storable
from ctxguard.monitor.store.transactions import Transaction, insertion, reads, writes
from ctxguard.monitor.store.types import (
    HOUR_SECONDS,
    Accounts,
    Entry,
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

_table = schema.accounts
_own = _table.c
_LOST = {reason: _own[f"lost_{reason.value}"] for reason in LostReason}
_COUNTED = (_own.sampled, _own.stored, *_LOST.values())
_SAMPLE_COLUMNS = tuple(schema.samples.c.keys()[:9])
"""All but those of claims."""


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
    row: dict[str, Any] = {"worker_id": worker_id, "hour": present, **lost}
    row |= {
        "sampled": counts.sampled,
        "stored": stored.pop(present, 0),
        "pending": counts.pending,
        "batch": batch or 0,
    }
    report = _report(is_sqlite=db.is_sqlite)
    if not db.execute(report, row, execution_options={"preserve_rowcount": True}).rowcount:
        return False
    if earlier := sorted(stored.keys() | counts.earlier.keys()):
        none = {**row, **dict.fromkeys([*lost, "pending", "batch"], 0)}
        rows = [
            {**none, "hour": hour, "sampled": counts.earlier.get(hour, 0), "stored": stored[hour]}
            for hour in earlier
        ]
        db.execute(report, rows)
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
    is_old = sa.and_(_own.hour < oldest, _own.worker_id != _ALL)
    found = db.execute(sa.select(_own.hour).where(is_old).with_for_update()).all()
    if not found:
        return 0
    sums = sa.select(
        sa.literal(_ALL), _own.hour, *map(sa.func.sum, _COUNTED), sa.literal(0), sa.literal(0)
    )
    insert = insertion(_table, is_sqlite=db.is_sqlite).from_select(
        [_own.worker_id, _own.hour, *_COUNTED, _own.pending, _own.batch],
        sums.where(is_old).group_by(_own.hour),
    )
    added = {each.name: each + insert.excluded[each.name] for each in _COUNTED}
    key = [_own.worker_id, _own.hour]
    db.execute(insert.on_conflict_do_update(index_elements=key, set_=added))
    db.execute(sa.delete(_table).where(is_old))
    return len(found)


def _waiting(db: Transaction) -> sa.ColumnElement[int]:
    """Count samples in the memory of a process when it reported last, if not long ago."""
    oldest = math.floor(db.store.clock() / HOUR_SECONDS) - _PENDING_HOURS
    later = _table.alias().c
    is_last = ~sa.exists().where(later.worker_id == _own.worker_id, later.hour > _own.hour)
    return sa.case((sa.and_(_own.hour >= oldest, is_last), _own.pending), else_=0)


def _insert(db: Transaction, entries: Sequence[Entry]) -> None:
    """Insert samples; those of probability 0 as forced."""
    ids = db.new_sample_ids(len(entries))
    samples, payloads = [], []
    for sample_id, entry in zip(ids, entries, strict=True):
        state = State.PENDING if entry.probability > 0.0 else State.FORCED
        samples.append(
            (
                sample_id,
                storable(entry.request_id),
                entry.time_seconds,
                entry.probability,
                None if entry.session_id is None else storable(entry.session_id),
                entry.label_order,
                len(entry.payload),
                state.value,
                0,
            )
        )
        payloads.append((sample_id, entry.payload))
    db.insert_raw(schema.samples, _SAMPLE_COLUMNS, samples)
    db.insert_raw(schema.payloads, ("sample_id", "payload"), payloads)


@cache
def _report(*, is_sqlite: bool) -> Any:
    """Adds to the row of a worker and an hour, but for a batch that is in it already."""
    insert = insertion(_table, is_sqlite=is_sqlite)
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
