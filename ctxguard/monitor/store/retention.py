"""Deletion of what is over the limits, in short transactions, so that writers get their turns.

By age a sample is deleted with all that belongs to it, so that the judged rows are those of all
requests of the time that is kept, labelled or not. What people graded outlives it in rows of its
own, without text (``graded``). By size the oldest payloads are deleted, with the verdicts that may
quote them; what was judged stays for the estimates until its age ends it, and samples that were
not judged are deleted whole.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import sqlalchemy as sa

from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import Database
from ctxguard.monitor.store.part import StorePart, reads
from ctxguard.monitor.store.types import FINAL_STATES, Cleaned

T = TypeVar("T")
_Row = sa.Row[int, str, int]
"""Sample id, state, bytes of payload."""

_BATCH_SAMPLES = 200
_BATCH_BYTES = 2 * 2**20
_VACUUM_PAGES = 256
_PAUSE_SECONDS = 0.002
"""Between transactions: long enough for a waiting writer's turn."""

_samples = schema.samples.c
_payloads = schema.payloads.c
_WITH_TEXT = (schema.payloads, schema.verdicts, schema.rejected)
_WITHOUT_TEXT = (schema.samples, schema.judged, schema.losses, schema.label_queue)


class Retention(StorePart):
    """How large the store is, and what is deleted to bound it."""

    @reads
    def size_bytes(self, connection: sa.Connection) -> int:
        """Bytes of payload in the store, which ``Limits.max_bytes`` bounds."""
        return _size_bytes(connection)

    def clean(self) -> Cleaned:
        """Delete what is over the limits, oldest first, in many short transactions.

        By age a sample is deleted whole, with its labels; its graded row stays. By size the
        oldest payloads and verdicts are deleted: judged rows stay for the estimates, and samples
        that were not judged are deleted whole. A SQLite file then shrinks. PostgreSQL's own vacuum
        frees its space.

        Raises:
            StoreFullError: the disk is full; deleting needs space too.
        """
        age = self.limits.max_age_seconds
        oldest_seconds = None if age is None else self._clock() - age
        cleaning = _Cleaning(self._database, oldest_seconds, self.limits.max_bytes)
        return cleaning.run()


class _Cleaning:
    """Deletes what is over two limits.

    Args:
        database: The database to clean.
        oldest_seconds: Samples from before this are deleted; None for no limit.
        max_bytes: Payloads beyond this are deleted; None for no limit.
    """

    def __init__(
        self, database: Database, oldest_seconds: float | None, max_bytes: int | None
    ) -> None:
        self._database = database
        self._oldest_seconds = oldest_seconds
        self._max_bytes = max_bytes
        self._expired = self._by_size = self._unjudged = 0

    def run(self) -> Cleaned:
        """Delete what is over the limits, and return the space to the disk."""
        while n := self._write(self._expire_some):
            self._expired += n
        excess = self._database.read(_size_bytes) - (self._max_bytes or 0)
        while self._max_bytes is not None and excess > 0:
            n, freed = self._write(partial(self._shrink, excess=excess))
            if n == 0:
                break
            self._by_size += n
            excess -= freed
        while self._database.is_sqlite and self._write(_vacuum_some):
            pass
        return Cleaned(self._expired, self._by_size, self._unjudged)

    def _write(self, work: Callable[[sa.Connection], T]) -> T:
        done = self._database.write(work)
        time.sleep(_PAUSE_SECONDS)
        return done

    def _expire_some(self, connection: sa.Connection) -> int:
        if self._oldest_seconds is None:
            return 0
        oldest = connection.execute(
            sa.select(_samples.sample_id, _samples.state, _samples.payload_bytes)
            .where(_samples.time_seconds < self._oldest_seconds)
            .order_by(_samples.time_seconds, _samples.sample_id)
            .limit(_BATCH_SAMPLES)
            .with_for_update(skip_locked=True)
        ).all()
        some = _within(oldest, _BATCH_BYTES)
        self._remove(connection, some, some)
        return len(some)

    def _shrink(self, connection: sa.Connection, excess: int) -> tuple[int, int]:
        """(samples, bytes) of one batch of the oldest payloads."""
        oldest = connection.execute(
            sa.select(_samples.sample_id, _samples.state, _samples.payload_bytes)
            .join(schema.payloads, _payloads.sample_id == _samples.sample_id)
            .order_by(_payloads.sample_id)
            .limit(_BATCH_SAMPLES)
            .with_for_update(skip_locked=True)
        ).all()
        some = _within(oldest, min(_BATCH_BYTES, excess))
        whole = [row for row in some if row.state not in FINAL_STATES]
        self._remove(connection, some, whole)
        return len(some), sum(row.payload_bytes for row in some)

    def _remove(
        self,
        connection: sa.Connection,
        rows: Sequence[_Row],
        whole: Sequence[_Row],
    ) -> None:
        """Delete the text of all rows, and everything else of those that are deleted whole."""
        if not rows:
            return
        self._unjudged += sum(row.state in schema.UNFINISHED for row in rows)
        ids = [row.sample_id for row in rows]
        for table in _WITH_TEXT:
            connection.execute(sa.delete(table).where(table.c.sample_id.in_(ids)))
        whole_ids = [row.sample_id for row in whole]
        if whole_ids:
            _forget(connection, whole_ids)
        if len(whole_ids) < len(ids):
            connection.execute(
                sa.update(schema.samples).where(_samples.sample_id.in_(ids)).values(payload_bytes=0)
            )


def _size_bytes(connection: sa.Connection) -> int:
    total = sa.select(sa.func.coalesce(sa.func.sum(_samples.payload_bytes), 0))
    return int(connection.execute(total).scalar_one())


def _within(rows: Sequence[_Row], most_bytes: int) -> list[_Row]:
    """As many of the first rows as it takes to reach so many bytes."""
    some: list[_Row] = []
    total = 0
    for row in rows:
        some.append(row)
        total += row.payload_bytes
        if total >= most_bytes:
            break
    return some


def _forget(connection: sa.Connection, sample_ids: Sequence[int]) -> None:
    requests = list(
        connection.execute(
            sa.select(_samples.request_id).where(_samples.sample_id.in_(sample_ids))
        ).scalars()
    )
    for table in _WITHOUT_TEXT:
        connection.execute(sa.delete(table).where(table.c.sample_id.in_(sample_ids)))
    # Another sample of the request may be younger.
    for table in (schema.feedback, schema.labels):
        connection.execute(
            sa.delete(table).where(
                table.c.request_id.in_(requests),
                table.c.request_id.not_in(sa.select(_samples.request_id)),
            )
        )


def _vacuum_some(connection: sa.Connection) -> bool:
    """Cut free pages off a SQLite file; whether more are free."""
    free = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
    if free == 0:
        return False
    connection.exec_driver_sql(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").close()
    left = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
    return bool(0 < left < free)
