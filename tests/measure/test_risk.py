"""The certificate's statistics: worked by hand, by properties, and against a known truth."""

from collections.abc import Callable
from math import log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ctxguard.core.types import FloatArray
from ctxguard.errors import CalibrationError
from ctxguard.measure.risk import (
    LARGEST_LOSS,
    betting_lower_bound,
    betting_p_value,
    betting_upper_bound,
    fixed_sequence,
    labels_needed,
    pareto_order,
)
from tests.made_up import fractional_losses

DELTA = 0.1

UNUSABLE = (-0.01, 1.01, float("inf"), float("nan"))

unit = st.floats(0.0, 1.0)
level = st.floats(0.01, 0.99)
loss_columns = arrays(np.float64, st.integers(2, 40), elements=unit)


def allowed(rate: float, repeats: int) -> float:
    """The rate with three Monte Carlo errors on top."""
    return rate + 3.0 * sqrt(rate * (1.0 - rate) / repeats)


def test_betting_equals_wealth_by_query() -> None:
    rng = np.random.default_rng(3)
    for n, alpha in ((1, 0.1), (7, 0.3), (60, 0.15), (300, 0.5)):
        losses = fractional_losses(rng, (n,), 0.7 * alpha, 0.5)
        wealth = best = 1.0
        mean_sum, square_sum, variance = 0.5, 0.25, 0.25
        for t, loss in enumerate(losses, start=1):
            stake = min(sqrt(2 * log(10) / (n * variance)), LARGEST_LOSS / (1 - alpha))
            wealth *= 1 - stake * (loss - alpha)
            best = max(best, wealth)
            mean_sum += loss
            square_sum += (loss - mean_sum / (t + 1)) ** 2
            variance = square_sum / (t + 1)
        assert betting_p_value(losses, alpha) == pytest.approx(1 / best)


@pytest.mark.parametrize("n", [20, 60, 200])
@pytest.mark.parametrize("mean", [0.02, 0.15, 0.5])
def test_upper_bound_misses_at_most_delta(n: int, mean: float) -> None:
    rng = np.random.default_rng(n)
    repeats = 150
    samples = fractional_losses(rng, (repeats, n), mean, certain=0.5)
    missed = np.mean([betting_upper_bound(sample, DELTA) < mean for sample in samples])
    assert missed <= allowed(DELTA, repeats)


def test_total_losses_bound_at_1() -> None:
    assert betting_upper_bound([1.0] * 20) == 1.0
    assert betting_upper_bound([1.0 - 1e-16, 1.0]) == 1.0


DIFFERENCES: dict[str, tuple[Callable[..., FloatArray], float]] = {
    "5% lose everything": (lambda rng, chance: np.where(chance < 0.05, -1.0, 0.0), -0.05),
    "small gains, rare total losses": (
        lambda rng, chance: np.where(chance < 0.02, -1.0, 0.05),
        -0.02 + 0.98 * 0.05,
    ),
    "half a loss, half a gain": (lambda rng, chance: np.where(chance < 0.5, -1.0, 1.0), 0.0),
    "all gain": (lambda rng, chance: rng.beta(2.0, 5.0, chance.shape), 2.0 / 7.0),
    "mostly lost": (lambda rng, chance: np.where(chance < 0.9, -1.0, 0.5), -0.85),
    "nothing changes": (lambda rng, chance: np.zeros(chance.shape), 0.0),
}
"""Differences in recall of a shape that occurs, and their mean."""


@pytest.mark.parametrize("n", [10, 50, 400])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_difference_bound_errs_at_most_delta(name: str, n: int) -> None:
    """A thousand certificates of one truth; the bound exceeds a truth that its test rejects."""
    repeats, (draw, truth) = 1_000, DIFFERENCES[name]
    rng = np.random.default_rng(n)
    samples = draw(rng, rng.random((n, repeats)))
    at_truth = betting_p_value((1.0 - samples) / 2.0, (1.0 - truth) / 2.0, target_delta=DELTA)
    false = at_truth <= DELTA
    assert false.mean() <= allowed(DELTA, repeats)
    for column in range(0, repeats, 100):
        bound = betting_lower_bound(samples[:, column], DELTA)
        # The bound never exceeds the mean of its sample, so the test may reject more.
        assert bound <= truth + 1e-6 or false[column]


@given(arrays(np.float64, st.integers(1, 40), elements=st.floats(-1.0, 1.0)))
def test_lower_bound_lies_below_mean(differences: FloatArray) -> None:
    assert -1.0 <= betting_lower_bound(differences) <= differences.mean() + 1e-9


def test_gains_count_against_losses() -> None:
    losing, mixed = [-0.2, 0.0] * 100, [-0.2, 0.2] * 100
    assert betting_lower_bound(mixed) > betting_lower_bound(losing)
    assert betting_lower_bound([0.5] * 100) > 0.0


def test_candidates_together_equal_each_alone() -> None:
    losses = np.random.default_rng(0).random((30, 6)) ** 4
    alone = [float(betting_p_value(losses[:, j], 0.25)) for j in range(6)]
    assert betting_p_value(losses, 0.25).tolist() == pytest.approx(alone)


