"""Replay: what is recorded of a retriever's answers, in which order, and how it is kept."""

import weakref
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from simulated_pools import Recorded, ranking_of

from calibration.data.dataset import Query
from calibration.replay import Readings, replay
from ctxguard.core.decision import decide
from ctxguard.core.passages import estimate_tokens
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import FloatArray, Hit, Leg, Passage, Ranking, Route, ScoreKind
from ctxguard.errors import CalibrationError
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.passages import PassageLines
from tests.doubles import WordHashEmbedder

QUERIES = (Query("q0", "first"), Query("q1", "second"))
LEGS = {
    "dense": Leg(np.array([0.1, 0.2, 0.3]), ScoreKind.COSINE),
    "lexical": Leg(np.array([1.0, 2.0, np.nan]), ScoreKind.RATIO),
}


def retriever_of(*rankings: Ranking) -> Recorded:
    return Recorded(
        {query.text: ranking for query, ranking in zip(QUERIES, rankings, strict=False)},
        {"system": "one"},
    )


class TestColumns:
    def test_candidates_are_recorded_best_first(self) -> None:
        pools = replay(retriever_of(ranking_of([1.0, 3.0, 2.0], legs=LEGS)), QUERIES[:1], depth=4)
        assert pools.passage_ids == (("p1", "p2", "p0"),)
        assert np.array_equal(pools.scores, [[3.0, 2.0, 1.0, np.nan]], equal_nan=True)
        assert np.array_equal(pools.legs["dense"], [[0.2, 0.3, 0.1, np.nan]], equal_nan=True)
        assert np.array_equal(pools.legs["lexical"], [[2.0, np.nan, 1.0, np.nan]], equal_nan=True)
        assert pools.leg_kinds == {"dense": ScoreKind.COSINE, "lexical": ScoreKind.RATIO}
        assert (pools.route, pools.kind) == (Route.HYBRID, ScoreKind.RATIO)
        assert pools.lengths.tolist() == [3]
        two = replay(retriever_of(ranking_of([1.0, 3.0, 2.0])), QUERIES[:1], depth=2)
        assert two.passage_ids == (("p1", "p2"),)

    def test_garbage_and_repeats_are_none(self) -> None:
        ranking = ranking_of([1.0, None, 2.0, float("nan")], ids=["a", "b", "a", "c"])
        pools = replay(retriever_of(ranking), QUERIES[:1])
        assert pools.passage_ids == (("a",),)
        assert pools.scores[0, 0] == 2.0

    @given(
        st.lists(st.sampled_from([0.0, 1.0, 2.0, None]), max_size=8), st.booleans(), st.randoms()
    )
    def test_order_is_that_of_decide(
        self, scores: list[float | None], with_ranks: bool, random: object
    ) -> None:
        ids = [f"p{i}" for i in range(len(scores))]
        ranks = list(range(1, len(scores) + 1))
        random.shuffle(ranks)  # type: ignore[attr-defined]
        assume(not scores or any(score is not None for score in scores))
        ranking = ranking_of(scores, ids=ids, ranks=ranks if with_ranks else None)
        pools = replay(retriever_of(ranking), QUERIES[:1])
        everything = RatioPolicy(k=100)
        assert pools.passage_ids[0] == decide(ranking, everything).kept_ids
        (recorded,) = pools.rankings()
        assert decide(recorded, everything).kept_ids == pools.passage_ids[0]

    def test_reordered_pools_are_alike(self) -> None:
        pools = replay(
            retriever_of(ranking_of([1.0], ids=["a"]), ranking_of([2.0], ids=["b"])), QUERIES
        )
        part = pools.subset(["q1", "absent", "q0"])
        assert part.query_ids == ("q1", "q0")
        assert part.passage_ids == (("b",), ("a",))
        assert part.scores[:, 0].tolist() == [2.0, 1.0]


class TestSkipped:
    def test_garbage_only_query_is_skipped(self) -> None:
        garbage = ranking_of([None, float("nan")])
        pools = replay(retriever_of(garbage, ranking_of([1.0])), QUERIES)
        assert pools.query_ids == ("q1",)
        assert "say that its score kind is rank" in pools.skipped[0]

    def test_refused_query_records_its_reason(self) -> None:
        done: list[int] = []
        pools = replay(retriever_of(ranking_of([1.0])), QUERIES, progress=done.append)
        assert pools.query_ids == ("q0",)
        assert pools.skipped == ("q1: 'second' cannot be searched",)
        assert sum(done) == 2

    def test_other_routes_do_not_mix(self) -> None:
        degraded = ranking_of([1.0], route=Route.LEXICAL)
        queries = (*QUERIES, Query("q2", "third"))
        answers = {"first": degraded, "second": ranking_of([1.0]), "third": ranking_of([1.0])}
        pools = replay(Recorded(answers), queries)
        assert pools.route is Route.HYBRID
        assert pools.query_ids == ("q1", "q2")
        assert pools.skipped == (
            "q0: answered by lexical with ratio scores, not hybrid with ratio",
        )

    def test_all_refused_names_first_reason(self) -> None:
        with pytest.raises(CalibrationError, match=r"none of 2 queries .*'first' cannot be"):
            replay(retriever_of(), QUERIES)
        with pytest.raises(CalibrationError, match="no queries"):
            replay(retriever_of(), ())


def test_answers_are_not_kept() -> None:
    scores: list[weakref.ref[FloatArray]] = []
    most = 0

    class Retriever:
        def retrieve(self, query: str, *, depth: int = 100) -> Ranking:
            nonlocal most
            del query, depth
            most = max(most, sum(one() is not None for one in scores))
            own = np.array([0.5, 0.2])
            scores.append(weakref.ref(own))
            return ranking_of([2.0, 1.0], legs={"dense": Leg(own, ScoreKind.COSINE)})

    queries = tuple(Query(str(number), f"query {number}") for number in range(20))
    assert len(replay(Retriever(), queries, depth=5)) == len(scores) == 20
    assert most <= 2


def test_each_passage_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and routes that find a passage again take what was read of it."""
    corpus = [Passage(f"p{n}", f"fox number {n} " * n) for n in range(1, 9)]
    retriever = HybridRetriever.build(corpus, embedder=WordHashEmbedder())
    read: list[int] = []

    def many(self: PassageLines, positions: Sequence[int]) -> list[Passage]:
        read.extend(self.starts[position] for position in positions)
        return own(self, positions)

    own = PassageLines.many
    monkeypatch.setattr(PassageLines, "many", many)
    readings = Readings()
    queries = [Query(f"q{n}", f"fox number {n}") for n in range(4)]
    for route in (Route.HYBRID, Route.LEXICAL, Route.DENSE):
        pools = replay(retriever.on_route(route), queries, depth=8, readings=readings)
        tokens = {each.passage_id: estimate_tokens(each.text) for each in corpus}
        assert pools.tokens is not None
        for row, ids in enumerate(pools.passage_ids):
            assert pools.tokens[row, : len(ids)].tolist() == [tokens[one] for one in ids]
    assert len(read) == len(set(read)) == len(corpus)


def test_query_dependent_texts_count_each() -> None:
    """A retriever may return another part of a passage under the same id."""
    answers = {
        query: Ranking.from_hits([Hit("p", 1.0, text=text)], ScoreKind.COSINE)
        for query, text in (("first", "short"), ("second", "a text that is quite a bit longer"))
    }
    pools = replay(Recorded(answers), QUERIES)
    assert pools.tokens is not None
    assert pools.tokens[0, 0] < pools.tokens[1, 0]
