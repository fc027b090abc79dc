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


def test_labels_are_the_grades_in_the_order_of_the_passages() -> None:
    grades = LabelJudge(QRELS).judge("how?", PASSAGES[::-1])
    assert grades == [
        Judgment("x", 0, judged=False),
        Judgment("z", 0),
        Judgment("c", 0),
        Judgment("b", 1),
        Judgment("a", 2),
    ]


def test_where_labels_hold_relevant_passages_only_a_missing_one_is_a_grade() -> None:
    judge = LabelJudge({"how?": {"a": 2}})
    assert [each and each.judged for each in judge.judge("how?", PASSAGES)] == [True] * 5


def test_where_a_distractor_is_named_a_missing_label_is_not_a_grade() -> None:
    judge = LabelJudge({"how?": {"a": 2}, "nothing?": {}}, {"how?": ["b"]})
    judged = [judgment and judgment.judged for judgment in judge.judge("how?", PASSAGES)]
    assert judged == [True, True, False, False, False]
    assert all(judgment and judgment.judged for judgment in judge.judge("nothing?", PASSAGES))


def test_known_distractor_is_irrelevant_and_marked() -> None:
    grades = LabelJudge(QRELS, {"how?": ["x", "a"]}).judge("how?", PASSAGES)
    marks = {each.passage_id: each.negative for each in grades if each}
    assert marks == {"a": None, "b": None, "c": None, "z": None, "x": Negative.DISTRACTOR}


def test_an_unknown_query_has_no_grades() -> None:
    assert LabelJudge(QRELS).judge("why?", PASSAGES) == []


def test_answerless_known_query_is_judged() -> None:
    grades = LabelJudge({"nothing?": {}}).judge("nothing?", [Passage("a", "")])
    assert grades == [Judgment("a", 0)]


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
        assert "1 texts stand for several" in caplog.text

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
    def test_where_their_labels_disagree_there_is_no_grade_and_it_is_counted(
        self, other: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            judge = LabelJudge({self.ASKED: {"a": 1}, other: {"c": 1}})
        assert judge.judge(self.WRITTEN, PASSAGES) == []
        assert judge.judge(self.ASKED, PASSAGES[:1]) == [Judgment("a", 1)]
        assert judge.ambiguous == 1
        assert "1 texts stand for several" in caplog.text
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
