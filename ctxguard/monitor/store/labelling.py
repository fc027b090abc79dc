"""Stores which passages people are asked to grade, their labels, and the rows with their grades.

Labels belong to a request, and so to every sample of that request. Touches the database, and
``graded`` the clock.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import sqlalchemy as sa

from ctxguard.errors import ConfigurationError
from ctxguard.measure.rows import Rows, to_blocks
from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import Transaction, chunks, reads, record, writes
from ctxguard.monitor.store.judgments import COLUMNS, rows_of
from ctxguard.monitor.store.schema import storable
from ctxguard.monitor.store.types import (
    MOST_UNCOVERED,
    OPENED,
    LabelRow,
    PickedPassage,
    PickedSample,
    PickKind,
)

_samples = schema.samples.c
_labels = schema.labels.c
_judged = schema.judged.c
_picked = schema.picked.c
_grades = schema.grades.c
_HAS_TEXT = sa.exists().where(schema.payloads.c.sample_id == _judged.sample_id)

_SCALE = "labels.top_grade"
"""The key, in the state, of the highest grade on people's scale."""


@writes
def add_labels(
    db: Transaction, rows: Sequence[LabelRow], top_grade: int | None = None
) -> tuple[int, int, list[str]]:
    """Add labels of sampled requests, except those that repeat an annotator's last one.

    Readers decide which of several labels of a passage counts.

    Args:
        top_grade: The highest grade of their scale, which the first labels fix for the store, as
            the worth of a grade depends on it. None for the store's scale.

    Returns:
        The numbers of labels added and of labels left out as repeats; and the request ids without a
        sample in the store, whose labels were left out.

    Raises:
        ConfigurationError: the store's labels are on another scale.
    """
    db.lock_writers(schema.labels)
    # In the form in which they are read back, for comparison.
    texts: list[dict[str, Any]] = [
        {name: storable(each) for name, each in asdict(row).items() if isinstance(each, str)}
        for row in rows
    ]
    rows = [replace(row, **own) for row, own in zip(rows, texts, strict=True)]
    scale = top_grade_of(db)
    highest = max((row.grade or 0 for row in rows), default=0)
    if scale is not None and (top_grade not in (None, scale) or highest > scale):
        raise ConfigurationError(
            f"the store's labels are graded from 0 to {scale}, but these from 0 to "
            f"{max(top_grade or 0, highest)}, and a grade means something different on each scale; "
            f"grade from 0 to {scale} (--max-grade {scale})"
        )
    known = known_requests(db, [row.request_id for row in rows])
    query = sa.select(schema.labels).order_by(_labels.label_id)
    former = [record(LabelRow, row) for row in db.rows_with(query, _labels.request_id, known)]
    of_known = [row for row in rows if row.request_id in known]
    new = _new_labels(former, of_known)
    db.insert(schema.labels, list(map(asdict, new)))
    if new and top_grade is not None and scale is None:
        db.set_state(_SCALE, str(top_grade))
    unknown = dict.fromkeys(row.request_id for row in rows if row.request_id not in known)
    return len(new), len(of_known) - len(new), list(unknown)


def _new_labels(former: Iterable[LabelRow], rows: Sequence[LabelRow]) -> list[LabelRow]:
    """Keep the ``rows`` that differ from their annotator's last grades."""
    in_time = sorted(former, key=lambda row: row.time_seconds)
    last = {_whose(row): (row.grade, row.negative) for row in in_time}
    new = []
    for row in rows:
        said = row.grade, row.negative
        if said != last.get(_whose(row), (None, None)):
            last[_whose(row)] = said
            new.append(row)
    return new


def _whose(row: LabelRow) -> tuple[str, ...]:
    return row.request_id, row.passage_id, row.annotator


def top_grade_of(db: Transaction) -> int | None:
    """Return the highest grade of the scale of people's labels; None if none was named."""
    value = db.state(_SCALE)
    return None if value is None else int(value)


