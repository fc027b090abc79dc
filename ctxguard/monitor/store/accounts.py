"""What writing processes report: samples, and what they sampled, stored and lost, by hour.

A report is added in the transaction that stores its samples. What a process held when it last
reported is pending while the process is heard of, and unaccounted for once it was silent.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import AHEAD_SECONDS, storable
from ctxguard.monitor.store.part import StorePart, reads, writes
from ctxguard.monitor.store.types import (
    HOUR_SECONDS,
    Accounts,
    Entry,
    LostReason,
    State,
    StoredShares,
    WorkerCounts,
)

SILENT_SECONDS = 300.0
"""A process that has not reported for so long is taken for dead, on whichever host it was."""
_SINGLE_HOURS = 48
"""Older hours are kept as one row of all processes."""
_ALL = ""
"""The worker id of these rows."""

_table = schema.accounts
_own = _table.c
_LOST = {reason: _own[f"lost_{reason.value}"] for reason in LostReason}
_COUNTED = (_own.sampled, _own.stored, *_LOST.values())
_SAMPLE_COLUMNS = (
    "sample_id",
    "request_id",
    "time_seconds",
    "probability",
    "session_id",
    "label_order",
    "payload_bytes",
    "state",
    "attempts",
)


class WorkerAccounts(StorePart):
    """The writing processes, their samples and their accounts."""

    @writes
    def append(
        self,
        connection: sa.Connection,
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
        present = math.floor(self._clock() / HOUR_SECONDS) if counts.hour is None else counts.hour
        stored = Counter(math.floor(entry.time_seconds / HOUR_SECONDS) for entry in entries)
        counts, own = replace(counts, hour=present), storable(worker_id)
        if not self._add(connection, own, stored.pop(present, 0), counts, batch):
            return False
        earlier = [
            {"hour": hour, "sampled": counts.earlier.get(hour, 0), "stored": stored[hour]}
            for hour in sorted(stored.keys() | counts.earlier.keys())
        ]
        if earlier:
            self._add_earlier(connection, own, earlier)
        if entries:
            self._insert(connection, entries)
        return True

    @reads
    def accounts(self, connection: sa.Connection, *, worker_id: str | None = None) -> Accounts:
        """The counts of the writing processes, as last reported.

        Args:
            worker_id: Only those of one process; None for all. Processes are told apart for two
                days.
        """
        query = sa.select(
            *[sa.func.coalesce(sa.func.sum(each), 0) for each in (*_COUNTED, self._waiting())]
        )
        if worker_id is not None:
            query = query.where(_own.worker_id == storable(worker_id))
        sampled, stored, *lost, waiting = map(int, connection.execute(query).one())
        return Accounts(sampled, stored, waiting, dict(zip(LostReason, lost, strict=True)))

    @reads
    def stored_shares(self, connection: sa.Connection) -> StoredShares:
        """Which share of each hour's samples was stored; what is in memory is left out."""
        waiting = sa.func.sum(self._waiting())
        rows = connection.execute(
            sa.select(_own.hour, sa.func.sum(_own.sampled), sa.func.sum(_own.stored), waiting)
            .group_by(_own.hour)
            .having(
                sa.func.sum(_own.stored) > 0, sa.func.sum(_own.sampled) > sa.func.sum(_own.stored)
            )
        )
        shares = {
            hour: float(stored) / float(sampled - pending)
            for hour, sampled, stored, pending in rows
            if sampled - pending > stored
        }
        return StoredShares(shares)

    @writes
    def add_counts(
        self, connection: sa.Connection, series: str, more: Mapping[tuple[str, ...], float]
    ) -> dict[tuple[str, ...], float]:
        """Add what a monitor has counted; return the totals of all monitors, which never fall.

        Args:
            series: The judge's.
            more: By name and label values, what was counted since the last call.
        """
        table, own = schema.counts, storable(series)
        rows = [{"series": own, "key": json.dumps(key), "n": n} for key, n in more.items()]
        if rows:
            # In one order, or two monitors might wait for each other.
            insert = self._database.insert(table)
            added = {"n": table.c.n + insert.excluded.n}
            upsert = insert.on_conflict_do_update(
                index_elements=list(table.primary_key), set_=added
            )
            connection.execute(upsert, sorted(rows, key=lambda row: str(row["key"])))
        query = sa.select(table.c.key, table.c.n).where(table.c.series == own)
        return {tuple(json.loads(row.key)): row.n for row in connection.execute(query)}

    @writes
    def fold_accounts(self, connection: sa.Connection) -> int:
        """Add up the processes of each hour that is two days old; how many rows were added up."""
        oldest = math.floor(self._clock() / HOUR_SECONDS) - _SINGLE_HOURS
        is_old = sa.and_(_own.hour < oldest, _own.worker_id != _ALL)
        found = connection.execute(sa.select(_own.hour).where(is_old).with_for_update()).all()
        if not found:
            return 0
        sums = sa.select(
            sa.literal(_ALL), _own.hour, *map(sa.func.sum, _COUNTED), sa.literal(0), sa.literal(0)
        )
        insert = self._database.insert(_table).from_select(
            [_own.worker_id, _own.hour, *_COUNTED, _own.pending, _own.batch],
            sums.where(is_old).group_by(_own.hour),
        )
        added = {each.name: each + insert.excluded[each.name] for each in _COUNTED}
        key = [_own.worker_id, _own.hour]
        connection.execute(insert.on_conflict_do_update(index_elements=key, set_=added))
        connection.execute(sa.delete(_table).where(is_old))
        return len(found)

    def _waiting(self) -> sa.ColumnElement[int]:
        """The samples in the memory of a process, while it is heard of."""
        now = self._database.lease_clock()
        is_heard = sa.and_(
            _own.heard_at > now - SILENT_SECONDS, _own.heard_at <= now + AHEAD_SECONDS
        )
        return sa.case((is_heard, _own.pending), else_=0)

    def _add_earlier(
        self, connection: sa.Connection, worker_id: str, counted: Sequence[Mapping[str, int]]
    ) -> None:
        """Add to the rows of a worker and of hours that are not the present one."""
        zeros = {each.name: 0 for each in (*_COUNTED, _own.pending, _own.batch)}
        rows = [{**zeros, "worker_id": worker_id, **one} for one in counted]
        connection.execute(_earlier(is_sqlite=self._database.is_sqlite), rows)

    def _add(
        self,
        connection: sa.Connection,
        worker_id: str,
        stored: int,
        counts: WorkerCounts,
        batch: int | None,
    ) -> bool:
        """Add to the row of a worker and an hour; whether the batch is new."""
        more = {
            "sampled": counts.sampled,
            "stored": stored,
            **{column.name: counts.lost.get(reason, 0) for reason, column in _LOST.items()},
        }
        given: dict[str, object] = {f"more_{name}": n for name, n in more.items()}
        given |= {"own_worker": worker_id, "own_hour": counts.hour, "new_pending": counts.pending}
        if batch is not None:
            given["new_batch"] = batch
        now = self._database.lease_clock()
        update = _present(is_numbered=batch is not None).values(heard_at=now)
        if connection.execute(update, given).rowcount:
            return True
        new: dict[str, object] = {
            **more,
            "worker_id": worker_id,
            "hour": counts.hour,
            "batch": batch or 0,
        }
        new |= {"pending": counts.pending, "heard_at": now}
        if self._database.upsert(connection, _table, new, changes=None):
            earlier = sa.and_(_own.worker_id == worker_id, _own.hour < counts.hour)
            connection.execute(sa.update(_table).where(earlier).values(pending=0))
            return True
        # Another connection of the worker may have inserted the row just now.
        return bool(connection.execute(update, given).rowcount)

    def _insert(self, connection: sa.Connection, entries: Sequence[Entry]) -> None:
        """Insert samples; those of probability 0 as forced."""
        ids = self._database.new_sample_ids(connection, len(entries))
        insert = self._database.insert_rows
        insert(
            connection,
            schema.samples,
            _SAMPLE_COLUMNS,
            [
                (
                    sample_id,
                    storable(entry.request_id),
                    entry.time_seconds,
                    entry.probability,
                    None if entry.session_id is None else storable(entry.session_id),
                    entry.label_order,
                    len(entry.payload),
                    (State.PENDING if entry.probability > 0.0 else State.FORCED).value,
                    0,
                )
                for sample_id, entry in zip(ids, entries, strict=True)
            ],
        )
        payloads = [
            (sample_id, entry.payload) for sample_id, entry in zip(ids, entries, strict=True)
        ]
        insert(connection, schema.payloads, ("sample_id", "payload"), payloads)


@cache
def _earlier(*, is_sqlite: bool) -> Any:
    """Adds rows of a worker and of hours that are not the present one; made once, for its speed."""
    insert = (sqlite if is_sqlite else postgresql).insert(_table)
    added = {name: _own[name] + insert.excluded[name] for name in ("sampled", "stored")}
    return insert.on_conflict_do_update(index_elements=[_own.worker_id, _own.hour], set_=added)


@cache
def _present(*, is_numbered: bool) -> sa.Update:
    """Adds to the row of a worker and the present hour; made once, for its speed."""
    added = {each: each + sa.bindparam(f"more_{each.name}") for each in _COUNTED}
    update = (
        sa.update(_table)
        .where(_own.worker_id == sa.bindparam("own_worker"), _own.hour == sa.bindparam("own_hour"))
        .values({**added, _own.pending: sa.bindparam("new_pending")})
    )
    if not is_numbered:
        return update.values(batch=_own.batch + 1)
    number = sa.bindparam("new_batch", type_=sa.BigInteger)
    return update.where(_own.batch < number).values(batch=number)
