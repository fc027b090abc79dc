"""Judges without a model: one takes its grades from known labels, the other leaves them to people.

Calls the given redactor; counts and logs unlabelled passages.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ctxguard.core.passages import text_key
from ctxguard.core.types import Passage, id_text
from ctxguard.measure.worth import Negative
from ctxguard.monitor.redaction import Redactor, redact, redacted
from ctxguard.monitor.sampling.record import Judgment

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
ByQuestion = Mapping[str, _T] | Iterable[tuple[str, _T]]


class LabelJudge:
    """Judges by known labels: qrels, or human labels.

    A question is identified by its text, ignoring case, white space and Unicode form. Labels of
    equal questions are merged. Labels name a question by its original text, and samples hold its
    redacted text, so it is looked up by both. Where equal questions contradict each other, or
    several have the same redacted text and different labels, a sample has no grade, and
    ``ambiguous`` counts the text.

    A passage without a label counts as not relevant. If the labels give some passages the grade 0,
    it is worth ``Utilities.unjudged``, as in calibration. A query without any label gets no
    grades.

    Args:
        qrels: Query text to passage id to grade, or pairs of these, as of equal questions. A
            negative grade is read as 0. An empty entry says that no passage answers the query. Ids
            may be whole numbers and UUIDs.
        distractors: Query text to the ids of its known distractors, or pairs of these.
        version: Identifies the labels; change it when they change.
        redactor: The samples' own redactor (``Privacy.redactor``); None if samples hold queries
            unchanged.
        texts: The texts of labelled passages by id, as far as they are known: a passage with one of
            them has its labels, whatever its id.

    Attributes:
        ambiguous: Texts of questions without grades, because their labels disagree.
        n_unlabelled: Passages without a label that were judged so far.

    Raises:
        RedactionError: the redactor failed on a query.
    """

    name = "labels"
    exact = True
    reads_text = False

    def __init__(
        self,
        qrels: "ByQuestion[Mapping[str, int]]",
        distractors: "ByQuestion[Collection[str]] | None" = None,
        *,
        version: str = "1",
        redactor: Redactor | None = redact,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        self.version, self.n_unlabelled = version, 0
        grades = [
            (text, {id_text(name): max(grade, 0) for name, grade in own.items()})
            for text, own in _pairs(qrels)
        ]
        self.max_grade = max([1, *[grade for _, own in grades for grade in own.values()]])
        misleading = [(text, {*map(id_text, ids)}) for text, ids in _pairs(distractors or {})]
        self._positives_only = not any(ids for _, ids in misleading) and all(
            own and min(own.values()) > 0 for _, own in grades
        )
        known: dict[bytes | None, _Labels | None] = {}
        for text, own in grades:
            key, labels = text_key(text), _Labels(own, set())
            known[key] = _together(known[key], labels) if key in known else labels
        for text, ids in misleading:
            found = known.get(text_key(text))
            if found is not None:
                found.distractors.update(ids)
        self._known = known
        self._copies: dict[bytes, list[str]] = {}
        for name, text in (texts or {}).items():
            for form in {text, redacted(text, redactor)}:
                if (key := text_key(form)) is not None:
                    self._copies.setdefault(key, []).append(id_text(name))
        if redactor is not None:
            self._add_redacted([text for text, _ in grades], redactor)
        self.ambiguous = sum(labels is None for labels in self._known.values())
        if self.ambiguous:
            _log.warning(
                "%d texts each belong to several labelled queries whose labels disagree: samples "
                "with these texts get no grade",
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
        labels = self._known.get(text_key(query))
        if labels is None:
            return []
        complete = self._positives_only or not labels.grades
        grades: list[Judgment | None] = []
        for passage in passages:
            key = text_key(passage.text) if self._copies else None
            names = [passage.passage_id, *self._copies.get(key or b"", ())]
            grade = max([0, *[labels.grades.get(name, 0) for name in names]])
            misleads = grade == 0 and not labels.distractors.isdisjoint(names)
            has_label = misleads or not labels.grades.keys().isdisjoint(names)
            self.n_unlabelled += bool(labels.grades) and not has_label
            negative = Negative.DISTRACTOR if misleads else None
            grades.append(Judgment(passage.passage_id, grade, negative, has_label or complete))
        return grades

    def _add_redacted(self, texts: Sequence[str], redactor: Redactor) -> None:
        """Index questions by their redacted texts too, unless several disagree."""
        several: dict[bytes | None, list[_Labels | None]] = {}
        for text in texts:
            own, written = text_key(text), text_key(redacted(text, redactor))
            if written != own:
                first = [self._known[written]] if written in self._known else []
                several.setdefault(written, first).append(self._known[own])
        for key, known in several.items():
            agree = all(one and known[0] and one.says() == known[0].says() for one in known)
            self._known[key] = known[0] if agree else None


class _Labels(NamedTuple):
    """The labels of one question: grades by passage id, and passages that mislead."""

    grades: dict[str, int]
    distractors: set[str]

    def says(self) -> tuple[dict[str, int], set[str]]:
        """Return the labels that say more than "not relevant"."""
        grades = {name: grade for name, grade in self.grades.items() if grade > 0}
        return grades, self.distractors - grades.keys()


def _together(one: _Labels | None, other: _Labels) -> _Labels | None:
    """Merge the labels of equal questions; None if they contradict each other."""
    if one is None:
        return None
    if not (one.grades and other.grades):
        # One of them says that nothing answers the question.
        are_relevant = any([*one.grades.values(), *other.grades.values()])
        return None if are_relevant else _Labels({}, one.distractors | other.distractors)
    if any(one.grades.get(name, grade) != grade for name, grade in other.grades.items()):
        return None
    return _Labels({**one.grades, **other.grades}, one.distractors | other.distractors)


def _pairs(labels: "ByQuestion[_T]") -> Iterable[tuple[str, _T]]:
    return labels.items() if isinstance(labels, Mapping) else labels


class PeopleAlone:
    """A judge that gives no grades.

    Its grades are missing labels of grade 0, the same for every passage, so an estimate corrected
    by people's labels rests on these labels alone.
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
        """Return a missing grade for each passage."""
        return [Judgment(passage.passage_id, 0, judged=False) for passage in passages]


PEOPLE_ALONE = f"{PeopleAlone.name} {PeopleAlone.version}"
"""The name of the series of requests that people grade without a judge."""
