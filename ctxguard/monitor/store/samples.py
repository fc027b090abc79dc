"""Stores samples with their writers' counts, keeps them waiting for the judge, and deletes them.

A writer's report is added in the transaction that stores its samples. Samples that a process held
at its last report are pending in that hour and the next, then unaccounted for: a living process
would have reported again, unless it cannot reach the store. Samples wait for the judge in the order
of their ids, so that no change of a clock puts one before another.

Samples beyond the limits are deleted in short transactions, so that writers get their turns. By age
a sample is deleted with all that belongs to it, so that the judged rows are those of all requests
of the time that is kept, labelled or not. Rows that people graded outlive it, without text, and
tell of the judge alone. By size the oldest payloads are deleted, with the grades that may quote
them; judged rows stay until their age ends them, and samples that were not judged are deleted
whole. Touches the database and the clock, sleeps between deletions, and logs.
"""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from ctxguard.errors import ConfigurationError, DataError
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.sampling.sampler import HOUR_SECONDS, Accounts, LostReason
from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import Store, Transaction, reads, record, writes
from ctxguard.monitor.store.types import FINAL_STATES, Batch, State, StoredSample

T = TypeVar("T")
_Payload = sa.Row[int, str, int]
"""Sample id, state, bytes of payload."""

_log = logging.getLogger(__name__)

_PENDING_HOURS = 1
_SINGLE_HOURS = 48
"""Older hours keep a single row for all processes."""
_ALL = ""
"""The worker id of that row."""
_LOOKED_AT = 1_000
_BATCH_SAMPLES = 200
_BATCH_BYTES = 2 * 2**20
_VACUUM_PAGES = 256
_FREE_PAGES = sa.text("PRAGMA freelist_count")
_PAUSE_SECONDS = 0.002
"""Seconds between transactions that delete: long enough for a waiting writer to take its turn."""

_accounts = schema.accounts.c
_samples = schema.samples.c
_payloads = schema.payloads.c
_judged = schema.judged.c
_LOST = {reason: _accounts[f"lost_{reason.value}"] for reason in LostReason}
_COUNTED = (_accounts.sampled, _accounts.stored, *_LOST.values())
_DELETABLE = sa.select(_samples.sample_id, _samples.state, _samples.payload_bytes)
_OF_RECORD = ("request_id", "time_seconds", "probability", "label_order")


@writes
def append(db: Transaction, worker_id: str, batch: Batch) -> bool:
    """Store samples together with their writer's counts, all or nothing.

    A worker is one process, for as long as it lives. Returns False where the store held the batch
    already.
    """
    present = math.floor(db.store.clock() / HOUR_SECONDS) if batch.hour is None else batch.hour
    stored = Counter([math.floor(one.time_seconds / HOUR_SECONDS) for one, _ in batch.samples])
    lost = {column.name: batch.lost.get(reason, 0) for reason, column in _LOST.items()}
    row: dict[str, Any] = {
        **lost,
        "worker_id": worker_id,
        "hour": present,
        "sampled": batch.sampled,
        "stored": stored.pop(present, 0),
        "pending": batch.pending,
        "batch": batch.number,
    }
    add = _adding(db)
    if not db.execute(add, row, execution_options={"preserve_rowcount": True}).rowcount:
        return False
    none = {**row, **dict.fromkeys([*lost, "pending", "batch"], 0)}
    of_earlier = [
        {**none, "hour": hour, "sampled": batch.earlier.get(hour, 0), "stored": stored[hour]}
        for hour in sorted(stored.keys() | batch.earlier.keys())
    ]
    if of_earlier:
        db.execute(add, of_earlier)
    samples, payloads = [], []
    ids = db.new_sample_ids(len(batch.samples)) if batch.samples else []
    for sample_id, (one, payload) in zip(ids, batch.samples, strict=True):
        # Those of probability 0 were added by hand.
        state = State.PENDING if one.probability > 0.0 else State.FORCED
        own = {name: getattr(one, name) for name in _OF_RECORD}
        size = {"payload_bytes": len(payload), "state": state.value}
        samples.append({"sample_id": sample_id, **own, **size})
        payloads.append({"sample_id": sample_id, "payload": payload})
    db.insert(schema.samples, samples)
    db.insert(schema.payloads, payloads)
    return True