@given(loss_columns, st.tuples(level, level))
def test_looser_limit_never_raises_p_value(losses: FloatArray, limits: tuple[float, float]) -> None:
    """The upper bound bisects by that."""
    values = [float(betting_p_value(losses, at)) for at in np.linspace(*sorted(limits), 20)]
    assert (np.diff(values) <= 1e-9).all()
    assert 0.0 <= min(values) <= max(values) <= 1.0


@given(losses=loss_columns, alpha=level, by=unit)
def test_losses_above_alpha_are_no_evidence(losses: FloatArray, alpha: float, by: float) -> None:
    above = alpha + (1.0 - alpha) * by * losses
    assert betting_p_value(np.clip(above, 0.0, 1.0), alpha) == pytest.approx(1.0)


@pytest.mark.parametrize("n", [50, 100, 200, 400])
@pytest.mark.parametrize("certain", [0.0, 0.6, 1.0])
def test_mean_of_alpha_rarely_certified(n: int, certain: float) -> None:
    repeats = 2000
    for alpha in (0.05, 0.2):
        losses = fractional_losses(np.random.default_rng(n), (n, repeats), alpha, certain)
        p_values = betting_p_value(losses, alpha)
        for delta in (0.05, 0.1, 0.2):
            assert (p_values <= delta).mean() <= allowed(delta, repeats)


def test_betting_is_valid_at_untuned_levels() -> None:
    repeats = 4000
    losses = fractional_losses(np.random.default_rng(5), (100, repeats), 0.15, 0.6)
    for target_delta in (0.001, 0.5):
        p_values = betting_p_value(losses, 0.15, target_delta=target_delta)
        assert (p_values <= DELTA).mean() <= allowed(DELTA, repeats)


@pytest.mark.parametrize(
    ("risk", "benefit", "order"),
    [
        ([0.0, 0.0, 0.0], [0.3, 0.1, 0.2], [1, 2, 0]),  # of equal risks the least beneficial first
        ([0.1, 0.1], [0.5, 0.5], [0]),  # of candidates alike in everything one
    ],
)
def test_equal_risks_order_by_benefit(
    risk: list[float], benefit: list[float], order: list[int]
) -> None:
    assert pareto_order(risk, benefit).tolist() == order


@given(figures=st.lists(st.tuples(st.integers(0, 6), st.integers(-6, 6)), min_size=1, max_size=30))
def test_order_leaves_out_only_dominated(figures: list[tuple[int, int]]) -> None:
    risk, benefit = np.array(figures).T
    order = pareto_order(risk, benefit)
    assert (np.diff(risk[order]) >= 0).all()
    assert (np.diff(benefit[order]) > 0).all()
    for left_out in set(range(len(figures))) - set(order.tolist()):
        dominates = (risk[order] <= risk[left_out]) & (benefit[order] >= benefit[left_out])
        assert dominates.any()


@pytest.mark.parametrize(
    ("p_values", "certified"), [([0.01, 0.1, 0.11, 0.0001], 2), ([0.2, 0.0], 0), ([0.01, 0.02], 2)]
)
def test_fixed_sequence_stops_at_first_failure(p_values: list[float], certified: int) -> None:
    assert fixed_sequence(p_values, 0.1) == certified


def test_disjoint_order_keeps_family_error() -> None:
    """Twenty candidates on both sides of alpha; one false certificate spoils a repeat."""
    rng, repeats, n, alpha = np.random.default_rng(11), 400, 100, 0.2
    means = np.linspace(0.10, 0.30, 20)
    spoiled = 0
    for _ in range(repeats):
        ordering = fractional_losses(rng, (40, 20), means, 0.5)
        testing = fractional_losses(rng, (n, 20), means, 0.5)
        order = pareto_order(ordering.mean(axis=0), means)
        certified = order[: fixed_sequence(betting_p_value(testing[:, order], alpha), DELTA)]
        spoiled += bool((means[certified] > alpha).any())
    assert spoiled / repeats <= allowed(DELTA, repeats)


@pytest.mark.parametrize(
    ("mean", "certain", "alpha"),
    [(0.05, 0.5, 0.1), (0.1, 1.0, 0.15), (0.1, 0.0, 0.15), (0.02, 0.8, 0.1), (0.13, 0.3, 0.15)],
)
def test_labels_needed_certify_as_planned(mean: float, certain: float, alpha: float) -> None:
    rng = np.random.default_rng(9)
    typical = fractional_losses(rng, (20_000,), mean, certain)
    n = labels_needed(typical, alpha, DELTA)
    p_values = betting_p_value(rng.choice(typical, (n, 500)), alpha, target_delta=DELTA)
    assert 0.7 <= (p_values <= DELTA).mean() <= 0.93


def test_rounding_errors_are_no_fault() -> None:
    rounded = betting_p_value(np.array([1.0 - 10 * 0.1 - 1e-15, 1.0 + 1e-15, 0.2]), 0.5)
    assert rounded == pytest.approx(float(betting_p_value(np.array([0.0, 1.0, 0.2]), 0.5)))


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        (np.empty((0, 3)), "at least one labelled query"),
        *[([0.0, one], f"{one!r} of query 1 is undefined or lies outside") for one in UNUSABLE],
    ],
)
def test_unusable_losses_are_refused(losses: list[float], says: str) -> None:
    for computed in (betting_p_value, labels_needed):
        with pytest.raises(CalibrationError, match=says):
            computed(losses, 0.1)
    assert fixed_sequence([0.05, float("nan")], 0.1) == 1
