"""Judged requests by series and time, and the judgments of single samples."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import sqlalchemy as sa

from ctxguard.monitor.store import schema
from ctxguard.monitor.store.transactions import Store, Transaction, reads, record
from ctxguard.monitor.store.types import NO_PICK, JudgedRows, LossRow, State, StoredSample

PAGE_ROWS = 5_000
_samples = schema.samples.c
_judged = schema.judged.c
JUDGED = (
    _judged.sample_id,
    _judged.time_seconds,
    sa.func.coalesce(_judged.first_pick, NO_PICK),
    _judged.block,
)
"""The columns of ``judged_rows``."""


@reads
def series(db: Transaction) -> list[str]:
    """Return every series of judgments, in the order in which they began."""
    table = schema.series.c
    return db.scalars(sa.select(table.name).order_by(table.series_id))


@reads
def judged_counts(db: Transaction) -> dict[str, tuple[int, int]]:
    """Count the judged samples of each series, and those of them that people labelled."""
    table, labels = schema.series.c, schema.labels.c
    labelled = sa.exists().where(
        _samples.sample_id == _judged.sample_id, labels.request_id == _samples.request_id
    )
    rows = db.execute(
        sa.select(
            table.name,
            sa.func.count().label("n"),
            sa.func.count().filter(labelled).label("n_labelled"),
        )
        .join(schema.judged, _judged.series_id == table.series_id)
        .where(_judged.is_counted)
        .group_by(table.series_id, table.name)
        .order_by(table.series_id)
    )
    return {row.name: (row.n, row.n_labelled) for row in rows}


def judged(
    store: Store, series: str, *, since: float | None = None, until: float | None = None
) -> JudgedRows:
    """Return the judged requests of a series with since ≤ time < until, ordered by time.

    Args:
        series: A series that has not begun has no rows.
        since: Seconds since the epoch; None for the beginning.
        until: Seconds since the epoch; None for no end.
    """
    return JudgedRows.joined(judged_pages(store, series, since=since, until=until))


def judged_pages(
    store: Store, series: str, *, since: float | None = None, until: float | None = None
) -> Iterator[JudgedRows]:
    """Read the rows of ``judged`` page by page, each in a transaction of its own.

    Memory holds one page. Requests that are judged meanwhile may or may not be read.
    """
    after: tuple[float, int] | None = None
    while True:
        page = _judged_page(store, series, since, until, after)
        if len(page):
            yield page
        if len(page) < PAGE_ROWS:
            return
        after = float(page.time_seconds[-1]), int(page.sample_ids[-1])


@reads
def _judged_page(
    db: Transaction,
    series: str,
    since: float | None,
    until: float | None,
    after: tuple[float, int] | None,
) -> JudgedRows:
    """Read the first rows after the one with this time and sample id; None for the first."""
    query = (
        sa.select(*JUDGED)
        .where(_judged.series_id == db.series_id(series), _judged.is_counted)
        .order_by(_judged.time_seconds, _judged.sample_id)
        .limit(PAGE_ROWS)
    )
    if after is not None:
        # One lower bound alone on the time, or SQLite may search from the other one.
        since, last_id = after
        is_later = sa.or_(_judged.time_seconds > since, _judged.sample_id > last_id)
        query = query.where(is_later)
    if since is not None:
        query = query.where(_judged.time_seconds >= since)
    if until is not None:
        query = query.where(_judged.time_seconds < until)
    return judged_rows(db.raw_rows(query))


@reads
def losses(
    db: Transaction, series: str, profile_id: str, *, since: float, until: float
) -> list[LossRow]:
    """Return the losses of requests of a profile with since ≤ time < until, in any order."""
    table = schema.losses.c
    query = sa.select(*[table[each.name] for each in fields(LossRow)]).where(
        *_of_profile(db, series, profile_id),
        table.time_seconds >= since,
        table.time_seconds < until,
    )
    return [LossRow(*row) for row in db.execute(query)]


@reads
def first_loss_seconds(
    db: Transaction, series: str, profile_id: str, *, since: float | None
) -> float | None:
    """Return the time of the first request with a loss; None if there is none.

    Args:
        profile_id: The profile that served it.
        since: Leave earlier ones out; None for the first of all.
    """
    times = schema.losses.c.time_seconds
    query = sa.select(sa.func.min(times)).where(*_of_profile(db, series, profile_id))
    if since is not None:
        query = query.where(times >= since)
    first: float | None = db.execute(query).scalar()
    return first


@reads
def verdicts(db: Transaction, series: str, sample_ids: Sequence[int]) -> dict[int, str]:
    """Return verdicts by sample, without those that were deleted or never given."""
    table = schema.verdicts.c
    query = sa.select(table.sample_id, table.verdicts).where(
        table.series_id == db.series_id(series)
    )
    return db.by_sample(query, sample_ids)


@reads
def rejected(
    db: Transaction, sample_ids: Sequence[int]
) -> dict[int, tuple[tuple[str, str, str], ...]]:
    """(passage id, reason, raw reply) of each verdict that was not valid, by sample."""
    table = schema.rejected.c
    query = sa.select(table.sample_id, table.passage_id, table.reason, table.reply)
    by_sample: dict[int, tuple[tuple[str, str, str], ...]] = {}
    for row in db.rows_with(query.order_by(table.rejected_id), table.sample_id, sample_ids):
        one = (row.passage_id, row.reason, row.reply)
        by_sample[row.sample_id] = (*by_sample.get(row.sample_id, ()), one)
    return by_sample


@reads
def find(db: Transaction, request_id: str) -> list[int]:
    """Return the samples of a request, oldest first."""
    query = sa.select(_samples.sample_id).where(_samples.request_id == request_id)
    return db.scalars(query.order_by(_samples.sample_id))


@reads
def samples_of(db: Transaction, request_id: str) -> list[StoredSample]:
    """Return the samples of a request, oldest first, and how far each came."""
    query = _stored().where(_samples.request_id == request_id)
    return list(map(_stored_sample, db.execute(query.order_by(_samples.sample_id))))


@reads
def newest_samples(db: Transaction, n: int, *, before: int | None = None) -> list[StoredSample]:
    """Return the samples stored last, newest first, and how far each came.

    Args:
        n: How many at most.
        before: Only samples stored before the one with this id; None for the newest of all.
    """
    query = _stored().order_by(_samples.sample_id.desc()).limit(n)
    if before is not None:
        query = query.where(_samples.sample_id < before)
    return list(map(_stored_sample, db.execute(query)))


@reads
def request_ids(db: Transaction, sample_ids: Sequence[int]) -> dict[int, str]:
    """Return the request of each sample, without samples that were deleted."""
    query = sa.select(_samples.sample_id, _samples.request_id)
    return db.by_sample(query, sample_ids)


def _of_profile(
    db: Transaction, series: str, profile_id: str
) -> tuple[sa.ColumnElement[bool], ...]:
    table = schema.losses.c
    return table.series_id == db.series_id(series), table.profile_id == profile_id


def _stored() -> sa.Select[Any]:
    payloads, series = schema.payloads.c, schema.series.c
    return (
        sa.select(
            schema.samples,
            payloads.sample_id.is_not(None).label("has_text"),
            series.name.label("series"),
        )
        .outerjoin(schema.payloads, payloads.sample_id == _samples.sample_id)
        .outerjoin(
            schema.judged,
            sa.and_(_judged.sample_id == _samples.sample_id, _judged.is_counted),
        )
        .outerjoin(schema.series, series.series_id == _judged.series_id)
    )


def _stored_sample(row: sa.Row[Any]) -> StoredSample:
    return record(StoredSample, row, state=State(row.state), has_text=bool(row.has_text))


def judged_rows(rows: Sequence[Any]) -> JudgedRows:
    """Make rows of the columns ``JUDGED``, in their order."""
    ids, times, picks, blocks = zip(*rows, strict=True) if rows else ((), (), (), ())
    return JudgedRows(
        np.fromiter(ids, np.int64, len(ids)),
        np.fromiter(times, np.float64, len(times)),
        np.fromiter(picks, np.int64, len(picks)),
        tuple(blocks),
    )
