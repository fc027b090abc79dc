"""Judging by labels that are known beforehand."""

import logging
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

from ctxguard.metrics import Negative
from ctxguard.monitor.judges.protocol import Judgment
from ctxguard.monitor.redaction import Redactor, redact, redacted
from ctxguard.types import Passage

_log = logging.getLogger(__name__)


class Unjudged(StrEnum):
    """What a missing label says."""

    IRRELEVANT = "irrelevant"
    """The labels are complete: what they do not name is irrelevant."""
    UNKNOWN = "unknown"
    """The labels are partial: what they do not name has no verdict."""


class LabelJudge:
    """Judges by labels that are known beforehand: qrels, or human labels.

    Labels name the question as it was asked, samples hold what was written of it. So a question is
    found by its own text and by what the redactor makes of it. Where labelled questions that
    differ before redaction and not after it have different labels, nobody can say which of them a
    sample asked: their redacted text has no verdicts, and ``ambiguous`` counts it.

    Args:
        qrels: Query text to passage id to grade. A negative grade is read as 0.
        distractors: Query text to the ids of its known distractors.
        unjudged: What a passage without a label is: irrelevant, or without a verdict. A query
            without any label has no verdicts in either case.
        version: Names the labels; change it when they change.
        redactor: The one that the samples' writers were given (``Privacy.redactor``); where they
            keep a keyed hash of the query, the two in turn. None where they keep queries as asked.

    Attributes:
        ambiguous: Redacted texts without a verdict, because they stand for questions whose labels
            disagree.

    Raises:
        RedactionError: the redactor failed on a question.
    """

    name = "labels"
    exact = True
    reads_text = False

    def __init__(
        self,
        qrels: Mapping[str, Mapping[str, int]],
        distractors: Mapping[str, Collection[str]] | None = None,
        *,
        unjudged: Unjudged | str = Unjudged.IRRELEVANT,
        version: str = "1",
        redactor: Redactor | None = redact,
    ) -> None:
        self.version = version
        self.max_grade = max([max(grades.values(), default=1) for grades in qrels.values()] + [1])
        self._qrels = qrels
        self._distractors = {} if distractors is None else distractors
        self._complete = Unjudged(unjudged) is Unjudged.IRRELEVANT
        self._asked = {} if redactor is None else self._by_redacted(redactor)
        self.ambiguous = sum(question is None for question in self._asked.values())
        if self.ambiguous:
            _log.warning(
                "%d redacted texts stand for several labelled questions whose labels disagree: "
                "samples that ask them get no verdict",
                self.ambiguous,
            )

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        """One verdict per passage, in their order.

        >>> judge = LabelJudge({"how?": {"a": 2}}, {"how?": {"b"}})
        >>> a, b, c = judge.judge("how?", [Passage(passage_id, "") for passage_id in "abc"])
        >>> a.grade, b.grade, b.negative.value, c.grade
        (2, 0, 'distractor', 0)
        """
        question = self._asked.get(query, query)
        grades = None if question is None else self._qrels.get(question)
        if question is None or grades is None:
            return [None] * len(passages)
        distractors = self._distractors.get(question, ())
        verdicts: list[Judgment | None] = []
        for passage in passages:
            passage_id = passage.passage_id
            grade = max(grades.get(passage_id, 0), 0)
            misleads = grade == 0 and passage_id in distractors
            known = self._complete or misleads or passage_id in grades
            negative = Negative.DISTRACTOR if misleads else None
            verdicts.append(Judgment(passage_id, grade, negative) if known else None)
        return verdicts

    def _by_redacted(self, redactor: Redactor) -> dict[str, str | None]:
        """Redacted text to a question that it stands for; None where those disagree."""
        questions: dict[str, list[str]] = {}
        for question in self._qrels:
            text = redacted(question, redactor)
            if text != question:
                questions.setdefault(text, [text] if text in self._qrels else []).append(question)
        return {
            text: several[0] if all(map(self._agree, several, several[1:])) else None
            for text, several in questions.items()
        }

    def _agree(self, question: str, other: str) -> bool:
        return self._said_of(question) == self._said_of(other)

    def _said_of(self, question: str) -> tuple[dict[str, int], set[str]]:
        """What ``judge`` would go by: zeros say nothing where labels are complete."""
        grades = {
            passage_id: max(grade, 0)
            for passage_id, grade in self._qrels[question].items()
            if grade > 0 or not self._complete
        }
        return grades, {*self._distractors.get(question, ())} - {
            passage_id for passage_id, grade in grades.items() if grade > 0
        }
