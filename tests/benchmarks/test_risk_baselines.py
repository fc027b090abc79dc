"""The methods that the certificate is compared with: by hand, by properties, against a truth."""

from math import e, exp, sqrt

import numpy as np
import pytest
from scipy import stats

from benchmarks._risk_baselines import (
    bonferroni,
    clt_p_value,
    conformal_risk_control,
    hoeffding_bentkus_p_value,
)
from ctxguard.measure.risk import betting_p_value, fixed_sequence, pareto_order
from tests.made_up import fractional_losses

DELTA = 0.1


def test_hoeffding_bentkus_equals_its_formula() -> None:
    # 30 losses of 0.1: the sum is 3 but for rounding, and Bentkus must count 3, not 4.
    alpha, n = 0.3, 30
    relative_entropy = stats.entropy([0.1, 0.9], [alpha, 1 - alpha])
    bentkus = e * sum(stats.binom.pmf(i, n, alpha) for i in range(4))
    expected = min(exp(-n * relative_entropy), bentkus)
    assert bentkus < exp(-n * relative_entropy)
    assert hoeffding_bentkus_p_value([0.1] * n, alpha) == pytest.approx(expected)
    expected = exp(-5 * stats.entropy([0.0, 1.0], [0.4, 0.6]))
    assert hoeffding_bentkus_p_value([0.0] * 5, 0.4) == pytest.approx(expected)


def test_clt_is_one_sided_z_test() -> None:
    losses = np.array([0.0, 0.1, 0.3, 0.0, 0.2])
    z = (losses.mean() - 0.25) / (losses.std(ddof=1) / sqrt(5))
    assert clt_p_value(losses, 0.25) == pytest.approx(stats.norm.cdf(z))
    assert clt_p_value([[0.0, 0.5]] * 4, 0.1).tolist() == [0.0, 1.0]


def test_clt_breaks_on_rare_losses() -> None:
    losses = fractional_losses(np.random.default_rng(1), (50, 4000), 0.05, 1.0)
    assert (clt_p_value(losses, 0.05) <= 0.05).mean() > 0.07
    assert (betting_p_value(losses, 0.05) <= 0.05).mean() <= 0.05


def test_bonferroni_divides_delta() -> None:
    assert bonferroni([0.06, 0.04, 0.0], 0.15).tolist() == [1, 2]


def test_betting_reaches_beyond_bonferroni() -> None:
    """A hundred nested candidates, 200 labels: the order costs 60, and still pays."""
    rng, alpha = np.random.default_rng(4), 0.15
    settings = np.linspace(0.05, 0.9, 100)
    reach_in_sequence, reach_at_once = [], []
    for _ in range(50):
        tolerance = rng.beta(2.0, 2.0, (200, 1))
        losses = np.clip(settings - tolerance, 0.0, 1.0)
        order = pareto_order(clt_p_value(losses[:60], alpha), settings)
        n_certified = fixed_sequence(betting_p_value(losses[60:][:, order], alpha), DELTA)
        reach_in_sequence.append(settings[order[:n_certified]].max(initial=0.0))
        at_once = bonferroni(hoeffding_bentkus_p_value(losses, alpha), DELTA)
        reach_at_once.append(settings[at_once].max(initial=0.0))
    assert np.mean(reach_in_sequence) > np.mean(reach_at_once) + 0.04
    true_risk = np.clip(settings - rng.beta(2.0, 2.0, (100_000, 1)), 0.0, 1.0).mean(axis=0)
    best = settings[true_risk <= alpha].max()
    assert np.mean(reach_in_sequence) > best - 0.06


def test_risk_control_adds_one_loss() -> None:
    # (9 × 0.1 + 1) / 10 = 0.19
    losses = np.full((9, 1), 0.1)
    assert (conformal_risk_control(losses, 0.191), conformal_risk_control(losses, 0.189)) == (1, 0)
    # A candidate is judged by the worst that came before it.
    losses = np.array([[0.0, 0.5, 0.0], [0.5, 0.0, 0.0]] * 100)
    assert conformal_risk_control(losses[:, [0, 2]], 0.3) == 2
    assert conformal_risk_control(losses, 0.3) == 1


def test_risk_control_bounds_expectation_only() -> None:
    rng, alpha, settings = np.random.default_rng(6), 0.15, np.linspace(0.05, 0.9, 100)
    true_risk = np.clip(settings - rng.beta(2.0, 2.0, (100_000, 1)), 0.0, 1.0).mean(axis=0)
    chosen = []
    for _ in range(400):
        losses = np.clip(settings - rng.beta(2.0, 2.0, (100, 1)), 0.0, 1.0)
        chosen.append(true_risk[conformal_risk_control(losses, alpha) - 1])
    risks = np.array(chosen)
    assert risks.mean() <= alpha + 3.0 * risks.std() / sqrt(risks.size)
    assert (risks > alpha).mean() > 0.2
