"""The signals of likeness give what their formulas say, whatever the retriever knows."""

import math
from collections.abc import Mapping
from statistics import fmean, pstdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxguard.core.fusion import Fusion, fuse
from ctxguard.core.types import FloatArray, Leg, ScoreKind
from ctxguard.retrieval.index.lexical import SparseRows, unit_weights
from ctxguard.retrieval.protocols import QueryStates
from ctxguard.retrieval.signals import (
    INPUTS,
    MOST_QUERY_PIECES,
    NAMES,
    CandidateFeatures,
    Cosines,
    QueryPieces,
    Ranker,
    ranker_inputs,
    second_pass,
    signals,
)


def legs_of(dense: FloatArray, lexical: FloatArray) -> dict[str, Leg]:
    return {"dense": Leg(dense, ScoreKind.COSINE), "lexical": Leg(lexical, ScoreKind.RATIO)}


class Pool:
    """Everything of a query's candidates, drawn at random."""

    def __init__(self, n: int, seed: int = 0, dimension: int = 24) -> None:
        rng = np.random.default_rng(seed)
        self.vectors = _units(rng, n, dimension)
        self.terms = [rng.integers(0, 12, rng.integers(1, 9)).astype(np.int32) for _ in range(n)]
        self.pieces = [rng.integers(0, 20, rng.integers(1, 9)).astype(np.int32) for _ in range(n)]
        states = QueryStates(self.vectors[0], rng.integers(0, 20, 6), _units(rng, 6, dimension))
        self.query = QueryPieces.of(states, rng.uniform(size=20), _units(rng, 20, dimension))
        self.legs = legs_of(rng.uniform(size=n), rng.exponential(size=n))

    def signals(
        self,
        legs: dict[str, Leg] | None = None,
        fused: FloatArray | None = None,
        **features: object,
    ) -> dict[str, FloatArray]:
        """Its signals, where legs, reciprocal ranks or features are others."""
        legs = self.legs if legs is None else legs
        fused = fuse(legs, Fusion()) if fused is None else fused
        terms = SparseRows.of(self.terms)
        own = CandidateFeatures(
            np.array([float(each.size) for each in self.terms]),
            terms,
            unit_weights(terms, terms.counts.astype(np.float64)),
            self.vectors,
            SparseRows.of(self.pieces),
        )
        return signals(own._replace(**features), legs, fused, self.query, Ranker.default())


def _units(rng: np.random.Generator, n: int, dimension: int) -> np.ndarray:
    vectors = rng.normal(size=(n, dimension)) + 0.5
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def plain_z(values: list[float]) -> list[float]:
    mean, spread = fmean(values), pstdev(values)
    return [min(max((value - mean) / (spread or 1.0), -4.0), 4.0) for value in values]


def plain_log_ranks(values: list[float]) -> list[float]:
    return [0.5 * math.log(1 + sum(other > value for other in values)) for value in values]


def plain_reciprocal_ranks(pool: Pool, constant: int) -> list[float]:
    fused = [0.0] * len(pool.vectors)
    for leg in pool.legs.values():
        for i, value in enumerate(leg.scores.tolist()):
            # A lexical score of 0 is no match, and has no rank.
            if leg.kind is ScoreKind.COSINE or value > 0:
                fused[i] += 1.0 / (constant + 1.0 + sum(other > value for other in leg.scores))
    return fused


