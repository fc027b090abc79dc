"""The contract of every judge, as a suite that a judge's tests inherit."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ctxguard.core.types import Passage
from ctxguard.monitor.judges import Judge, Judgment


def agree(some: Sequence[Judgment | None], others: Sequence[Judgment | None]) -> bool:
    """Whether grades are the same, but for last digits that the rest of a batch may change."""
    grades = [[each and replace(each, score=None) for each in given] for given in (some, others)]
    scores = [[each and each.score for each in given] for given in (some, others)]
    return grades[0] == grades[1] and scores[0] == pytest.approx(scores[1], abs=1e-5)


class JudgeContract(ABC):
    """The contract of every judge. Inherit in a test module, as ``class TestMine``."""

    QUERY = "How long does a red fox live?"
    RELEVANT = Passage("relevant", "A red fox lives three years in the wild.", "Red fox")
    IRRELEVANT = Passage("irrelevant", "The kettle boils water within minutes.", "Kettle")
    AWKWARD = (
        Passage("empty", ""),
        Passage("white", " \n\t"),
        Passage("surrogate", "half a pair: \ud800"),
        Passage("hidden", "a\x00b\u202ec\u200bd"),
        Passage("fences", '</passage> </query> {text} {{ }} %s \\ " \n```'),
        Passage("long", "water and kettles " * 5000),
        Passage("", "without an id"),
    )

    @abstractmethod
    def judge(self) -> Judge:
        """Return a judge that can tell ``RELEVANT`` from ``IRRELEVANT`` for ``QUERY``."""

    def test_relevant_grades_above_irrelevant(self) -> None:
        relevant, irrelevant = self.judge().judge(self.QUERY, [self.RELEVANT, self.IRRELEVANT])
        assert relevant is not None
        assert irrelevant is not None
        assert relevant.grade > irrelevant.grade == 0

    def test_grades_keep_order_and_ids(self) -> None:
        """Grades come in the order of the passages and bear their ids."""
        judge = self.judge()
        passages = [self.RELEVANT, self.IRRELEVANT, self.RELEVANT]
        grades = judge.judge(self.QUERY, passages)
        assert [judgment and judgment.passage_id for judgment in grades] == [
            passage.passage_id for passage in passages
        ]
        assert agree(judge.judge(self.QUERY, passages[1::-1]), grades[1::-1])

    def test_neighbours_leave_grades_alone(self) -> None:
        judge = self.judge()
        together = judge.judge(self.QUERY, [self.IRRELEVANT] * 3 + [self.RELEVANT])
        assert agree(together[3:], judge.judge(self.QUERY, [self.RELEVANT]))

    def test_no_passages_get_no_grades(self) -> None:
        assert list(self.judge().judge(self.QUERY, [])) == []

    def test_grades_are_bounded_whole_numbers(self) -> None:
        judge = self.judge()
        assert judge.max_grade >= 1
        for judgment in judge.judge(self.QUERY, [self.RELEVANT, self.IRRELEVANT, *self.AWKWARD]):
            assert judgment is None or type(judgment.grade) is int
            assert judgment is None or 0 <= judgment.grade <= judge.max_grade

    def test_awkward_passage_costs_itself(self) -> None:
        judge = self.judge()
        alone = judge.judge(self.QUERY, [self.RELEVANT])
        for awkward in self.AWKWARD:
            grades = judge.judge(self.QUERY, [self.RELEVANT, awkward, self.RELEVANT])
            assert len(grades) == 3
            assert agree(grades[::2], [*alone, *alone])

    def test_an_awkward_query_raises_nothing(self) -> None:
        for query in ("", " ", "half a pair: \ud800", "</query> {title}", "fox " * 2000):
            # None where it knows nothing of the query.
            assert len(self.judge().judge(query, [self.RELEVANT])) <= 1

    def test_name_and_version_stay(self) -> None:
        judge = self.judge()
        pinned = (judge.name, judge.version)
        assert all(pinned)
        judge.judge(self.QUERY, [self.RELEVANT])
        assert ((judge.name, judge.version), self.judge().version) == (pinned, judge.version)

    def test_many_threads_may_ask_at_once(self) -> None:
        judge = self.judge()
        passages = [self.RELEVANT, self.IRRELEVANT]
        alone = judge.judge(self.QUERY, passages)
        with ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(judge.judge, self.QUERY, passages) for _ in range(8)]
        assert all(agree(grades.result(), alone) for grades in asked)
