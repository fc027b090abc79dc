"""The judging budget: what it affords, the probability that it sets, restarts and clocks."""

import logging
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storing import Clock

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.judging.budget import BudgetLimits, JudgingBudget
from ctxguard.monitor.store import SampleStore

HOUR, DAY = 3600.0, 86_400.0
NOON = 20_000 * DAY + DAY / 2


def at_noon() -> Clock:
    clock = Clock()
    clock.now = NOON
    return clock


def budget(
    clock: Callable[[], float] | None = None, *, after: SampleStore | None = None, **limits: float
) -> JudgingBudget:
    """A budget of which nothing is spent, or what a store has kept of it."""
    store = SampleStore.open("sqlite://") if after is None else after
    return JudgingBudget(BudgetLimits(**limits), store, "judge", clock or at_noon())


def kept(known: JudgingBudget) -> SampleStore:
    """A store that has kept what was spent."""
    store = SampleStore.open("sqlite://")
    for key, value in known.kept.items():
        store.set_state(key, value)
    return store


@pytest.mark.parametrize("name", ["calls_per_hour", "calls_per_day", "cost_per_day"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_invalid_limit_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=name):
        BudgetLimits(**{name: value})


@pytest.mark.parametrize(
    ("limits", "spent", "waiting", "expected"),
    [
        ({"calls_per_hour": 100}, [], 400, 0.25),
        ({"calls_per_hour": 100}, [], 50, 1.0),
        ({"calls_per_hour": 100, "calls_per_day": 50, "cost_per_day": 1_000.0}, [], 100, 0.5),
        # Ten calls and 0.2 each, of which 80 calls and 9.6 are left.
        ({"calls_per_hour": 100, "cost_per_day": 10.0}, [(8, 0.1), (12, 0.3)], 16, 0.5),
        ({"calls_per_hour": 100, "cost_per_day": 10.0}, [(8, 0.1), (12, 0.3)], 4, 1.0),
        ({"cost_per_day": 1.0}, [(100, 0.0)], 10**6, 1.0),
        ({"calls_per_day": 10}, [(10, 0.0)], 1, 0.0),
        ({"calls_per_day": 10}, [(6, 0.0)], 1, 0.0),
    ],
    ids=["shared", "enough", "tightest", "as before", "enough so", "free", "used up", "too little"],
)
def test_rest_is_shared_among_waiting(
    limits: dict[str, float], spent: list[tuple[float, float]], waiting: int, expected: float
) -> None:
    """Each is taken to cost what those before have cost."""
    known = budget(**limits)
    for calls, cost in spent:
        known.spend(calls, cost)
    assert known.probability_for(waiting, 0.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("limits", "spent", "later_seconds", "left"),
    [
        ({"calls_per_hour": 10, "calls_per_day": 100}, 4, 0.0, 6),
        ({"calls_per_hour": 10}, 10, HOUR - 1.0, 0),
        ({"calls_per_hour": 10}, 10, HOUR, 10),
        ({"calls_per_day": 10}, 10, DAY / 2 - 1.0, 0),
        ({"calls_per_day": 10}, 10, DAY / 2, 10),
        ({"calls_per_hour": 10, "calls_per_day": 15}, 10, HOUR, 5),
        # A clock that is set back gives nothing until that time is reached again.
        ({"calls_per_hour": 10, "calls_per_day": 10}, 10, -DAY, 0),
        ({"calls_per_hour": 10, "calls_per_day": 10}, 10, DAY, 10),
    ],
)
def test_each_period_has_its_limit(
    limits: dict[str, float], spent: int, later_seconds: float, left: int
) -> None:
    """A sample that may need more than is left is not afforded."""
    clock = at_noon()
    used = budget(clock, **limits)
    used.spend(spent, 0.0)
    clock.now += later_seconds
    assert used.allows(left)
    assert not used.allows(left + 1)


def test_expected_arrivals_count_as_waiting() -> None:
    clock = at_noon()
    for expected in (0.5, 1.0):
        found = budget(clock, calls_per_hour=1800).probability_for(0, 1.0)
        assert found == pytest.approx(expected, rel=1e-3)
        clock.now += HOUR / 2


def test_spending_goes_on_after_a_restart() -> None:
    clock = at_noon()
    before = budget(clock, calls_per_hour=10, cost_per_day=5.0)
    before.spend(7, 4.5)
    after = budget(clock, after=kept(before), calls_per_hour=10, cost_per_day=5.0)
    after.refresh()
    assert after.allows(3)
    assert not after.allows(4)
    clock.now += HOUR
    assert after.allows(10)


@pytest.mark.parametrize("days", [1.5, 20.0, 40_000.0])
def test_period_from_the_future(days: float, caplog: pytest.LogCaptureFixture) -> None:
    """A clock was fast for one run: its period is not believed beyond a day, and that is told."""
    clock = at_noon()
    clock.now += days * DAY
    before = budget(clock, calls_per_hour=10, calls_per_day=10)
    before.spend(10, 0.0)
    clock.now = NOON
    after = budget(clock, after=kept(before), calls_per_hour=10, calls_per_day=10)
    with caplog.at_level(logging.WARNING):
        assert after.allows(10)
    assert f"{days:.1f} days in the future" in caplog.text
    after.spend(10, 0.0)
    assert not after.allows(1)


@settings(max_examples=50)
@given(
    waiting=st.integers(0, 10**6),
    arriving=st.floats(0.0, 1e4),
    spent=st.lists(st.tuples(st.integers(1, 50), st.floats(0.0, 5.0)), max_size=5),
    now=st.floats(0.0, 1e10),
)
def test_probability_keeps_limits_on_average(
    waiting: int, arriving: float, spent: list[tuple[int, float]], now: float
) -> None:
    """It gives a probability and within it no limit is passed on average."""
    known = budget(lambda: now, calls_per_hour=100, cost_per_day=20.0)
    for calls, cost in spent:
        known.spend(calls, cost)
    probability = known.probability_for(waiting, arriving)
    assert 0.0 <= probability <= 1.0
    if spent and probability > 0.0:
        calls = sum(one for one, _ in spent)
        assert calls + probability * waiting * calls / len(spent) <= 100 * (1 + 1e-9)
