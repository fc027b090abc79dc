"""Judging by labels."""

import pytest

from ctxguard.metrics import Negative
from ctxguard.monitor.judges import Judgment, LabelJudge, Unjudged
from ctxguard.testing import JudgeContract
from ctxguard.types import Passage

QRELS = {"how?": {"a": 2, "b": 1, "c": 0, "z": -1}}
PASSAGES = [Passage(name, "") for name in "abczx"]


class TestLabelJudge(JudgeContract):
    def judge(self) -> LabelJudge:
        return LabelJudge({self.QUERY: {self.RELEVANT.passage_id: 2}})


def test_labels_are_the_verdicts_in_the_order_of_the_passages() -> None:
    verdicts = LabelJudge(QRELS).judge("how?", PASSAGES[::-1])
    assert verdicts == [
        Judgment("x", 0),
        Judgment("z", 0),
        Judgment("c", 0),
        Judgment("b", 1),
        Judgment("a", 2),
    ]


def test_a_known_distractor_is_irrelevant_and_marked() -> None:
    verdicts = LabelJudge(QRELS, {"how?": ["x", "a"]}).judge("how?", PASSAGES)
    marks = {verdict.passage_id: verdict.negative for verdict in verdicts if verdict}
    assert marks == {"a": None, "b": None, "c": None, "z": None, "x": Negative.DISTRACTOR}


def test_with_partial_labels_what_is_not_labelled_has_no_verdict() -> None:
    judge = LabelJudge(QRELS, unjudged="unknown")
    assert [verdict is None for verdict in judge.judge("how?", PASSAGES)] == [
        False,
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("unjudged", list(Unjudged))
def test_an_unknown_query_has_no_verdicts(unjudged: Unjudged) -> None:
    assert LabelJudge(QRELS, unjudged=unjudged).judge("why?", PASSAGES) == [None] * 5


def test_a_query_without_relevant_passages_is_judged_if_it_is_known() -> None:
    verdicts = LabelJudge({"nothing?": {}}).judge("nothing?", [Passage("a", "")])
    assert verdicts == [Judgment("a", 0)]


def test_the_highest_grade_is_that_of_the_labels_and_at_least_one() -> None:
    assert LabelJudge(QRELS).max_grade == 2
    assert LabelJudge({}).max_grade == 1
