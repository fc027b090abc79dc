"""Certification on grids whose truth is known: the order, the test, the choice among certified."""

import math

import numpy as np
import pytest
from simulated_pools import DEPTH, labelled, ranking_of, simulate

from calibration import risk
from calibration.certify import Promise, _needed, certify
from calibration.grid import Grid, ratio_grid
from calibration.pool_labels import label
from calibration.replay import replay
from ctxguard.errors import CalibrationError

PROMISE = Promise(alpha=0.1, delta=0.1)


def population(n: int, *, noise: float, seed: int = 0) -> Grid:
    retriever, dataset = simulate(n, noise=noise, seed=seed)
    pools = replay(retriever, dataset.queries, depth=DEPTH)
    return ratio_grid(pools, label(pools, dataset, baseline_k=10))


class TestCertify:
    def test_certified_policies_keep_the_promise_as_often_as_it_says(self) -> None:
        """Samples of a population whose every mean is known."""
        grid = population(3000, noise=0.25)
        truth = grid.means.recall_loss
        random = np.random.default_rng(5)
        repeats, broken, certified = 200, 0, 0
        for repeat in range(repeats):
            rows = random.choice(3000, 150, replace=False)
            found = certify(grid.rows(rows[:60]), grid.rows(rows[60:]), PROMISE, seed=repeat)
            if found.grid_index is not None:
                certified += 1
                broken += bool(truth[found.grid_index] > PROMISE.alpha)
        # 0.1 and three standard errors of 200 repeats.
        assert broken / repeats <= 0.1 + 3 * np.sqrt(0.09 / repeats)
        assert certified > 0.8 * repeats

    def test_of_the_certified_the_one_worth_most_on_all_these_queries_is_chosen(self) -> None:
        grid = population(400, noise=0.25)
        ordering, testing = grid.rows(np.arange(160)), grid.rows(np.arange(160, 400))
        found = certify(ordering, testing, PROMISE, seed=3)
        means = ordering.means
        flat = risk.pareto_order(means.recall_loss.ravel(), means.udcg_strict.ravel())
        indices = [divmod(int(index), means.udcg_strict.shape[1]) for index in flat]
        losses = testing.at(indices).recall_loss
        losses = losses[np.random.default_rng(3).permutation(240)]
        passed = 0
        for column in range(len(indices)):
            own = losses[~np.isnan(losses[:, column]), column]
            if own.mean() > 0.1 or risk.betting_p_value(own, 0.1) > 0.1:
                break
            passed += 1
        assert found.certified == passed > 0
        assert found.tested == len(indices)
        utility = np.concatenate(
            [part.at(indices[:passed]).udcg_strict for part in (ordering, testing)]
        )
        assert found.grid_index == indices[int(utility.mean(axis=0).argmax())]

    def test_a_promise_that_its_own_evidence_contradicts_is_never_made(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        grid = population(200, noise=0.3)

        def always(losses: np.ndarray, alpha: float) -> np.ndarray:
            return np.zeros(losses.shape[1])

        monkeypatch.setattr(risk, "betting_p_value", always)
        found = certify(grid.rows(np.arange(80)), grid.rows(np.arange(80, 200)), PROMISE)
        assert found.recall_loss is not None
        assert found.recall_loss <= PROMISE.alpha
        assert found.certified < found.tested

    def test_the_labels_needed_count_the_harm_as_well(self) -> None:
        # The relevant passage is second: keeping it costs a harm of 0.5 every time.
        pools, labels = labelled([ranking_of([2.0, 1.0])] * 20, [{"p1": 1}] * 20, depth=2)
        grid = ratio_grid(pools, labels)
        ordering, testing = grid.rows(np.arange(10)), grid.rows(np.arange(10, 20))
        for beta, possible in ((None, True), (0.6, True), (0.4, False)):
            found = certify(ordering, testing, Promise(alpha=0.05, beta=beta))
            assert found.grid_index is None
            assert (found.labels_needed is not None) == possible, beta

    def test_the_labels_needed_are_those_that_define_recall_loss(self) -> None:
        """Harm that is as large on twice the queries needs no more answerable ones than half."""
        promise = Promise(alpha=0.5, beta=0.3)
        harm = np.full((40, 1), 0.2)
        every, half = (_needed(np.zeros((n, 1)), harm, 1.0, promise) for n in (40, 20))
        assert every is not None
        assert half is not None
        assert half == math.ceil(every / 2)

    def test_a_seed_gives_the_same_certification(self) -> None:
        grid = population(200, noise=0.25)
        parts = grid.rows(np.arange(80)), grid.rows(np.arange(80, 200))
        assert certify(*parts, PROMISE, seed=1) == certify(*parts, PROMISE, seed=1)

    def test_test_queries_without_a_relevant_passage_cannot_test_recall(self) -> None:
        pools, labels = labelled([ranking_of([1.0])] * 2, [{"p0": 1}, {}], depth=1)
        grid = ratio_grid(pools, labels)
        one, none = grid.rows(np.array([0])), grid.rows(np.array([1]))
        with pytest.raises(CalibrationError, match="none of the 1 test queries"):
            certify(one, none, PROMISE)
        with pytest.raises(CalibrationError, match="no query to choose on"):
            certify(none, one, PROMISE)
