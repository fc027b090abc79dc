"""Several retrievers as one: the contract, each leg's scores, and legs that fail."""

import asyncio
from collections.abc import Sequence
from threading import Event
from typing import Any

import numpy as np
import pytest

from ctxguard import (
    ConfigurationError,
    ContextGuard,
    Flag,
    Hit,
    Passage,
    QueryError,
    ScoreKind,
    StageUnavailableError,
    Where,
)
from ctxguard.core.context import Context
from ctxguard.integrations.separate_legs import SeparateLegs
from ctxguard.testing import RetrieverContract
from tests.doubles import FakeRetriever


def found(*hits: Hit) -> Any:
    return lambda query, *, depth: list(hits)


def raises(error: Exception) -> Any:
    def search(query: str, *, depth: int) -> list[Hit]:
        raise error

    return search


def retrieve(legs: SeparateLegs, **options: Any) -> Context:
    guard = ContextGuard(legs)
    return guard.retrieve("q", **options)


class TestContract(RetrieverContract):
    def retriever(self, passages: Sequence[Passage]) -> SeparateLegs:
        return SeparateLegs({"lexical": FakeRetriever(passages), "other": FakeRetriever(passages)})

    def unreachable_retriever(self) -> SeparateLegs:
        return SeparateLegs(
            {"a": raises(ConnectionError("refused")), "b": raises(OSError("reset"))}
        )


class TestContractAwaited(TestContract):
    awaited = True


class TestContractAwaitedWithALimit(TestContract):
    awaited = True

    def retriever(self, passages: Sequence[Passage]) -> SeparateLegs:
        legs = {"lexical": FakeRetriever(passages), "other": FakeRetriever(passages)}
        return SeparateLegs(legs, leg_seconds=30.0)


def test_candidates_have_every_legs_score() -> None:
    legs = SeparateLegs(
        {
            "lexical": found(Hit("a", 4.0, "A"), Hit("b", 2.0, "B")),
            "dense": found(Hit("b", 0.9, "B"), Hit("c", 0.4, "C")),
            "ordered": found(Hit("c", text="C"), Hit("a", text="A")),
        },
        score_kinds={"lexical": "ratio", "dense": "cosine"},
    )
    ranking = legs.retrieve("q", depth=10)
    assert ranking.kind is ScoreKind.RANK
    assert list(ranking.passage_ids) == ["a", "b", "c"]  # all in two legs: 1st and 2nd
    scores = {name: leg.scores.tolist() for name, leg in ranking.legs.items()}
    assert (scores["lexical"], scores["dense"]) == ([4.0, 2.0, 0.0], [0.4, 0.9, 0.4])
    assert scores["ordered"] == pytest.approx([-np.log(2), -np.log(2), 0.0])
    assert [leg.kind.value for leg in ranking.legs.values()] == ["ratio", "cosine", "logit"]


def test_foreign_scores_give_ranks_only() -> None:
    """A leg whose scores are not of its kind gives ranks only."""
    legs = SeparateLegs(
        {"a": found(Hit("x", 7.0, "X")), "b": found(Hit("x", 1.0, "X"))},
        score_kinds={"a": "cosine", "b": "ratio"},
    )
    assert list(legs.retrieve("q", depth=10).legs) == ["b"]


def test_zero_may_mean_no_match() -> None:
    """A leg without a match has no match for all if zero means that."""
    legs = SeparateLegs(
        {"a": found(), "b": found(), "c": found(Hit("x", 0.5, "X"))},
        score_kinds={"a": "ratio", "b": "cosine", "c": "cosine"},
    )
    ranking = legs.retrieve("q", depth=10)
    assert {name: leg.scores.tolist() for name, leg in ranking.legs.items()} == {
        "a": [0.0],
        "c": [0.5],
    }


def test_raising_leg_is_left_out() -> None:
    context = retrieve(SeparateLegs({"a": raises(OSError("no")), "b": found(Hit("x", text="X"))}))
    assert context.kept_ids == ("x",)
    assert Flag.DEGRADED in context.flags
    assert [(failure.stage, failure.kind.value) for failure in context.failures] == [("a", "error")]


