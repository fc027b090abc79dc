"""The rule by which several labels of one passage become one."""

from ctxguard.measure.worth import Negative
from ctxguard.monitor.labels.adjudication import Adjudicated, Vote, adjudicate


def test_each_annotators_latest_label_counts() -> None:
    votes = [Vote(0, None, "ann", 2.0), Vote(3, None, "ann", 1.0), Vote(1, None, "ben", 1.0)]
    assert adjudicate(votes) == Adjudicated(0, None, relevance_disputed=True)
    assert adjudicate(votes[:2]) == Adjudicated(0, None, relevance_disputed=False)


def test_later_label_of_one_time_counts() -> None:
    assert adjudicate([Vote(0, None, "ann", 1.0), Vote(2, None, "ann", 1.0)]).grade == 2


def test_annotators_without_a_name_are_several() -> None:
    assert adjudicate([Vote(grade, None, None, 1.0) for grade in (2, 2, 0)]).grade == 2


def test_latest_mislead_label_counts() -> None:
    votes = [
        Vote(0, Negative.HARD_NEGATIVE, "ann", 3.0),
        Vote(0, Negative.DISTRACTOR, "ben", 1.0),
        Vote(0, None, "eve", 4.0),
    ]
    assert adjudicate(votes).negative is Negative.HARD_NEGATIVE


def test_a_relevant_passage_does_not_mislead() -> None:
    votes = [Vote(2, None, "ann", 1.0), Vote(2, None, "ben", 1.0)]
    distractor = Vote(0, Negative.DISTRACTOR, "eve", 1.0)
    assert adjudicate([*votes, distractor]) == Adjudicated(2, None, relevance_disputed=True)
