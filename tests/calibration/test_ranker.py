"""Training the pooled ranker finds what is there to be learned, and moves no further."""

import math
from pathlib import Path

import numpy as np
import pytest

from calibration.pool_labels import PoolLabels
from calibration.ranker import (
    PENALTY,
    Lists,
    fit,
    levels,
    ndcg_by_query,
    refit,
    train,
    train_ranker,
    training_lists,
)
from calibration.replay import Pools
from ctxguard.core.metrics import DEFAULT_UTILITIES
from ctxguard.core.types import FloatArray, Leg, Route, ScoreKind
from ctxguard.errors import CalibrationError
from ctxguard.retrieval.signals.pooled import ranker_inputs
from ctxguard.retrieval.signals.ranker import INPUTS, Ranker

DEPTH = 12
SIGNALS = sorted({name.rpartition(".")[0] for name in INPUTS["full"]})
SENTENCES = ("sentence_match", "token_match", "sentence_similarity")
LEGS = {"dense": ScoreKind.COSINE, "lexical": ScoreKind.RATIO}
FLAT = Ranker(dict.fromkeys(INPUTS["full"], 0.0), dict.fromkeys(INPUTS["text"], 0.0))


def labelled(
    n_queries: int,
    *,
    seed: int = 0,
    by: str = "coverage.z",
    noise: float = 0.5,
    sentences: bool = True,
) -> tuple[Pools, PoolLabels]:
    """Queries of which one candidate is relevant, mostly that of the highest input ``by``."""
    rng = np.random.default_rng(seed)
    shape = (n_queries, DEPTH)
    legs = {"dense": rng.uniform(size=shape), "lexical": rng.exponential(size=shape)}
    signals = {name: rng.normal(size=shape) for name in SIGNALS if name not in legs}
    del signals["reciprocal_ranks"]
    grades = np.zeros(shape, np.int64)
    for row in range(n_queries):
        inputs = ranker_inputs(
            {name: Leg(values[row], LEGS[name]) for name, values in legs.items()},
            {name: values[row] for name, values in signals.items()},
            "full",
        )
        wanted = inputs[INPUTS["full"].index(by)] + noise * rng.gumbel(size=DEPTH)
        grades[row, wanted.argmax()] = 2
    if not sentences:
        signals = {name: each for name, each in signals.items() if name not in SENTENCES}
    pools = Pools(
        route=Route.HYBRID,
        kind=ScoreKind.LOGIT,
        query_ids=tuple(f"q{row}" for row in range(n_queries)),
        passage_ids=tuple([tuple(f"p{i:02}" for i in range(DEPTH))] * n_queries),
        scores=np.tile(np.arange(DEPTH, 0.0, -1.0), (n_queries, 1)),
        legs=legs,
        leg_kinds=LEGS,
        signals=signals,
    )
    everywhere = np.ones(shape, bool)
    return pools, PoolLabels(
        grades=grades,
        retrieved=everywhere,
        judged=everywhere,
        utilities=np.zeros(shape),
        negatives=np.full(shape, None, object),
        in_baseline=everywhere,
        served=np.zeros((n_queries, 2)),
        best_grades=np.full((n_queries, 1), 2),
        n_relevant=np.ones(n_queries, dtype=int),
        top_grade=2,
        rules=DEFAULT_UTILITIES,
        positives_only=False,
        weights=np.ones(n_queries),
    )


