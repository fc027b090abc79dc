"""Judging by labels that are known beforehand."""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

from ctxguard.metrics import Negative
from ctxguard.monitor.judges.protocol import Judgment
from ctxguard.types import Passage


class Unjudged(StrEnum):
    """What a missing label says."""

    IRRELEVANT = "irrelevant"
    """The labels are complete: what they do not name is irrelevant."""
    UNKNOWN = "unknown"
    """The labels are partial: what they do not name has no verdict."""


class LabelJudge:
    """Judges by labels that are known beforehand: qrels, or human labels.

    Args:
        qrels: Query text to passage id to grade. A negative grade is read as 0.
        distractors: Query text to the ids of its known distractors.
        unjudged: What a passage without a label is: irrelevant, or without a verdict. A query
            without any label has no verdicts in either case.
        version: Names the labels; change it when they change.
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
    ) -> None:
        self.version = version
        self.max_grade = max([max(grades.values(), default=1) for grades in qrels.values()] + [1])
        self._qrels = qrels
        self._distractors = {} if distractors is None else distractors
        self._complete = Unjudged(unjudged) is Unjudged.IRRELEVANT

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        """One verdict per passage, in their order.

        >>> judge = LabelJudge({"how?": {"a": 2}}, {"how?": {"b"}})
        >>> a, b, c = judge.judge("how?", [Passage(passage_id, "") for passage_id in "abc"])
        >>> a.grade, b.grade, b.negative.value, c.grade
        (2, 0, 'distractor', 0)
        """
        grades = self._qrels.get(query)
        if grades is None:
            return [None] * len(passages)
        distractors = self._distractors.get(query, ())
        verdicts: list[Judgment | None] = []
        for passage in passages:
            passage_id = passage.passage_id
            grade = max(grades.get(passage_id, 0), 0)
            misleads = grade == 0 and passage_id in distractors
            known = self._complete or misleads or passage_id in grades
            negative = Negative.DISTRACTOR if misleads else None
            verdicts.append(Judgment(passage_id, grade, negative) if known else None)
        return verdicts
