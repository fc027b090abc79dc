"""What writing processes do: store samples together with their own counts.

Processes end without a word: those that are silent are settled by what they reported last, and the
counts of ended ones are added up in one row, so that a report reads few.
"""

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from ctxguard.errors import StoreFullError
from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import AHEAD_SECONDS, storable
from ctxguard.monitor.store.part import StorePart, reads, writes
from ctxguard.monitor.store.types import Entry, State, WorkerCounts, WorkerRow, WorkerTotals

SILENT_SECONDS = 300.0
"""A process that has not written for so long is taken for dead, on whichever host it was."""
_DAY_SECONDS = 86_400.0
_FORGOTTEN_SECONDS = 30 * _DAY_SECONDS
_BATCH_WORKERS = 1_000
_PAUSE_SECONDS = 0.002
"""Between transactions: long enough for a waiting writer's turn."""
_ENDED = "ended"
"""The id of the row that holds the counts of workers that were folded."""

_workers = schema.workers.c
# Made once: they are part of every append.
_own = _workers.worker_id == sa.bindparam("own")
_ROW = sa.select(schema.workers).where(_own).with_for_update()
_UPDATE = (
    sa.update(schema.workers)
    .where(_own)
    .values(
        {
            name: sa.bindparam(f"new_{name}")
            for name in ("seen_seconds", "sampled", "stored", "lost", "pending", "batch", "closed")
        }
    )
)