def simulated_lists(n_queries: int, weights: FloatArray, seed: int = 0) -> Lists:
    """Queries whose relevant candidate is drawn by softmax of these weights."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(n_queries, weights.size, DEPTH))
    scores = np.einsum("k,qkn->qn", weights, inputs) + rng.gumbel(size=(n_queries, DEPTH))
    shares = (scores == scores.max(axis=1, keepdims=True)).astype(float)
    return Lists(inputs, shares, np.ones(shares.shape, bool), np.ones(n_queries))


class TestTrain:
    def test_known_weights_are_found(self) -> None:
        weights = np.array([1.0, -0.5, 0.0])
        found = train([simulated_lists(4000, weights)], 1e-9)
        assert found == pytest.approx(weights, abs=0.1)

    def test_two_candidates_are_a_logistic_regression_without_intercept(self) -> None:
        # The relevant one is ahead by 1 in three of four queries: e^a / (1 + e^a) = 3/4.
        inputs = np.array([[[1.0, 0.0]]] * 3 + [[[0.0, 1.0]]])
        shares = np.array([[1.0, 0.0]] * 4)
        lists = Lists(inputs, shares, np.ones((4, 2), bool), np.ones(4))
        assert train([lists], 1e-12) == pytest.approx(np.array([math.log(3.0)]))

    def test_what_lies_beyond_a_pool_does_not_count(self) -> None:
        lists = simulated_lists(50, np.array([1.0, 0.0]))
        padded = Lists(
            np.concatenate([lists.inputs, np.zeros((50, 2, 3))], axis=2),
            np.concatenate([lists.shares, np.zeros((50, 3))], axis=1),
            np.concatenate([lists.retrieved, np.zeros((50, 3), bool)], axis=1),
            lists.weights,
        )
        assert train([padded], PENALTY) == pytest.approx(train([lists], PENALTY))

    def test_a_collection_of_four_times_as_many_queries_counts_twice(self) -> None:
        small, large = (simulated_lists(20, np.array([w]), seed=3) for w in (1.0, -1.0))
        repeated = Lists(
            np.repeat(large.inputs, 4, axis=0),
            np.repeat(large.shares, 4, axis=0),
            np.repeat(large.retrieved, 4, axis=0),
            np.repeat(large.weights, 4),
        )
        expected = train([small, large, large], PENALTY)
        assert train([small, repeated], PENALTY) == pytest.approx(expected)

    def test_the_penalty_draws_towards_the_start(self) -> None:
        lists = simulated_lists(50, np.array([1.0, -1.0]))
        start = np.array([0.3, 0.7])
        assert train([lists], 1e6, start) == pytest.approx(start, abs=1e-4)
        assert train([lists], 1e6) == pytest.approx(np.zeros(2), abs=1e-4)

    def test_nothing_relevant_gives_nothing_to_learn(self) -> None:
        pools, labels = labelled(5)
        labels.grades[:] = 0
        with pytest.raises(CalibrationError, match="no labelled query has a relevant passage"):
            train([training_lists(pools, labels, "full")], PENALTY)
        with pytest.raises(CalibrationError, match="no labelled query"):
            train([], PENALTY)


class TestTrainingLists:
    def test_grades_are_shares_and_queries_without_a_relevant_candidate_are_left_out(self) -> None:
        pools, labels = labelled(3)
        labels.grades[0] = 0
        labels.grades[1] = 0
        labels.grades[1, :2] = [1, 2]
        lists = training_lists(pools, labels, "full")
        assert len(lists) == 2
        assert lists.shares[0, :3] == pytest.approx(np.array([1 / 3, 2 / 3, 0.0]))
        assert lists.inputs.shape == (2, len(INPUTS["full"]), DEPTH)
        some = training_lists(pools, labels, "full", np.array([0, 2]))
        assert np.array_equal(some.inputs, lists.inputs[1:])


class TestRankers:
    def test_what_decides_relevance_gets_the_weight(self) -> None:
        ranker = train_ranker({"a": labelled(300), "b": labelled(300, seed=1)})
        for level in INPUTS:
            weights = ranker.weights(level)
            assert max(weights, key=lambda name: abs(weights[name])) == "coverage.z"
            assert weights["coverage.z"] > 1.0
        assert ranker.trained_on == ("a", "b")

    def test_equal_labels_give_equal_bytes(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            train_ranker({"a": labelled(40)}).save(tmp_path / name)
        assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()

    def test_a_few_queries_move_the_weights_a_little_and_many_far(self) -> None:
        pools, labels = labelled(400)
        few = refit(FLAT, "own", pools, labels, np.arange(5))
        many = refit(FLAT, "own", pools, labels)
        assert 0.0 < few.full["coverage.z"] < many.full["coverage.z"]
        assert many.trained_on == ("own",)

    def test_without_sentence_signals_only_the_weights_of_text_move(self) -> None:
        pools, labels = labelled(30, sentences=False)
        fitted = refit(FLAT, "own", pools, labels)
        assert levels(pools) == ("text",)
        assert fitted.full == FLAT.full
        assert fitted.text["coverage.z"] > 0.0


class TestNdcg:
    def test_worked_by_hand(self) -> None:
        pools, labels = labelled(1)
        labels.grades[:] = 0
        labels.grades[0, 3] = 2
        weights = dict.fromkeys(INPUTS["full"], 0.0) | {"dense.z": 1.0}
        pools.legs["dense"][0] = -np.abs(np.arange(DEPTH) - 4.0)  # p04, then p03 and p05
        found = ndcg_by_query(pools, labels, Ranker(weights, FLAT.text))
        assert found.tolist() == pytest.approx([1.0 / math.log2(3.0)])

    def test_reciprocal_ranks_read_the_legs_alone_and_ties_go_by_passage_id(self) -> None:
        pools, labels = labelled(1)
        pools.legs["dense"][0] = pools.legs["lexical"][0] = 1.0
        labels.grades[:] = 0
        labels.grades[0, 1] = 1
        labels.best_grades[:] = 1
        assert ndcg_by_query(pools, labels, None).tolist() == pytest.approx([1 / math.log2(3.0)])


class TestFit:
    def test_a_signal_that_the_start_does_not_use_is_gained_on_queries_not_fitted_to(self) -> None:
        pools, labels = labelled(200)
        ranker, found = fit(FLAT, "own", pools, labels)
        assert levels(pools) == ("full", "text")
        assert found["fitted"].mean() > found["shipped"].mean() + 0.2
        assert ranker == refit(FLAT, "own", pools, labels)

    def test_labels_without_a_pattern_do_little_harm(self) -> None:
        start = Ranker.default()
        pools, labels = labelled(60, noise=1e6)
        _, found = fit(start, "own", pools, labels)
        assert found["fitted"].mean() > found["shipped"].mean() - 0.05

    def test_one_query_cannot_be_held_out(self) -> None:
        with pytest.raises(CalibrationError, match="label more queries"):
            fit(FLAT, "own", *labelled(1))
