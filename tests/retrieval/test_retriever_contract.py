"""The contract of retrievers: the package's own keep it, and a faulty one is found."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import DEFAULT_DEPTH, Hit, Passage, Ranking, Route, ScoreKind
from ctxguard.errors import CtxguardError
from ctxguard.resilience.deadlines import Deadlines
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.protocols import FloatArray
from ctxguard.testing import RetrieverContract
from tests.doubles import FakeRetriever, FaultyRetriever, WordHashEmbedder
from tests.timing import NEVER


def down(work: Callable[[], Any]) -> Any:
    """A fault: the engine cannot be reached."""
    raise ConnectionError("the engine is gone")


class SharedWords:
    """A reranker by the number of words that a text shares with the query."""

    fingerprint = "shared words"

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        wanted = set(ENGLISH.analyse(query))
        return np.array([len(wanted & set(ENGLISH.analyse(text))) for text in texts], np.float64)


def hits_of(ranking: Ranking) -> list[Hit]:
    """A ranking as the plain hits that a callable returns."""
    return [
        Hit(one.passage_id, score, one.text, one.title, metadata=one.metadata)
        for position, score in enumerate(ranking.scores)
        for one in [ranking.passages[position]]
    ]


class TestHybrid(RetrieverContract):
    def view(self, retriever: HybridRetriever) -> HybridRetriever:
        """The retriever as it is tested."""
        return retriever

    def retriever(self, passages: Sequence[Passage]) -> HybridRetriever:
        return self.view(HybridRetriever.build(passages, embedder=WordHashEmbedder()))

    def unreachable_retriever(self) -> HybridRetriever:
        faulty = FaultyRetriever(self.PASSAGES)
        for fault in faulty.faults.values():
            fault.instead = down
        return self.view(faulty.retriever)


class TestAwaitedWithDeadlines(TestHybrid):
    awaited = True

    def view(self, retriever: HybridRetriever) -> HybridRetriever:
        return retriever.with_deadlines(Deadlines(total_seconds=NEVER))


class TestLexical(TestHybrid):
    def view(self, retriever: HybridRetriever) -> HybridRetriever:
        return retriever.on_route(Route.LEXICAL)


class TestDense(TestHybrid):
    # The hashes of no words have no direction; a model's vectors always have one.
    ODD_QUERIES = tuple(query for query in RetrieverContract.ODD_QUERIES if ENGLISH.analyse(query))

    def view(self, retriever: HybridRetriever) -> HybridRetriever:
        return retriever.on_route(Route.DENSE)


class TestReranked(TestHybrid):
    def view(self, retriever: HybridRetriever) -> HybridRetriever:
        return retriever.with_reranker(SharedWords())


class TestFake(RetrieverContract):
    def retriever(self, passages: Sequence[Passage]) -> FakeRetriever:
        return FakeRetriever(passages)

    def unreachable_retriever(self) -> FakeRetriever:
        retriever = FakeRetriever(self.PASSAGES)
        retriever.error = ConnectionError("the engine is gone")
        return retriever


class TestCallable(RetrieverContract):
    """A plain function that gives hits."""

    score_kind = ScoreKind.RATIO
    can_filter = False

    def retriever(self, passages: Sequence[Passage]) -> Any:
        fake = FakeRetriever(passages)
        return lambda query, depth: hits_of(fake.retrieve(query, depth=depth))

    def unreachable_retriever(self) -> Any:
        def search(query: str, depth: int) -> list[Hit]:
            raise TimeoutError

        return search


class TestCallableWithoutScores(TestCallable):
    """Hits without scores, whose kind need not be said."""

    score_kind = None

    def retriever(self, passages: Sequence[Passage]) -> Any:
        fake = FakeRetriever(passages)
        return lambda query, depth: [
            replace(hit, score=None) for hit in hits_of(fake.retrieve(query, depth=depth))
        ]


class TestAsyncCallable(RetrieverContract):
    """A coroutine function that gives hits, and takes a filter."""

    score_kind = "ratio"
    awaited = True

    def retriever(self, passages: Sequence[Passage]) -> Any:
        fake = FakeRetriever(passages)

        async def search(query: str, *, depth: int, where: Where | None = None) -> list[Hit]:
            await asyncio.sleep(0)
            return hits_of(fake.retrieve(query, depth=depth, where=where))

        return search


Over = Callable[[Sequence[Passage]], Any]
"""Makes a faulty retriever over passages."""


def faulty(answer: Callable[[FakeRetriever, str, int, Where | None], Any]) -> Over:
    """A good retriever whose answers are made by ``answer``."""

    def over(passages: Sequence[Passage]) -> Any:
        good = FakeRetriever(passages)
        return lambda query, *, depth=DEFAULT_DEPTH, where=None: answer(good, query, depth, where)

    return over


def altered(alter: Callable[[list[Hit], int], list[Hit]], kind: ScoreKind | None = None) -> Over:
    """A good retriever whose hits, all of them, are altered."""

    def answer(good: FakeRetriever, query: str, depth: int, where: Where | None) -> Ranking:
        whole = good.retrieve(query, depth=1_000, where=where)
        return Ranking.from_hits(alter(hits_of(whole), depth), kind or whole.kind)

    return faulty(answer)


def scored(change: Callable[[float], float | None]) -> Over:
    return altered(
        lambda hits, depth: [replace(hit, score=change(hit.score or 0.0)) for hit in hits[:depth]]
    )


def filters_what_it_found(
    good: FakeRetriever, query: str, depth: int, where: Where | None
) -> Ranking:
    hits = hits_of(good.retrieve(query, depth=depth))
    kept = [hit for hit in hits if where is None or where.allows(hit.metadata)]
    return Ranking.from_hits(kept, ScoreKind.RATIO)


def remembers_the_last_query(
    good: FakeRetriever, query: str, depth: int, where: Where | None
) -> Ranking:
    """Two steps over one attribute, between which another thread may search."""
    good.queries.append(query)
    asyncio.run(asyncio.sleep(0.001))
    return good.retrieve(good.queries[-1], depth=depth, where=where)


def breaks_on_surrogates(
    good: FakeRetriever, query: str, depth: int, where: Where | None
) -> Ranking:
    query.encode()
    return good.retrieve(query, depth=depth, where=where)


FAULTS: dict[str, tuple[str, Over]] = {
    "worst first": ("the_best_match_comes_first", altered(lambda hits, depth: hits[::-1])),
    "no scores": ("every_candidate_has_a_score", scored(lambda score: None)),
    "distances as they are": ("every_candidate_has_a_score", scored(lambda score: 1.0 / score)),
    "another kind": (
        "every_candidate_has_a_score",
        altered(lambda hits, depth: hits, ScoreKind.COSINE),
    ),
    "a passage twice": ("no_passage_comes_twice", altered(lambda hits, depth: hits * 2)),
    "other texts": (
        "texts_come_back",
        altered(lambda hits, depth: [replace(hit, text=hit.text.strip(".")) for hit in hits]),
    ),
    "all whatever the depth": ("depth_bounds", altered(lambda hits, depth: hits)),
    "no filter": (
        "a_filter_is_applied_before",
        faulty(lambda good, query, depth, where: good.retrieve(query, depth=depth)),
    ),
    "a filter of what was found": ("a_filter_is_applied_before", faulty(filters_what_it_found)),
    "shared state": ("many_may_search_at_once", faulty(remembers_the_last_query)),
    "surrogates": ("an_odd_query_is_answered_or_refused", faulty(breaks_on_surrogates)),
    "an empty result in an outage": (
        "an_outage_raises",
        lambda passages: lambda query, depth, where=None: [],
    ),
}


@pytest.mark.parametrize(("test", "retriever"), FAULTS.values(), ids=FAULTS)
def test_fault_fails_only_its_test(test: str, retriever: Over) -> None:
    class Contract(RetrieverContract):
        score_kind = ScoreKind.RATIO

        def retriever(self, passages: Sequence[Passage]) -> Any:
            return retriever(passages)

        def unreachable_retriever(self) -> Any:
            return retriever(self.PASSAGES)

    (name,) = [name for name in dir(Contract) if name.startswith(f"test_{test}")]
    with pytest.raises((AssertionError, CtxguardError)):
        getattr(Contract(), name)()
