"""The hybrid retriever: what it returns, what it refuses, and how it answers when a leg fails."""

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxguard.core.fusion import Fusion, fuse
from ctxguard.core.types import FailureKind, Passage, Route, ScoreKind
from ctxguard.errors import ConfigurationError, DataError, QueryError
from ctxguard.resilience.deadlines import Deadlines
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.dense import DenseIndex
from tests.doubles import FaultyEmbedder, FaultyReranker, FaultyRetriever, WordHashEmbedder
from tests.timing import NEVER, SOON

QUERY = "deserialize a JSON string"


def fail(_: Callable[[], Any]) -> None:
    raise OSError("down")


class TestRanking:
    def test_one_legged_candidate_gets_both_scores(self, retriever: HybridRetriever) -> None:
        """A candidate of one leg alone is scored as the other would."""
        ranking = retriever.retrieve("suspend the JSON queue", depth=8)
        assert {name: leg.kind for name, leg in ranking.legs.items()} == {
            "lexical": ScoreKind.RATIO,
            "dense": ScoreKind.COSINE,
        }
        for route, leg in ((Route.LEXICAL, "lexical"), (Route.DENSE, "dense")):
            alone = retriever.on_route(route).retrieve("suspend the JSON queue", depth=8)
            own = dict(zip(alone.passage_ids, alone.legs[leg].scores, strict=True))
            for passage_id, score in zip(
                ranking.passage_ids, ranking.legs[leg].scores, strict=True
            ):
                assert score == pytest.approx(own.get(passage_id, 0.0), abs=1e-6)

    def test_scores_are_the_fusion_of_legs(self, retriever: HybridRetriever) -> None:
        fusion = Fusion("convex", weight=0.7)
        ranking = retriever.with_fusion(fusion).retrieve(QUERY)
        assert ranking.scores == pytest.approx(fuse(ranking.legs, fusion).tolist())
        assert list(ranking.scores) == sorted(ranking.scores, reverse=True)
        assert ranking.kind is ScoreKind.RATIO

    def test_ranker_is_default_with_signals(
        self, retriever: HybridRetriever, corpus: list[Passage], embedder: WordHashEmbedder
    ) -> None:
        """Another fusion computes none; an index without signals says that it has none."""
        ranking = retriever.retrieve(QUERY)
        assert ranking.kind is ScoreKind.LOGIT
        assert tuple(ranking.signals["ranker"].tolist()) == ranking.scores
        assert {"length", "redundancy", "term_support"} <= ranking.signals.keys()
        plain = HybridRetriever.build(corpus, embedder=embedder, signals="none")
        others = [each.retrieve(QUERY) for each in (plain, retriever.with_fusion(Fusion()))]
        for other in others:
            assert (other.kind, other.signals, other.failures) == (ScoreKind.RANK, {}, ())
            assert set(other.passage_ids) == set(ranking.passage_ids)
        failed = plain.with_fusion(Fusion("ranker")).retrieve(QUERY)
        assert (failed.kind, failed.passage_ids) == (ScoreKind.RANK, others[0].passage_ids)
        assert [failure.stage for failure in failed.failures] == ["signals"]

    @pytest.mark.parametrize(
        ("depth", "kept"), [(10, 10), (60, 60), (61, 60), (100, 60), (150, 90), (300, 120)]
    )
    def test_deep_list_ends_with_its_signals(
        self, embedder: WordHashEmbedder, depth: int, kept: int
    ) -> None:
        """The best by reciprocal ranks have signals and are ranked; what follows is left out."""
        many = [Passage(f"p{n:03}", f"JSON number {n} " + "x " * n) for n in range(120)]
        retriever = HybridRetriever.build(many, embedder=embedder)
        ranking = retriever.retrieve("JSON number 7", depth=depth)
        by_ranks = retriever.with_fusion(Fusion()).retrieve("JSON number 7", depth=depth)
        assert len(by_ranks) == min(depth, 120)
        n = min(kept, len(by_ranks))
        assert set(ranking.passage_ids) == set(by_ranks.passage_ids[:n])
        for values in ranking.signals.values():
            assert values.shape == (n,)
            assert np.isfinite(values).all()
        lexical = retriever.on_route(Route.LEXICAL).retrieve("JSON number 7", depth=depth)
        assert len(lexical) == len(lexical.signals["ranker"]) == n
        reranked = retriever.with_reranker(FaultyReranker(), rerank_depth=110)
        assert len(reranked.retrieve("JSON number 7", depth=110)) == 110

    @pytest.mark.parametrize(
        ("route", "kind"), [(Route.DENSE, ScoreKind.COSINE), (Route.LEXICAL, ScoreKind.RATIO)]
    )
    def test_one_leg_keeps_order_and_signals(
        self, retriever: HybridRetriever, route: Route, kind: ScoreKind
    ) -> None:
        ranking = retriever.on_route(route).retrieve(QUERY)
        plain = retriever.with_fusion(Fusion()).on_route(route).retrieve(QUERY)
        assert ranking.passage_ids == plain.passage_ids
        assert (ranking.route, ranking.kind, plain.kind) == (route, kind, kind)
        assert list(ranking.legs) == [route.value]
        assert {"length", "ranker", "vector_support_3"} <= ranking.signals.keys()

    def test_ties_break_by_id_not_corpus(self, embedder: WordHashEmbedder) -> None:
        """Ties are broken by passage id whatever the order of the corpus."""
        twins = [Passage(f"p{n}", "the very same text") for n in range(9)]
        rankings, ranked = set(), set()
        for seed in range(5):
            random.Random(seed).shuffle(twins)
            retriever = HybridRetriever.build(twins, embedder=embedder)
            # The ranker tells twins apart: all but the first repeat a better candidate.
            ranked.add(retriever.retrieve("same text").passage_ids)
            for route in (Route.HYBRID, Route.LEXICAL, Route.DENSE):
                ranking = retriever.with_fusion(Fusion()).on_route(route).retrieve("same text")
                rankings.add(ranking.passage_ids)
        assert (len(ranked), rankings) == (1, {tuple(f"p{n}" for n in range(9))})

    def test_given_query_vector_replaces_encoding(
        self, corpus: list[Passage], embedder: WordHashEmbedder
    ) -> None:
        faulty = FaultyRetriever(corpus)
        faulty.faults["dense"].instead = fail
        vector = 5.0 * embedder.encode_query(QUERY)
        ranking = faulty.retriever.retrieve(QUERY, query_vector=vector)
        assert ranking.failures == ()
        assert ranking.legs["dense"].scores.max() <= 1.0 + 1e-6

    @pytest.mark.parametrize("route", [Route.HYBRID, Route.DENSE, Route.LEXICAL])
    @pytest.mark.parametrize("shape", [(32,), (1, 64), ()])
    def test_misshapen_query_vector_blames_caller(
        self, retriever: HybridRetriever, route: Route, shape: tuple[int, ...]
    ) -> None:
        view = retriever.on_route(route)
        with pytest.raises(ConfigurationError) as caught:
            view.retrieve(QUERY, query_vector=np.ones(shape, np.float32))
        assert str(shape) in str(caught.value)
        assert "(64,)" in str(caught.value)
        assert view.retrieve(QUERY).failures == ()