def test_hanging_leg_is_left_out_timely() -> None:
    released = Event()

    def hangs(query: str, *, depth: int) -> list[Hit]:
        released.wait(60)
        return []

    async def ahangs(query: str, *, depth: int) -> list[Hit]:
        await asyncio.sleep(60)
        return []

    fine = found(Hit("x", text="X"))
    try:
        context = retrieve(SeparateLegs({"a": hangs, "b": fine}, leg_seconds=0.05))
    finally:
        released.set()
    assert (context.kept_ids, context.failures[0].kind.value) == (("x",), "timeout")
    legs = SeparateLegs({"a": ahangs, "b": fine}, leg_seconds=0.05)
    ranking = asyncio.run(legs.aretrieve("q", depth=5))
    assert [failure.kind.value for failure in ranking.failures] == ["timeout"]


def test_failing_leg_is_left_alone_awhile() -> None:
    """A leg that fails again and again is not called for a while."""
    calls = []

    def fails(query: str, *, depth: int) -> list[Hit]:
        calls.append(query)
        raise OSError("no")

    legs = SeparateLegs({"a": fails, "b": found(Hit("x", text="X"))}, leg_seconds=30.0)
    changes: list[tuple[str, bool]] = []
    legs.watch_stages(lambda leg, is_open: changes.append((leg, is_open)))
    failures = [legs.retrieve("q", depth=5).failures[0].kind.value for _ in range(20)]
    assert failures[-1] == "circuit_open"
    assert len(calls) < 20
    assert changes == [("a", True)]


def test_callers_fault_is_no_outage() -> None:
    fine = found(Hit("x", text="X"))
    with pytest.raises(QueryError):
        retrieve(SeparateLegs({"a": raises(QueryError("empty")), "b": fine}))
    with pytest.raises(ConfigurationError, match="got a str"):
        retrieve(SeparateLegs({"a": lambda query, *, depth: "no", "b": fine}))
    with pytest.raises(ConfigurationError, match="'a' cannot filter"):
        retrieve(SeparateLegs({"a": fine, "b": fine}), where=Where(tenant="a"))

    async def asynchronous(query: str, *, depth: int) -> list[Hit]:
        return []

    with pytest.raises(ConfigurationError, match="'a' is asynchronous"):
        retrieve(SeparateLegs({"a": asynchronous, "b": fine}))


def test_every_leg_failing_is_an_outage() -> None:
    with pytest.raises(StageUnavailableError, match="a: OSError"):
        retrieve(SeparateLegs({"a": raises(OSError("x")), "b": raises(OSError("y"))}))


def test_legs_that_cannot_work_are_refused() -> None:
    fine = found()
    with pytest.raises(ConfigurationError, match="two legs"):
        SeparateLegs({"a": fine})
    with pytest.raises(ConfigurationError, match="names 'c'"):
        SeparateLegs({"a": fine, "b": fine}, score_kinds={"c": "cosine"})
    with pytest.raises(ConfigurationError, match="leg_seconds"):
        SeparateLegs({"a": fine, "b": fine}, leg_seconds=0.0)


@pytest.mark.parametrize("kind", ["cosine", "inner_product", "ratio"])
@pytest.mark.parametrize("awaited", [False, True])
def test_distance_leg_keeps_its_order(kind: str, *, awaited: bool) -> None:
    rows = enumerate([0.05, 0.31, 0.62, 0.8])
    distances = [Hit(f"p{at}", score, f"text {at}") for at, score in rows]
    others = [Hit(hit.passage_id, 9.0 - at, hit.text) for at, hit in enumerate(distances)]
    legs = SeparateLegs(
        {"dense": found(*distances), "lexical": found(*others)},
        score_kinds={"dense": kind, "lexical": "ratio"},
    )
    guard = ContextGuard(legs)
    context = asyncio.run(guard.aretrieve("q")) if awaited else guard.retrieve("q")
    assert context.kept_ids == ("p0", "p1", "p2", "p3")
    assert Flag.SCORES_CONTRADICTED in context.flags
    assert [*context.decision.ranking.legs] == ["lexical"]
