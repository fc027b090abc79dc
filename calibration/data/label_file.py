"""Keeps a file of labels while people grade; it holds the whole state of their work.

Each grade replaces the file in one step. Other fields of its lines are left alone. Reads and writes
that file; `listed_questions` reads another.
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
from calibration.data.text_files import clean, read_lines, read_records, write_lines
from ctxguard._support.regular_file import FileVersion, file_version
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
        raise DataError("contains no questions; write one per line", path=path)
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
        queries: All questions, in order.
    """

    def __init__(
        self, path: Path, questions: Sequence[str] = (), labelled: Dataset | None = None
    ) -> None:
        self.path = path
        self._lock = RLock()
        # The lines of the file and the labels in them, by question.
        self._rows: dict[str, dict[str, Any]] = {}
        self._judgments: dict[str, dict[str, Judgment]] = {}
        queries: dict[str, Query] = {}
        begun: list[tuple[Dataset, Mapping[str, dict[str, Any]]]] = []
        if path.exists():
            own = read_jsonl(path)
            lines = [dict(record.fields) for record in read_records(path, Counter())]
            begun.append(
                (own, dict(zip([one.query_id for one in own.queries], lines, strict=True)))
            )
        if labelled is not None:
            begun.append((labelled, {}))
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
                f"{dataset.name} has keywords instead of passages: write grades to a separate file"
            )
        labels = {
            one: Judgment(one, grade, Negative(kinds[one]) if one in kinds else None)
            for one, grade in (dict.fromkeys(kinds, 0) | dict(dataset.qrels.get(name, {}))).items()
        }
        if row is None:
            row = self._row(query, labels, no_answer=dataset.qrels.get(name) == {})
        self._judgments[name], self._rows[name] = labels, row

    def judgments(self, query_id: str) -> Mapping[str, Judgment]:
        """Return the labels of a question, by passage id."""
        return self._judgments.get(query_id, {})

    def has_no_answer(self, query_id: str) -> bool:
        """Return whether a question is marked as having no answer."""
        row = self._rows.get(query_id, {})
        return bool(row) and not row["relevant"]

    @property
    def max_grade(self) -> int:
        """The highest grade of any passage; 0 without grades."""
        given = [one.grade for of_one in self._judgments.values() for one in of_one.values()]
        return max(given, default=0)

    @property
    def n_answerable(self) -> int:
        """How many questions have a relevant passage."""
        return sum(
            any(one.grade > 0 for one in of_one.values()) for of_one in self._judgments.values()
        )

    def put(self, query: Query, passage_id: str, judgment: Judgment | None) -> None:
        """Label a passage, or withdraw its label; either removes a "no answer" mark.

        Raises:
            DataError: the file cannot be written, or another program has changed it meanwhile.
        """
        with self._lock:
            labels = {**self.judgments(query.query_id)}
            if judgment is None:
                labels.pop(passage_id, None)
            else:
                labels[passage_id] = judgment
            self._keep(query, labels, no_answer=False)

    def mark(self, query: Query, *, no_answer: bool) -> None:
        """Mark a question as having no answer in the whole corpus, or undo that.

        Raises:
            DataError: as `put`; or a passage is labelled relevant.
        """
        with self._lock:
            labels = {**self.judgments(query.query_id)}
            if no_answer and any(one.grade > 0 for one in labels.values()):
                raise DataError(
                    f"{query.text!r} has a relevant passage: withdraw that passage's grade first"
                )
            self._keep(query, labels, no_answer=no_answer)

    def _keep(self, query: Query, labels: dict[str, Judgment], *, no_answer: bool) -> None:
        """Write the file with a question's new labels, and only then adopt them."""
        rows = {**self._rows, query.query_id: self._row(query, labels, no_answer=no_answer)}
        in_order = [rows.get(each.query_id) for each in self.queries]
        try:
            if file_version(self.path) != self._version:
                raise DataError(
                    "has been changed by another program, so the grade was not saved; stop this "
                    "command and start it again",
                    path=self.path,
                )
            lines = [json.dumps(row, ensure_ascii=False) for row in in_order if row]
            # Half a surrogate pair, which UTF-8 cannot hold, is replaced as in reading.
            write_lines(self.path, [clean(line, Counter()) for line in lines])
        except OSError as error:
            what = f"cannot be written to ({error.strerror}): the grade is not saved"
            raise DataError(what, path=self.path) from error
        self._rows, self._judgments[query.query_id] = rows, labels
        self._version = file_version(self.path)

    def _row(
        self, query: Query, labels: Mapping[str, Judgment], *, no_answer: bool
    ) -> dict[str, Any]:
        """Write a question's labels into its line, which is empty if there are none."""
        if not (labels or no_answer):
            return {}
        about = {} if query.metadata is None else {"metadata": dict(query.metadata)}
        row = self._rows.get(query.query_id) or {"_id": query.query_id, "text": query.text, **about}
        row = {key: value for key, value in row.items() if key not in ("relevant", "distractors")}
        row["relevant"] = [] if no_answer else {one: each.grade for one, each in labels.items()}
        if kinds := {one: each.negative.value for one, each in labels.items() if each.negative}:
            row["distractors"] = kinds
        return row
