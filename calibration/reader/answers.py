"""Answers marked right or wrong, with the labels of the contexts behind them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.data.dataset import Dataset
from calibration.data.text_files import Record, read_records, shown
from ctxguard.core.metrics import Negative
from ctxguard.core.types import FloatArray
from ctxguard.errors import CalibrationError, ConfigurationError, DataError

IntArray = NDArray[np.int64]

COSTS: tuple[str, ...] = ("unjudged", "irrelevant", "hard_negative", "distractor")
"""Kinds of passages that are not relevant, by their expected cost, ascending."""
TERMS: tuple[str, ...] = ("relevant", *COSTS, "position", "completeness")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a reader, with the context that it was given.

    Attributes:
        query_id: The question.
        passage_ids: The context in the order that the reader saw, distinct; empty without one.
        correct: Whether the answer was marked right.
        pipeline: Name of the system that made the context; empty if the file does not name it.
        reader: Name of the reader; empty if the file does not name it.
    """

    query_id: str
    passage_ids: tuple[str, ...]
    correct: bool
    pipeline: str = ""
    reader: str = ""


def read_answers(path: Path | str) -> tuple[Answer, ...]:
    """Read the answers of a JSONL file, one object per line, in order.

    Fields: ``query_id``, ``passage_ids`` in context order, ``correct`` (``true`` or ``false``)
    and optionally ``pipeline`` and ``reader``. One question may have several answers, from
    several pipelines or from one.

    Raises:
        DataError: no such file, broken JSON, a missing field, ``correct`` is not a boolean, a
            passage twice in one context, or no answer.
    """
    path = Path(path)
    answers = tuple([_answer(record) for record in read_records(path, Counter())])
    if not answers:
        raise DataError("holds no answer; write one JSON object per line", path=path)
    return answers


def _answer(record: Record) -> Answer:
    query_id = record.identifier("query_id")
    for name in ("passage_ids", "correct"):
        if name not in record.fields:
            raise record.error(
                f"the field {name} is missing; an answer has query_id, passage_ids and correct"
            )
    correct, ids = record.fields["correct"], record.identifiers("passage_ids")
    if not isinstance(correct, bool):
        raise record.error(f"correct is {shown(correct)}; write true or false")
    repeated = [passage_id for passage_id, n in Counter(ids).items() if n > 1]
    if repeated:
        raise record.error(
            f"passage {shown(repeated[0])} is in the context {ids.count(repeated[0])} times; list "
            "each passage once, at its first position"
        )
    pipeline, reader = (record.text(name, default="") for name in ("pipeline", "reader"))
    return Answer(query_id, tuple(ids), correct, pipeline, reader)


def of_reader(answers: Sequence[Answer], reader: str | None) -> tuple[Answer, ...]:
    """Return the answers of one reader: the one named, or the only one.

    Raises:
        ConfigurationError: there are several readers and none is named, or none has this name.
    """
    readers = sorted({answer.reader for answer in answers})
    if reader is None and len(readers) == 1:
        return tuple(answers)
    if reader not in readers:
        named = ", ".join([shown(name) for name in readers])
        raise ConfigurationError(
            f"the answers are of the readers {named}, and utilities belong to one; name one of "
            "them with --reader"
        )
    return tuple([answer for answer in answers if answer.reader == reader])


class LabelledContext(NamedTuple):
    """The labels of one context.

    Attributes:
        grades: In context order; 0 if not relevant or not judged.
        negatives: In context order, the kind of each passage known to mislead, else None.
        known: In context order, whether each passage has a label; all do if the labels of the
            collection hold relevant passages only.
        judged: All grades in the question's labels.
    """

    grades: tuple[int, ...]
    negatives: tuple[Negative | None, ...]
    known: tuple[bool, ...]
    judged: tuple[int, ...]

    @property
    def n_relevant(self) -> int:
        return sum(grade > 0 for grade in self.grades)

    @property
    def n_needed(self) -> int:
        """Number of relevant passages that the question has, ≥ 1."""
        return sum(grade > 0 for grade in self.judged)


@dataclass(frozen=True)
class MarkedContexts:
    """The answers to labelled questions: the rows that utilities are fitted to.

    Attributes:
        contexts: The contexts, length n.
        correct: Shape (n,), whether each answer is right.
        question: Shape (n,), the row of ``query_ids`` that each answer belongs to.
        query_ids: Length n_q, the questions with an answer here, sorted.
        top_grade: The highest grade of the collection.
        notes: The answers that were left out, one readable line for each reason: their question
            is not labelled, or has no relevant passage, so that shares of them are undefined; or
            they had no context, which shows nothing of what passages are worth.
    """

    contexts: tuple[LabelledContext, ...]
    correct: NDArray[np.bool_]
    question: IntArray
    query_ids: tuple[str, ...]
    top_grade: int
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.contexts)

    def part(self, chosen: NDArray[np.bool_]) -> "MarkedContexts":
        """Select the answers to some questions: ``chosen`` has shape (n_q,)."""
        rows = np.flatnonzero(chosen[self.question])
        return replace(
            self,
            contexts=tuple([self.contexts[row] for row in rows]),
            correct=self.correct[rows],
            question=(np.cumsum(chosen) - 1)[self.question[rows]],
            query_ids=tuple(compress(self.query_ids, chosen)),
        )


