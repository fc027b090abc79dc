"""List signals, the ranker's score and the second pass give what their formulas say, by numpy.

`test_ranked_signals` compares the compiled ones with these.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxguard.core.types import FloatArray, Leg, ScoreKind
from ctxguard.retrieval.signals.candidates import best_first, list_signals
from ctxguard.retrieval.signals.pooled import (
    level_of,
    rank_candidates,
    ranker_inputs,
)
from ctxguard.retrieval.signals.ranker import INPUTS, Ranker
from ctxguard.retrieval.signals.second_pass import second_pass

COSINES = np.array(
    [[9.0, 0.9, 0.5, 0.1], [0.9, 9.0, 0.4, 0.2], [0.5, 0.4, 9.0, 0.3], [0.1, 0.2, 0.3, 9.0]]
)
"""Of a to d. The diagonal must not be read."""

TEXT = ("stem_bm25", "stem_coverage", "coverage", "sentence_coverage", "lead_coverage", "length")
SENTENCES = ("sentence_match", "token_match", "sentence_similarity")


def legs_of(dense: FloatArray, lexical: FloatArray) -> dict[str, Leg]:
    return {"dense": Leg(dense, ScoreKind.COSINE), "lexical": Leg(lexical, ScoreKind.RATIO)}


class Pool:
    """Everything of a query's candidates, drawn at random."""

    def __init__(self, n: int, seed: int = 0, dimension: int = 24) -> None:
        rng = np.random.default_rng(seed)
        vectors = rng.normal(size=(n, dimension)) + 0.5
        self.vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
        terms = np.abs(rng.normal(size=(n, 6)))
        terms /= np.linalg.norm(terms, axis=1, keepdims=True)
        self.term_cosines = np.einsum("it,jt->ij", terms, terms)
        self.legs = legs_of(rng.uniform(size=n), rng.exponential(size=n))
        names = (*TEXT, "bigram_coverage", *SENTENCES)
        self.signals = {name: rng.normal(size=n) for name in names}

    def agree(self) -> None:
        """Let both legs give one order, so that no two reciprocal ranks are equal."""
        dense = self.legs["dense"].scores
        self.legs = legs_of(dense, np.exp(dense))

    def ranked(self, positions: list[int] | None = None) -> dict[str, FloatArray]:
        """The pooled signals of the candidates at some positions, in that order."""
        at = list(range(len(self.vectors))) if positions is None else positions
        legs = {name: Leg(leg.scores[at], leg.kind) for name, leg in self.legs.items()}
        return rank_candidates(
            legs,
            {name: values[at] for name, values in self.signals.items()},
            self.vectors[at],
            self.term_cosines[np.ix_(at, at)],
            Ranker.default(),
        )


class TestListSignals:
    def test_worked_by_hand(self) -> None:
        best = [1, 0, 3, 2]  # b, a, d, c
        cosines = COSINES[np.ix_(best, best)]
        found = list_signals(cosines, cosines / 2)
        assert found["redundancy"] == pytest.approx(np.array([0.9, 0.0, 0.5, 0.2])[best])
        thirds = np.array([1.5, 1.5, 1.2, 0.6])[best] / 3
        assert found["similarity_3"] == pytest.approx(thirds)
        assert found["similarity_10"] == pytest.approx(thirds)
        assert found["term_similarity_3"] == pytest.approx(thirds / 2)

    def test_one_candidate_resembles_nothing(self) -> None:
        one = np.ones((1, 1))
        found = list_signals(one, one)
        assert {name: values.tolist() for name, values in found.items()} == {
            name: [0.0] for name in found
        }


class TestSecondPass:
    def test_worked_by_hand(self) -> None:
        # The weights are as 2 to 4 to 1 to 2, so the order is b, a, d, c.
        scores = np.log([2.0, 4.0, 1.0, 2.0])
        found = second_pass(COSINES, COSINES / 2, scores)
        thirds = np.array([1.5, 1.5, 1.2, 0.6]) / 3
        assert found["vector_support_3"] == pytest.approx(thirds)
        assert found["term_support_3"] == pytest.approx(thirds / 2)
        support = np.array([4.3 / 7, 2.6 / 5, 3.2 / 8, 1.3 / 7])
        assert found["term_support"] == pytest.approx(support / 2)
        assert found["vector_redundancy"] == pytest.approx(np.array([0.9, 0.0, 0.5, 0.2]))
        assert found["term_redundancy"] == pytest.approx(np.array([0.45, 0.0, 0.25, 0.1]))

    def test_smoothing_worked_by_hand(self) -> None:
        cosine = 1.0 - 0.1 * math.log(2.0)  # so that exp((S − 1) / 0.1) is one half
        vectors, terms = np.full((2, 2), cosine), np.full((2, 2), 0.5)
        found = second_pass(vectors, terms, np.array([1.0, 0.0]))
        own = math.exp(-10.0)
        expected = np.array([own, 0.5]) / (own + 0.5)
        assert found["smoothed_by_vectors"] == pytest.approx(expected)
        expected = np.array([1e-6, 0.25 + 1e-6]) / (0.25 + 2e-6)
        assert found["smoothed_by_terms"] == pytest.approx(expected)

    def test_one_candidate_keeps_its_score_and_has_no_support(self) -> None:
        one = np.ones((1, 1))
        for name, values in second_pass(one, one, np.ones(1)).items():
            assert values.tolist() == ([1.0] if name.startswith("smoothed") else [0.0])

    def test_a_score_that_is_far_higher_leaves_the_others_finite(self) -> None:
        pair = np.full((2, 2), 0.5)
        for values in second_pass(pair, pair, np.array([1000.0, -1000.0])).values():
            assert np.isfinite(values).all()


