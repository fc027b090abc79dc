"""Labels of passages, the queue of samples to label, and feedback on answers.

All of it belongs to a request, and so to every sample of that request.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import sqlalchemy as sa

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.store import schema
from ctxguard.monitor.store.schema import storable
from ctxguard.monitor.store.transactions import Transaction, reads, record, writes
from ctxguard.monitor.store.types import Added, FeedbackRow, LabelRow

_samples = schema.samples.c
_labels = schema.labels.c
_queue = schema.label_queue.c
_feedback = schema.feedback.c

_Verdict = tuple[int | None, str | None]

_TAKEN_BACK = -1
"""The stored grade of a row that takes a label back."""
_SCALE = "labels.top_grade"
"""The key of the state that holds the highest grade of people's scale."""


@writes
def add_labels(db: Transaction, rows: Sequence[LabelRow], top_grade: int | None = None) -> Added:
    """Add labels of sampled requests.

    A label that repeats the same annotator's last label of that passage is left out. Labels
    that contradict others, or the same annotator's earlier ones, are added and counted: which
    of them holds is for those who read them to decide. A row without a grade takes the
    annotator's label of that passage back, and is added only if there is one.

    Args:
        top_grade: The highest grade of their scale, which the first labels set for the store:
            the worth of a grade depends on it. None for the store's.

    Raises:
        ConfigurationError: the store's labels are on another scale.
    """
    db.lock_writers(schema.labels)
    # As they are read back, to be compared with those.
    rows = [replace(row, **_storable_texts(row)) for row in rows]
    scale = _top_grade(db)
    highest = max((row.grade or 0 for row in rows), default=0)
    if scale is not None and (top_grade not in (None, scale) or highest > scale):
        raise ConfigurationError(
            f"the store's labels are graded from 0 to {scale}, these from 0 to "
            f"{top_grade or highest}, and a grade is worth something else on each scale; "
            f"grade from 0 to {scale} (--max-grade {scale})"
        )
    known = _known_requests(db, [row.request_id for row in rows])
    query = sa.select(schema.labels).order_by(_labels.label_id)
    former = map(_label, db.rows_with(query, _labels.request_id, sorted(known)))
    of_known = [row for row in rows if row.request_id in known]
    new, disagreeing = _new_labels(list(former), of_known)
    db.insert(
        schema.labels,
        [asdict(row) | ({"grade": _TAKEN_BACK} if row.grade is None else {}) for row in new],
    )
    if new and top_grade is not None and scale is None:
        db.upsert(schema.state, {"key": _SCALE, "value": str(top_grade)}, changes=None)
    unknown = dict.fromkeys(row.request_id for row in rows if row.request_id not in known)
    return Added(len(new), tuple(unknown), len(of_known) - len(new), disagreeing)


def _new_labels(former: Sequence[LabelRow], rows: Sequence[LabelRow]) -> tuple[list[LabelRow], int]:
    """Keep the ``rows`` that say something new, and count how many contradict one before."""
    verdicts: dict[tuple[str, str], set[_Verdict]] = {}
    latest: dict[tuple[str, ...], tuple[float, _Verdict]] = {}
    exact = set[LabelRow]()
    new: list[LabelRow] = []
    disagreeing = 0
    for place, row in enumerate((*former, *rows)):
        passage, verdict = (row.request_id, row.passage_id), (row.grade, row.negative)
        who = (*passage, row.annotator, row.source)
        given_at, given = latest.get(who, (-math.inf, (None, None)))
        is_later = row.time_seconds >= given_at
        of_passage = verdicts.setdefault(passage, set())
        if place >= len(former):
            if row in exact or (is_later and verdict == given):
                continue
            disagreeing += row.grade is not None and bool(of_passage - {verdict})
            new.append(row)
        if row.grade is not None:
            of_passage.add(verdict)
        exact.add(row)
        if is_later:
            latest[who] = (row.time_seconds, verdict)
    return new, disagreeing


def _top_grade(db: Transaction) -> int | None:
    """Return the highest grade of the scale of people's labels; None where none was named."""
    query = sa.select(schema.state.c.value).where(schema.state.c.key == _SCALE)
    value = db.execute(query).scalar()
    return None if value is None else int(value)


