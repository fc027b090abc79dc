"""What a framework's engine may return, and what the guard makes of it: one suite for all."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import pytest

from ctxguard import ContextGuard, Flag, RatioPolicy, ScoreKind, StageUnavailableError
from ctxguard.core.context import Context
from ctxguard.core.types import Route
from tests.profiles import profile_with, unenforced


class Row(NamedTuple):
    """One result of an engine."""

    id: str
    text: Any
    score: Any


def rows(scores: Sequence[Any]) -> list[Row]:
    return [Row(f"d{at}", f"Text number {at}.", score) for at, score in enumerate(scores)]


class PassesAll(ABC):
    """What a framework's filter passes where nothing is enforced; inherit as ``FaultRows``."""

    @abstractmethod
    def passed(self, guard: ContextGuard, found: Sequence[Row]) -> list[tuple[str, float]]:
        """The ids and scores of the documents that a guard's filter passes."""

    @pytest.mark.parametrize("decision", ["keep", "shadow", None])
    def test_all_pass_in_their_order(self, decision: Literal["keep", "shadow"] | None) -> None:
        """Copies of one text too."""
        profile = decision and profile_with(
            {Route.EXTERNAL: unenforced(decision, ScoreKind.COSINE)}
        )
        guard = ContextGuard(profile=profile, score_kind="cosine")
        found = [row._replace(text="Text.") for row in rows([0.9, 0.2, 0.8, 0.7, 0.4, 0.6, 0.1])]
        assert self.passed(guard, found) == [(row.id, row.score) for row in found]


class FaultRows(ABC):
    """Inherit in a framework's test module, as ``class TestFaultRows``."""

    has_scores = True
    has_distances = True

    @abstractmethod
    def retriever(self, found: Sequence[Row], score_kind: str) -> Any:
        """A retriever that ``ContextGuard`` takes, whose engine returns these rows."""

    def context(self, found: Sequence[Row], score_kind: str = "cosine", **options: Any) -> Context:
        guard = ContextGuard(self.retriever(found, score_kind), **options)
        return guard.retrieve("text")

    def test_many_results_are_cut_to_depth(self) -> None:
        context = self.context(rows([1.0 - at / 20_000 for at in range(10_000)]), depth=100)
        assert (context.candidates, context.kept_ids) == (100, ("d0", "d1", "d2", "d3", "d4"))

    def test_nothing_found_says_so(self) -> None:
        context = self.context([])
        assert context.empty
        assert Flag.EMPTY_RETRIEVAL in context.flags

    def test_repeated_id_is_served_once(self) -> None:
        found = rows([0.9, 0.8, 0.7])
        context = self.context([*found, found[0]._replace(score=0.6)])
        assert context.kept_ids == ("d0", "d1", "d2")
        assert context.dropped_by_reason == {"duplicate_id": 1}

    def test_textless_document_is_left_out_alone(self) -> None:
        """A document without text is left out and the others are served."""
        found = [Row("blank", None, 0.9), *rows([0.8, 0.7])]
        context = self.context(found)
        assert context.kept_ids == ("d0", "d1")

    def test_only_textless_documents_are_an_outage(self) -> None:
        with pytest.raises(StageUnavailableError):
            self.context([Row("blank", None, 0.9)])

    def test_results_without_scores_keep_their_order(self) -> None:
        context = self.context(rows([None] * 7))
        assert context.kept_ids == ("d0", "d1", "d2", "d3", "d4")
        assert context.decision.ranking.kind is ScoreKind.RANK or (
            Flag.INVALID_SCORES in context.flags
        )

    def test_scores_as_texts_are_no_scores(self) -> None:
        if not self.has_scores:
            pytest.skip("no scores are read")
        policy = RatioPolicy(k=2, min_ratio=0.9)
        context = self.context(rows(["0.9", "0.8", "0.1"]), policy=policy)
        assert context.kept_ids == ("d0", "d1")
        assert Flag.INVALID_SCORES in context.flags

    def test_distances_are_turned_round(self) -> None:
        if not self.has_scores or not self.has_distances:
            pytest.skip("no distances are read")
        policy = RatioPolicy(k=5, min_ratio=0.5)
        context = self.context(rows([0.1, 0.2, 3.0]), "distance", policy=policy)
        assert context.kept_ids == ("d0", "d1")
        assert list(context.decision.ranking.scores) == [-0.1, -0.2, -3.0]
        assert context.flags == (Flag.UNCALIBRATED,)

    def test_impossible_score_leaves_the_order(self) -> None:
        if not self.has_scores:
            pytest.skip("no scores are read")
        context = self.context(rows([3.5, 2.0]), policy=RatioPolicy(k=5, min_ratio=0.9))
        assert context.kept_ids == ("d0", "d1")
        assert Flag.DOMAIN_VIOLATION in context.flags
