"""Certificates on grids whose truth is known, and the certified threshold of sufficiency."""

import math
from typing import Any

import numpy as np
import pytest
from simulated_pools import DEPTH, calibrated, labelled, part_of, ranking_of, simulate

from calibration.certify import (
    calibrate_sufficiency,
    certified_threshold,
    certify,
    fewest_for_threshold,
    sufficiency_words,
)
from calibration.fit import fit_relevance
from calibration.grid import Grid, ratio_grid
from calibration.pools import LabelledPools, label
from calibration.replay import replay
from calibration.report import report
from ctxguard.core.decision import decide, sufficiency_of
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy, RatioPolicy
from ctxguard.core.types import Route
from ctxguard.measure import risk
from ctxguard.measure.worth import READERS, STRICT, Utilities
from ctxguard.profile.schema import SufficiencyProfile

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
    return part_of(grid, np.arange(middle)), part_of(grid, np.arange(middle, end))


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
            found = certify(
                part_of(grid, rows[:60]), part_of(grid, rows[60:]), **PROMISE, seed=repeat
            )
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
            found = certify(
                part_of(grid, rows[:40]), part_of(grid, rows[40:]), **PROMISE, seed=repeat
            )
            if found.grid_index is not None:
                assert gain(part_of(grid, rows))[found.grid_index] > 0.0

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


SHARE = 0.05


def simulated_rankings(n: int, seed: int) -> LabelledPools:
    """Rankings of two noisy scorers; a third of the queries has no relevant passage."""
    retriever, dataset = simulate(n, seed=seed, noise=0.2, unanswerable=1 / 3)
    return label(replay(retriever, dataset.queries, depth=DEPTH), dataset)


SIMULATED = simulated_rankings(200, seed=0)


def fitted() -> SufficiencyProfile:
    calibration = calibrated(600, noise=0.2, unanswerable=0.4)
    return calibration.profile.routes[Route.HYBRID].sufficiency


MODEL = fit_relevance(SIMULATED)
POLICY = ExpectedUtilityPolicy(MODEL, k=3, cost=0.0)


def certified(n: int, policy: Policy = POLICY, **asked: Any) -> SufficiencyProfile:
    """Certify by the contexts of so many queries that the model did not see."""
    pools = simulated_rankings(n, seed=1)
    best, holds = np.full(n, np.nan), np.zeros(n, dtype=bool)
    for row, ranking in enumerate(pools.rankings()):
        decision = decide(ranking, policy)
        own = None if policy == POLICY else MODEL
        probability, _ = sufficiency_of(decision, None, own)
        best[row] = np.nan if probability is None else probability
        holds[row] = pools.relevant[row, list(decision.kept)].any()
    return calibrate_sufficiency(best, holds, **asked)


class TestThreshold:
    @pytest.mark.parametrize("n", [45, 60, 200])
    def test_false_alarms_are_rare_as_stated(self, n: int) -> None:
        random = np.random.default_rng(n)
        repeats = 2_000
        # Of uniform probabilities, exactly the share t lies below t.
        thresholds = [certified_threshold(random.random(n), SHARE, DELTA) for _ in range(repeats)]
        violations = np.mean([threshold > SHARE for threshold in thresholds if threshold])
        assert violations <= DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / repeats)

    def test_threshold_is_as_low_as_possible(self) -> None:
        # With 77 labels the second smallest would do in 90.2% of samples: P(Binomial < 2) ≤ 0.1.
        values = np.linspace(0.01, 0.77, 77)
        assert certified_threshold(values, SHARE, DELTA) == pytest.approx(0.02)
        assert certified_threshold(values[:76], SHARE, DELTA) == pytest.approx(0.01)
        # Ties are not counted below it.
        assert certified_threshold([0.3] * 200, SHARE, DELTA) == 0.3

    def test_one_label_more_gives_one(self) -> None:
        n = fewest_for_threshold(SHARE, DELTA)
        assert certified_threshold([0.5] * (n - 1), SHARE, DELTA) is None
        assert certified_threshold([0.5] * n, SHARE, DELTA) == 0.5
        assert 0.95**n <= 0.1 < 0.95 ** (n - 1)


class TestCalibration:
    def test_tells_apart_and_keeps_promise(self) -> None:
        own = fitted()
        assert own.auroc > 0.8
        assert own.false_alarms <= SHARE * own.n_sufficient
        assert own.detected > 0.2 * own.n_insufficient
        calibration = calibrated(600, noise=0.2, unanswerable=0.4)
        assert calibration.profile.safe().routes[Route.HYBRID].sufficiency is None
        route = calibration.profile.routes[Route.HYBRID]
        retriever, dataset = simulate(1_000, seed=1, noise=0.2, unanswerable=0.4)
        alarms = []
        for query in dataset.queries:
            decision = decide(retriever.retrieve(query.text), route.policy)
            if set(decision.kept_ids) & dataset.qrels[query.query_id].keys():
                _, suffices = sufficiency_of(decision, own.threshold, own.model)
                alarms.append(suffices is False)
        # The promise itself fails in one calibration of ten; this one must be near it.
        assert np.mean(alarms) <= 1.5 * SHARE

    def test_too_few_queries_say_enough(self) -> None:
        own = certified(40)
        assert own.threshold is None
        assert own.n_sufficient < own.needed == 45
        assert "needs 45 labelled queries" in own.statement
        assert f"there were {own.n_sufficient}." in own.statement

    def test_without_queries_there_is_no_threshold(self) -> None:
        own = calibrate_sufficiency(np.zeros(0), np.zeros(0, dtype=bool))
        assert (own.threshold, own.n_sufficient, own.auroc) == (None, 0, None)

    def test_without_probabilities_there_is_none(self) -> None:
        calibration = calibrated(120, policy="ratio")
        assert calibration.profile.routes[Route.HYBRID].sufficiency is None
        assert sufficiency_words(None) == "Not certified: no probabilities were fitted."

    def test_policy_without_probabilities_takes_fitted(self) -> None:
        own = certified(200, RatioPolicy(k=3), model=MODEL)
        assert own.model == MODEL
        assert own.threshold is not None
        assert own.auroc > 0.7

    def test_larger_share_detects_more(self) -> None:
        strict, lax = certified(200), certified(200, false_alarms=0.2)
        assert (strict.threshold or 1.0) < (lax.threshold or 0.0)
        assert "at most 0.2 are called insufficient" in lax.statement

    def test_the_report_says_it(self) -> None:
        calibration = calibrated(60, noise=0.2, unanswerable=0.4)
        own = calibration.profile.routes[Route.HYBRID].sufficiency
        words = report(calibration).routes[0].sufficiency
        assert words == sufficiency_words(own)
        assert "AUROC on these queries 0." in words


@pytest.mark.parametrize("held_out", [None, 0.5])
def test_kept_passages_labels_decide(held_out: float | None) -> None:
    calibration = calibrated(600, noise=0.2, unanswerable=0.4, held_out=held_out)
    outcome = calibration.outcomes[Route.HYBRID]
    relevant, chosen = outcome.route.measured.relevant, outcome.chosen
    holds = (np.take_along_axis(relevant, chosen.order, axis=1) & chosen.kept).any(axis=1)
    found = outcome.profile.sufficiency
    assert found.n_sufficient == holds.sum()
    assert found.n_insufficient == len(holds) - holds.sum()
    assert found.shown_by == ("held_out" if held_out else "folds")