class TestRankCandidates:
    @given(st.integers(2, 30), st.integers(0, 10_000))
    @settings(deadline=None, max_examples=40)
    def test_candidates_in_another_order_have_the_same_signals(self, n: int, seed: int) -> None:
        pool = Pool(n, seed)
        pool.agree()
        positions = np.random.default_rng(seed).permutation(n).tolist()
        here, there = pool.ranked(), pool.ranked(positions)
        for name, values in there.items():
            assert values == pytest.approx(here[name][positions], abs=1e-6), name

    def test_one_candidate_has_every_signal(self) -> None:
        found = Pool(1).ranked()
        assert all(values.shape == (1,) and np.isfinite(values).all() for values in found.values())
        assert found["ranker"].tolist() == [0.0]

    def test_of_equal_candidates_the_first_is_the_better_one(self) -> None:
        assert Pool(1).ranked([0, 0, 0])["redundancy"] == pytest.approx(np.array([0.0, 1.0, 1.0]))
        assert best_first(np.zeros(3)).tolist() == [0, 1, 2]

    @given(st.integers(6, 30), st.integers(0, 10_000))
    @settings(deadline=None, max_examples=20)
    def test_one_more_candidate_that_both_legs_put_last_changes_no_better_ones_list_signals(
        self, n: int, seed: int
    ) -> None:
        pool = Pool(n, seed)
        pool.agree()
        order = np.argsort(-pool.legs["dense"].scores).tolist()
        with_last, without = pool.ranked(order), pool.ranked(order[:-1])
        for name in ("redundancy", "similarity_3", "term_similarity_3"):
            assert with_last[name][:-1] == pytest.approx(without[name], abs=1e-6)

    def test_without_sentence_signals_the_weights_of_text_hold(self) -> None:
        pool = Pool(12)
        for name in SENTENCES:
            del pool.signals[name]
        weights = dict.fromkeys(INPUTS["text"], 0.0) | {"dense.log_rank": -2.0}
        ranker = Ranker(dict.fromkeys(INPUTS["full"], 1.0), weights)
        found = rank_candidates(pool.legs, pool.signals, pool.vectors, pool.term_cosines, ranker)
        ranks = 1 + np.argsort(np.argsort(-pool.legs["dense"].scores))
        assert level_of(pool.signals) == "text"
        assert found["ranker"] == pytest.approx(-np.log(ranks))


class TestRankerInputs:
    def test_a_z_score_is_clipped_at_4(self) -> None:
        values = np.zeros(100)
        values[7] = 1.0  # √99 standard deviations above the mean
        inputs = self.inputs(length=values)
        assert inputs["length.z"][7] == 4.0
        assert inputs["length.z"][0] == pytest.approx(-0.01 / math.sqrt(0.01 * 0.99))

    def test_an_unknown_value_is_the_mean_and_ranks_last(self) -> None:
        inputs = self.inputs(sentence_match=np.array([1.0, math.nan, 3.0]))
        assert inputs["sentence_match.z"].tolist() == [-1.0, 0.0, 1.0]
        expected = 0.5 * np.log([2.0, 3.0, 1.0])
        assert inputs["sentence_match.log_rank"] == pytest.approx(expected)

    def test_bm25_counts_by_its_logarithm(self) -> None:
        values = np.log1p(Pool(5).legs["lexical"].scores)
        inputs = self.inputs(length=np.arange(5.0))
        assert inputs["lexical.z"] == pytest.approx((values - values.mean()) / values.std())

    def test_equal_values_say_nothing_and_share_the_first_rank(self) -> None:
        inputs = self.inputs(sentence_match=np.full(5, 0.1))
        assert inputs["sentence_match.z"].tolist() == [0.0] * 5
        assert inputs["sentence_match.log_rank"].tolist() == [0.0] * 5

    def inputs(self, **signals: FloatArray) -> dict[str, FloatArray]:
        """The inputs by name, of a pool with these signals."""
        pool = Pool(len(next(iter(signals.values()))))
        pool.signals |= signals
        inputs = ranker_inputs(pool.legs, pool.signals | pool.ranked(), "full")
        return dict(zip(INPUTS["full"], inputs, strict=True))