class TestRoutes:
    def test_reranking_scores_the_best_alone(self, retriever: HybridRetriever) -> None:
        reranked = retriever.with_reranker(FaultyReranker(), rerank_depth=3)
        ranking = reranked.retrieve(QUERY)
        assert (ranking.route, ranking.kind) == (Route.HYBRID_RERANK, ScoreKind.LOGIT)
        assert set(ranking.passage_ids) == set(retriever.retrieve(QUERY).passage_ids[:3])
        assert list(ranking.scores) == sorted(ranking.scores, reverse=True)
        assert list(ranking.legs) == ["lexical", "dense", "rerank"]
        assert len(reranked.retrieve(QUERY, depth=2)) == 2
        assert reranked.on_route(Route.HYBRID).retrieve(QUERY).route is Route.HYBRID
        assert reranked.on_route(Route.LEXICAL_RERANK).retrieve(QUERY).kind is ScoreKind.LOGIT

    def test_unavailable_route_is_refused(self, retriever: HybridRetriever) -> None:
        with pytest.raises(ConfigurationError, match="no reranker was given"):
            retriever.on_route(Route.HYBRID_RERANK)
        with pytest.raises(ConfigurationError, match="names no stages"):
            retriever.on_route(Route.EXTERNAL)


class TestFailures:
    @pytest.mark.parametrize(
        ("stage", "instead", "cause"),
        [
            ("dense", lambda _: np.full(64, np.nan, np.float32), "length nan"),
            ("dense", lambda _: np.full(64, np.inf, np.float32), "length inf"),
            ("dense", lambda _: np.zeros(64, np.float32), "length 0.0"),
            ("dense", lambda _: np.ones(32, np.float32), "(32,), but the index has (64"),
            ("rerank", lambda _: np.array([1.0]), "returned shape (1,) for 8 passages"),
            ("rerank", lambda _: np.full(8, np.nan), "returned NaN or an infinity"),
        ],
    )
    def test_garbage_costs_only_its_stage(
        self, corpus: list[Passage], stage: str, instead: Callable[..., Any], cause: str
    ) -> None:
        faulty = FaultyRetriever(corpus)
        retriever = faulty.retriever.with_reranker(faulty.reranker)
        with faulty.faults[stage].injected(instead):
            ranking = retriever.retrieve(QUERY)
        (failure,) = ranking.failures
        assert (failure.stage, failure.kind) == (stage, FailureKind.GARBAGE)
        assert cause in failure.cause
        assert ranking.route is (Route.LEXICAL_RERANK if stage == "dense" else Route.HYBRID)
        left = retriever.on_route(ranking.route).retrieve(QUERY)
        assert (ranking.passage_ids, ranking.kind) == (left.passage_ids, left.kind)

    @pytest.mark.parametrize("deadlines", [None, Deadlines(total_seconds=5.0)])
    @pytest.mark.parametrize("dead", ["lexical", "dense"])
    def test_dead_leg_leaves_no_garbage(
        self, corpus: list[Passage], dead: str, deadlines: Deadlines | None
    ) -> None:
        faulty = FaultyRetriever(corpus)
        retriever = faulty.retriever.with_deadlines(deadlines)
        faulty.faults[dead].instead = fail
        retriever.retrieve(QUERY)
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                assert retriever.retrieve(QUERY).failures[0].stage == dead
            assert gc.collect() == 0
        finally:
            gc.enable()

    @pytest.mark.parametrize("fusion", [Fusion(), Fusion("convex")], ids=lambda each: each.method)
    @pytest.mark.parametrize(
        "deadlines", [None, Deadlines(total_seconds=NEVER)], ids=["no limit", "limit"]
    )
    def test_damaged_vector_costs_only_its_leg(
        self,
        retriever: HybridRetriever,
        embedder: WordHashEmbedder,
        fusion: Fusion,
        deadlines: Deadlines | None,
    ) -> None:
        index = retriever.generation
        vectors = index.dense.vectors.copy()
        vectors[retriever.passage_ids.index("json.loads")] = np.nan
        damaged = HybridRetriever(
            replace(index, dense=DenseIndex(vectors)),
            embedder=embedder,
            fusion=fusion,
            deadlines=deadlines,
        )
        ranking = damaged.retrieve(QUERY)
        assert (ranking.route, ranking.passage_ids[0]) == (Route.LEXICAL, "json.loads")
        assert [failure.kind for failure in ranking.failures] == [FailureKind.GARBAGE]


