"""Samples on their way: written, claimed for judging, finished or given back.

Functions of one open transaction each. The order in which samples wait is that of their ids, so
no step of a clock puts one before another.
"""

import json
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import Database, chunks, storable
from ctxguard.monitor.store.types import (
    Claimed,
    Entry,
    Finished,
    State,
    WorkerCounts,
    WorkerRow,
)

_samples = schema.samples.c

_AHEAD_SECONDS = 60.0
"""A lease may begin this much ahead: another may have read the clock later and acted sooner."""


def insert_samples(database: Database, connection: sa.Connection, entries: Sequence[Entry]) -> None:
    """Write samples down; those of probability 0 as forced."""
    ids = database.new_sample_ids(connection, len(entries))
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


def count_for_worker(
    database: Database,
    connection: sa.Connection,
    worker_id: str,
    counts: WorkerCounts,
    now_seconds: float,
    *,
    stored: int,
    closed: bool,
) -> None:
    """Bring a worker's row up to date; what it stored is added."""
    changes: dict[str, Any] = {
        "seen_seconds": now_seconds,
        "sampled": counts.sampled,
        "lost": json.dumps(dict(counts.lost), sort_keys=True),
    }
    if closed:
        changes["closed"] = True
    values = {
        "worker_id": storable(worker_id),
        "host": storable(socket.gethostname()),
        "pid": os.getpid(),
        "started_seconds": now_seconds,
        "stored": stored,
        "closed": closed,
        **changes,
    }
    changes["stored"] = schema.workers.c.stored + stored
    database.upsert(connection, schema.workers, values, changes=changes)


def workers(connection: sa.Connection) -> list[WorkerRow]:
    """Every worker, in the order in which they began."""
    table = schema.workers
    rows = connection.execute(sa.select(table).order_by(table.c.started_seconds, table.c.worker_id))
    return [WorkerRow(**{**row._mapping, "lost": json.loads(row.lost)}) for row in rows]


def claim(
    database: Database,
    connection: sa.Connection,
    claimant: str,
    limit: int,
    lease_seconds: float,
) -> list[Claimed]:
    """Take the oldest samples that wait, or whose claimant has let its lease run out."""
    now = database.lease_now(connection)
    # A lease counts only between its two ends: one from before a restart or a step of the
    # server's clock seems to begin far ahead, and must not bind until then.
    has_ended = sa.or_(_samples.leased_until <= now, _samples.leased_at > now + _AHEAD_SECONDS)
    # One state at a time, which an index holds in order: a long queue costs no more than a short.
    found = _oldest(connection, _samples.state == State.CLAIMED.value, has_ended, limit=limit)
    if len(found) < limit:
        waits = _samples.state == State.PENDING.value
        found = [*found, *_oldest(connection, waits, limit=limit - len(found))]
    if not found:
        return []
    attempts = {row.sample_id: row.attempts + (row.state == State.CLAIMED.value) for row in found}
    connection.execute(
        sa.update(schema.samples)
        .where(_samples.sample_id == sa.bindparam("claimed_id"))
        .values(
            state=State.CLAIMED.value,
            claimant=storable(claimant),
            leased_at=now,
            leased_until=now + lease_seconds,
            attempts=sa.bindparam("tried"),
        ),
        [{"claimed_id": sample_id, "tried": tried} for sample_id, tried in attempts.items()],
    )
    payload_of = payloads(connection, list(attempts))
    return [
        Claimed(
            sample_id=row.sample_id,
            request_id=row.request_id,
            time_seconds=row.time_seconds,
            probability=row.probability,
            session_id=row.session_id,
            payload=payload_of[row.sample_id],
            attempts=attempts[row.sample_id],
        )
        for row in found
    ]