@reads
def labels(db: Transaction, sample_ids: Sequence[int] | None = None) -> list[tuple[int, LabelRow]]:
    """Return pairs of sample id and label, in the order in which the labels were added.

    Args:
        sample_ids: The samples; None for all. A request that was sampled twice has its labels
            twice.
    """
    query = sa.select(_samples.sample_id, schema.labels).join(
        schema.samples, _samples.request_id == _labels.request_id
    )
    rows = db.rows_with(query, _samples.sample_id, sample_ids)
    in_order = sorted(rows, key=lambda row: (row.label_id, row.sample_id))
    return [(row.sample_id, record(LabelRow, row)) for row in in_order]


def known_requests(db: Transaction, request_ids: Iterable[str]) -> set[str]:
    """Return those of these requests that have a sample."""
    column = _samples.request_id
    return {row.request_id for row in db.rows_with(sa.select(column), column, request_ids)}


@reads
def to_pick(db: Transaction, series: str) -> tuple[list[int], int]:
    """Read the judged samples that a draw can open, in the order of a hash of each request.

    Returns:
        Those of the series that no draw has opened and whose text is kept; the last draw of any
        series, 0 without one.
    """
    opened = sa.exists().where(_picked.sample_id == _judged.sample_id, _picked.kind.in_(OPENED))
    query = (
        sa.select(_judged.sample_id)
        .join(schema.samples, _samples.sample_id == _judged.sample_id)
        .where(_of_series(db, series), _HAS_TEXT, ~opened)
        .order_by(_samples.label_order, _judged.sample_id)
    )
    return db.scalars(query), _last_pick(db)


def _of_series(db: Transaction, series: str) -> sa.ColumnElement[bool]:
    return sa.and_(_judged.series_id == db.series_id(series), _judged.is_counted)


def _last_pick(db: Transaction) -> int:
    last: int | None = db.execute(sa.select(sa.func.max(_picked.pick_id))).scalar()
    return last or 0


@writes
def save_pick(
    db: Transaction, series: str, passages: Sequence[PickedPassage], last_pick: int
) -> bool:
    """Save a draw, and the judged samples of the series that it could have taken.

    Returns:
        False, and nothing is written, if another draw than ``to_pick`` told of was saved meanwhile.
    """
    db.lock_writers(schema.picked)
    if _last_pick(db) != last_pick:
        return False
    own = {"pick_id": (pick_id := last_pick + 1), "series_id": db.series_id(series)}
    db.execute(
        sa.update(schema.judged)
        .where(_of_series(db, series), _judged.first_pick.is_(None), _HAS_TEXT)
        .values(first_pick=pick_id)
    )
    rows = [{**asdict(one), **own, "kind": one.kind.value} for one in passages]
    db.execute(sa.insert(schema.picked), rows)
    for some in chunks(sorted({one.sample_id for one in passages})):
        # Earlier grades count in this draw too.
        db.execute(
            sa.update(schema.judged).where(_judged.sample_id.in_(some)).values(last_label=-1)
        )
    return True


@writes
def ask_for_labels(db: Transaction, sample_ids: Sequence[int], tenant: str) -> None:
    """Record for which tenant a file first asks people to grade picked samples.

    The tenant is empty for a file of all.
    """
    for some in chunks(sample_ids):
        db.execute(
            sa.update(schema.picked)
            .where(_picked.sample_id.in_(some), _picked.asked.is_(None))
            .values(asked=tenant)
        )


@reads
def picked(
    db: Transaction, series: str | None, sample_ids: Sequence[int] | None = None
) -> dict[int, list[PickedPassage]]:
    """Read the passages that people are asked about, by sample, in the order of draws.

    Args:
        series: The series whose judged samples were drawn from; None for any.
        sample_ids: None for all.
    """
    query = sa.select(schema.picked).order_by(_picked.pick_id, _picked.sample_id, _picked.position)
    if series is not None:
        query = query.where(_picked.series_id == db.series_id(series))
    found: dict[int, list[PickedPassage]] = {}
    for row in db.rows_with(query, _picked.sample_id, sample_ids):
        passage = record(PickedPassage, row, kind=PickKind(row.kind))
        found.setdefault(row.sample_id, []).append(passage)
    return found


