"""Judging by labels."""

import logging
from typing import ClassVar

import pytest
from contexts import make_context
from watching import Watching

from ctxguard.core.types import Passage
from ctxguard.errors import RedactionError
from ctxguard.measure.worth import Negative
from ctxguard.monitor.judges import Judgment, LabelJudge
from ctxguard.monitor.service import JudgingOutcome
from tests.doubles import JudgeContract

QRELS = {"how?": {"a": 2, "b": 1, "c": 0, "z": -1}}
PASSAGES = [Passage(name, "") for name in "abczx"]


class TestLabelJudge(JudgeContract):
    def judge(self) -> LabelJudge:
        return LabelJudge({self.QUERY: {self.RELEVANT.passage_id: 2}})


@pytest.mark.parametrize(
    ("qrels", "distractors", "grades", "misleading", "unlabelled"),
    [
        (QRELS, None, {"a": 2, "b": 1}, "", "x"),
        (QRELS, {"how?": ["x", "a"]}, {"a": 2, "b": 1}, "x", ""),
        # Where labels hold relevant passages only, a missing one is a grade.
        ({"how?": {"a": 2}}, None, {"a": 2}, "", ""),
        ({"how?": {"a": 2}, "nothing?": {}}, {"how?": ["b"]}, {"a": 2}, "b", "czx"),
        ({"how?": {}, "why?": {"a": 0}}, None, {}, "", ""),
    ],
    ids=["labels", "a distractor", "positives only", "a distractor and no other", "no answer"],
)
def test_labels_are_the_grades(
    qrels: dict[str, dict[str, int]],
    distractors: dict[str, list[str]] | None,
    grades: dict[str, int],
    misleading: str,
    unlabelled: str,
) -> None:
    """In the order of the passages; and an unknown question has none."""
    judge = LabelJudge(qrels, distractors)
    assert judge.judge("how?", PASSAGES[::-1]) == [
        Judgment(
            one.passage_id,
            grades.get(one.passage_id, 0),
            Negative.DISTRACTOR if one.passage_id in misleading else None,
            judged=one.passage_id not in unlabelled,
        )
        for one in PASSAGES[::-1]
    ]
    assert judge.judge("who?", PASSAGES) == []


def test_highest_grade_is_labels_at_least_one() -> None:
    assert LabelJudge(QRELS).max_grade == 2
    assert LabelJudge({}).max_grade == 1


