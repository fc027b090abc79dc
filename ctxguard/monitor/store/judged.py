"""What was judged, by series and time; and what is known of single samples."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import sqlalchemy as sa

from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import chunks, storable
from ctxguard.monitor.store.types import PICKED, JudgedRows

_FETCHED = 2_000
_samples = schema.samples.c
_judged = schema.judged.c


def judged(
    connection: sa.Connection,
    series: str,
    *,
    since: float | None,
    until: float | None,
    with_grades: bool,
) -> JudgedRows:
    """The judged requests of a series with since ≤ time < until."""
    series_id = _series_id(connection, series)
    columns: list[sa.ColumnElement[Any]] = [
        _judged.sample_id,
        _judged.time_seconds,
        _judged.summary,
    ]
    source: sa.FromClause = schema.judged
    if with_grades:
        columns.append(schema.grades.c.grades)
        source = source.outerjoin(schema.grades, schema.grades.c.sample_id == _judged.sample_id)
    query = (
        sa.select(*columns)
        .select_from(source)
        .where(_judged.series_id == series_id)
        .order_by(_judged.time_seconds, _judged.sample_id)
    )
    if since is not None:
        query = query.where(_judged.time_seconds >= since)
    if until is not None:
        query = query.where(_judged.time_seconds < until)
    parts: list[JudgedRows] = []
    with closing(_cursor(connection, query)) as cursor:
        while rows := cursor.fetchmany(_FETCHED):
            ids, times, summaries, *grades = zip(*rows, strict=True)
            parts.append(
                JudgedRows(
                    np.fromiter(ids, np.int64, len(ids)),
                    np.fromiter(times, np.float64, len(times)),
                    b"".join(summaries),
                    [one or b"" for one in grades[0]] if with_grades else None,
                )
            )
    return JudgedRows(
        np.concatenate([np.empty(0, np.int64), *(part.sample_ids for part in parts)]),
        np.concatenate([np.empty(0), *(part.time_seconds for part in parts)]),
        b"".join([part.summaries for part in parts]),
        [one for part in parts for one in part.grades or ()] if with_grades else None,
    )


def _cursor(connection: sa.Connection, query: sa.Select[Any]) -> Any:
    """The driver's own: a million rows of SQLAlchemy's take longer than the query."""
    if connection.dialect.name == "sqlite":
        return connection.execute(query).cursor
    driver: Any = connection.connection.driver_connection
    compiled = query.compile(connection)
    # Bytes cross as they are, not as text.
    return driver.cursor(binary=True).execute(str(compiled), compiled.params)


def _series_id(connection: sa.Connection, series: str) -> int:
    found = connection.execute(
        sa.select(schema.series.c.series_id).where(schema.series.c.name == storable(series))
    ).scalar()
    return -1 if found is None else found


def series_names(connection: sa.Connection) -> list[str]:
    """Every series, in the order in which they began."""
    table = schema.series.c
    return list(connection.execute(sa.select(table.name).order_by(table.series_id)).scalars())


def verdicts(connection: sa.Connection, series: str, sample_ids: Sequence[int]) -> dict[int, str]:
    """The verdicts that are still kept, by sample."""
    table = schema.verdicts.c
    series_id = _series_id(connection, series)
    found: dict[int, str] = {}
    for some in chunks(sample_ids):
        rows = connection.execute(
            sa.select(table.sample_id, table.verdicts).where(
                table.sample_id.in_(some), table.series_id == series_id
            )
        )
        found.update((row.sample_id, row.verdicts) for row in rows)
    return found


def rejected(
    connection: sa.Connection, sample_ids: Sequence[int]
) -> dict[int, tuple[tuple[str, str, str], ...]]:
    """(passage id, reason, raw reply) of each rejected verdict, by sample."""
    table = schema.rejected.c
    found: dict[int, tuple[tuple[str, str, str], ...]] = {}
    for some in chunks(sample_ids):
        rows = connection.execute(
            sa.select(table.sample_id, table.passage_id, table.reason, table.reply)
            .where(table.sample_id.in_(some))
            .order_by(table.rejected_id)
        )
        for row in rows:
            one = (row.passage_id, row.reason, row.reply)
            found[row.sample_id] = (*found.get(row.sample_id, ()), one)
    return found


def find(connection: sa.Connection, request_id: str) -> list[int]:
    """The samples of a request, oldest first."""
    return list(
        connection.execute(
            sa.select(_samples.sample_id)
            .where(_samples.request_id == storable(request_id))
            .order_by(_samples.sample_id)
        ).scalars()
    )


def request_ids(connection: sa.Connection, sample_ids: Sequence[int]) -> dict[int, str]:
    """Which requests samples are of."""
    found: dict[int, str] = {}
    for some in chunks(sample_ids):
        rows = connection.execute(
            sa.select(_samples.sample_id, _samples.request_id).where(_samples.sample_id.in_(some))
        )
        found.update((row.sample_id, row.request_id) for row in rows)
    return found


def pick_for_labels(
    connection: sa.Connection, series: str, n: int, *, since: float | None
) -> list[int]:
    """Judged samples with a payload that are not labelled at random, lowest label order first."""
    queue = schema.label_queue.c
    sought = sa.select(queue.sample_id).where(queue.why.not_in(PICKED))
    labelled = sa.select(_samples.sample_id).where(
        _samples.request_id.in_(sa.select(schema.labels.c.request_id)),
        _samples.sample_id.not_in(sought),
    )
    query = (
        sa.select(_judged.sample_id)
        .where(
            _judged.series_id == _series_id(connection, series),
            _judged.sample_id.not_in(labelled),
            sa.exists().where(schema.payloads.c.sample_id == _judged.sample_id),
        )
        .order_by(_judged.label_order, _judged.sample_id)
        .limit(n)
    )
    if since is not None:
        query = query.where(_judged.time_seconds >= since)
    return list(connection.execute(query).scalars())