def mark(answers: Sequence[Answer], dataset: Dataset) -> MarkedContexts:
    """Look up the labels of every answer's context.

    Raises:
        CalibrationError: no answer is left, or the labels hold no relevant passage.
    """
    if dataset.max_grade is None:
        raise CalibrationError(
            f"{dataset.name}: no passage is labelled relevant, so utilities cannot be fitted"
        )
    known = {query.query_id for query in dataset.queries}
    answerable = set(dataset.answerable)
    with_context = [answer for answer in answers if answer.passage_ids]
    usable = [answer for answer in with_context if answer.query_id in answerable]
    n_unknown = sum(answer.query_id not in known for answer in with_context)
    if not usable:
        raise CalibrationError(
            f"{dataset.name}: of {len(with_context)} answers, {n_unknown} are of questions that "
            "the labels do not hold and the others of questions without a relevant passage; check "
            "that the answers and the labels (and the split) belong together"
        )
    query_ids = sorted({answer.query_id for answer in usable})
    place = {query_id: row for row, query_id in enumerate(query_ids)}
    left_out = (
        (n_unknown, "of questions that the labels do not hold"),
        (len(with_context) - len(usable) - n_unknown, "of questions without a relevant passage"),
        (len(answers) - len(with_context), "without a context"),
    )
    return MarkedContexts(
        contexts=tuple([_look_up(answer, dataset) for answer in usable]),
        correct=np.array([answer.correct for answer in usable], dtype=bool),
        question=np.array([place[answer.query_id] for answer in usable], dtype=np.int64),
        query_ids=tuple(query_ids),
        top_grade=dataset.max_grade,
        notes=tuple([f"{n} answers {what} are left out" for n, what in left_out if n]),
    )


def _look_up(answer: Answer, dataset: Dataset) -> LabelledContext:
    ids, grades = answer.passage_ids, dataset.qrels.get(answer.query_id, {})
    misleading = dataset.distractors.get(answer.query_id, {})
    kinds = [misleading.get(passage_id) for passage_id in ids]
    return LabelledContext(
        grades=tuple([max(grades.get(passage_id, 0), 0) for passage_id in ids]),
        negatives=tuple([None if kind is None else Negative(kind) for kind in kinds]),
        known=tuple(
            [True] * len(ids) if dataset.positives_only else dataset.judged(answer.query_id, ids)
        ),
        judged=tuple(grades.values()),
    )


def term_columns(contexts: Sequence[LabelledContext]) -> dict[str, FloatArray]:
    """Turn the contexts into columns of a regression, shape (n,) each.

    ``relevant``: log2(1 + relevant passages held) / log2(1 + needed), in [0, 1]: the share of
    the needed passages with diminishing returns, as a rank discount gives passages at the top.
    ``COSTS``: counts of passages that are not relevant, by kind. ``position``: 1 − 1 / log2(1 +
    rank of the first relevant passage), the share that UDCG's discount takes from it; 0 without
    one. ``completeness``: whether every relevant passage is in the context.

    >>> columns = term_columns([LabelledContext((0, 1), (None, None), (True, True), (1, 2, 1))])
    >>> {name: round(float(column[0]), 3) for name, column in columns.items()}  # doctest: +ELLIPSIS
    {'relevant': 0.5, 'unjudged': 0.0, 'irrelevant': 1.0, 'hard_negative': 0.0, ...
    """
    table = np.zeros((len(contexts), len(TERMS)))
    for row, context in enumerate(contexts):
        held, needed = context.n_relevant, context.n_needed
        first = next((rank for rank, grade in enumerate(context.grades, 1) if grade > 0), 1)
        counts = Counter(
            [
                negative.value if negative else "irrelevant" if known else "unjudged"
                for grade, negative, known in zip(*context[:3], strict=True)
                if grade <= 0
            ]
        )
        share = np.log2(1.0 + held) / np.log2(1.0 + needed)
        of_kind = [counts[name] for name in COSTS]
        table[row] = (share, *of_kind, 1.0 - 1.0 / np.log2(1.0 + first), held == needed)
    return dict(zip(TERMS, table.T, strict=True))