class TestEqualQuestions:
    """Equal but for case, white space and Unicode form."""

    FORMS = ("How?", "how?", " HOW?\n", "ｈow?")

    @pytest.mark.parametrize("other", FORMS)
    def test_share_the_union_of_their_labels(self, other: str) -> None:
        judge = LabelJudge([("How?", {"a": 2}), (other, {"b": 1, "a": 2})], [(other, ["c"])])
        for asked in self.FORMS:
            grades = judge.judge(asked, PASSAGES[:3])
            assert [each.grade for each in grades if each] == [2, 1, 0]
        assert judge.ambiguous == 0

    @pytest.mark.parametrize("own", [{"a": 0}, {"a": 1}, {"a": 2, "b": 1, "c": 3}, {}])
    @pytest.mark.parametrize("last", [0, 1])
    def test_that_contradict_have_no_grade(
        self, own: dict[str, int], last: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Whichever stands last in the file, and whatever comes after it."""
        pair = [("How?", own), ("how?", {"a": 2, "c": 0})]
        with caplog.at_level(logging.WARNING):
            judge = LabelJudge([*(pair if last else pair[::-1]), ("how?", {"d": 1})])
        assert judge.judge("How?", PASSAGES) == []
        assert judge.ambiguous == 1
        assert "1 texts each belong to several" in caplog.text

    def test_unanswered_agree_with_irrelevant(self) -> None:
        judge = LabelJudge([("How?", {}), ("how?", {"a": 0})])
        assert [each and each.judged for each in judge.judge("how?", PASSAGES)] == [True] * 5


class TestCopies:
    """A passage whose text is that of a labelled one has its labels."""

    TEXTS: ClassVar = {"twin": "Boil the  kettle. joe@example.org", "other": "Drain it."}

    @pytest.mark.parametrize(
        "text", ["Boil the kettle. joe@example.org", "BOIL THE KETTLE. [e-mail]"]
    )
    def test_count_under_any_id(self, text: str) -> None:
        """Samples hold the redacted text."""
        judge = LabelJudge({"how?": {"twin": 2}}, texts=self.TEXTS)
        found = judge.judge(
            "how?", [Passage("a", text), Passage("b", "Rinse it."), Passage("c", "")]
        )
        assert [each.grade for each in found if each] == [2, 0, 0]

    def test_mislead_alike(self) -> None:
        judge = LabelJudge({"how?": {"other": 0, "a": 1}}, {"how?": ["twin"]}, texts=self.TEXTS)
        [found] = judge.judge("how?", [Passage("x", self.TEXTS["twin"])])
        assert found == Judgment("x", 0, Negative.DISTRACTOR)


class TestRedactedQuestions:
    """Samples hold what the redactor left of a question; labels hold it as it was asked."""

    ASKED = "where is the order of joe@example.org?"
    WRITTEN = "where is the order of [e-mail]?"

    def test_question_is_found_as_written(self) -> None:
        judge = LabelJudge({self.ASKED: {"a": 2}}, {self.ASKED: ["b"]})
        for query in (self.ASKED, self.WRITTEN):
            assert judge.judge(query, PASSAGES) == [
                Judgment("a", 2),
                Judgment("b", 0, Negative.DISTRACTOR),
                *[Judgment(passage.passage_id, 0, judged=False) for passage in PASSAGES[2:]],
            ]

    def test_other_writers_redactor_is_applied(self) -> None:
        judge = LabelJudge(
            {"what does Ann owe?": {"a": 1}}, redactor=lambda q: q.replace("Ann", "X")
        )
        assert judge.judge("what does X owe?", PASSAGES[:1]) == [Judgment("a", 1)]
        assert judge.judge(self.WRITTEN, PASSAGES[:1]) == []

    def test_questions_made_one_share_agreeing_labels(self) -> None:
        other = self.ASKED.replace("joe", "ann")
        judge = LabelJudge({self.ASKED: {"a": 1}, other: {"a": 1, "c": 0}})
        assert judge.judge(self.WRITTEN, PASSAGES[:1]) == [Judgment("a", 1)]
        assert judge.ambiguous == 0

    @pytest.mark.parametrize("other", ["where is the order of ann@example.org?", WRITTEN])
    def test_disagreeing_labels_give_no_grade(
        self, other: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            judge = LabelJudge({self.ASKED: {"a": 1}, other: {"c": 1}})
        assert judge.judge(self.WRITTEN, PASSAGES) == []
        assert judge.judge(self.ASKED, PASSAGES[:1]) == [Judgment("a", 1)]
        assert judge.ambiguous == 1
        assert "1 texts each belong to several" in caplog.text
        assert "order" not in caplog.text

    def test_unredacted_queries_stay_unredacted(self) -> None:
        judge = LabelJudge({self.ASKED: {"a": 1}}, redactor=None)
        assert judge.judge(self.WRITTEN, PASSAGES[:1]) == []
        assert judge.judge(self.ASKED, PASSAGES[:1]) == [Judgment("a", 1)]

    def test_failing_redactor_is_an_error(self) -> None:
        with pytest.raises(RedactionError):
            LabelJudge({self.ASKED: {"a": 1}}, redactor=lambda query: None)  # type: ignore[arg-type,return-value]

    def test_question_with_address_is_judged(self) -> None:
        live = Watching(LabelJudge({self.ASKED: {"p0": 1}}))
        live.watch(make_context(["p0", "p1"], 1, query=self.ASKED))
        assert live.monitor.report().outcomes[JudgingOutcome.JUDGED] == 1