def _oldest(
    connection: sa.Connection, *conditions: sa.ColumnElement[bool], limit: int
) -> Sequence[Any]:
    """The samples of lowest id, locked; those that another transaction has are passed over."""
    return connection.execute(
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


def finish(
    database: Database, connection: sa.Connection, series: str, finished: Sequence[Finished]
) -> list[int]:
    """Put down what became of samples; those that are finished already stay as they are.

    Returns:
        The samples that were not.
    """
    last = {one.sample_id: one for one in reversed(finished)}
    orders = _unfinished(connection, list(last))
    accepted = [one for one in last.values() if one.sample_id in orders]
    if not accepted:
        return []
    series_id = _series_id(database, connection, series, accepted)
    connection.execute(
        sa.update(schema.samples)
        .where(_samples.sample_id == sa.bindparam("finished_id"))
        .values(state=sa.bindparam("outcome"), claimant=None, leased_at=None, leased_until=None),
        [{"finished_id": one.sample_id, "outcome": one.state.value} for one in accepted],
    )
    _insert(
        connection,
        schema.judged,
        (
            {
                "series_id": series_id,
                "time_seconds": one.time_seconds,
                "sample_id": one.sample_id,
                "label_order": orders[one.sample_id],
                "summary": one.summary,
            }
            for one in accepted
            if one.state is State.JUDGED
        ),
    )
    _insert(
        connection,
        schema.grades,
        ({"sample_id": one.sample_id, "grades": one.grades} for one in accepted if one.grades),
    )
    _insert(
        connection,
        schema.verdicts,
        (
            {
                "sample_id": one.sample_id,
                "series_id": series_id,
                "verdicts": storable(one.verdicts),
            }
            for one in accepted
            if one.verdicts
        ),
    )
    _insert(
        connection,
        schema.rejected,
        (
            {
                "sample_id": one.sample_id,
                "passage_id": storable(passage_id),
                "reason": storable(reason),
                "reply": storable(reply),
            }
            for one in accepted
            for passage_id, reason, reply in one.rejected
        ),
    )
    return [one.sample_id for one in accepted]


def give_back(
    connection: sa.Connection, sample_ids: Sequence[int], max_attempts: int | None
) -> int:
    """Let samples wait again; those that were tried too often fail."""
    failed = 0
    for some in chunks(sorted(set(sample_ids))):
        claimed = sa.and_(_samples.sample_id.in_(some), _samples.state == State.CLAIMED.value)
        tried = 0 if max_attempts is None else 1
        is_last = sa.false() if max_attempts is None else _samples.attempts + 1 >= max_attempts
        failed += connection.execute(
            sa.select(sa.func.count()).select_from(schema.samples).where(claimed, is_last)
        ).scalar_one()
        connection.execute(
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


def payloads(connection: sa.Connection, sample_ids: Sequence[int]) -> dict[int, bytes]:
    """The payloads that are still kept, by sample."""
    table = schema.payloads.c
    found: dict[int, bytes] = {}
    for some in chunks(sample_ids):
        rows = connection.execute(
            sa.select(table.sample_id, table.payload).where(table.sample_id.in_(some))
        )
        found.update((row.sample_id, row.payload) for row in rows)
    return found


def states(connection: sa.Connection) -> dict[State, int]:
    """How many samples are in each state, zeros included."""
    rows = connection.execute(
        sa.select(_samples.state, sa.func.count().label("n")).group_by(_samples.state)
    )
    counted = {row.state: row.n for row in rows}
    return {state: counted.get(state.value, 0) for state in State}


def oldest_pending(connection: sa.Connection) -> float | None:
    """When the sample that waits longest was answered; None where none waits."""
    return connection.execute(
        sa.select(_samples.time_seconds)
        .where(_samples.state == State.PENDING.value)
        .order_by(_samples.sample_id)
        .limit(1)
    ).scalar()


def _unfinished(connection: sa.Connection, sample_ids: Sequence[int]) -> dict[int, float]:
    """The label order of those samples that nobody has finished, locked until the end."""
    found: dict[int, float] = {}
    for some in chunks(sorted(sample_ids)):
        rows = connection.execute(
            sa.select(_samples.sample_id, _samples.label_order)
            .where(_samples.sample_id.in_(some), _samples.state.in_(schema.UNFINISHED))
            .order_by(_samples.sample_id)
            .with_for_update()
        )
        found.update((row.sample_id, row.label_order) for row in rows)
    return found


def _series_id(
    database: Database, connection: sa.Connection, series: str, accepted: Sequence[Finished]
) -> int:
    """The id of a series, which begins with its first finished sample."""
    sizes = sorted({len(one.summary) for one in accepted if one.summary})
    table = schema.series
    found = _series_row(connection, series)
    if found is None:
        database.upsert(connection, table, {"name": storable(series)}, changes=None)
        found = _series_row(connection, series)
    if found is None:
        raise RuntimeError("a series vanished in its own transaction")
    known: int | None = found.summary_bytes
    if known is None and sizes:
        known = sizes[0]
    if any(size != known for size in sizes):
        raise ConfigurationError(
            f"series {series!r} holds summaries of {known} bytes, not {sizes[-1]}: they are read "
            "as one array; begin a new series"
        )
    if found.summary_bytes is None and known is not None:
        connection.execute(
            sa.update(table).where(table.c.series_id == found.series_id).values(summary_bytes=known)
        )
    series_id: int = found.series_id
    return series_id


def _series_row(connection: sa.Connection, series: str) -> sa.Row[Any] | None:
    table = schema.series
    return connection.execute(
        sa.select(table).where(table.c.name == storable(series))
    ).one_or_none()


def _insert(connection: sa.Connection, table: sa.Table, rows: Iterable[dict[str, Any]]) -> None:
    rows = list(rows)
    if rows:
        connection.execute(sa.insert(table), rows)


def lead(
    database: Database, connection: sa.Connection, name: str, who: str, lease_seconds: float
) -> bool:
    """Take or renew a lease that one holder has at a time."""
    now = database.lease_now(connection)
    lease = {"holder": storable(who), "leased_at": now, "leased_until": now + lease_seconds}
    database.upsert(connection, schema.leases, {"name": name, **lease}, changes=None)
    table = schema.leases.c
    held = connection.execute(
        sa.select(schema.leases).where(table.name == name).with_for_update()
    ).one()
    holds = held.leased_at - _AHEAD_SECONDS <= now < held.leased_until
    if held.holder != lease["holder"] and holds:
        return False
    connection.execute(sa.update(schema.leases).where(table.name == name).values(lease))
    return True
