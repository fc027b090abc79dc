"""Reads the sources of golden sets: labels, traffic and questions, in JSONL, CSV or BEIR.

Every error names the file, the line and the value.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from calibration.data.dataset import Dataset, Query, folded
from calibration.data.golden import (
    SOURCES,
    Annotation,
    GoldenSet,
    Source,
    Value,
    moment,
)
from calibration.data.readers import default_split, grade_of, kind_of, read_beir, read_jsonl
from calibration.data.text_files import Record, notes_of, read_csv, read_records, shown
from ctxguard.errors import ConfigurationError, DataError

PROVENANCE = "provenance.jsonl"
QUERIES = "queries.jsonl"
DEFAULT_SPLIT = "train"
"""The split that `ctxguard calibrate` prefers too."""

_ID_DIGITS = 12
_UNLABELLED = "rows for a passage have an empty grade and are left out: not labelled yet"


class _Row(NamedTuple):
    """One row of a source.

    Attributes:
        query: Named by id, by text, or by both.
        given: What the row says of it.
    """

    record: Record
    query: Query
    given: tuple[Annotation, ...] = ()


def read_sources(
    paths: Sequence[Path | str], *, source: Source | None = None, split: str | None = None
) -> GoldenSet:
    """Read all labels and questions of some files and folders as one golden set.

    A row of a JSONL or CSV file names its query (``query_id``, ``query`` or both). It holds
    either a label (``passage_id``, and ``grade`` or ``distractor``) or a question alone, with
    ``count`` if traffic asked it more than once. Either may have ``source`` (``human``,
    ``authored``, ``traffic``, ``llm``), ``annotator`` or ``who``, ``date`` or ``when``
    (ISO 8601), ``note`` and ``metadata``. A row with a passage and an empty grade is not labelled
    yet and is left out. A JSONL file whose rows have ``relevant`` is read as ``read_jsonl``
    does. A folder is a frozen set, read with its provenance, or one split of a BEIR folder.

    A query without an id gets that of the same text (apart from case and white space), or one
    made from the text.

    Args:
        paths: Files and folders, in any order: the result does not depend on it.
        source: Origin of labels that do not name one.
        split: Split of a BEIR folder without provenance; None for ``train`` or the only one.

    Raises:
        ConfigurationError: no path is given, or one twice.
        DataError: a source cannot be read; names file and line.
    """
    given = [Path(path) for path in paths]
    if not given:
        raise ConfigurationError("name at least one file or folder of labels")
    distinct = {path.resolve(): path for path in given}
    if len(distinct) < len(given):
        raise ConfigurationError("a source is named twice: its labels would count double")
    counts: Counter[str] = Counter()
    notes: list[str] = []
    rows: list[_Row] = []
    for path in sorted(distinct):
        rows += _rows(distinct[path], source, split, counts, notes)
    if not rows:
        raise DataError("holds no label and no question", path=given[0])
    return _golden(rows, counts, notes)


def _rows(
    path: Path, source: Source | None, split: str | None, counts: Counter[str], notes: list[str]
) -> list[_Row]:
    questions: list[_Row] = []
    records: Iterator[Record]
    if path.is_dir() and not (path / PROVENANCE).is_file():
        if split is None:
            split, taken = default_split(path, DEFAULT_SPLIT)
            notes += taken
        return _of_dataset(read_beir(path, split), path, source, notes)
    if path.is_dir():
        for record in read_records(path / QUERIES, counts):
            query = Query(record.identifier("_id"), record.text("text"), record.metadata())
            questions.append(_Row(record, query))
        records = read_records(path / PROVENANCE, counts)
    elif path.suffix.lower() == ".csv":
        records = read_csv(path, counts)
    else:
        first = next(read_records(path, Counter()), None)
        if first is not None and "relevant" in first.fields:
            return _of_dataset(read_jsonl(path), path, source, notes)
        records = read_records(path, counts)
    return questions + [_row(record, source) for record in records if _is_labelled(record)]


def _is_labelled(record: Record) -> bool:
    """Tell whether a row has its label; False, and counted, if it still waits for one."""
    fields = record.fields
    has_passage = any(fields.get(name) is not None for name in ("passage_id", "passage"))
    waits = has_passage and fields.get("grade") is None and fields.get("distractor") is None
    # A row without even the column was not made for labelling: that is a mistake.
    if waits and "grade" not in fields and "distractor" not in fields:
        raise record.error("a passage without a label; add grade or distractor")
    record.counts[_UNLABELLED] += waits
    return not waits


def _row(record: Record, default: Source | None) -> _Row:
    filled = {name: value for name, value in record.fields.items() if value is not None}
    given_fields, record = record.fields, record._replace(fields=filled)
    query_id = record.identifier("query_id") if "query_id" in filled else ""
    query = Query(query_id, record.text("query", default=""), record.metadata())
    if not query_id and not query.text.strip():
        raise record.error(
            "names no query; give query_id, query or both; it has "
            f"{', '.join(given_fields) or 'no field'}"
        )
    source = filled.get("source", default)
    if source is None:
        raise record.error(
            f"does not say where the label comes from; give source ({', '.join(SOURCES)}) here, "
            "or --source for all that do not say"
        )
    if source not in SOURCES:
        raise record.error(f"source is {shown(source)}; it is one of {', '.join(SOURCES)}")
    annotator, date = _either(record, "annotator", "who"), _either(record, "date", "when")
    if date is not None:
        try:
            moment(date)
        except ValueError:
            raise record.error(
                f"date {shown(date)} is not ISO 8601; write 2026-01-31 or 2026-01-31T09:30:00+01:00"
            ) from None
    provenance = (annotator, date, record.text("note", default="") or None)
    given: tuple[Annotation, ...] = ()
    if "passage_id" in filled or "passage" in filled:
        passage_id = record.identifier("passage_id", "passage")
        given = (Annotation(query_id, passage_id, _value(record), source, *provenance),)
    elif "grade" in filled or "distractor" in filled:
        raise record.error("a label without a passage; give passage_id")
    if not given or "count" in filled:
        count = record.whole_number(filled.get("count", 1), "count")
        if count < 1:
            raise record.error(f"count is {count}; a question was asked at least once")
        given += (Annotation(query_id, None, 0, source, *provenance, count),)
    return _Row(record, query, given)


def _either(record: Record, *names: str) -> str | None:
    name = next((name for name in names if name in record.fields), names[0])
    return record.text(name, default="").strip() or None


def _value(record: Record) -> Value:
    fields = record.fields
    grade = grade_of(record, fields["grade"]) if "grade" in fields else 0
    if "distractor" not in fields:
        return grade
    kind = kind_of(record, fields["distractor"])
    if grade:
        raise record.error(f"grade {grade} and a {kind}: a passage is relevant or misleads")
    return kind


def _of_dataset(
    dataset: Dataset, path: Path, source: Source | None, notes: list[str]
) -> list[_Row]:
    if source is None:
        raise DataError(
            "holds labels that do not say where they come from; say it with --source "
            f"({', '.join(SOURCES)})",
            path=path,
        )
    notes += dataset.notes
    record = Record(path, None, {}, Counter())
    rows = []
    for query in dataset.queries:
        query_id = query.query_id
        labels: dict[str, Value] = {
            **dataset.qrels.get(query_id, {}),
            **dataset.distractors.get(query_id, {}),
        }
        given = [Annotation(query_id, name, value, source) for name, value in labels.items()]
        rows.append(_Row(record, query, tuple(given) or (Annotation(query_id, None, 0, source),)))
    return rows


def _golden(rows: list[_Row], counts: Counter[str], notes: list[str]) -> GoldenSet:
    ids_of: dict[str, set[str]] = {}
    for row in rows:
        if row.query.query_id and row.query.text.strip():
            ids_of.setdefault(folded(row.query.text), set()).add(row.query.query_id)
    rows = [
        row._replace(query=replace(row.query, query_id=row.query.query_id or _id_of(row, ids_of)))
        for row in rows
    ]
    queries = _queries(rows)
    repeated = len(queries) - len({folded(query.text) for query in queries})
    if repeated:
        counts["queries repeat another's text under another id"] += repeated
    times: Counter[Annotation] = Counter()
    for row in rows:
        for each in row.given:
            one = replace(each, query_id=row.query.query_id, count=1)
            repeated = one in times and one.passage_id is not None
            counts["labels are identical to another"] += repeated
            times[one] += 0 if repeated else each.count
    annotations = [replace(one, count=count) for one, count in times.items()]
    return GoldenSet(
        queries=queries,
        annotations=tuple(sorted(annotations, key=_order)),
        notes=(*notes, *notes_of(+counts)),
    )


def _id_of(row: _Row, ids_of: dict[str, set[str]]) -> str:
    """Return the id of the query with this text, or make one from the text if there is none."""
    text = folded(row.query.text)
    ids = ids_of.get(text, set())
    if len(ids) > 1:
        raise row.record.error(
            f"the query {shown(row.query.text)} is that of {' and of '.join(sorted(ids))}; "
            "give query_id"
        )
    made = f"q-{hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]}"
    return next(iter(ids), made)


def _queries(rows: list[_Row]) -> tuple[Query, ...]:
    """Merge the rows to one query per id, with its text and metadata.

    Raises:
        DataError: a query has two texts or none, or different metadata in two rows.
    """
    with_text: dict[str, _Row] = {}
    with_metadata: dict[str, _Row] = {}
    for row in rows:
        query_id, text = row.query.query_id, row.query.text
        if text.strip():
            earlier = with_text.setdefault(query_id, row)
            if folded(earlier.query.text) != folded(text):
                raise row.record.error(
                    f"query {shown(query_id)} is {shown(text)} here and "
                    f"{shown(earlier.query.text)} in {earlier.record.place}"
                )
            # The least of several spellings, whichever file is read first.
            with_text[query_id] = min(earlier, row, key=lambda row: row.query.text)
        if row.query.metadata is not None:
            earlier = with_metadata.setdefault(query_id, row)
            if earlier.query.metadata != row.query.metadata:
                raise row.record.error(
                    f"query {shown(query_id)} has other metadata in {earlier.record.place}"
                )
    for row in rows:
        if row.query.query_id not in with_text:
            raise row.record.error(f"no row gives the text of query {shown(row.query.query_id)}")
    return tuple(
        [
            replace(row.query, metadata=with_metadata.get(query_id, row).query.metadata)
            for query_id, row in sorted(with_text.items())
        ]
    )


def _order(item: Annotation) -> tuple[str, ...]:
    provenance = (item.source, item.annotator or "", item.date or "", item.note or "")
    return (item.query_id, item.passage_id or "", *provenance, str(item.value))
