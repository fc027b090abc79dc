"""Reads judged requests: by series and time, singly, or those people have graded."""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import sqlalchemy as sa

from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import Store
from ctxguard.monitor.store.transactions import Transaction, reads, record, writes
from ctxguard.monitor.store.types import (
    MOST_UNCOVERED,
    NO_PICK,
    OPENED,
    GradedBlock,
    GradedRows,
    JudgedRows,
    LossRow,
    State,
    StoredSample,
)

PAGE_ROWS = 5_000
_samples = schema.samples.c
_judged = schema.judged.c
_grades = schema.grades.c
_picked = schema.picked.c


@reads
def series(db: Transaction) -> list[str]:
    """Return every series of judgments, in the order in which they began."""
    table = schema.series.c
    return db.scalars(sa.select(table.name).order_by(table.series_id))


def judged_pages(
    store: Store, series: str, *, since: float | None = None, until: float | None = None
) -> Iterator[JudgedRows]:
    """Read the judged requests of a series by time, page by page, each in its own transaction.

    Memory holds one page. Requests that are judged meanwhile may or may not be read.

    Args:
        series: A series that has not begun has no rows.
        since: Seconds since the epoch, the earliest; None for the beginning.
        until: Seconds since the epoch, exclusive; None for no end.
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
    first_pick = sa.func.coalesce(_judged.first_pick, NO_PICK)
    query = (
        sa.select(_judged.sample_id, _judged.time_seconds, first_pick, _judged.block)
        .where(_judged.series_id == db.series_id(series), _judged.is_counted)
        .order_by(_judged.time_seconds, _judged.sample_id)
        .limit(PAGE_ROWS)
    )
    if after is not None:
        # A single lower bound on the time, or SQLite may search from the other one.
        since, last_id = after
        is_later = sa.or_(_judged.time_seconds > since, _judged.sample_id > last_id)
        query = query.where(is_later)
    if since is not None:
        query = query.where(_judged.time_seconds >= since)
    if until is not None:
        query = query.where(_judged.time_seconds < until)
    rows = db.raw_rows(query)
    ids, times, picks, blocks = zip(*rows, strict=True) if rows else ((), (), (), ())
    return JudgedRows(
        np.fromiter(ids, np.int64, len(ids)),
        np.fromiter(times, np.float64, len(times)),
        np.fromiter(picks, np.int64, len(picks)),
        tuple(blocks),
    )


@reads
def losses(
    db: Transaction, series: str, profile_id: str, *, since: float, until: float
) -> list[LossRow]:
    """Return the losses of requests of a profile with since ≤ time < until, in any order."""
    query = sa.select(*[_judged[each.name] for each in fields(LossRow)]).where(
        *_of_profile(db, series, profile_id),
        _judged.time_seconds >= since,
        _judged.time_seconds < until,
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
    first_of = sa.func.min(_judged.time_seconds)
    query = sa.select(first_of).where(*_of_profile(db, series, profile_id))
    if since is not None:
        query = query.where(_judged.time_seconds >= since)
    first: float | None = db.execute(query).scalar()
    return first


@reads
def grades(db: Transaction, series: str | None, sample_ids: Sequence[int]) -> dict[int, str]:
    """Return grades by sample, without deleted or missing ones.

    Args:
        series: The series; None for the one that judged each sample first.
    """
    query = sa.select(_grades.sample_id, _grades.grades)
    if series is None:
        first = sa.and_(
            _judged.sample_id == _grades.sample_id,
            _judged.series_id == _grades.series_id,
            _judged.is_counted,
        )
        query = query.join(schema.judged, first)
    else:
        query = query.where(_grades.series_id == db.series_id(series))
    return db.by_sample(query, sample_ids)


@reads
def rejected(
    db: Transaction, sample_ids: Sequence[int]
) -> dict[int, tuple[tuple[str, str, str], ...]]:
    """(passage id, reason, raw reply) of each grade that was not valid, by sample."""
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
    """Return the samples of a request, oldest first, and how far each came."""
    query = _stored().where(_samples.request_id == request_id)
    return list(map(_stored_sample, db.execute(query.order_by(_samples.sample_id))))


@reads
def newest_samples(db: Transaction, n: int, *, before: int | None = None) -> list[StoredSample]:
    """Return the samples stored last, newest first, and how far each came.

    Args:
        n: The most samples to return.
        before: Only samples stored before the one with this id; None for the newest of all.
    """
    query = _stored().order_by(_samples.sample_id.desc()).limit(n)
    if before is not None:
        query = query.where(_samples.sample_id < before)
    return list(map(_stored_sample, db.execute(query)))


def _of_profile(
    db: Transaction, series: str, profile_id: str
) -> tuple[sa.ColumnElement[bool], ...]:
    return _judged.series_id == db.series_id(series), _judged.profile_id == profile_id


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


@reads
def to_grade(db: Transaction, series: str) -> dict[int, int]:
    """Return the judged samples with labels that their block in the series lacks.

    Samples that another series judged first count once this series has judged them.

    Returns:
        By sample, the id of its newest label.
    """
    newest = sa.func.max(schema.labels.c.label_id)
    own, block = db.series_id(series), schema.judged.alias()
    again = sa.and_(_grades.sample_id == _judged.sample_id, _grades.series_id == own)
    of_sample = sa.and_(block.c.sample_id == _judged.sample_id, block.c.series_id == own)
    query = (
        sa.select(_judged.sample_id, newest.label("newest"))
        .join(schema.samples, _samples.sample_id == _judged.sample_id)
        .join(schema.labels, schema.labels.c.request_id == _samples.request_id)
        .outerjoin(schema.grades, again)
        .outerjoin(block, of_sample)
        .where(
            _judged.is_counted,
            sa.or_(_judged.series_id == own, _grades.sample_id.is_not(None)),
        )
        .group_by(_judged.sample_id, block.c.last_label_id)
        .having(newest > sa.func.coalesce(block.c.last_label_id, -1))
    )
    return {row.sample_id: row.newest for row in db.execute(query)}


@reads
def labelled(db: Transaction, series: str) -> dict[int, bool]:
    """Return the samples that draws asked about, people labelled, and whose text is kept.

    Returns:
        By sample, whether the series has judged it, first or again, without a call that failed.
    """
    own = db.series_id(series)
    again = sa.and_(
        _grades.sample_id == _picked.sample_id,
        _grades.series_id == own,
        sa.or_(
            _grades.n_failed == 0,
            sa.exists().where(
                _judged.sample_id == _grades.sample_id,
                _judged.series_id == own,
                _judged.is_counted,
            ),
        ),
    )
    labels = schema.labels.c
    rows = db.execute(
        sa.select(_picked.sample_id, _grades.sample_id.is_not(None).label("is_judged"))
        .join(schema.samples, _samples.sample_id == _picked.sample_id)
        .join(schema.payloads, schema.payloads.c.sample_id == _picked.sample_id)
        .outerjoin(schema.grades, again)
        .where(sa.exists().where(labels.request_id == _samples.request_id))
        .distinct()
    )
    return {row.sample_id: bool(row.is_judged) for row in rows}


@reads
def blocks(db: Transaction, sample_ids: Sequence[int]) -> dict[int, bytes]:
    """Return the block of each sample by its first series, without those that were deleted."""
    query = sa.select(_judged.sample_id, _judged.block).where(_judged.is_counted)
    return db.by_sample(query, sorted(set(sample_ids)))


@writes
def save_graded(db: Transaction, series: str, rows: Sequence[GradedBlock]) -> None:
    """Save the blocks of a series in place of its former ones of their samples."""
    own = db.series_id(series)
    first = sa.select(sa.literal(own), _judged.time_seconds, _judged.sample_id).where(
        _judged.is_counted
    )
    for row in rows:
        values = asdict(row)
        is_own = sa.and_(_judged.series_id == own, _judged.sample_id == values.pop("sample_id"))
        updated = db.execute(sa.update(schema.judged).where(is_own).values(values))
        if not updated.rowcount:
            given = {**values, "is_counted": False}
            copied = first.where(_judged.sample_id == row.sample_id)
            literals = [sa.literal(value, _judged[name].type) for name, value in given.items()]
            columns = ["series_id", "time_seconds", "sample_id", *given]
            db.execute(sa.insert(schema.judged).from_select(columns, copied.add_columns(*literals)))


@reads
def graded(db: Transaction, series: str) -> GradedRows:
    """Read all samples of a series that people have graded, by ascending id.

    Those whose text or sample was deleted since are among them.
    """
    own = db.series_id(series)
    rows = db.execute(
        sa.select(schema.judged)
        .where(_judged.series_id == own, _judged.is_graded)
        .order_by(_judged.sample_id)
    ).all()
    firsts = [NO_PICK if row.first_pick is None else row.first_pick for row in rows]
    return GradedRows(
        sample_ids=np.array([row.sample_id for row in rows], np.int64),
        time_seconds=np.array([row.time_seconds for row in rows], np.float64),
        first_pick=np.array(firsts, np.int64),
        routes=tuple([row.route for row in rows]),
        blocks=tuple([row.block for row in rows]),
        draws=_draws(db, own),
        disagreements=sum(row.disagreements for row in rows),
    )


@reads
def draws(db: Transaction, series: str, graded: Collection[int]) -> frozenset[int]:
    """Return the draws whose graded samples stand for all that they could have taken.

    Args:
        graded: Samples that people graded, whether their blocks say so yet or not.
    """
    return _draws(db, db.series_id(series), graded)


def _draws(db: Transaction, own: int, graded: Collection[int] = ()) -> frozenset[int]:
    """Return the draws in which every tenant's part has grades.

    A draw from what another series judged counts as far as the samples were judged again. People
    grade the samples of a file in random order, so those that they got to stand for the
    others of the same file. But one tenant's graded file says nothing of the other tenants: until
    theirs has grades, no label of the draw counts.
    """
    query = (
        sa.select(_picked.pick_id, _picked.asked, _picked.sample_id, _judged.is_graded)
        .outerjoin(
            schema.judged,
            sa.and_(_judged.sample_id == _picked.sample_id, _judged.series_id == own),
        )
        .where(_picked.kind.in_(OPENED))
    )
    files, graded_files = Counter[tuple[int, str]](), set[tuple[int, str]]()
    for pick, asked, sample_id, is_graded in db.execute(query):
        files[pick, asked] += 1
        if is_graded or sample_id in graded:
            graded_files.add((pick, asked))
    whole, missed = Counter[int](), Counter[int]()
    for (pick, asked), n in files.items():
        whole[pick] += n
        missed[pick] += n * ((pick, asked) not in graded_files)
    return frozenset([pick for pick, n in whole.items() if missed[pick] <= MOST_UNCOVERED * n])