class TestQueries:
    @pytest.mark.parametrize("query", ["", "   ", "\n\t", None, 7])
    def test_an_empty_query_is_refused(self, retriever: HybridRetriever, query: str) -> None:
        with pytest.raises(QueryError, match="is empty"):
            retriever.retrieve(query)

    def test_options_hold_when_built_or_loaded(
        self, corpus: list[Passage], tmp_path: Path, hang: Callable[..., None]
    ) -> None:
        """The longest query and the time limits; the first of a view too."""
        embedder, long = FaultyEmbedder(), f"{QUERY} " * 1000
        options: dict[str, Any] = {
            "embedder": embedder,
            "max_query_chars": 50_000,
            "deadlines": Deadlines(dense_seconds=SOON),
        }
        built = HybridRetriever.build(corpus, **options)
        built.save(tmp_path / "index")
        loaded = HybridRetriever.load(tmp_path / "index", **options)
        unset = HybridRetriever.load(tmp_path / "index", embedder=embedder)
        for retriever in (built, loaded, unset.with_max_query_chars(50_000)):
            assert retriever.retrieve(long).passage_ids[0] == "json.loads"
        with embedder.fault.injected(hang):
            for retriever in (built, loaded):
                assert retriever.retrieve(QUERY).failures[0].kind is FailureKind.TIMEOUT
        with pytest.raises(QueryError, match="but the limit is 10,000"):
            unset.retrieve(long)
        for refused in (
            lambda: unset.with_max_query_chars(0),
            lambda: HybridRetriever.build(corpus, embedder=embedder, max_query_chars=0),
        ):
            with pytest.raises(ConfigurationError, match="max_query_chars 0 must be at least 1"):
                refused()

    def test_dense_leg_answers_unknown_words(self, retriever: HybridRetriever) -> None:
        ranking = retriever.retrieve("zebra quagga")
        assert ranking.route is Route.HYBRID
        assert not ranking.legs["lexical"].scores.any()
        assert len(ranking) > 0
        nothing = retriever.on_route(Route.LEXICAL).retrieve("zebra quagga")
        assert (len(nothing), nothing.failures) == (0, ())

    @pytest.mark.parametrize("depth", [0, -1])
    def test_a_depth_below_one_is_refused(self, retriever: HybridRetriever, depth: int) -> None:
        with pytest.raises(ConfigurationError, match="depth"):
            retriever.retrieve(QUERY, depth=depth)


