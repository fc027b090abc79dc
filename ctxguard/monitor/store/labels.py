"""What people said: labels on passages, the queue of samples to label, feedback on answers.

All of it belongs to a request, and so to every sample of that request.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import Database, chunks, storable
from ctxguard.monitor.store.types import (
    PICKED,
    FeedbackAdded,
    FeedbackRow,
    LabelRow,
    LabelsAdded,
)

_samples = schema.samples.c
_labels = schema.labels.c
_queue = schema.label_queue.c
_feedback = schema.feedback.c

_Word = tuple[int, str | None]


class _Said:
    """What was said of one passage of one request so far."""

    def __init__(self) -> None:
        self.words: set[_Word] = set()
        self.latest: dict[tuple[str, str], tuple[float, _Word]] = {}
        self.exact: set[tuple[str, str, float, _Word]] = set()

    def knows(self, row: LabelRow) -> bool:
        """Whether it was said before, or says again what this annotator said last."""
        word, who = (row.grade, row.negative), (row.annotator, row.source)
        latest = self.latest.get(who)
        return (*who, row.time_seconds, word) in self.exact or (
            latest is not None and row.time_seconds >= latest[0] and word == latest[1]
        )

    def add(self, row: LabelRow) -> None:
        word, who = (row.grade, row.negative), (row.annotator, row.source)
        self.words.add(word)
        self.exact.add((*who, row.time_seconds, word))
        latest = self.latest.get(who)
        if latest is None or row.time_seconds >= latest[0]:
            self.latest[who] = (row.time_seconds, word)

    def contradicts(self, row: LabelRow) -> bool:
        return bool(self.words - {(row.grade, row.negative)})


def add_labels(
    database: Database, connection: sa.Connection, rows: Sequence[LabelRow]
) -> LabelsAdded:
    """Keep labels of known requests, once each."""
    _one_at_a_time(database, connection, schema.labels)
    rows = [_storable_label(row) for row in rows]
    known = _known_requests(connection, (row.request_id for row in rows))
    said = _said_so_far(connection, sorted(known))
    duplicates = disagreeing = 0
    new: list[LabelRow] = []
    for row in rows:
        if row.request_id not in known:
            continue
        so_far = said.setdefault((row.request_id, row.passage_id), _Said())
        if so_far.knows(row):
            duplicates += 1
            continue
        disagreeing += so_far.contradicts(row)
        so_far.add(row)
        new.append(row)
    if new:
        connection.execute(sa.insert(schema.labels), [_columns(row) for row in new])
    unknown = dict.fromkeys(row.request_id for row in rows if row.request_id not in known)
    return LabelsAdded(len(new), duplicates, disagreeing, tuple(unknown))


def unknown_requests(connection: sa.Connection, request_ids: Iterable[str]) -> list[str]:
    """The requests that no sample is of, each once, in the order given."""
    asked = {request_id: storable(request_id) for request_id in request_ids}
    known = _known_requests(connection, asked.values())
    return [request_id for request_id, text in asked.items() if text not in known]


def labels(
    connection: sa.Connection, sample_ids: Sequence[int] | None
) -> list[tuple[int, LabelRow]]:
    """Every label with its sample, in the order in which they were handed in."""
    query = (
        sa.select(_samples.sample_id, schema.labels)
        .join(schema.samples, _samples.request_id == _labels.request_id)
        .order_by(_labels.label_id, _samples.sample_id)
    )
    if sample_ids is None:
        return [_label(row) for row in connection.execute(query)]
    found = [
        row
        for some in chunks(sorted(set(sample_ids)))
        for row in connection.execute(query.where(_samples.sample_id.in_(some)))
    ]
    return [_label(row) for row in sorted(found, key=lambda row: (row.label_id, row.sample_id))]


def queue_labels(
    database: Database, connection: sa.Connection, sample_ids: Sequence[int], why: str
) -> int:
    """Ask for labels of samples; those that are asked for already keep their place."""
    _one_at_a_time(database, connection, schema.label_queue)
    wanted = dict.fromkeys(sample_ids)
    new: list[int] = []
    if why in PICKED:
        for some in chunks(list(wanted)):
            connection.execute(
                sa.update(schema.label_queue)
                .where(_queue.sample_id.in_(some), _queue.why.not_in(PICKED))
                .values(why=why)
            )
    for some in chunks(list(wanted)):
        known = set(
            connection.execute(
                sa.select(_samples.sample_id).where(_samples.sample_id.in_(some))
            ).scalars()
        )
        asked = set(
            connection.execute(
                sa.select(_queue.sample_id).where(_queue.sample_id.in_(some))
            ).scalars()
        )
        new += [sample_id for sample_id in some if sample_id in known - asked]
    if new:
        connection.execute(
            sa.insert(schema.label_queue),
            [{"sample_id": sample_id, "why": storable(why)} for sample_id in new],
        )
    return len(new)


def label_queue(connection: sa.Connection) -> list[tuple[int, str]]:
    """The samples asked for that have no label yet, in the order in which they were asked for."""
    rows = connection.execute(
        sa.select(_queue.sample_id, _queue.why)
        .join(schema.samples, _samples.sample_id == _queue.sample_id)
        .where(_samples.request_id.not_in(sa.select(_labels.request_id)))
        .order_by(_queue.place)
    )
    return [(row.sample_id, row.why) for row in rows]


def label_reasons(connection: sa.Connection) -> dict[int, str]:
    """Why each sample was asked for."""
    rows = connection.execute(sa.select(_queue.sample_id, _queue.why))
    return {row.sample_id: row.why for row in rows}


def add_feedback(connection: sa.Connection, rows: Sequence[FeedbackRow]) -> FeedbackAdded:
    """Keep feedback on known requests."""
    known = _known_requests(connection, (storable(row.request_id) for row in rows))
    new = [
        {
            "request_id": storable(row.request_id),
            "kind": row.kind,
            "passage_ids": json.dumps(row.passage_ids),
            "time_seconds": row.time_seconds,
        }
        for row in rows
        if storable(row.request_id) in known
    ]
    if new:
        connection.execute(sa.insert(schema.feedback), new)
    unknown = dict.fromkeys(row.request_id for row in rows if storable(row.request_id) not in known)
    return FeedbackAdded(len(new), tuple(unknown))


def feedback(
    connection: sa.Connection, sample_ids: Sequence[int] | None
) -> list[tuple[int, FeedbackRow]]:
    """All feedback with its sample, in the order in which it was handed in."""
    query = (
        sa.select(_samples.sample_id, schema.feedback)
        .join(schema.samples, _samples.request_id == _feedback.request_id)
        .order_by(_feedback.feedback_id, _samples.sample_id)
    )
    wanted = None if sample_ids is None else set(sample_ids)
    return [
        (
            row.sample_id,
            FeedbackRow(
                row.request_id, row.kind, tuple(json.loads(row.passage_ids)), row.time_seconds
            ),
        )
        for row in connection.execute(query)
        if wanted is None or row.sample_id in wanted
    ]


def _one_at_a_time(database: Database, connection: sa.Connection, table: sa.Table) -> None:
    """Whoever looks before inserting must be alone; on SQLite every writer is."""
    if not database.is_sqlite:
        connection.exec_driver_sql(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE")


def _known_requests(connection: sa.Connection, request_ids: Iterable[str]) -> set[str]:
    known: set[str] = set()
    for some in chunks(sorted(set(request_ids))):
        known.update(
            connection.execute(
                sa.select(_samples.request_id).where(_samples.request_id.in_(some))
            ).scalars()
        )
    return known


def _said_so_far(
    connection: sa.Connection, request_ids: Sequence[str]
) -> dict[tuple[str, str], _Said]:
    said: dict[tuple[str, str], _Said] = {}
    for some in chunks(request_ids):
        rows = connection.execute(
            sa.select(schema.labels).where(_labels.request_id.in_(some)).order_by(_labels.label_id)
        )
        for row in rows:
            said.setdefault((row.request_id, row.passage_id), _Said()).add(_row(row))
    return said


def feedback_counts(connection: sa.Connection) -> dict[str, int]:
    """Users' reactions by kind."""
    kind = schema.feedback.c.kind
    rows = connection.execute(sa.select(kind, sa.func.count()).group_by(kind)).all()
    return {str(row[0]): int(row[1]) for row in rows}


def _label(row: sa.Row[Any]) -> tuple[int, LabelRow]:
    return row.sample_id, _row(row)


def _row(row: sa.Row[Any]) -> LabelRow:
    return LabelRow(
        request_id=row.request_id,
        passage_id=row.passage_id,
        grade=row.grade,
        negative=row.negative,
        annotator=row.annotator,
        time_seconds=row.time_seconds,
        source=row.source,
    )


def _columns(row: LabelRow) -> dict[str, Any]:
    return {
        "request_id": row.request_id,
        "passage_id": row.passage_id,
        "grade": row.grade,
        "negative": row.negative,
        "annotator": row.annotator,
        "time_seconds": row.time_seconds,
        "source": row.source,
    }


def _storable_label(row: LabelRow) -> LabelRow:
    return LabelRow(
        request_id=storable(row.request_id),
        passage_id=storable(row.passage_id),
        grade=row.grade,
        negative=None if row.negative is None else storable(row.negative),
        annotator=storable(row.annotator),
        time_seconds=row.time_seconds,
        source=storable(row.source),
    )
