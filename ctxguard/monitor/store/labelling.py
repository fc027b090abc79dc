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
from ctxguard.monitor.store.database import storable
from ctxguard.monitor.store.transactions import StoreHandle, reads, record, rows_with, writes
from ctxguard.monitor.store.types import (
    Added,
    FeedbackRow,
    LabelRow,
)

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
def add_labels(
    store: StoreHandle,
    connection: sa.Connection,
    rows: Sequence[LabelRow],
    top_grade: int | None = None,
) -> Added:
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
    store.lock_writers(connection, schema.labels)
    rows = [_storable(row) for row in rows]
    scale = _top_grade(connection)
    highest = max((row.grade or 0 for row in rows), default=0)
    if scale is not None and (top_grade not in (None, scale) or highest > scale):
        raise ConfigurationError(
            f"the store's labels are graded from 0 to {scale}, these from 0 to "
            f"{top_grade or highest}, and a grade is worth something else on each scale; "
            f"grade from 0 to {scale} (--max-grade {scale})"
        )
    known = _known_requests(connection, [row.request_id for row in rows])
    passages = _labelled_passages(connection, sorted(known))
    duplicates = disagreeing = 0
    new: list[LabelRow] = []
    for row in rows:
        if row.request_id not in known:
            continue
        passage = passages.setdefault((row.request_id, row.passage_id), _LabelledPassage())
        if passage.has(row):
            duplicates += 1
            continue
        disagreeing += passage.is_contradicted_by(row)
        passage.add(row)
        new.append(row)
    if new:
        connection.execute(
            sa.insert(schema.labels),
            [
                {**asdict(row), "grade": _TAKEN_BACK if row.grade is None else row.grade}
                for row in new
            ],
        )
        if top_grade is not None and scale is None:
            named = {"key": _SCALE, "value": str(top_grade)}
            store.database.upsert(connection, schema.state, named, changes=None)
    unknown = dict.fromkeys(row.request_id for row in rows if row.request_id not in known)
    return Added(len(new), tuple(unknown), duplicates, disagreeing)


@reads
def top_grade(_: StoreHandle, connection: sa.Connection) -> int | None:
    """The highest grade of the scale of people's labels; None where none was named."""
    return _top_grade(connection)


@reads
def unknown_requests(
    _: StoreHandle, connection: sa.Connection, request_ids: Sequence[str]
) -> list[str]:
    """The requests without a sample in the store, each once, in the order given."""
    stored = {request_id: storable(request_id) for request_id in request_ids}
    known = _known_requests(connection, stored.values())
    return [request_id for request_id, text in stored.items() if text not in known]


@reads
def labels(
    _: StoreHandle, connection: sa.Connection, sample_ids: Sequence[int] | None = None
) -> list[tuple[int, LabelRow]]:
    """(sample id, label) in the order in which the labels were added.

    Args:
        sample_ids: None for all. A request that was sampled twice has its labels twice.
    """
    query = sa.select(_samples.sample_id, schema.labels).join(
        schema.samples, _samples.request_id == _labels.request_id
    )
    rows = _of_samples(connection, query, "label_id", sample_ids)
    return [(row.sample_id, _label(row)) for row in rows]


@writes
def queue_labels(
    store: StoreHandle, connection: sa.Connection, sample_ids: Sequence[int], *, reason: str
) -> int:
    """Request labels of samples; those already requested keep their place.

    Args:
        sample_ids: Samples that the store does not hold are left out.
        reason: Such as the alarm that they are evidence of.

    Returns:
        How many were not requested before.
    """
    store.lock_writers(connection, schema.label_queue)
    wanted = list(dict.fromkeys(sample_ids))
    known, requested = (
        {row.sample_id for row in rows_with(connection, sa.select(column), column, wanted)}
        for column in (_samples.sample_id, _queue.sample_id)
    )
    new = [sample_id for sample_id in wanted if sample_id in known - requested]
    if new:
        connection.execute(
            sa.insert(schema.label_queue),
            [{"sample_id": sample_id, "reason": storable(reason)} for sample_id in new],
        )
    return len(new)


@reads
def label_queue(_: StoreHandle, connection: sa.Connection) -> list[tuple[int, str]]:
    """(sample id, reason) of samples whose labels were requested, in order."""
    rows = connection.execute(
        sa.select(_queue.sample_id, _queue.reason)
        .join(schema.samples, _samples.sample_id == _queue.sample_id)
        .order_by(_queue.place)
    )
    return [(row.sample_id, row.reason) for row in rows]


