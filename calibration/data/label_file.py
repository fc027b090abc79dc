"""A file of labels, written while people grade: it holds the whole state of their work.

Each grade replaces the file in one step. Other fields of its lines are left alone.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import RLock
from typing import Any

from calibration.data.dataset import Dataset, Query, folded
from calibration.data.readers import read_jsonl
from calibration.data.text_files import read_lines, read_records, write_lines
from ctxguard._support.file_version import FileVersion, file_version
from ctxguard.errors import ConfigurationError, DataError
from ctxguard.measure.worth import Negative
from ctxguard.monitor.judges import Judgment

_ID_CHARS = 12


def listed_questions(path: Path) -> list[str]:
    """Read the distinct questions of a text file, one per line.

    Raises:
        DataError: the file cannot be read, or holds none.
    """
    texts: dict[str, str] = {}
    for _, text in read_lines(path):
        texts.setdefault(folded(text), text.strip())
    if not texts:
        raise DataError("holds no question; write one a line", path=path)
    return list(texts.values())


class LabelFile:
    """Labels of questions, kept in a JSONL file as docs/labels.md describes it.

    Questions are the same apart from case and white space. Safe to use from several threads.

    Args:
        path: The file, which need not exist; its own questions come first.
        questions: Further questions to label.
        labelled: Labels to begin with, for questions that have none in the file.

    Raises:
        DataError: the file cannot be read.
        ConfigurationError: its labels are keywords, which cannot stand beside grades of passages.

    Attributes:
        path: The file.
        queries: All questions, in order.
    """

    def __init__(
        self, path: Path, questions: Sequence[str] = (), labelled: Dataset | None = None
    ) -> None:
        self.path = path
        self._lock = RLock()
        self._rows: dict[str, dict[str, Any]] = {}
        self._judgments: dict[str, dict[str, Judgment]] = {}
        self._no_answer: set[str] = set()
        queries: dict[str, Query] = {}
        begun = [_read(path)] if path.exists() else []
        begun += [] if labelled is None else [(labelled, {})]
        for dataset, rows in begun:
            for query in dataset.queries:
                if folded(query.text) not in queries:
                    queries[folded(query.text)] = query
                    self._take(query, dataset, rows.get(query.query_id))
        self._version: FileVersion | None = file_version(path)
        for text in questions:
            name = hashlib.sha256(folded(text).encode("utf-8", "replace")).hexdigest()
            queries.setdefault(folded(text), Query(name[:_ID_CHARS], text))
        self.queries = list(queries.values())

    def _take(self, query: Query, dataset: Dataset, row: dict[str, Any] | None) -> None:
        name, kinds = query.query_id, dataset.distractors.get(query.query_id, {})
        if dataset.keywords and name not in dataset.qrels:
            raise ConfigurationError(
                f"{dataset.name} has keywords in place of passages: grades need a file of their own"
            )
        grades = {**dict.fromkeys(kinds, 0), **dataset.qrels.get(name, {})}
        self._judgments[name] = {
            one: Judgment(one, grade, Negative(kinds[one]) if one in kinds else None)
            for one, grade in grades.items()
        }
        if dataset.qrels.get(name) == {}:
            self._no_answer.add(name)
        own: dict[str, Any] = {"_id": name, "text": query.text}
        if query.metadata is not None:
            own["metadata"] = dict(query.metadata)
        self._rows[name] = own if row is None else row
        if row is None:
            self._write_row(query)

    def judgments(self, query_id: str) -> Mapping[str, Judgment]:
        """Return the labels of a question, by passage id."""
        return self._judgments.get(query_id, {})

    def has_no_answer(self, query_id: str) -> bool:
        """Return whether a question is marked as having no answer."""
        return query_id in self._no_answer

    @property
    def max_grade(self) -> int:
        """The highest grade of a passage; 0 without any."""
        given = [one.grade for of_one in self._judgments.values() for one in of_one.values()]
        return max(given, default=0)

    @property
    def n_answerable(self) -> int:
        """How many questions have a relevant passage."""
        return sum(
            any(one.grade > 0 for one in of_one.values()) for of_one in self._judgments.values()
        )

    def put(self, query: Query, passage_id: str, judgment: Judgment | None) -> None:
        """Label a passage, or take its label back; this removes a "no answer" mark.

        Raises:
            DataError: the file cannot be written, or another program has changed it meanwhile.
        """
        with self._lock:
            before = self._judgments.get(query.query_id, {})
            after = {one: label for one, label in before.items() if one != passage_id}
            self._judgments[query.query_id] = (
                after if judgment is None else {**before, passage_id: judgment}
            )
            self._keep(query, before, no_answer=False)

    def mark(self, query: Query, *, no_answer: bool) -> None:
        """Mark a question as having no answer in the whole corpus, or take that back.

        Raises:
            DataError: as `put`; or a passage is labelled relevant.
        """
        with self._lock:
            before = self._judgments.setdefault(query.query_id, {})
            if no_answer and any(one.grade > 0 for one in before.values()):
                raise DataError(f"{query.text!r} has a relevant passage: take its grade back first")
            self._keep(query, before, no_answer=no_answer)

    def _keep(self, query: Query, before: dict[str, Judgment], *, no_answer: bool) -> None:
        name, marked, row = query.query_id, set(self._no_answer), self._rows.get(query.query_id)
        (self._no_answer.add if no_answer else self._no_answer.discard)(name)
        try:
            if file_version(self.path) != self._version:
                raise DataError(
                    "was changed by another program: the grade is not kept; end this command, and "
                    "begin it again on the file as it is now",
                    path=self.path,
                )
            self._write_row(query)
            write_lines(self.path, map(_line, self._in_order()))
        except (OSError, DataError) as error:
            self._judgments[name], self._no_answer = before, marked
            self._rows.pop(name, None)
            if row is not None:
                self._rows[name] = row
            if isinstance(error, OSError):
                what = f"cannot be written ({error.strerror}): the grade is not kept"
                raise DataError(what, path=self.path) from error
            raise
        self._version = file_version(self.path)

    def _in_order(self) -> list[dict[str, Any]]:
        names = [query.query_id for query in self.queries]
        return [self._rows[name] for name in names if name in self._rows]

    def _write_row(self, query: Query) -> None:
        """Write the labels of a question into its line, or leave out a line without labels."""
        name, no_answer = query.query_id, query.query_id in self._no_answer
        labels = self._judgments.get(name, {})
        row = self._rows.get(name, {"_id": name, "text": query.text})
        row = {key: value for key, value in row.items() if key not in ("relevant", "distractors")}
        row["relevant"] = [] if no_answer else {one: each.grade for one, each in labels.items()}
        if kinds := {one: each.negative.value for one, each in labels.items() if each.negative}:
            row["distractors"] = kinds
        self._rows[name] = row
        if not (labels or no_answer):
            del self._rows[name]


def _read(path: Path) -> tuple[Dataset, dict[str, dict[str, Any]]]:
    """Read a file of labels, and its lines as they stand by question."""
    dataset = read_jsonl(path)
    records = read_records(path, Counter())
    rows = [dict(record.fields) for record in records]
    return dataset, {query.query_id: row for query, row in zip(dataset.queries, rows, strict=True)}


def _line(row: Mapping[str, Any]) -> str:
    # Half a surrogate pair, which UTF-8 cannot hold, is replaced as in reading.
    text = json.dumps(row, ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
