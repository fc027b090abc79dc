"""The certified threshold of sufficiency, and when there is none."""

import math
from typing import Any

import numpy as np
import pytest
from simulated_pools import DEPTH, calibrated, simulate

from calibration.certify import (
    calibrate_sufficiency,
    certified_threshold,
    fewest_for_threshold,
    sufficiency_words,
)
from calibration.fit import fit_relevance
from calibration.pools import LabelledPools, label
from calibration.replay import replay
from calibration.report import report
from ctxguard.core.decision import decide, sufficiency_of
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy, RatioPolicy
from ctxguard.core.types import Route
from ctxguard.profile.schema import SufficiencyProfile

ALPHA, DELTA = 0.05, 0.1


def simulated_rankings(n: int, seed: int) -> LabelledPools:
    """Rankings of two noisy scorers; a third of the queries has no relevant passage."""
    retriever, dataset = simulate(n, seed=seed, noise=0.2, unanswerable=1 / 3)
    return label(replay(retriever, dataset.queries, depth=DEPTH), dataset)


SIMULATED = simulated_rankings(200, seed=0)


def fitted() -> SufficiencyProfile:
    calibration = calibrated(600, noise=0.2, unanswerable=0.4)
    own = calibration.profile.routes[Route.HYBRID].sufficiency
    assert own is not None
    return own


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
        thresholds = [certified_threshold(random.random(n), ALPHA, DELTA) for _ in range(repeats)]
        violations = np.mean([threshold > ALPHA for threshold in thresholds if threshold])
        assert violations <= DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / repeats)

    def test_threshold_is_as_low_as_possible(self) -> None:
        # With 77 labels the second smallest would do in 90.2% of samples: P(Binomial < 2) ≤ 0.1.
        values = np.linspace(0.01, 0.77, 77)
        assert certified_threshold(values, ALPHA, DELTA) == pytest.approx(0.02)
        assert certified_threshold(values[:76], ALPHA, DELTA) == pytest.approx(0.01)
        # Ties are not counted below it.
        assert certified_threshold([0.3] * 200, ALPHA, DELTA) == 0.3

    def test_one_label_more_gives_one(self) -> None:
        n = fewest_for_threshold(ALPHA, DELTA)
        assert certified_threshold([0.5] * (n - 1), ALPHA, DELTA) is None
        assert certified_threshold([0.5] * n, ALPHA, DELTA) == 0.5
        assert 0.95**n <= 0.1 < 0.95 ** (n - 1)


class TestCalibration:
    def test_tells_apart_and_keeps_promise(self) -> None:
        own = fitted()
        assert own.auroc > 0.8
        assert own.false_alarms <= ALPHA * own.n_sufficient
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
        assert np.mean(alarms) <= 1.5 * ALPHA

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
