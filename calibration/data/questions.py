"""Reads questions, and what people graded of them, from JSONL and CSV files."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from calibration.data.dataset import Dataset, DistractorKind, Query, folded
from calibration.data.readers import grade_of, kind_of
from calibration.data.text_files import Record, notes_of, read_csv, read_records, shown
from ctxguard.errors import DataError

_ID_DIGITS = 12
_WAITING = "rows for a passage have an empty grade and are left out"


def read_questions(paths: Sequence[Path], name: str) -> Dataset:
    """Read questions and the labels that some rows give of a passage.

    A row names its query (``query_id``, ``query`` or both) and may have ``metadata``. With
    ``passage_id`` and ``grade`` or ``distractor`` it is a label; of several labels of a passage the
    last counts. A query without an id gets that of the same text (apart from case and white
    space), or one made from the text.

    Raises:
        DataError: a row cannot be read; names file and line.
    """
    counts: Counter[str] = Counter()
    rows = [(record, _query(record)) for path in paths for record in _records(path, counts)]
    if not rows:
        raise DataError("holds no question", path=paths[0])
    ids = {folded(query.text): query.query_id for _, query in rows if query.query_id}
    queries: dict[str, Query] = {}
    qrels: dict[str, dict[str, int]] = {}
    distractors: dict[str, dict[str, DistractorKind]] = {}
    for record, query in rows:
        query_id = query.query_id or ids.get(folded(query.text)) or _made_id(query.text)
        known = queries.setdefault(query_id, replace(query, query_id=query_id))
        if not known.text:
            queries[query_id] = replace(known, text=query.text)
        elif query.text and folded(query.text) != folded(known.text):
            raise record.error(
                f"query {shown(query_id)} is {shown(query.text)} here, and was {shown(known.text)}"
            )
        fields = record.fields
        if fields.get("passage_id") is None:
            continue
        passage_id, grade, kind = record.identifier("passage_id"), 0, None
        if fields.get("grade") is not None:
            grade = grade_of(record, fields["grade"])
        elif fields.get("distractor") is not None:
            kind = kind_of(record, fields["distractor"])
        else:
            counts[_WAITING] += 1
            continue
        qrels.setdefault(query_id, {})[passage_id] = grade
        distractors.setdefault(query_id, {}).pop(passage_id, None)
        if kind is not None:
            distractors[query_id][passage_id] = kind
    unknown = [query_id for query_id, query in queries.items() if not query.text]
    if unknown:
        raise DataError(f"no row gives the text of query {shown(unknown[0])}", path=paths[0])
    given = {query_id: kinds for query_id, kinds in distractors.items() if kinds}
    return Dataset(name, tuple(queries.values()), qrels, given, notes=notes_of(+counts))


def _records(path: Path, counts: Counter[str]) -> Iterator[Record]:
    return (read_csv if path.suffix.lower() == ".csv" else read_records)(path, counts)


def _query(record: Record) -> Query:
    query_id = record.identifier("query_id") if record.fields.get("query_id") is not None else ""
    text = record.text("query", default="")
    if not query_id and not text.strip():
        raise record.error(
            "names no query; give query_id, query or both; it has "
            f"{', '.join(record.fields) or 'no field'}"
        )
    return Query(query_id, text if text.strip() else "", record.metadata())


def _made_id(text: str) -> str:
    return f"q-{hashlib.sha256(folded(text).encode()).hexdigest()[:_ID_DIGITS]}"
