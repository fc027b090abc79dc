"""The judging budget: what it affords, the probability that it sets, restarts and clocks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.judging.budget import BudgetLimits, JudgingBudget
from ctxguard.monitor.store import SampleStore

HOUR, DAY = 3600.0, 86_400.0
NOON = 20_000 * DAY + DAY / 2


class Clock:
    """Stands still unless it is set."""

    def __init__(self, now: float = NOON) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


STORE = SampleStore.open("sqlite://")


@pytest.fixture(autouse=True)
def nothing_saved() -> None:
    STORE.set_state("budget judge 1", "")


def budget(
    clock: Clock | None = None, *, store: SampleStore = STORE, **limits: float
) -> JudgingBudget:
    clock = Clock() if clock is None else clock
    return JudgingBudget(BudgetLimits(**limits), store, "judge 1", clock)


@pytest.mark.parametrize("name", ["calls_per_hour", "calls_per_day", "cost_per_day"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_limit_that_is_none_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=name):
        BudgetLimits(**{name: value})


def test_without_limits_every_sample_is_taken_up() -> None:
    free = budget()
    free.spend(1e9, 1e9)
    assert free.probability_for(10**9, 1e6) == 1.0
    assert free.affords(1e9)


def test_what_is_left_is_shared_among_what_waits() -> None:
    assert budget(calls_per_hour=100).probability_for(400, 0.0) == 0.25
    assert budget(calls_per_hour=100).probability_for(50, 0.0) == 1.0


def test_what_will_come_until_the_hour_ends_counts_as_waiting() -> None:
    clock = Clock(NOON)
    assert budget(clock, calls_per_hour=1800).probability_for(0, 1.0) == pytest.approx(
        0.5, rel=1e-3
    )
    clock.now += HOUR / 2
    assert budget(clock, calls_per_hour=1800).probability_for(0, 1.0) == pytest.approx(
        1.0, rel=1e-3
    )


def test_the_tightest_limit_counts() -> None:
    tight = budget(calls_per_hour=100, calls_per_day=50, cost_per_day=1_000.0)
    assert tight.probability_for(100, 0.0) == 0.5


def test_a_sample_costs_what_samples_have_cost_so_far() -> None:
    known = budget(calls_per_hour=100, cost_per_day=10.0)
    known.spend(8, 0.1)
    known.spend(12, 0.3)
    # Ten calls and 0.2 each, of which 80 calls and 9.6 are left.
    assert known.probability_for(16, 0.0) == pytest.approx(0.5)
    assert known.probability_for(4, 0.0) == 1.0


def test_a_judge_without_prices_is_not_bound_by_a_cost() -> None:
    free = budget(cost_per_day=1.0)
    free.spend(100, 0.0)
    assert free.probability_for(10**6, 0.0) == 1.0


def test_nothing_is_taken_up_once_a_limit_is_used_up() -> None:
    used = budget(calls_per_day=10)
    used.spend(10, 0.0)
    assert used.probability_for(1, 0.0) == 0.0


def test_nothing_is_taken_up_that_would_go_beyond_a_limit() -> None:
    nearly = budget(calls_per_day=10)
    nearly.spend(6, 0.0)
    assert nearly.probability_for(1, 0.0) == 0.0


def test_a_sample_that_may_need_more_than_is_left_is_not_afforded() -> None:
    some = budget(calls_per_hour=10, calls_per_day=100)
    some.spend(4, 0.0)
    assert some.affords(6)
    assert not some.affords(7)


@pytest.mark.parametrize(("limit", "seconds"), [("calls_per_hour", HOUR), ("calls_per_day", DAY)])
def test_the_next_period_begins_with_the_whole_limit(limit: str, seconds: float) -> None:
    clock = Clock(math.floor(NOON / seconds) * seconds + seconds - 1.0)
    used = budget(clock, **{limit: 10})
    used.spend(10, 0.0)
    assert not used.affords(1)
    clock.now += 1.0
    assert used.affords(10)
    assert used.probability_for(1, 0.0) == 1.0


def test_an_hour_that_begins_anew_leaves_the_day_as_it_is() -> None:
    clock = Clock()
    used = budget(clock, calls_per_hour=10, calls_per_day=15)
    used.spend(10, 0.0)
    clock.now += HOUR
    assert used.affords(5)
    assert not used.affords(6)


def test_a_clock_set_back_gives_nothing_twice() -> None:
    clock = Clock()
    used = budget(clock, calls_per_hour=10, calls_per_day=10)
    used.spend(10, 0.0)
    clock.now -= DAY
    assert used.probability_for(1, 0.0) == 0.0
    assert not used.affords(1)
    # Until the time that was is reached again, and with it the next period.
    clock.now += 2 * DAY
    assert used.affords(10)


def test_a_clock_set_forward_begins_the_next_day_early() -> None:
    clock = Clock()
    used = budget(clock, calls_per_day=10)
    used.spend(10, 0.0)
    clock.now += DAY
    assert used.affords(10)


def test_spending_goes_on_after_a_restart() -> None:
    clock = Clock()
    before = budget(clock, calls_per_hour=10, cost_per_day=5.0)
    before.spend(7, 4.5)
    before.save()
    after = budget(clock, calls_per_hour=10, cost_per_day=5.0)
    after.refresh()
    assert after.affords(3)
    assert not after.affords(4)
    clock.now += HOUR
    assert after.affords(10)


def test_what_was_spent_yesterday_is_not_carried_over() -> None:
    clock = Clock()
    before = budget(clock, calls_per_day=10)
    before.spend(10, 0.0)
    before.save()
    clock.now += DAY
    after = budget(clock, calls_per_day=10)
    after.refresh()
    assert after.affords(10)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "no JSON",
        '{"hour": [1], "day": 3}',
        '{"hour": [1, 2, 3, 4], "day": [1, 2, 3]}',
        '{"hour": ["1", "x", null], "day": ["1", "x", null]}',
        f'{{"hour": [{NOON / HOUR:.0f}, NaN, 0], "day": [1, 0, 0]}}',
        f'{{"hour": [{NOON / HOUR:.0f}, -5, 0], "day": [1, 0, 0]}}',
    ],
)
def test_a_state_that_cannot_be_read_is_as_if_nothing_were_spent(text: str) -> None:
    STORE.set_state("budget judge 1", text)
    afresh = budget(calls_per_hour=10)
    afresh.refresh()
    assert afresh.affords(10)
    assert afresh.probability_for(1, 0.0) == 1.0
    afresh.spend(4, 0.0)
    assert not afresh.affords(7)


@given(
    waiting=st.integers(0, 10**6),
    arriving=st.floats(0.0, 1e4),
    spent=st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(0.0, 5.0)), max_size=5),
    now=st.floats(0.0, 1e10),
)
def test_it_gives_a_probability_and_within_it_no_limit_is_passed_on_average(
    waiting: int, arriving: float, spent: list[tuple[float, float]], now: float
) -> None:
    known = budget(Clock(now), calls_per_hour=100, cost_per_day=20.0)
    for calls, cost in spent:
        known.spend(calls, cost)
    probability = known.probability_for(waiting, arriving)
    assert 0.0 <= probability <= 1.0
    if spent and probability > 0.0:
        calls = sum(one for one, _ in spent)
        assert calls + probability * waiting * calls / len(spent) <= 100 * (1 + 1e-9)
