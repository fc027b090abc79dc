"""Certification on grids whose truth is known: the order, the test, the choice among certified."""

import numpy as np
import pytest
from simulated_pools import DEPTH, labelled, ranking_of, simulate

from calibration.certify import certify
from calibration.grid import Grid, ratio_grid
from calibration.pools import label
from calibration.replay import replay
from ctxguard.measure import risk
from ctxguard.measure.worth import READERS, STRICT, Utilities

ALPHA, DELTA = 0.1, 0.1
PROMISE = {"alpha": ALPHA, "delta": DELTA}
SERVING_K = 10


def population(
    n: int, *, noise: float, seed: int = 0, k: int = SERVING_K, utilities: Utilities = READERS
) -> Grid:
    """Every policy of a family, beside the first k, over all queries."""
    retriever, dataset = simulate(n, noise=noise, seed=seed)
    pools = replay(retriever, dataset.queries, depth=DEPTH)
    return ratio_grid(label(pools, dataset, utilities, baseline_k=k))


def parts(grid: Grid, middle: int, end: int) -> tuple[Grid, Grid]:
    """The queries that order, and those that test."""
    return grid.rows(np.arange(middle)), grid.rows(np.arange(middle, end))


def gain(grid: Grid) -> np.ndarray:
    """Mean UDCG of every policy above that of the first k."""
    return grid.means[0] - grid.today


class TestCertify:
    def test_certified_keep_promise_as_said(self) -> None:
        """Samples of a population whose every mean is known."""
        grid = population(3000, noise=0.25)
        _, truth = grid.means
        random = np.random.default_rng(5)
        repeats, broken, certified = 200, 0, 0
        for repeat in range(repeats):
            rows = random.choice(3000, 150, replace=False)
            found = certify(grid.rows(rows[:60]), grid.rows(rows[60:]), **PROMISE, seed=repeat)
            if found.grid_index is not None:
                certified += 1
                broken += bool(truth[found.grid_index] > ALPHA)
        # 0.1 and three standard errors of 200 repeats.
        assert broken / repeats <= 0.1 + 3 * np.sqrt(0.09 / repeats)
        assert certified > 0.8 * repeats

    def test_worthiest_certified_is_chosen(self) -> None:
        ordering, testing = parts(population(400, noise=0.25), 160, 400)
        found = certify(ordering, testing, **PROMISE, seed=3)
        udcg, recall_loss = ordering.means
        better = np.argwhere(gain(ordering) > 1e-12)
        cells = tuple(better.T)
        order = risk.pareto_order(recall_loss[cells], udcg[cells])
        indices = [(int(k), int(threshold)) for k, threshold in better[order]]
        _, losses = testing.at(indices)
        losses = losses[np.random.default_rng(3).permutation(240)]
        passed = 0
        for column in range(len(indices)):
            own = losses[~np.isnan(losses[:, column]), column]
            if own.mean() > 0.1 + 1e-12 or risk.betting_p_value(own, 0.1) > 0.1:
                break
            passed += 1
        assert found.certified == passed > 0
        assert found.tested == len(indices)
        utility = np.concatenate([part.at(indices[:passed])[0] for part in (ordering, testing)])
        assert found.grid_index == indices[int(utility.mean(axis=0).argmax())]

    def test_only_gainers_are_tested(self) -> None:
        """The test once began with contexts of 20 passages, and stopped at the first failure."""
        for k in (2, 5, 10):
            ordering, testing = parts(population(300, noise=0.25, k=k), 120, 300)
            found = certify(ordering, testing, **PROMISE)
            gaining = int((gain(ordering) > 0.0).sum())
            assert found.tested <= gaining
            if found.grid_index is not None:
                assert gain(ordering)[found.grid_index] > 0.0

    def test_gainless_keeps_first_k(self) -> None:
        # The only passage of each query is relevant and is served.
        pools = labelled([ranking_of([1.0])] * 20, [{"p0": 1}] * 20, depth=1, baseline_k=5)
        found = certify(*parts(ratio_grid(pools), 10, 20), **PROMISE)
        assert found.grid_index is None
        assert (found.tested, found.certified, found.labels_needed) == (0, 0, None)
        assert (found.recall_loss, found.n_recall) == (0.0, 10)

    @pytest.mark.parametrize("k", [2, 5, 10])
    def test_choice_beats_first_k_overall(self, k: int) -> None:
        grid = population(600, noise=0.3, k=k)
        random = np.random.default_rng(k)
        for repeat in range(20):
            rows = random.choice(600, 100, replace=False)
            found = certify(grid.rows(rows[:40]), grid.rows(rows[40:]), **PROMISE, seed=repeat)
            if found.grid_index is not None:
                assert gain(grid.rows(rows))[found.grid_index] > 0.0

    def test_contradicted_promise_is_never_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        grid = population(200, noise=0.3, utilities=STRICT)

        def always(losses: np.ndarray, alpha: float) -> np.ndarray:
            return np.zeros(losses.shape[1])

        monkeypatch.setattr(risk, "betting_p_value", always)
        found = certify(*parts(grid, 80, 200), **PROMISE)
        assert found.grid_index is not None
        assert found.recall_loss <= ALPHA + 1e-12
        assert found.certified < found.tested

    def test_unanswering_first_k_is_kept(self) -> None:
        pools = labelled([ranking_of([1.0])] * 2, [{"p0": 1}, {}], depth=1, baseline_k=1)
        one, none = parts(ratio_grid(pools), 1, 2)
        for ordering, testing in ((one, none), (none, one)):
            assert certify(ordering, testing, **PROMISE).grid_index is None