class Workers(StorePart):
    """The writing processes and their samples."""

    def append(
        self,
        worker_id: str,
        entries: Sequence[Entry],
        counts: WorkerCounts,
        *,
        batch: int | None = None,
    ) -> int:
        """Store samples together with their writer's counts: all of it or nothing.

        Args:
            worker_id: The id of one process, for as long as it lives.
            entries: The samples; may be empty, to store the counts alone.
            counts: What the process has counted since it began, with these samples stored.
            batch: Number of the batch, higher than those before. One that the store holds already
                changes nothing, so that a batch may be sent again where the answer was lost; None
                for one that is never sent again.

        Returns:
            How many samples are stored for the worker now.

        Raises:
            StoreFullError: the disk is full, or the reserved space is in use for cleaning.
        """
        reserve = self._database.reserve
        if reserve is not None and entries and not reserve.hold():
            raise StoreFullError(
                f"{self._database.name}: the disk is full except for the space reserved for "
                "cleaning; free space on it, or lower max_bytes or max_age_seconds and clean"
            )
        return self._append(worker_id, entries, counts, batch)

    @writes
    def _append(
        self,
        connection: sa.Connection,
        worker_id: str,
        entries: Sequence[Entry],
        counts: WorkerCounts,
        batch: int | None,
    ) -> int:
        row = self._row(connection, worker_id)
        stored: int = row.stored
        if batch is not None and batch <= row.batch:
            return stored
        if entries:
            self._insert(connection, entries)
            stored += len(entries)
        self._update(connection, row, counts, stored=stored, batch=batch or row.batch)
        return stored

    @writes
    def close_worker(
        self,
        connection: sa.Connection,
        worker_id: str,
        counts: WorkerCounts,
        *,
        reason: str = "killed",
        batch: int = 0,
    ) -> int:
        """Store a worker's final counts; calling it again changes nothing else.

        Args:
            worker_id: The process that ends, or has ended.
            counts: Its pending samples are those of which nobody knows whether they were stored.
            reason: Why those of them are lost that were not stored.
            batch: The batch that it sent last: should that arrive yet, it is not stored.

        Returns:
            How many samples are stored for the worker.
        """
        row = self._row(connection, worker_id)
        self._update(
            connection,
            row,
            _settled(counts, row.stored, reason),
            batch=max(batch, row.batch),
            closed=True,
        )
        stored: int = row.stored
        return stored

    def settle_silent_workers(self) -> int:
        """Count the samples of processes as lost that have not written for ``SILENT_SECONDS``.

        What such a process reported as pending is lost as ``killed``. If it writes again, or its
        final counts are found, those hold instead.

        Returns:
            How many were settled.
        """
        return self._in_batches(self._settle_some)

    @writes
    def _settle_some(self, connection: sa.Connection) -> int:
        now = self._database.lease_now(connection)
        open_ones = sa.and_(sa.not_(_workers.closed), _workers.pending > 0)
        # Heard before a restart or a change of the clock, or never: silent from now on.
        unknown = sa.or_(_workers.heard_at.is_(None), _workers.heard_at > now + AHEAD_SECONDS)
        connection.execute(sa.update(schema.workers).where(open_ones, unknown).values(heard_at=now))
        silent = connection.execute(
            sa.select(schema.workers)
            .where(open_ones, _workers.heard_at < now - SILENT_SECONDS)
            .limit(_BATCH_WORKERS)
            .with_for_update(skip_locked=True)
        ).all()
        for row in silent:
            reported = WorkerCounts(row.sampled, json.loads(row.lost), row.pending)
            connection.execute(
                sa.update(schema.workers)
                .where(_workers.worker_id == row.worker_id)
                .values(_columns(_settled(reported, row.stored, "killed")))
            )
        return len(silent)

    def fold_ended_workers(self) -> int:
        """Add the counts of processes that ended a day ago to one row, and forget the processes.

        So with those that never closed their accounts, a month after they were last heard of.

        Returns:
            How many were forgotten.
        """
        return self._in_batches(self._fold_some)

    @writes
    def _fold_some(self, connection: sa.Connection) -> int:
        now = self._database.lease_now(connection)
        ended = sa.and_(_workers.closed, _workers.seen_seconds < self._clock() - _DAY_SECONDS)
        forgotten = sa.and_(sa.not_(_workers.closed), _workers.heard_at < now - _FORGOTTEN_SECONDS)
        rows = connection.execute(
            sa.select(schema.workers)
            .where(sa.or_(ended, forgotten), _workers.worker_id != _ENDED)
            .limit(_BATCH_WORKERS)
            .with_for_update(skip_locked=True)
        ).all()
        if not rows:
            return 0
        ids = [row.worker_id for row in rows]
        connection.execute(sa.delete(schema.workers).where(_workers.worker_id.in_(ids)))
        total = self._row(connection, _ENDED)
        lost = Counter(json.loads(total.lost))
        for row in rows:
            lost.update(json.loads(row.lost))
        self._update(
            connection,
            total,
            WorkerCounts(
                total.sampled + sum(row.sampled for row in rows),
                lost,
                total.pending + sum(row.pending for row in rows),
            ),
            stored=total.stored + sum(row.stored for row in rows),
            closed=True,
        )
        return len(rows)

    @reads
    def workers(self, connection: sa.Connection) -> list[WorkerRow]:
        """The writing processes, in the order in which they began, without those long ended."""
        names = WorkerRow.__dataclass_fields__
        rows = connection.execute(
            sa.select(*[_workers[name] for name in names])
            .where(_workers.worker_id != _ENDED)
            .order_by(_workers.started_seconds, _workers.worker_id)
        )
        return [WorkerRow(**{**row._mapping, "lost": json.loads(row.lost)}) for row in rows]

    @reads
    def worker_totals(self, connection: sa.Connection) -> WorkerTotals:
        """The counts of all writing processes so far, those long ended included."""
        numbers = (_workers.sampled, _workers.stored, _workers.pending)
        # Most have lost nothing, and many the same. One statement: PostgreSQL reads it at once.
        losses = (
            sa.select(_workers.lost, sa.func.count(), *[sa.literal(0) for _ in numbers])
            .where(_workers.lost != "{}")
            .group_by(_workers.lost)
        )
        sums = [sa.func.coalesce(sa.func.sum(number), 0) for number in numbers]
        rows = connection.execute(
            sa.select(sa.literal("{}"), sa.literal(1), *sums).union_all(losses)
        )
        sampled = stored = pending = 0
        lost: Counter[str] = Counter()
        for text, n, *of_all in rows:
            sampled, stored, pending = (
                before + int(more)
                for before, more in zip((sampled, stored, pending), of_all, strict=True)
            )
            lost.update({reason: n * count for reason, count in json.loads(text).items()})
        return WorkerTotals(sampled, stored, lost, pending)

    @reads
    def stored_count(self, connection: sa.Connection, worker_id: str) -> int:
        """How many samples were stored for a worker; 0 for one that is unknown."""
        query = sa.select(_workers.stored).where(_workers.worker_id == storable(worker_id))
        return connection.execute(query).scalar() or 0

    def _insert(self, connection: sa.Connection, entries: Sequence[Entry]) -> None:
        """Insert samples; those of probability 0 as forced."""
        ids = self._database.new_sample_ids(connection, len(entries))
        rows = [
            {
                "sample_id": sample_id,
                "request_id": storable(entry.request_id),
                "time_seconds": entry.time_seconds,
                "probability": entry.probability,
                "session_id": None if entry.session_id is None else storable(entry.session_id),
                "label_order": entry.label_order,
                "payload_bytes": len(entry.payload),
                "state": (State.PENDING if entry.probability > 0.0 else State.FORCED).value,
                "attempts": 0,
            }
            for sample_id, entry in zip(ids, entries, strict=True)
        ]
        connection.execute(sa.insert(schema.samples), rows)
        connection.execute(
            sa.insert(schema.payloads),
            [
                {"sample_id": sample_id, "payload": entry.payload}
                for sample_id, entry in zip(ids, entries, strict=True)
            ],
        )

    def _row(self, connection: sa.Connection, worker_id: str) -> sa.Row[Any]:
        """A worker's row, new where there is none; locked until the transaction ends.

        So what another connection of the worker still does is seen, or finds this done.
        """
        own = {"own": storable(worker_id)}
        row = connection.execute(_ROW, own).one_or_none()
        if row is not None:
            return row
        now = self._clock()
        values = {
            "worker_id": own["own"],
            "host": storable(socket.gethostname()),
            "pid": os.getpid(),
            "started_seconds": now,
            "seen_seconds": now,
            "sampled": 0,
            "stored": 0,
            "lost": "{}",
            "closed": False,
        }
        # Where another connection has just inserted it, this waits for that one's end.
        self._database.upsert(connection, schema.workers, values, changes=None)
        return connection.execute(_ROW, own).one()

    def _update(
        self, connection: sa.Connection, row: sa.Row[Any], counts: WorkerCounts, **others: int
    ) -> None:
        """Change a locked row: the counts, and those of ``stored``, ``batch``, ``closed`` given."""
        changes = {
            "stored": row.stored,
            "batch": row.batch,
            "closed": row.closed,
            **others,
            **_columns(counts),
            "seen_seconds": self._clock(),
        }
        connection.execute(
            _UPDATE.values(heard_at=self._database.lease_clock()),
            {"own": row.worker_id, **{f"new_{name}": new for name, new in changes.items()}},
        )

    def _in_batches(self, some: Callable[[], int]) -> int:
        """Call a short transaction until it finds no full batch; the sum of what it returned."""
        total = n = some()
        while n == _BATCH_WORKERS:
            time.sleep(_PAUSE_SECONDS)
            total += (n := some())
        return total


def _columns(counts: WorkerCounts) -> dict[str, int | str]:
    lost = {reason: n for reason, n in counts.lost.items() if n}
    return {
        "sampled": counts.sampled,
        "lost": json.dumps(lost, sort_keys=True),
        "pending": counts.pending,
    }


def _settled(counts: WorkerCounts, stored: int, reason: str) -> WorkerCounts:
    """Counts in which nothing is pending: what was not stored is lost for a reason.

    Never more than was pending: what nobody can account for is not explained away.

    >>> _settled(WorkerCounts(9, {"queue_full": 1}, pending=5), 4, "killed").lost["killed"]
    4
    """
    lost = Counter(counts.lost)
    unknown = counts.sampled - stored - lost.total()
    lost[reason] += min(max(unknown, 0), counts.pending)
    return WorkerCounts(counts.sampled, lost)