def _adding(db: Transaction) -> Any:
    """Add to the row of a worker and an hour, unless it already includes the batch."""
    insert = db.insertion(schema.accounts)
    new = insert.excluded
    return insert.on_conflict_do_update(
        index_elements=[_accounts.worker_id, _accounts.hour],
        set_={
            **{each.name: each + new[each.name] for each in _COUNTED},
            "pending": new.pending,
            "batch": sa.case((new.batch > 0, new.batch), else_=_accounts.batch),
        },
        where=sa.or_(new.batch == 0, new.batch > _accounts.batch),
    )


@reads
def accounts(db: Transaction, *, worker_id: str | None = None) -> Accounts:
    """Return the counts of all writing processes, or of one, as last reported.

    Processes are told apart for two days.
    """
    query = sa.select(
        *[sa.func.coalesce(sa.func.sum(each), 0) for each in (*_COUNTED, _pending(db))]
    )
    if worker_id is not None:
        query = query.where(_accounts.worker_id == worker_id)
    sampled, stored, *lost, pending = map(int, db.execute(query).one())
    return Accounts(sampled, stored, pending, dict(zip(LostReason, lost, strict=True)))


def stored_shares(db: Transaction) -> dict[float, float]:
    """Return the share of each hour's samples that was stored, if it is below 1."""
    held = sa.func.sum(_pending(db))
    sampled, stored = sa.func.sum(_accounts.sampled), sa.func.sum(_accounts.stored)
    query = sa.select(_accounts.hour, sampled, stored, held).group_by(_accounts.hour)
    rows = db.execute(query.having(stored > 0, sampled > stored)).all()
    return {
        hour: float(n_stored) / float(n_sampled - n_held)
        for hour, n_sampled, n_stored, n_held in rows
        if n_sampled - n_held > n_stored
    }


