"""A policy rises from shadow by judged traffic, by evidence that is valid at every look."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ctxguard.core.types import FloatArray
from ctxguard.monitor.estimation.promotion import DELTA, FEWEST_REQUESTS, log_wealth, rise

MAX_LOSS, TOLERANCE = 0.05, 0.01

Draw = Callable[[np.random.Generator, tuple[int, int]], FloatArray]


def shares(losses: float, share: float, gains: float = 0.0) -> Draw:
    """Some requests lose a share of their relevant passages, some gain as much, others nothing."""

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
        return share * rng.choice([-1.0, 1.0, 0.0], shape, p=[losses, gains, 1.0 - losses - gains])

    return draw


def ever(draw: Draw, *, per_day: int, days: int, runs: int, seed: int = 0) -> float:
    """The share of runs whose wealth suffices at the end of any day."""
    rng, risen = np.random.default_rng(seed), 0
    for _ in range(runs // 50):
        wealth = log_wealth(draw(rng, (per_day * days, 50)), MAX_LOSS)
        risen += int((wealth.max(axis=0) >= -np.log(DELTA)).sum())
    return risen / runs


@pytest.mark.parametrize(
    "at_the_limit",
    [shares(0.1, 0.5), shares(0.15, 0.5, 0.05), shares(0.05, 1.0), shares(0.2, 0.25)],
    ids=["half of a tenth", "with gains", "all of a twentieth", "a quarter of a fifth"],
)
def test_with_the_loss_at_the_limit_a_tenth_of_simulated_years_rise_at_most(
    at_the_limit: Draw,
) -> None:
    """A thousand years with a look a day, and indeed after every request."""
    assert ever(at_the_limit, per_day=50, days=365, runs=1_000) <= DELTA


def test_a_policy_of_no_loss_rises_within_days() -> None:
    assert ever(shares(0.02, 0.5, 0.02), per_day=50, days=7, runs=200) >= 0.95


@given(
    arrays.arrays(
        np.float64, st.integers(1, 200), elements=st.sampled_from([-1.0, -0.5, 0.0, 0.3, 1.0])
    ),
    st.sampled_from([0.01, 0.05, 0.5]),
)
def test_a_look_does_not_depend_on_what_comes_after(differences: FloatArray, limit: float) -> None:
    whole = log_wealth(differences, limit)
    part = log_wealth(differences[: differences.size // 2], limit)
    assert np.allclose(whole[: part.size], part)
    assert np.isfinite(whole).all()


def test_requests_of_little_weight_move_the_wealth_little() -> None:
    heavy = log_wealth(np.zeros(50), MAX_LOSS, np.ones(50))[-1]
    light = log_wealth(np.zeros(50), MAX_LOSS, np.full(50, 0.1))[-1]
    assert 0.0 < light < heavy


class TestRise:
    def test_without_traffic_nothing_is_known(self) -> None:
        found = rise(np.zeros(0), tolerance=TOLERANCE, max_loss=MAX_LOSS)
        assert (found.n, found.difference, found.risen, found.missing) == (0, None, False, None)

    def test_the_requests_that_are_missing_are_about_as_many_as_it_then_takes(self) -> None:
        early = rise(np.zeros(30), tolerance=TOLERANCE, max_loss=MAX_LOSS)
        assert not early.risen
        assert early.missing is not None
        later = rise(np.zeros(30 + 2 * early.missing), tolerance=TOLERANCE, max_loss=MAX_LOSS)
        assert later.risen
        assert later.missing == 0

    @pytest.mark.parametrize("n", [1, 2, 3, FEWEST_REQUESTS - 1])
    @pytest.mark.parametrize("difference", [0.0, -0.5, 1.0])
    def test_a_handful_of_requests_forecasts_nothing(self, n: int, difference: float) -> None:
        found = rise(
            np.full(n, difference), tolerance=TOLERANCE, max_loss=MAX_LOSS, days=1.0, labelled=None
        )
        assert (found.risen, found.missing, found.days_missing) == (False, None, None)
        assert found.statement.endswith(
            f"it stays in shadow; fewer than {FEWEST_REQUESTS} say nothing of how many it takes"
        )

    @pytest.mark.parametrize(
        ("differences", "suffices", "missing"),
        [
            (np.where(np.arange(5_000) % 50, 0.0, -1.0), True, None),
            (np.ones(10), True, None),
            (np.full(100, -0.2), False, None),
        ],
        ids=["a mean below the tolerance", "a handful of gains", "recall is lost"],
    )
    def test_wealth_alone_does_not_let_a_policy_rise(
        self, differences: FloatArray, suffices: bool, missing: int | None
    ) -> None:
        found = rise(differences, tolerance=TOLERANCE, max_loss=MAX_LOSS)
        assert (found.wealth > 1.0 / DELTA) is suffices
        assert (found.risen, found.missing) == (False, missing)