@writes
def add_feedback(_: StoreHandle, connection: sa.Connection, rows: Sequence[FeedbackRow]) -> Added:
    """Add users' reactions to answers of sampled requests."""
    rows = [replace(row, request_id=storable(row.request_id)) for row in rows]
    known = _known_requests(connection, [row.request_id for row in rows])
    new = [
        {**asdict(row), "passage_ids": json.dumps(row.passage_ids)}
        for row in rows
        if row.request_id in known
    ]
    if new:
        connection.execute(sa.insert(schema.feedback), new)
    unknown = dict.fromkeys(row.request_id for row in rows if row.request_id not in known)
    return Added(len(new), tuple(unknown))


@reads
def feedback_counts(_: StoreHandle, connection: sa.Connection) -> dict[str, int]:
    """How many reactions of each kind there are."""
    query = sa.select(_feedback.kind, sa.func.count()).group_by(_feedback.kind)
    return {str(kind): int(count) for kind, count in connection.execute(query)}


@reads
def feedback(
    _: StoreHandle, connection: sa.Connection, sample_ids: Sequence[int] | None = None
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
        for row in _of_samples(connection, query, "feedback_id", sample_ids)
    ]


def _top_grade(connection: sa.Connection) -> int | None:
    query = sa.select(schema.state.c.value).where(schema.state.c.key == _SCALE)
    value = connection.execute(query).scalar()
    return None if value is None else int(value)


_NOTHING_GIVEN: tuple[float, _Verdict] = (-math.inf, (None, None))


class _LabelledPassage:
    """The labels of one passage of one request."""

    def __init__(self) -> None:
        self._verdicts: set[_Verdict] = set()
        self._latest: dict[tuple[str, str], tuple[float, _Verdict]] = {}
        self._exact: set[tuple[str, str, float, _Verdict]] = set()

    def has(self, row: LabelRow) -> bool:
        """Whether the label is there, or repeats this annotator's last one."""
        verdict, who = (row.grade, row.negative), (row.annotator, row.source)
        latest = self._latest.get(who, _NOTHING_GIVEN)
        return (*who, row.time_seconds, verdict) in self._exact or (
            row.time_seconds >= latest[0] and verdict == latest[1]
        )

    def add(self, row: LabelRow) -> None:
        verdict, who = (row.grade, row.negative), (row.annotator, row.source)
        if row.grade is not None:
            self._verdicts.add(verdict)
        self._exact.add((*who, row.time_seconds, verdict))
        latest = self._latest.get(who)
        if latest is None or row.time_seconds >= latest[0]:
            self._latest[who] = (row.time_seconds, verdict)

    def is_contradicted_by(self, row: LabelRow) -> bool:
        return row.grade is not None and bool(self._verdicts - {(row.grade, row.negative)})


def _of_samples(
    connection: sa.Connection,
    query: sa.Select[Any],
    number: str,
    sample_ids: Sequence[int] | None,
) -> list[sa.Row[Any]]:
    """The rows of some samples, or of all, in the order of the column ``number``."""
    rows: Iterable[sa.Row[Any]] = (
        connection.execute(query)
        if sample_ids is None
        else rows_with(connection, query, _samples.sample_id, sorted(set(sample_ids)))
    )
    return sorted(rows, key=lambda row: (getattr(row, number), row.sample_id))


def _known_requests(connection: sa.Connection, request_ids: Iterable[str]) -> set[str]:
    column = _samples.request_id
    wanted = sorted(set(request_ids))
    return {row.request_id for row in rows_with(connection, sa.select(column), column, wanted)}


def _labelled_passages(
    connection: sa.Connection, request_ids: Sequence[str]
) -> dict[tuple[str, str], _LabelledPassage]:
    passages: dict[tuple[str, str], _LabelledPassage] = {}
    query = sa.select(schema.labels).order_by(_labels.label_id)
    for row in rows_with(connection, query, _labels.request_id, request_ids):
        passages.setdefault((row.request_id, row.passage_id), _LabelledPassage()).add(_label(row))
    return passages


def _label(row: sa.Row[Any]) -> LabelRow:
    return record(LabelRow, row, grade=None if row.grade == _TAKEN_BACK else row.grade)


def _storable(row: LabelRow) -> LabelRow:
    return replace(
        row,
        request_id=storable(row.request_id),
        passage_id=storable(row.passage_id),
        negative=None if row.negative is None else storable(row.negative),
        annotator=storable(row.annotator),
        source=storable(row.source),
    )