top_grade = reads(_top_grade)


@reads
def unknown_requests(db: Transaction, request_ids: Sequence[str]) -> list[str]:
    """Return the requests without a sample in the store, each once, in the order given."""
    stored = {request_id: storable(request_id) for request_id in request_ids}
    known = _known_requests(db, stored.values())
    return [request_id for request_id, text in stored.items() if text not in known]


@reads
def labels(db: Transaction, sample_ids: Sequence[int] | None = None) -> list[tuple[int, LabelRow]]:
    """(sample id, label) in the order in which the labels were added.

    Args:
        sample_ids: None for all. A request that was sampled twice has its labels twice.
    """
    query = sa.select(_samples.sample_id, schema.labels).join(
        schema.samples, _samples.request_id == _labels.request_id
    )
    rows = _of_samples(db, query, "label_id", sample_ids)
    return [(row.sample_id, _label(row)) for row in rows]


@writes
def queue_labels(db: Transaction, sample_ids: Sequence[int], *, reason: str) -> int:
    """Request labels of samples; those already requested keep their place.

    Args:
        sample_ids: Samples that the store does not hold are left out.
        reason: Such as the alarm that they are evidence of.

    Returns:
        How many were not requested before.
    """
    db.lock_writers(schema.label_queue)
    wanted = list(dict.fromkeys(sample_ids))
    known, requested = (
        {row.sample_id for row in db.rows_with(sa.select(column), column, wanted)}
        for column in (_samples.sample_id, _queue.sample_id)
    )
    new = [sample_id for sample_id in wanted if sample_id in known - requested]
    db.insert(schema.label_queue, [{"sample_id": sample_id, "reason": reason} for sample_id in new])
    return len(new)


@reads
def label_queue(db: Transaction) -> list[tuple[int, str]]:
    """(sample id, reason) of samples whose labels were requested, in order."""
    rows = db.execute(
        sa.select(_queue.sample_id, _queue.reason)
        .join(schema.samples, _samples.sample_id == _queue.sample_id)
        .order_by(_queue.place)
    )
    return [(row.sample_id, row.reason) for row in rows]


@writes
def add_feedback(db: Transaction, rows: Sequence[FeedbackRow]) -> Added:
    """Add users' reactions to answers of sampled requests."""
    rows = [replace(row, request_id=storable(row.request_id)) for row in rows]
    known = _known_requests(db, [row.request_id for row in rows])
    new = [
        {**asdict(row), "passage_ids": json.dumps(row.passage_ids)}
        for row in rows
        if row.request_id in known
    ]
    db.insert(schema.feedback, new)
    unknown = dict.fromkeys(row.request_id for row in rows if row.request_id not in known)
    return Added(len(new), tuple(unknown))


@reads
def feedback_counts(db: Transaction) -> dict[str, int]:
    """Count reactions by kind."""
    query = sa.select(_feedback.kind, sa.func.count()).group_by(_feedback.kind)
    return {str(kind): int(count) for kind, count in db.execute(query)}


@reads
def feedback(
    db: Transaction, sample_ids: Sequence[int] | None = None
) -> list[tuple[int, FeedbackRow]]:
    """(sample id, feedback) in the order in which it was added; None for all samples."""
    query = sa.select(_samples.sample_id, schema.feedback).join(
        schema.samples, _samples.request_id == _feedback.request_id
    )
    return [
        (
            row.sample_id,
            record(FeedbackRow, row, passage_ids=tuple(json.loads(row.passage_ids))),
        )
        for row in _of_samples(db, query, "feedback_id", sample_ids)
    ]


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


def _known_requests(db: Transaction, request_ids: Iterable[str]) -> set[str]:
    column = _samples.request_id
    wanted = sorted(set(request_ids))
    return {row.request_id for row in db.rows_with(sa.select(column), column, wanted)}


def _label(row: sa.Row[Any]) -> LabelRow:
    return record(LabelRow, row, grade=None if row.grade == _TAKEN_BACK else row.grade)


def _storable_texts(row: LabelRow) -> dict[str, Any]:
    return {name: storable(text) for name, text in asdict(row).items() if isinstance(text, str)}
