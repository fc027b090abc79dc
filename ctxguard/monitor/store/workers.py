"""What writing processes do: store samples together with their own counts."""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import sqlalchemy as sa

from ctxguard.errors import StoreFullError
from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import storable
from ctxguard.monitor.store.part import StorePart, reads, writes
from ctxguard.monitor.store.types import Entry, State, WorkerCounts, WorkerRow


class Workers(StorePart):
    """The writing processes and their samples."""

    def append(self, worker_id: str, entries: Sequence[Entry], counts: WorkerCounts) -> None:
        """Store samples together with their writer's counts: all of it or nothing.

        Args:
            worker_id: The id of one process, for as long as it lives.
            entries: The samples; may be empty, to store the counts alone.
            counts: What the process has counted since it began.

        Raises:
            StoreFullError: the disk is full, or the reserved space is in use for cleaning.
        """
        reserve = self._database.reserve
        if reserve is not None and entries and not reserve.hold():
            raise StoreFullError(
                f"{self._database.name}: the disk is full except for the space reserved for "
                "cleaning; free space on it, or lower max_bytes or max_age_seconds and clean"
            )
        self._append(worker_id, entries, counts)

    @writes
    def _append(
        self,
        connection: sa.Connection,
        worker_id: str,
        entries: Sequence[Entry],
        counts: WorkerCounts,
    ) -> None:
        if entries:
            self._insert(connection, entries)
        self._count(connection, worker_id, counts, stored=len(entries), closed=False)

    @writes
    def close_worker(self, connection: sa.Connection, worker_id: str, counts: WorkerCounts) -> None:
        """Store a worker's final counts; calling it again changes nothing else."""
        self._count(connection, worker_id, counts, stored=0, closed=True)

    @reads
    def workers(self, connection: sa.Connection) -> list[WorkerRow]:
        """Every writing process so far, in the order in which they began."""
        table = schema.workers
        columns = [table.c[field.name] for field in fields(WorkerRow)]
        rows = connection.execute(
            sa.select(*columns).order_by(table.c.started_seconds, table.c.worker_id)
        )
        return [WorkerRow(**{**row._mapping, "lost": json.loads(row.lost)}) for row in rows]

    @reads
    def stored_count(self, connection: sa.Connection, worker_id: str) -> int:
        """How many samples were stored for a worker; 0 for one that is unknown."""
        table = schema.workers.c
        query = sa.select(table.stored).where(table.worker_id == storable(worker_id))
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

    def _count(
        self,
        connection: sa.Connection,
        worker_id: str,
        counts: WorkerCounts,
        *,
        stored: int,
        closed: bool,
    ) -> None:
        """Update a worker's row; ``stored`` is added to what it had stored."""
        now = self._clock()
        changes: dict[str, Any] = {
            "seen_seconds": now,
            "sampled": counts.sampled,
            "lost": json.dumps(dict(counts.lost), sort_keys=True),
        }
        if closed:
            changes["closed"] = True
        values = {
            "worker_id": storable(worker_id),
            "host": storable(socket.gethostname()),
            "pid": os.getpid(),
            "started_seconds": now,
            "stored": stored,
            "closed": closed,
            **changes,
        }
        changes["stored"] = schema.workers.c.stored + stored
        self._database.upsert(connection, schema.workers, values, changes=changes)