def plain_best_first(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def plain_mean(table: list[list[float]], order: list[int], i: int, k: int) -> float:
    best = [j for j in order if j != i][:k]
    return math.fsum(table[i][j] for j in best) / len(best) if best else 0.0


def plain_highest(table: list[list[float]], order: list[int], i: int) -> float:
    return max([0.0, *(table[i][j] for j in order[: order.index(i)])])


def plain_smoothed(weights: list[list[float]], scores: list[float], i: int) -> float:
    return math.fsum(w * r for w, r in zip(weights[i], scores, strict=True)) / math.fsum(weights[i])


def plain_match(pool: Pool, i: int) -> float:
    """Σ w max_j q · (e(t_j) + v)."""
    states, weights, table = (each.astype(np.float64) for each in pool.query)
    v = pool.vectors[i].astype(np.float64)
    best = [max(float(q @ (table[piece] + v)) for piece in pool.pieces[i]) for q in states]
    return float(sum(w * each for w, each in zip(weights, best, strict=True)))


def plain(pool: Pool, ranker: Ranker, fused: list[float]) -> Mapping[str, list[float]]:
    """All pooled signals again, in loops over lists."""
    n = len(pool.vectors)
    all_s = pool.vectors.astype(np.float64)
    s = [[float(np.dot(all_s[i], all_s[j])) if i != j else 0.0 for j in range(n)] for i in range(n)]
    counts = [np.bincount(terms, minlength=12) / 1.0 for terms in pool.terms]
    unit = [each / np.linalg.norm(each) for each in counts]
    t = [[float(unit[i] @ unit[j]) if i != j else 0.0 for j in range(n)] for i in range(n)]
    order = plain_best_first(fused)
    found = {
        "redundancy": [plain_highest(s, order, i) for i in range(n)],
        "similarity_3": [plain_mean(s, order, i, 3) for i in range(n)],
        "similarity_10": [plain_mean(s, order, i, 10) for i in range(n)],
        "term_similarity_3": [plain_mean(t, order, i, 3) for i in range(n)],
    }
    found["match"] = [plain_match(pool, i) for i in range(n)]
    states, weights, _ = (each.astype(np.float64) for each in pool.query)
    found["vector_match"] = [float(weights @ (states @ v)) for v in pool.vectors.astype(float)]
    found["length"] = [math.log1p(len(terms)) for terms in pool.terms]
    values = dict(found)
    values["dense"] = pool.legs["dense"].scores.tolist()
    values["lexical"] = [math.log1p(score) for score in pool.legs["lexical"].scores.tolist()]
    values["reciprocal_ranks"] = fused
    scores = [0.0] * n
    for name, weight in ranker.weights.items():
        signal, _, form = name.rpartition(".")
        given = (plain_z if form == "z" else plain_log_ranks)(values[signal])
        scores = [score + weight * value for score, value in zip(scores, given, strict=True)]
    order = plain_best_first(scores)
    total = math.fsum(math.exp(score) for score in scores)
    w = [math.exp(score) / total for score in scores]
    by_vectors = [[math.exp((s[i][j] - 1) / 0.1) for j in range(n)] for i in range(n)]
    by_terms = [[t[i][j] ** 2 + 1e-6 for j in range(n)] for i in range(n)]
    return found | {
        "ranker": scores,
        "term_support_3": [plain_mean(t, order, i, 3) for i in range(n)],
        "term_support": [
            math.fsum(w[j] * t[i][j] for j in range(n) if j != i)
            / math.fsum(w[j] for j in range(n) if j != i)
            for i in range(n)
        ],
        "vector_support_3": [plain_mean(s, order, i, 3) for i in range(n)],
        "smoothed_by_vectors": [plain_smoothed(by_vectors, scores, i) for i in range(n)],
        "smoothed_by_terms": [plain_smoothed(by_terms, scores, i) for i in range(n)],
        "vector_redundancy": [plain_highest(s, order, i) for i in range(n)],
        "term_redundancy": [plain_highest(t, order, i) for i in range(n)],
    }


class TestSignals:
    @given(st.integers(2, 30), st.integers(0, 10_000), st.sampled_from([1, 10, 60, 500]))
    @settings(deadline=None, max_examples=40)
    def test_signals_follow_their_formulas(self, n: int, seed: int, constant: int) -> None:
        """Written in plain loops, and by the order of the reciprocal ranks that are given."""
        pool = Pool(n, seed)
        fused = plain_reciprocal_ranks(pool, constant)
        found = pool.signals(fused=np.array(fused))
        expected = plain(pool, Ranker.default(), fused)
        assert found.keys() == expected.keys()
        for name, values in found.items():
            assert values.tolist() == pytest.approx(expected[name], abs=1e-5), name

    def test_one_candidate_has_every_signal(self) -> None:
        found = Pool(1).signals()
        assert set(found) == set(NAMES)
        assert all(values.shape == (1,) and np.isfinite(values).all() for values in found.values())
        alone = [*("redundancy", "similarity_3", "similarity_10", "term_similarity_3", "ranker")]
        alone += [name for name in NAMES if name.startswith(("smoothed", "term_", "vector_s"))]
        assert {found[name].item() for name in alone} == {0.0}

    def test_far_higher_score_leaves_others_finite(self) -> None:
        pair = Cosines(np.array([[0.0, 0.5], [0.5, 0.0]], np.float32), np.arange(2))
        for values in second_pass(pair, pair, np.array([1000.0, -1000.0])).values():
            assert np.isfinite(values).all()

    def test_first_of_equal_candidates_is_better(self) -> None:
        pool = Pool(3)
        pool.vectors[:], pool.legs = pool.vectors[0], legs_of(np.ones(3), np.ones(3))
        assert pool.signals()["redundancy"] == pytest.approx(np.array([0.0, 1.0, 1.0]))

    def test_unknown_is_left_out(self) -> None:
        found = Pool(12).signals(vectors=None)
        assert {name for name in NAMES if name not in found} == {
            *("match", "vector_match", "redundancy", "similarity_3", "similarity_10"),
            *("vector_support_3", "smoothed_by_vectors", "vector_redundancy"),
        }
        assert all(np.isfinite(values).all() for values in found.values())

    @pytest.mark.parametrize("leg", ["lexical", "dense"])
    def test_unanswered_leg_says_nothing(self, leg: str) -> None:
        pool = Pool(12)
        pool.query = None
        found = pool.signals({leg: pool.legs[leg]})
        assert set(NAMES) - found.keys() == {"match", "vector_match"}
        assert np.isfinite(found["ranker"]).all()

    def test_passage_without_pieces_matches_least(self) -> None:
        pool = Pool(5)
        pool.pieces[2] = np.zeros(0, np.int32)
        pool.vectors[2] = pool.vectors[1]
        match = pool.signals()["match"]
        assert match[2] < match[1]

    def test_rarest_of_many_query_pieces_count(self) -> None:
        rng, n = np.random.default_rng(0), MOST_QUERY_PIECES + 36
        states = QueryStates(np.ones(4, np.float32), np.arange(n), _units(rng, n, 4))
        rarity = np.arange(float(n))
        kept = QueryPieces.of(states, rarity, _units(rng, n, 4))
        assert kept.weights.size == MOST_QUERY_PIECES
        assert kept.weights.sum() == pytest.approx(1.0)
        assert kept.states[0].tolist() == states.states[-1].tolist()

    def test_long_list_compares_its_first_hundred(self) -> None:
        pool = Pool(130)
        dense = pool.legs["dense"].scores
        # Both legs give one order, so that no two reciprocal ranks are equal.
        pool.legs, order = legs_of(dense, np.exp(dense)), np.argsort(-dense).tolist()
        pool.vectors[order[-1]] = pool.vectors[order[-2]]
        found = pool.signals()
        # They resemble each other, but neither is among those that all are compared with.
        assert found["redundancy"][order[-1]] < 1.0 - 1e-6


class TestRankerInputs:
    def test_z_score_is_clipped_at_4(self) -> None:
        values = np.zeros(100)
        values[7] = 1.0  # √99 standard deviations above the mean
        inputs = self.inputs(length=values)
        assert inputs["length.z"][7] == 4.0
        assert inputs["length.z"][0] == pytest.approx(-0.01 / math.sqrt(0.01 * 0.99))

    def test_unknown_value_is_mean_ranked_last(self) -> None:
        inputs = self.inputs(match=np.array([1.0, math.nan, 3.0]))
        assert inputs["match.z"].tolist() == [-1.0, 0.0, 1.0]
        expected = 0.5 * np.log([2.0, 3.0, 1.0])
        assert inputs["match.log_rank"] == pytest.approx(expected)

    def test_equal_values_share_first_rank(self) -> None:
        inputs = self.inputs(match=np.full(5, 0.1))
        assert inputs["match.z"].tolist() == [0.0] * 5
        assert inputs["match.log_rank"].tolist() == [0.0] * 5

    def inputs(self, **given: FloatArray) -> dict[str, FloatArray]:
        """The inputs by name, of a pool with these signals."""
        pool = Pool(len(next(iter(given.values()))))
        inputs = ranker_inputs(pool.legs, pool.signals() | given, fuse(pool.legs, Fusion()))
        return dict(zip(INPUTS, inputs, strict=True))


FLAT = Ranker(dict.fromkeys(INPUTS, 0.5), ("a", "b"))


def test_shipped_ranker_names_collections_read_once() -> None:
    shipped = Ranker.default()
    assert shipped is Ranker.default()
    assert shipped.trained_on


def test_digest_covers_the_weights_alone() -> None:
    assert Ranker(FLAT.weights).digest() == FLAT.digest()
    assert Ranker({**FLAT.weights, "dense.z": 0.25}).digest() != FLAT.digest()