@reads
def picked_samples(db: Transaction, series: str) -> list[PickedSample]:
    """Read the picked samples whose text is kept, by sample id."""
    own = (
        sa.select(_picked.sample_id, _picked.question)
        .where(_picked.series_id == db.series_id(series))
        .distinct()
        .subquery()
    )
    query = (
        sa.select(
            _samples.sample_id,
            _samples.request_id,
            own.c.question,
            sa.func.count(_labels.label_id).label("n_labels"),
        )
        .join(own, own.c.sample_id == _samples.sample_id)
        .join(schema.payloads, schema.payloads.c.sample_id == _samples.sample_id)
        .outerjoin(schema.labels, _labels.request_id == _samples.request_id)
        .group_by(_samples.sample_id, _samples.request_id, own.c.question)
        .order_by(_samples.sample_id)
    )
    return [record(PickedSample, row) for row in db.execute(query)]


@reads
def to_grade(db: Transaction, series: str) -> dict[int, int]:
    """Return each judged sample with labels that its rows in the series lack, and its newest label.

    Samples that another series judged first count once this series has judged them.
    """
    newest = sa.func.max(_labels.label_id)
    own, block = db.series_id(series), schema.judged.alias()
    again = sa.and_(_grades.sample_id == _judged.sample_id, _grades.series_id == own)
    of_sample = sa.and_(block.c.sample_id == _judged.sample_id, block.c.series_id == own)
    query = (
        sa.select(_judged.sample_id, newest.label("newest"))
        .join(schema.samples, _samples.sample_id == _judged.sample_id)
        .join(schema.labels, _labels.request_id == _samples.request_id)
        .outerjoin(schema.grades, again)
        .outerjoin(block, of_sample)
        .where(
            _judged.is_counted,
            sa.or_(_judged.series_id == own, _grades.sample_id.is_not(None)),
        )
        .group_by(_judged.sample_id, block.c.last_label)
        .having(newest > sa.func.coalesce(block.c.last_label, -1))
    )
    return {row.sample_id: row.newest for row in db.execute(query)}


@reads
def labelled(db: Transaction, series: str) -> dict[int, bool]:
    """Return whether the series judged each sample that draws asked about and people labelled.

    It has if it did so first or again, without a call that failed. Only those with their text.
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
    rows = db.execute(
        sa.select(_picked.sample_id, _grades.sample_id.is_not(None).label("is_judged"))
        .join(schema.samples, _samples.sample_id == _picked.sample_id)
        .join(schema.payloads, schema.payloads.c.sample_id == _picked.sample_id)
        .outerjoin(schema.grades, again)
        .where(sa.exists().where(_labels.request_id == _samples.request_id))
        .distinct()
    )
    return {row.sample_id: bool(row.is_judged) for row in rows}


@writes
def save_graded(db: Transaction, series: str, rows: Rows) -> None:
    """Save the rows of a series, replacing its former rows of the same samples."""
    names = ["sample_id", "time_seconds", "is_graded", "last_label"]
    own, columns = {"series_id": db.series_id(series)}, rows.requests[names].tolist()
    db.replace(
        schema.judged,
        [
            {**own, **dict(zip(names, values, strict=True)), "block": block}
            for values, block in zip(columns, to_blocks(rows), strict=True)
        ],
    )


@reads
def graded(db: Transaction, series: str) -> Rows:
    """Read all samples of a series that people have graded, by ascending id.

    Those whose text or sample was deleted since are among them.
    """
    query = sa.select(*COLUMNS).where(_judged.series_id == db.series_id(series), _judged.is_graded)
    return rows_of(db, db.raw_rows(query.order_by(_judged.sample_id)))


def draws_of(db: Transaction, series: str, graded: Collection[int] = ()) -> frozenset[int]:
    """Return the draws whose graded samples stand for all samples that they could have taken.

    A draw from what another series judged counts as far as the samples were judged again. People
    grade the samples of a file in random order, so those that they got to stand for the
    others of the same file. But one tenant's graded file says nothing of the other tenants: until
    theirs has grades, no label of the draw counts.

    Args:
        graded: Samples that people graded, though their rows may not say so yet.
    """
    own = db.series_id(series)
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
