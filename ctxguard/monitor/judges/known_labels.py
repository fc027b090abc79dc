"""Judges without a model: one takes its verdicts from known labels, one leaves all to people."""

import logging
from collections.abc import Collection, Mapping, Sequence

from ctxguard.core.metrics import Negative
from ctxguard.core.types import Passage
from ctxguard.monitor.judges.protocol import Judgment
from ctxguard.monitor.redaction import Redactor, redact, redacted

_log = logging.getLogger(__name__)


class LabelJudge:
    """Judges by known labels: qrels, or human labels.

    Labels name a query by its original text, and samples hold its redacted text, so a query is
    looked up by both. If several labelled queries have the same redacted text and different
    labels, a sample of that text has no verdict, and ``ambiguous`` counts the text.

    A passage without a label counts as not relevant. If the labels give some passages the grade 0,
    it is worth ``Utilities.unjudged``, as in calibration. A query without any label gets no
    grades.

    Args:
        qrels: Query text to passage id to grade. A negative grade is read as 0. An empty entry
            says that no passage answers the query.
        distractors: Query text to the ids of its known distractors.
        version: Identifies the labels; change it when they change.
        redactor: The samples' own redactor (``Privacy.redactor``); None if samples hold queries
            unchanged.

    Attributes:
        ambiguous: Redacted texts without verdicts, because they stand for queries whose labels
            disagree.

    Raises:
        RedactionError: the redactor failed on a query.
    """

    name = "labels"
    exact = True
    reads_text = False

    def __init__(
        self,
        qrels: Mapping[str, Mapping[str, int]],
        distractors: Mapping[str, Collection[str]] | None = None,
        *,
        version: str = "1",
        redactor: Redactor | None = redact,
    ) -> None:
        self.version = version
        self.max_grade = max([max(grades.values(), default=1) for grades in qrels.values()] + [1])
        self._qrels = qrels
        self._distractors = {} if distractors is None else distractors
        self._positives_only = not any(self._distractors.values()) and all(
            grades and min(grades.values()) > 0 for grades in qrels.values()
        )
        self._originals = {} if redactor is None else self._by_redacted(redactor)
        self.ambiguous = sum(original is None for original in self._originals.values())
        if self.ambiguous:
            _log.warning(
                "%d redacted texts stand for several labelled queries whose labels disagree: "
                "samples of these texts get no verdict",
                self.ambiguous,
            )

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        """Return one grade per passage, in their order; an empty list for a query without labels.

        >>> judge = LabelJudge({"how?": {"a": 2}}, {"how?": {"b"}})
        >>> a, b, c = judge.judge("how?", [Passage(passage_id, "") for passage_id in "abc"])
        >>> a.grade, b.grade, b.negative.value, c.grade
        (2, 0, 'distractor', 0)
        >>> b.judged, c.judged  # c has no label, and a distractor is labelled
        (True, False)
        """
        original = self._originals.get(query, query)
        grades = None if original is None else self._qrels.get(original)
        if original is None or grades is None:
            return []
        distractors = self._distractors.get(original, ())
        complete = self._positives_only or not grades
        verdicts: list[Judgment | None] = []
        for passage in passages:
            passage_id = passage.passage_id
            grade = max(grades.get(passage_id, 0), 0)
            misleads = grade == 0 and passage_id in distractors
            has_label = misleads or passage_id in grades
            negative = Negative.DISTRACTOR if misleads else None
            verdicts.append(Judgment(passage_id, grade, negative, has_label or complete))
        return verdicts

    def _by_redacted(self, redactor: Redactor) -> dict[str, str | None]:
        """Map each redacted text to the query that it stands for; None if several disagree."""
        queries: dict[str, list[str]] = {}
        for query in self._qrels:
            text = redacted(query, redactor)
            if text != query:
                queries.setdefault(text, [text] if text in self._qrels else []).append(query)
        return {
            text: several[0] if all(map(self._agree, several, several[1:])) else None
            for text, several in queries.items()
        }

    def _agree(self, query: str, other: str) -> bool:
        return self._labels_of(query) == self._labels_of(other)

    def _labels_of(self, query: str) -> tuple[dict[str, int], set[str]]:
        """Return the labels of a query that say more than that a passage is not relevant."""
        grades = {name: grade for name, grade in self._qrels[query].items() if grade > 0}
        return grades, {*self._distractors.get(query, ())} - grades.keys()


class PeopleAlone:
    """Says nothing about any passage.

    Its verdicts are missing labels of grade 0, the same for every passage, so an estimate that
    people's labels correct is the estimate from these labels alone.
    """

    name = "people"
    version = "alone"
    max_grade = 1
    reads_text = False

    def judge(
        self,
        query: str,  # noqa: ARG002 - the protocol's
        passages: Sequence[Passage],
    ) -> list[Judgment | None]:
        """Return a missing label for each passage."""
        return [Judgment(passage.passage_id, 0, judged=False) for passage in passages]


PEOPLE_ALONE = f"{PeopleAlone.name} {PeopleAlone.version}"
"""The series of requests that people grade without a judge."""