class TestBuilding:
    def test_report_counts_empty_and_repaired(self, embedder: WordHashEmbedder) -> None:
        """Lone surrogates are replaced in passages, and in queries too."""
        broken = Passage("a", "bro\ud800ken")
        passages = [broken, Passage("b", " \n"), Passage("c", "", title="three")]
        retriever = HybridRetriever.build(passages, embedder=embedder)
        report = retriever.report
        assert (retriever.passage_ids, report.empty, report.repaired) == (("a", "c"), 1, 1)
        assert retriever.passage("a").text == "bro\ufffdken"
        assert retriever.retrieve("\ud800 three").passage_ids[0] == "c"

    @pytest.mark.parametrize(
        ("passages", "message"),
        [
            ([], "corpus is empty"),
            ([Passage("b", "")], "all 1 passages"),
            (
                [Passage("a", "one"), Passage("a", "two")],
                "1 of 2 .* the same id as another, such as 'a'",
            ),
            ([Passage("a", "one"), Passage("", "text")], "number 2 has an empty id"),
            ([Passage("b", None)], "number 1 has text None"),  # type: ignore[arg-type]
            ([Passage("b", "text", metadata={"when": object()})], "metadata of passage 'b'"),
        ],
    )
    def test_what_is_no_passage_is_named(
        self, embedder: WordHashEmbedder, passages: list[Passage], message: str
    ) -> None:
        with pytest.raises(DataError, match=message):
            HybridRetriever.build(passages, embedder=embedder)


class TestFingerprint:
    def test_changes_change_their_own_entry(
        self, corpus: list[Passage], embedder: WordHashEmbedder, retriever: HybridRetriever
    ) -> None:
        base = retriever.fingerprint()
        assert list(base) == [
            "embedder",
            "embedder_weights",
            "lexical",
            "fusion",
            "reranker",
            "corpus_size",
            "corpus_digest",
        ]

        def differing(other: HybridRetriever) -> set[str]:
            return {key for key, value in other.fingerprint().items() if value != base[key]}

        build = HybridRetriever.build
        assert differing(build(reversed(corpus), embedder=embedder)) == set()
        assert differing(retriever.with_fusion(Fusion("convex", weight=0.7))) == {"fusion"}
        assert differing(build(corpus, embedder=embedder, lexical="rank-bm25")) == {"lexical"}
        assert differing(build(corpus, embedder=WordHashEmbedder(salt="other"))) == {
            "embedder_weights"
        }
        edited = [Passage("json.load", "Another text."), *corpus[1:]]
        assert differing(build(edited, embedder=embedder)) == {"corpus_digest"}
        assert differing(retriever.with_reranker(FaultyReranker())) == {"reranker"}
