"""The passages people are asked to grade, with their probabilities, and people's labels.

Labels belong to a request, and so to every sample of that request.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import sqlalchemy as sa

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.store import schema
from ctxguard.monitor.store.schema import storable
from ctxguard.monitor.store.transactions import Transaction, chunks, reads, record, writes
from ctxguard.monitor.store.types import (
    OPENED,
    Added,
    LabelRow,
    PickedPassage,
    PickedSample,
    PickKind,
)

_samples = schema.samples.c
_labels = schema.labels.c
_judged = schema.judged.c
_picked = schema.picked.c
_HAS_TEXT = sa.exists().where(schema.payloads.c.sample_id == _judged.sample_id)

_TAKEN_BACK = -1
"""The stored grade of a row that takes a label back."""
_NOTHING_SAID = LabelRow("", "", None, None, "", -math.inf)
_SCALE = "labels.top_grade"
"""The state's key for the highest grade of people's scale."""


@writes
def add_labels(db: Transaction, rows: Sequence[LabelRow], top_grade: int | None = None) -> Added:
    """Add labels of sampled requests.

    A label that repeats the same annotator's last label of that passage is left out. Readers decide
    which of several labels of a passage counts. A row without a grade takes the annotator's label
    of that passage back, and is added only if there is one.

    Args:
        top_grade: The highest grade of their scale, which the first labels fix for the store, as
            the worth of a grade depends on it. None for the store's scale.

    Raises:
        ConfigurationError: the store's labels are on another scale.
    """
    db.lock_writers(schema.labels)
    # In the form in which they are read back, for comparison.
    rows = [replace(row, **_storable_texts(row)) for row in rows]
    scale = _top_grade(db)
    highest = max((row.grade or 0 for row in rows), default=0)
    if scale is not None and (top_grade not in (None, scale) or highest > scale):
        raise ConfigurationError(
            f"the store's labels are graded from 0 to {scale}, these from 0 to "
            f"{top_grade or highest}, and a grade is worth something else on each scale; "
            f"grade from 0 to {scale} (--max-grade {scale})"
        )
    known = known_requests(db, [row.request_id for row in rows])
    query = sa.select(schema.labels).order_by(_labels.label_id)
    former = map(_label, db.rows_with(query, _labels.request_id, sorted(known)))
    of_known = [row for row in rows if row.request_id in known]
    new = _new_labels(former, of_known)
    db.insert(
        schema.labels,
        [asdict(row) | ({"grade": _TAKEN_BACK} if row.grade is None else {}) for row in new],
    )
    if new and top_grade is not None and scale is None:
        db.set_state(_SCALE, str(top_grade))
    unknown = dict.fromkeys(row.request_id for row in rows if row.request_id not in known)
    return Added(len(new), tuple(unknown), len(of_known) - len(new))


def _new_labels(former: Iterable[LabelRow], rows: Sequence[LabelRow]) -> list[LabelRow]:
    """Keep the ``rows`` that differ from their annotator's last grades."""
    last: dict[tuple[str, ...], LabelRow] = {}
    for row in former:
        before = last.setdefault(_whose(row), row)
        if row.time_seconds >= before.time_seconds:
            last[_whose(row)] = row
    new = []
    for row in rows:
        before = last.get(_whose(row), _NOTHING_SAID)
        if (row.grade, row.negative) != (before.grade, before.negative):
            last[_whose(row)] = row
            new.append(row)
    return new


def _whose(row: LabelRow) -> tuple[str, ...]:
    return row.request_id, row.passage_id, row.annotator


def _top_grade(db: Transaction) -> int | None:
    """Return the highest grade of the scale of people's labels; None where none was named."""
    value = db.state(_SCALE)
    return None if value is None else int(value)


top_grade = reads(_top_grade)


@reads
def labels(db: Transaction, sample_ids: Sequence[int] | None = None) -> list[tuple[int, LabelRow]]:
    """(sample id, label) in the order in which the labels were added.

    Args:
        sample_ids: The samples; None for all. A request that was sampled twice has its labels
            twice.
    """
    query = sa.select(_samples.sample_id, schema.labels).join(
        schema.samples, _samples.request_id == _labels.request_id
    )
    rows = _of_samples(db, query, "label_id", sample_ids)
    return [(row.sample_id, _label(row)) for row in rows]


def _of_samples(
    db: Transaction,
    query: sa.Select[Any],
    number: str,
    sample_ids: Sequence[int] | None,
) -> list[sa.Row[Any]]:
    """Return the rows of some samples, or of all, in the order of the column ``number``."""
    rows: Iterable[sa.Row[Any]] = (
        db.execute(query)
        if sample_ids is None
        else db.rows_with(query, _samples.sample_id, sorted(set(sample_ids)))
    )
    return sorted(rows, key=lambda row: (getattr(row, number), row.sample_id))


def known_requests(db: Transaction, request_ids: Iterable[str]) -> set[str]:
    """Return the requests among these that have a sample."""
    column = _samples.request_id
    wanted = sorted(set(request_ids))
    return {row.request_id for row in db.rows_with(sa.select(column), column, wanted)}


def _label(row: sa.Row[Any]) -> LabelRow:
    return record(LabelRow, row, grade=None if row.grade == _TAKEN_BACK else row.grade)


def _storable_texts(row: LabelRow) -> dict[str, Any]:
    return {name: storable(text) for name, text in asdict(row).items() if isinstance(text, str)}


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
    """Save a draw, and the judged samples it could have taken.

    Args:
        series: The series of the judged samples.
        passages: The drawn passages and opened requests.
        last_pick: The last draw, from ``to_pick``.

    Returns:
        False if another draw was saved meanwhile; nothing is written then.
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
            sa.update(schema.judged).where(_judged.sample_id.in_(some)).values(last_label_id=-1)
        )
    return True


@writes
def ask_for_labels(db: Transaction, sample_ids: Sequence[int], tenant: str) -> None:
    """Remember that people are asked to grade picked samples, which is the first time.

    Args:
        tenant: The tenant whose file they are in; empty for a file of all tenants.
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
    """Read the passages people are asked about by sample, in the order of draws.

    Args:
        series: The series whose judged samples were drawn from; None for any.
        sample_ids: None for all.
    """
    query = sa.select(schema.picked).order_by(_picked.pick_id, _picked.sample_id, _picked.position)
    if series is not None:
        query = query.where(_picked.series_id == db.series_id(series))
    rows = (
        db.execute(query)
        if sample_ids is None
        else db.rows_with(query, _picked.sample_id, sorted(set(sample_ids)))
    )
    found: dict[int, list[PickedPassage]] = {}
    for row in rows:
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
