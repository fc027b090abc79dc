"""Deletes samples beyond the limits, in short transactions, so that writers get their turns.

By age a sample is deleted with all that belongs to it, so that the judged rows are those of all
requests of the time that is kept, labelled or not. A block that people graded outlives it, without
text, and tells of the judge alone. By size the oldest payloads are deleted, with the grades that
may quote them; what was judged stays for the estimates until its age ends it, and samples that were
not judged are deleted whole.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeVar

import sqlalchemy as sa

from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import Store
from ctxguard.monitor.store.transactions import Transaction, reads
from ctxguard.monitor.store.types import FINAL_STATES

T = TypeVar("T")
_Row = sa.Row[int, str, int]
"""Sample id, state, bytes of payload."""

_BATCH_SAMPLES = 200
_BATCH_BYTES = 2 * 2**20
_VACUUM_PAGES = 256
_FREE_PAGES = sa.text("PRAGMA freelist_count")
_PAUSE_SECONDS = 0.002
"""Seconds between transactions: long enough for a waiting writer's turn."""

_samples = schema.samples.c
_payloads = schema.payloads.c
_judged = schema.judged.c
_WITH_TEXT = (schema.payloads, schema.grades)


@reads
def size_bytes(db: Transaction) -> int:
    """Count the bytes of payload in the store, which ``Limits.max_bytes`` bounds."""
    total = sa.select(sa.func.coalesce(sa.func.sum(_samples.payload_bytes), 0))
    return int(db.execute(total).scalar_one())


def clean(store: Store) -> tuple[int, int]:
    """Delete samples over the limits, oldest first, in many short transactions.

    By age a sample is deleted whole, with its labels; its graded block stays. By size the
    oldest payloads and grades are deleted: judged rows stay for the estimates, and samples
    that were not judged are deleted whole. A SQLite file then shrinks. PostgreSQL's own vacuum
    frees its space.

    Returns:
        How many samples had reached the age limit, and of how many others the payload was deleted.

    Raises:
        StoreFullError: the disk is full; deleting needs space too.
    """
    age, most = store.limits.max_age_seconds, store.limits.max_bytes
    expired = by_size = 0
    if age is not None:
        oldest_seconds = store.clock() - age
        while n := _delete(store, partial(_expire_some, oldest_seconds=oldest_seconds)):
            expired += n
    excess = 0 if most is None else size_bytes(store) - most
    while excess > 0:
        n, freed = _delete(store, partial(_shrink, excess=excess))
        if not n:
            break
        by_size += n
        excess -= freed
    # Pages freed by a killed monitor are returned with the next deletion.
    while (expired or by_size) and store.is_sqlite and _delete(store, _vacuum_some):
        pass
    return expired, by_size


def _delete(store: Store, work: Callable[[Transaction], T]) -> T:
    with store.transaction(writes=True) as connection:
        done = work(Transaction(store, connection))
    time.sleep(_PAUSE_SECONDS)
    return done


def _expire_some(db: Transaction, oldest_seconds: float) -> int:
    """Delete some of the samples from before a time; return how many."""
    some = _oldest(db, _BATCH_BYTES, _samples.time_seconds < oldest_seconds)
    _remove(db, some, some)
    return len(some)


def _shrink(db: Transaction, excess: int) -> tuple[int, int]:
    """Delete some of the oldest payloads; return how many, and their bytes."""
    some = _oldest(db, min(_BATCH_BYTES, excess), None)
    _remove(db, some, [row for row in some if row.state not in FINAL_STATES])
    return len(some), sum(row.payload_bytes for row in some)


def _oldest(
    db: Transaction, most_bytes: int, condition: sa.ColumnElement[bool] | None
) -> list[_Row]:
    """Find the oldest samples of a condition, or with a payload, up to so many bytes."""
    query = sa.select(_samples.sample_id, _samples.state, _samples.payload_bytes)
    if condition is None:
        query = query.join(schema.payloads, _payloads.sample_id == _samples.sample_id)
        query = query.order_by(_payloads.sample_id)
    else:
        query = query.where(condition).order_by(_samples.time_seconds, _samples.sample_id)
    rows = db.execute(query.limit(_BATCH_SAMPLES).with_for_update(skip_locked=True)).all()
    before = [0, *accumulate(row.payload_bytes for row in rows)]
    return [
        row for row, bytes_before in zip(rows, before, strict=False) if bytes_before < most_bytes
    ]


def _remove(db: Transaction, rows: Sequence[_Row], whole: Sequence[_Row]) -> None:
    """Delete the text of all rows, and everything else of those deleted whole."""
    ids = [row.sample_id for row in rows]
    whole_ids = [row.sample_id for row in whole]
    for table in _WITH_TEXT:
        db.execute(sa.delete(table).where(table.c.sample_id.in_(ids)))
    if whole_ids:
        _forget(db, whole_ids)
    if len(whole_ids) < len(ids):
        without = sa.update(schema.samples).values(payload_bytes=0, rejected=None)
        db.execute(without.where(_samples.sample_id.in_(ids)))


def _forget(db: Transaction, sample_ids: Sequence[int]) -> None:
    requests = db.scalars(sa.select(_samples.request_id).where(_samples.sample_id.in_(sample_ids)))
    db.execute(sa.delete(schema.samples).where(_samples.sample_id.in_(sample_ids)))
    own = _judged.sample_id.in_(sample_ids)
    db.execute(sa.delete(schema.judged).where(own, ~_judged.is_graded))
    db.execute(sa.update(schema.judged).where(own).values(is_counted=False, profile_id=None))
    # Another sample of the request may be younger.
    request_id = schema.labels.c.request_id
    is_gone = request_id.not_in(sa.select(_samples.request_id))
    db.execute(sa.delete(schema.labels).where(request_id.in_(requests), is_gone))


def _vacuum_some(db: Transaction) -> bool:
    """Cut free pages off a SQLite file; return whether more are free."""
    free = db.execute(_FREE_PAGES).scalar_one()
    if free == 0:
        return False
    db.execute(sa.text(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")).close()
    left = db.execute(_FREE_PAGES).scalar_one()
    return bool(0 < left < free)
