"""Hybrid searches whose stages fail, hang or give garbage: the others answer, and in time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ctxguard.core.fusion import Fusion
from ctxguard.core.types import FailureKind, Passage, Route, ScoreKind
from ctxguard.errors import OverloadedError, StageUnavailableError
from ctxguard.resilience.breaker import FAILURES, RETRY_SECONDS
from ctxguard.resilience.deadlines import Deadlines
from ctxguard.resilience.stage import Stage
from ctxguard.retrieval.hybrid.search import Search, SearchSettings
from tests.doubles import FaultyEmbedder, FaultyReranker, FaultyRetriever
from tests.timing import NEVER, SOON, Clock

QUERY = "deserialize a JSON string"

Instead = Callable[[Callable[[], Any]], Any]


def fail(_: Callable[[], Any]) -> None:
    raise OSError("down")


class System:
    """A retriever whose three stages can be made to fail."""

    def __init__(self, corpus: list[Passage]) -> None:
        self._faulty = FaultyRetriever(corpus)
        self.bare = self._faulty.retriever
        self.bare.warm_up()
        self.retriever = self.bare.with_reranker(self._faulty.reranker)

    def switch(self, stages: Sequence[str], instead: Instead | None) -> None:
        for stage in stages:
            self._faulty.faults[stage].instead = instead


@pytest.fixture
def system(corpus: list[Passage]) -> System:
    return System(corpus)


AMPLE = Deadlines(NEVER, NEVER, NEVER, NEVER)
LEFT = {
    ("lexical",): Route.DENSE_RERANK,
    ("dense",): Route.LEXICAL_RERANK,
    ("rerank",): Route.HYBRID,
    ("lexical", "rerank"): Route.DENSE,
    ("dense", "rerank"): Route.LEXICAL,
}
KINDS = {
    Route.HYBRID: ScoreKind.RANK,
    Route.DENSE: ScoreKind.COSINE,
    Route.LEXICAL: ScoreKind.RATIO,
}
"""Of routes without a reranker, whose scores are logits."""


@pytest.mark.parametrize("gone", LEFT, ids="+".join)
@pytest.mark.parametrize("hung", [True, False], ids=["hung", "dead"])
def test_failed_stages_are_left_out(
    gone: tuple[str, ...], system: System, hang: Instead, *, hung: bool
) -> None:
    system.switch(gone, hang if hung else fail)
    limited = system.retriever.with_deadlines(
        replace(AMPLE, **{f"{stage}_seconds": SOON for stage in gone}) if hung else AMPLE
    )
    for retriever in [limited] if hung else [system.retriever, limited]:
        ranking = retriever.retrieve(QUERY)
        assert ranking.route is LEFT[gone]
        assert ranking.kind is KINDS.get(ranking.route, ScoreKind.LOGIT)
        assert tuple(failure.stage for failure in ranking.failures) == gone
        kind = FailureKind.TIMEOUT if hung else FailureKind.ERROR
        assert {failure.kind for failure in ranking.failures} == {kind}
        assert len(ranking) > 0


@pytest.mark.parametrize(
    ("route", "legs"), [(Route.HYBRID, "lexical and dense"), (Route.DENSE, "dense")]
)
def test_all_legs_hung_is_an_outage(route: Route, legs: str, system: System, hang: Instead) -> None:
    system.switch(("lexical", "dense"), hang)
    limited = system.retriever.with_deadlines(Deadlines(total_seconds=SOON))
    with pytest.raises(StageUnavailableError, match=f"^{legs}: no answer within"):
        limited.on_route(route).retrieve(QUERY)


def test_whole_time_bounds_every_stage(system: System, hang: Instead) -> None:
    system.switch(("dense",), hang)
    ranking = system.retriever.with_deadlines(Deadlines(total_seconds=0.5)).retrieve(QUERY)
    assert ranking.route is Route.LEXICAL
    assert [failure.stage for failure in ranking.failures] == ["dense", "rerank"]
    assert ranking.failures[1].cause == "no time was left when its turn came"


def test_in_time_answer_needs_no_deadlines(system: System) -> None:
    for retriever in (system.bare, system.retriever):
        unhurried = retriever.retrieve(QUERY)
        for limits in (AMPLE, Deadlines(lexical_seconds=NEVER), Deadlines(dense_seconds=NEVER)):
            ranking = retriever.with_deadlines(limits).retrieve(QUERY)
            assert ranking.passage_ids == unhurried.passage_ids
            assert (ranking.scores, ranking.failures) == (pytest.approx(unhurried.scores), ())


def test_retry_answers_with_all_circuits_open(system: System, clock: Clock) -> None:
    """With all circuits open the request that tries again is answered by it."""
    system.switch(("lexical", "dense"), fail)
    for _ in range(2 * FAILURES):
        with pytest.raises(StageUnavailableError, match="lexical and dense: OSError at test_degr"):
            system.bare.retrieve(QUERY)
    system.switch(("lexical", "dense"), None)
    clock.now += RETRY_SECONDS + 0.01
    assert system.bare.retrieve(QUERY).route is Route.HYBRID


def test_callers_bad_vector_spares_the_leg(system: System) -> None:
    """A vector that the caller got wrong says nothing against the leg."""
    for _ in range(2 * FAILURES):
        ranking = system.bare.retrieve(QUERY, query_vector=np.zeros(64, np.float32))
        assert ranking.route is Route.LEXICAL
        assert "length 0.0" in ranking.failures[0].cause
    assert system.bare.retrieve(QUERY).failures == ()


def test_rerankers_have_circuits_of_their_own(system: System) -> None:
    system.switch(("rerank",), fail)
    for _ in range(FAILURES + 1):
        ranking = system.retriever.retrieve(QUERY)
    assert ranking.failures[0].kind is FailureKind.CIRCUIT_OPEN
    other = system.bare.with_reranker(FaultyReranker())
    assert other.retrieve(QUERY).route is Route.HYBRID_RERANK


def test_warming_up_has_no_limit(system: System) -> None:
    system.retriever.with_deadlines(Deadlines(total_seconds=1e-9)).warm_up()


def test_legs_without_threads_are_overload(system: System) -> None:
    full = {leg: Stage(leg, workers=1, waiting=0) for leg in ("lexical", "dense")}
    settings = SearchSettings(embedder=FaultyEmbedder(), fusion=Fusion())
    index = system.bare.generation
    search = Search(index=index, settings=settings, stages=full, query=QUERY, depth=5, dimension=64)
    with pytest.raises(OverloadedError, match="lexical and dense: no thread is free"):
        search.legs(AMPLE.start())


@pytest.mark.parametrize("limits", [Deadlines(), AMPLE], ids=["no limits", "limits"])
def test_open_circuit_counts_beside_answers_only(
    limits: Deadlines, system: System, clock: Clock
) -> None:
    """The circuits are those of every view."""
    retriever = system.bare.with_deadlines(limits)
    system.switch(("dense",), fail)
    for _ in range(FAILURES):
        system.bare.retrieve(QUERY)
    assert retriever.retrieve(QUERY).failures[0].kind is FailureKind.CIRCUIT_OPEN
    system.switch(("dense",), None)
    system.switch(("lexical",), fail)
    assert retriever.retrieve(QUERY).route is Route.DENSE
    system.switch(("lexical",), None)
    assert retriever.retrieve(QUERY).route is Route.HYBRID