def shares_at(
    shares: Mapping[float, float], time_seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the share stored at the times of some requests, in the same shape.

    >>> shares_at({1: 0.5}, np.array([0.0, 3600.0, 7199.0, 7200.0])).tolist()
    [1.0, 0.5, 0.5, 1.0]
    """
    hours = np.floor(time_seconds / HOUR_SECONDS).tolist() if shares else []
    return np.array([shares.get(hour, 1.0) for hour in hours] or np.ones(time_seconds.shape))


@writes
def fold_accounts(db: Transaction) -> int:
    """Merge the processes' rows for each hour two days old; return how many were merged."""
    oldest = math.floor(db.store.clock() / HOUR_SECONDS) - _SINGLE_HOURS
    old = sa.delete(schema.accounts).where(_accounts.hour < oldest, _accounts.worker_id != _ALL)
    rows = db.execute(old.returning(_accounts.hour, *_COUNTED)).all()
    none = {"worker_id": _ALL, "pending": 0, "batch": 0}
    if rows:
        # Each is added to the row of its hour.
        db.execute(_adding(db), [{**none, **row._mapping} for row in rows])
    return len(rows)


def _pending(db: Transaction) -> sa.ColumnElement[int]:
    """Count samples in a process's memory at its last report, if that is recent."""
    oldest = math.floor(db.store.clock() / HOUR_SECONDS) - _PENDING_HOURS
    later = schema.accounts.alias().c
    is_last = ~sa.exists().where(
        later.worker_id == _accounts.worker_id, later.hour > _accounts.hour
    )
    return sa.case((sa.and_(_accounts.hour >= oldest, is_last), _accounts.pending), else_=0)


@reads
def waiting(db: Transaction, limit: int) -> dict[int, SampleRecord | DataError]:
    """Return the samples that have waited longest for a judge, at most ``limit`` ≥ 1.

    By sample, its record, or why it cannot be read.
    """
    if limit < 1:
        raise ConfigurationError(f"limit {limit!r} must be at least 1")
    oldest = sa.select(_samples.sample_id).where(_samples.state == State.PENDING.value)
    ids = db.scalars(oldest.order_by(_samples.sample_id).limit(limit))
    found = _records_or_errors(db, ids)
    return {sample_id: found[sample_id] for sample_id in ids}


@reads
def records(db: Transaction, sample_ids: Sequence[int]) -> dict[int, SampleRecord]:
    """Return the records of the samples whose text was kept and can be read."""
    found = {}
    for sample_id, one in _records_or_errors(db, sample_ids).items():
        if isinstance(one, DataError):
            _log.warning("sample %d is left out: %s", sample_id, one)
        else:
            found[sample_id] = one
    return found


def _records_or_errors(
    db: Transaction, sample_ids: Sequence[int]
) -> dict[int, SampleRecord | DataError]:
    found: dict[int, SampleRecord | DataError] = {}
    query = sa.select(_payloads.sample_id, _payloads.payload)
    payloads: dict[int, bytes] = db.by_sample(query, sample_ids)
    for sample_id, payload in payloads.items():
        try:
            found[sample_id] = SampleRecord.from_bytes(payload)
        except DataError as error:
            found[sample_id] = error
    return found


@reads
def states(db: Transaction) -> dict[State, int]:
    """Count samples by state; ``PENDING`` is the judges' queue."""
    rows = db.execute(sa.select(_samples.state, sa.func.count()).group_by(_samples.state))
    counted = dict(map(tuple, rows))
    return {state: counted.get(state.value, 0) for state in State}


@reads
def oldest_waiting(db: Transaction) -> float | None:
    """Return when the oldest request that waits for its judge was answered; None without one.

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


@reads
def rejected(
    db: Transaction, sample_ids: Sequence[int]
) -> dict[int, tuple[tuple[str, str, str], ...]]:
    """Return the passage id, reason and raw reply of each invalid grade, by sample."""
    query = sa.select(_samples.sample_id, _samples.rejected).where(_samples.rejected.is_not(None))
    found: dict[int, str] = db.by_sample(query, sample_ids)
    return {each: tuple(map(tuple, json.loads(text))) for each, text in found.items()}


@reads
def find(db: Transaction, request_ids: Sequence[str]) -> list[int]:
    """Return the samples of requests, oldest first."""
    rows = db.rows_with(sa.select(_samples.sample_id), _samples.request_id, request_ids)
    return sorted({row.sample_id for row in rows})


@reads
def samples_of(db: Transaction, request_id: str) -> list[StoredSample]:
    """Return the samples of a request, oldest first, and how far each got."""
    query = _stored().where(_samples.request_id == request_id)
    return list(map(_stored_sample, db.execute(query.order_by(_samples.sample_id))))


@reads
def newest_samples(db: Transaction, n: int, *, before: int | None = None) -> list[StoredSample]:
    """Return the n samples stored last (before the one with an id), and how far each got."""
    query = _stored().order_by(_samples.sample_id.desc()).limit(n)
    if before is not None:
        query = query.where(_samples.sample_id < before)
    return list(map(_stored_sample, db.execute(query)))


def _stored() -> sa.Select[Any]:
    series = schema.series.c
    return (
        sa.select(
            schema.samples,
            _payloads.sample_id.is_not(None).label("has_text"),
            series.name.label("series"),
        )
        .outerjoin(schema.payloads, _payloads.sample_id == _samples.sample_id)
        .outerjoin(
            schema.judged, sa.and_(_judged.sample_id == _samples.sample_id, _judged.is_counted)
        )
        .outerjoin(schema.series, series.series_id == _judged.series_id)
    )


def _stored_sample(row: sa.Row[Any]) -> StoredSample:
    return record(StoredSample, row, state=State(row.state), has_text=bool(row.has_text))


def clean(store: Store) -> tuple[int, int]:
    """Delete samples beyond the limits, oldest first, in many short transactions.

    A SQLite file then shrinks. PostgreSQL's own vacuum frees its space. A StoreFullError where
    the disk is full: deleting needs space too.

    Returns:
        How many samples had reached the age limit, and of how many others the payload was deleted.
    """
    age, most = store.limits.max_age_seconds, store.limits.max_bytes
    expired = by_size = 0
    if age is not None:
        oldest_seconds = store.clock() - age
        while n := _take_turn(store, partial(_expire_some, oldest_seconds=oldest_seconds)):
            expired += n
    excess = 0 if most is None else _size_bytes(store) - most
    while excess > 0:
        n, freed = _take_turn(store, partial(_shrink, excess=excess))
        if not n:
            break
        by_size += n
        excess -= freed
    # Pages freed by a killed monitor are returned with the next deletion.
    while (expired or by_size) and store.is_sqlite and _take_turn(store, _vacuum_some):
        pass
    return expired, by_size


@reads
def _size_bytes(db: Transaction) -> int:
    """Count the bytes of payload in the store."""
    total = sa.select(sa.func.coalesce(sa.func.sum(_samples.payload_bytes), 0))
    return int(db.execute(total).scalar_one())


def _take_turn(store: Store, work: Callable[[Transaction], T]) -> T:
    """Do work in a transaction of its own, then leave the store to a waiting writer."""
    with store.transaction(writes=True) as connection:
        done = work(Transaction(store, connection))
    time.sleep(_PAUSE_SECONDS)
    return done


def _expire_some(db: Transaction, oldest_seconds: float) -> int:
    """Delete some of the samples that are older than a time; return how many."""
    query = _DELETABLE.where(_samples.time_seconds < oldest_seconds)
    some = _first(db, query.order_by(_samples.time_seconds, _samples.sample_id), _BATCH_BYTES)
    _remove(db, some, some)
    return len(some)


def _shrink(db: Transaction, excess: int) -> tuple[int, int]:
    """Delete some of the oldest payloads; return how many, and their bytes."""
    query = _DELETABLE.join(schema.payloads, _payloads.sample_id == _samples.sample_id)
    some = _first(db, query.order_by(_payloads.sample_id), min(_BATCH_BYTES, excess))
    _remove(db, some, [row for row in some if row.state not in FINAL_STATES])
    return len(some), sum(row.payload_bytes for row in some)


def _first(db: Transaction, query: sa.Select[Any], most_bytes: int) -> list[_Payload]:
    """Return the first rows of a query, up to this many bytes of payload."""
    rows = db.execute(query.limit(_BATCH_SAMPLES).with_for_update(skip_locked=True)).all()
    before = [0, *accumulate(row.payload_bytes for row in rows)]
    return [
        row for row, bytes_before in zip(rows, before, strict=False) if bytes_before < most_bytes
    ]


def _remove(db: Transaction, rows: Sequence[_Payload], whole: Sequence[_Payload]) -> None:
    """Delete the texts of all these rows, and everything else of those deleted entirely."""
    ids, gone = [row.sample_id for row in rows], [row.sample_id for row in whole]
    for table in (schema.payloads, schema.grades):
        db.execute(sa.delete(table).where(table.c.sample_id.in_(ids)))
    if gone:
        request_id = _samples.request_id
        requests = db.scalars(sa.select(request_id).where(_samples.sample_id.in_(gone)))
        db.execute(sa.delete(schema.samples).where(_samples.sample_id.in_(gone)))
        own = _judged.sample_id.in_(gone)
        db.execute(sa.delete(schema.judged).where(own, ~_judged.is_graded))
        db.execute(sa.update(schema.judged).where(own).values(is_counted=False, profile=None))
        # Another sample of the request may be younger.
        labelled = schema.labels.c.request_id
        is_gone = labelled.not_in(sa.select(request_id))
        db.execute(sa.delete(schema.labels).where(labelled.in_(requests), is_gone))
    if len(gone) < len(ids):
        without = sa.update(schema.samples).values(payload_bytes=0, rejected=None)
        db.execute(without.where(_samples.sample_id.in_(ids)))


def _vacuum_some(db: Transaction) -> bool:
    """Return some free pages of a SQLite file to the disk; return whether more are free."""
    free = db.execute(_FREE_PAGES).scalar_one()
    if free == 0:
        return False
    db.execute(sa.text(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")).close()
    left = db.execute(_FREE_PAGES).scalar_one()
    return bool(0 < left < free)
