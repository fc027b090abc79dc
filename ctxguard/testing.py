"""Tests the contract of every retriever, as a suite that an adapter's tests inherit.

Calls the retriever, from threads and event loops too.
"""

# ruff: noqa: S101  a contract suite asserts

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, NoReturn

from prometheus_client import CollectorRegistry

from ctxguard.core.corpus_sketch import CorpusSketch, passage_digest
from ctxguard.core.metadata_filter import Where
from ctxguard.core.scores import is_valid, within_domain
from ctxguard.core.types import DEFAULT_DEPTH, Passage, Ranking, ScoreKind
from ctxguard.errors import ConfigurationError, QueryError, StageError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry
from ctxguard.retrieval.protocols import AnyRetriever

__all__ = ["RetrieverContract"]

_AT_ONCE = 8


class RetrieverContract(ABC):
    """The contract of every retriever. Inherit in a test module, as ``class TestMine``.

    Every search goes through a `ContextGuard`, so the suite fits anything that a guard takes: an
    object with ``retrieve`` or ``aretrieve``, or a callable, plain or asynchronous.

    Attributes:
        score_kind: The kind of the scores of plain ``Hit`` objects; None for a retriever that
            returns a ``Ranking``.
        awaited: Whether to search from an event loop, a new one for each retriever. For a
            retriever with both calls, inherit twice.
        can_filter: Whether it takes the keyword ``where``.
    """

    score_kind: ScoreKind | None = None
    awaited: bool = False
    can_filter: bool = True

    PASSAGES = (
        Passage("fox", "A red fox sleeps in its den.", "Fox", {"tenant": "a", "groups": ["x"]}),
        Passage("kettle", "The kettle boils water.", "Kettle", {"tenant": "a", "groups": ["y"]}),
        Passage("bread", "Bake bread with flour and yeast.", "Bread", {"tenant": "b"}),
        Passage("bicycle", "Repair a bicycle tyre.", "Bicycle", {"tenant": "b"}),
        Passage("größe/東京 #1", "Tokyo: 東京タワーの高さ, 333 m. 🗼", "Tower", {"tenant": "a"}),
        Passage("lines", "Storm\nclouds\tover “hills” & <b>seas</b>.", "", {"tenant": "b"}),
        Passage("mixture", "My red kettle, a bicycle and Tokyo.", metadata={"tenant": "b"}),
        *[
            Passage(f"queue-{n}", f"A queue for threads, number{n}.", metadata={"tenant": "c"})
            for n in range(8)
        ],
    )
    BEST: ClassVar[dict[str, str]] = {
        "a red fox in its den": "fox",
        "how does a kettle boil water": "kettle",
        "repair my bicycle tyre": "bicycle",
        "Tokyo 東京タワーの高さ": "größe/東京 #1",
    }
    ODD_QUERIES = (
        "zzyzx qwv",
        "?",
        "東京",
        "طويل برج",
        "🦊🦊",
        "re\u0301sume\u0301",
        "half a pair: \ud800",
        "a\x00b\u202ec\u200bd",
        '"unbalanced AND (fox OR [',
        "*:* ' OR 1=1; --",
        "fox " * 2000,
    )

    @abstractmethod
    def retriever(self, passages: Sequence[Passage]) -> AnyRetriever:
        """Return a retriever that searches exactly these passages."""

    def unreachable_retriever(self) -> AnyRetriever | None:
        """Return a retriever whose engine cannot be reached, or None to skip the test of it."""
        return None

    def search(
        self, queries: Sequence[str], *, depth: int = DEFAULT_DEPTH, where: Where | None = None
    ) -> list[Ranking]:
        """Search ``PASSAGES`` with one retriever, one query after another; return the rankings."""
        return self._search(self.retriever(self.PASSAGES), queries, depth, where)

    def test_the_best_match_comes_first(self) -> None:
        for ranking, expected in zip(self.search(list(self.BEST)), self.BEST.values(), strict=True):
            assert ranking.passage_ids[0] == expected

    def test_every_candidate_has_a_score_and_higher_is_better(self) -> None:
        """Expect distances turned round: a score of kind ``distance`` is zero or below.

        Kind ``rank`` needs no scores.
        """
        for ranking in self.search(list(self.BEST)):
            if ranking.kind is ScoreKind.RANK and set(ranking.scores) == {None}:
                continue
            assert all(map(is_valid, ranking.scores)), "a score is missing or not a number"
            scores = [float(score) for score in ranking.scores if score is not None]
            assert all(a >= b for a, b in pairwise(scores)), "a better score comes later"
            assert within_domain(ranking.kind, min(scores), max(scores)), (
                f"scores from {min(scores)} to {max(scores)} are not of kind {ranking.kind}"
            )

    def test_no_passage_comes_twice_and_each_is_one_of_those_indexed(self) -> None:
        ids = {passage.passage_id for passage in self.PASSAGES}
        for ranking in self.search(["a queue for threads", *self.BEST]):
            assert len(set(ranking.passage_ids)) == len(ranking)
            assert ids.issuperset(ranking.passage_ids)

    def test_texts_come_back_as_they_were_indexed(self) -> None:
        texts = {passage.passage_id: passage.text for passage in self.PASSAGES}
        for ranking in self.search(["storm clouds over hills", *self.BEST]):
            for position, passage_id in enumerate(ranking.passage_ids):
                passage = ranking.passages[position]
                assert (passage.passage_id, passage.text) == (passage_id, texts[passage_id])

    def test_depth_bounds_the_candidates_and_may_exceed_the_corpus(self) -> None:
        for depth in (1, 3, 10 * len(self.PASSAGES)):
            (ranking,) = self.search(["a queue for threads"], depth=depth)
            assert 1 <= len(ranking) <= min(depth, len(self.PASSAGES))

    def test_the_same_query_finds_the_same(self) -> None:
        first, second = self.search(["a queue for threads"] * 2)
        assert first.passage_ids == second.passage_ids

    def test_a_query_that_matches_nothing_is_answered_and_is_no_error(self) -> None:
        (ranking,) = self.search(["zzyzx qwv"])
        assert len(ranking) <= len(self.PASSAGES)

    def test_an_odd_query_is_answered_or_refused_with_a_query_error(self) -> None:
        """Expect no outage, which would be retried, and open the circuit for everybody."""
        ids = {passage.passage_id for passage in self.PASSAGES}
        for query in self.ODD_QUERIES:
            try:
                (ranking,) = self.search([query])
            except QueryError:
                continue
            assert ids.issuperset(ranking.passage_ids)

    def test_a_filter_is_applied_before_the_best_are_taken(self) -> None:
        if not self.can_filter:
            _skip("this retriever takes no filter")
        (ranking,) = self.search(["a red fox, a queue"], depth=2, where=Where(tenant="c"))
        assert len(ranking) == 2
        assert all(passage_id.startswith("queue-") for passage_id in ranking.passage_ids)
        (ranking,) = self.search(["a red fox"], where=Where(tenant="a", groups=["x", "z"]))
        assert ranking.passage_ids == ("fox",)

    def test_a_filter_that_allows_nothing_finds_nothing(self) -> None:
        if not self.can_filter:
            _skip("this retriever takes no filter")
        for where in (Where(tenant="absent"), Where(nowhere="a"), Where(groups=[])):
            (ranking,) = self.search(["a red fox"], where=where)
            assert len(ranking) == 0

    def test_without_the_keyword_where_a_filtered_search_is_refused(self) -> None:
        if self.can_filter:
            _skip("this retriever takes a filter")
        try:
            self.search(["a red fox"], where=Where(tenant="a"))
        except ConfigurationError:
            return
        raise AssertionError("the retriever takes the keyword `where`, but can_filter is False")

    def test_many_may_search_at_once(self) -> None:
        queries = list(self.BEST) * _AT_ONCE
        alone = self.search(queries)
        together = self._search(self.retriever(self.PASSAGES), queries, at_once=True)
        assert [ranking.passage_ids for ranking in together] == [
            ranking.passage_ids for ranking in alone
        ]

    def test_an_outage_raises_and_is_no_empty_result(self) -> None:
        retriever = self.unreachable_retriever()
        if retriever is None:
            _skip("no unreachable_retriever() is given")
        try:
            found = self._search(retriever, ["a red fox"])
        except StageError:
            return
        raise AssertionError(f"an unreachable engine must raise, but gave {len(found[0])} hits")

    def test_a_fingerprint_is_of_texts_and_stays(self) -> None:
        retriever = self.retriever(self.PASSAGES)
        identify: Any = getattr(retriever, "fingerprint", None)
        if identify is not None:
            fingerprint = identify()
            assert fingerprint
            assert all(isinstance(text, str) for item in fingerprint.items() for text in item)
            self._search(retriever, list(self.BEST))
            assert identify() == fingerprint

    def test_a_sketch_of_the_corpus_is_of_these_passages(self) -> None:
        retriever = self.retriever(self.PASSAGES)
        sketch: Any = getattr(retriever, "corpus_sketch", None)
        if sketch is not None:
            assert sketch() == CorpusSketch.of(map(passage_digest, self.PASSAGES))

    def _search(
        self,
        retriever: AnyRetriever,
        queries: Sequence[str],
        depth: int = DEFAULT_DEPTH,
        where: Where | None = None,
        at_once: bool = False,
    ) -> list[Ranking]:
        guard = ContextGuard(
            retriever,
            mode="off",
            depth=depth,
            score_kind=self.score_kind,
            telemetry=Telemetry(CollectorRegistry()),
        )
        if not self.awaited:
            search = partial(guard.retrieve, where=where)
            with ThreadPoolExecutor(_AT_ONCE if at_once else 1) as threads:
                contexts = list(threads.map(search, queries))
            return [context.decision.ranking for context in contexts]

        async def main() -> list[Ranking]:
            asearch = partial(guard.aretrieve, where=where)
            if at_once:
                contexts = await asyncio.gather(*map(asearch, queries))
            else:
                contexts = [await asearch(query) for query in queries]
            return [context.decision.ranking for context in contexts]

        return asyncio.run(main())


def _skip(reason: str) -> NoReturn:
    # Imported here: the fakes beside this suite are usable without pytest.
    import pytest

    pytest.skip(reason)
