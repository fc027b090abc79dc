"""The alarm: seldom while the promise holds, soon once it does not."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.alarms.ecusum import ECusum

WATCH = ECusum(target=0.12, suspected=0.2)


def run_length(rng: random.Random, mean: float, limit: int, watch: ECusum = WATCH) -> int:
    """Losses of 0 and 1 up to the alarm; ``limit`` where there was none."""
    for n in range(1, limit + 1):
        watch = watch.after(float(rng.random() < mean))
        if watch.alarm():
            return n
    return limit


def test_a_loss_that_doubles_from_a_tenth_is_noticed_within_350_requests() -> None:
    rng = random.Random(1)
    delays = []
    for _ in range(150):
        watch = WATCH
        for _ in range(100):
            watch = watch.after(float(rng.random() < 0.10))
        delays.append(run_length(rng, 0.20, 2_000, watch))
    assert statistics.median(delays) <= 350


@pytest.mark.slow
def test_false_alarms_are_rare_in_ten_thousand_requests_in_control() -> None:
    rng = random.Random(2)
    alarms = sum(run_length(rng, 0.10, 10_000) < 10_000 for _ in range(300))
    assert alarms / 300 <= 0.02


def test_at_the_target_itself_alarms_are_as_far_apart_as_the_threshold() -> None:
    rng = random.Random(3)
    lengths = []
    for _ in range(100):
        watch, n = WATCH, 0
        while not watch.alarm(threshold=50.0):
            watch, n = watch.after(float(rng.random() < 0.12)), n + 1
        lengths.append(n)
    assert statistics.mean(lengths) >= 50.0


def test_partial_losses_count_as_well_as_whole_ones() -> None:
    rng = random.Random(4)
    watch, n = WATCH, 0
    while not watch.alarm():
        watch, n = watch.after(rng.betavariate(0.8, 3.2)), n + 1
    assert n <= 350


def test_a_quiet_past_does_not_delay_the_alarm() -> None:
    watch = WATCH
    for _ in range(5_000):
        watch = watch.after(0.0)
    quiet = watch
    fresh, n_quiet, n_fresh = WATCH, 0, 0
    while not quiet.alarm():
        quiet, n_quiet = quiet.after(0.5), n_quiet + 1
    while not fresh.alarm():
        fresh, n_fresh = fresh.after(0.5), n_fresh + 1
    assert n_quiet == n_fresh


def test_before_any_loss_there_is_no_evidence() -> None:
    assert (WATCH.e_value, WATCH.n, WATCH.alarm()) == (1.0, 0, False)


def test_a_loss_leaves_the_state_before_it_as_it_was() -> None:
    after = WATCH.after(1.0)
    assert (WATCH.n, after.n) == (0, 1)
    assert after.e_value > WATCH.e_value


@given(st.floats(0.001, 0.98), st.lists(st.floats(0.0, 1.0), max_size=50))
def test_no_loss_can_break_the_bank(target: float, losses: list[float]) -> None:
    watch = ECusum(target=target, suspected=1.0)
    for loss in losses:
        watch = watch.after(loss)
        assert 0.0 < watch.e_value < float("inf")


@pytest.mark.parametrize("loss", [-0.1, 1.1, float("nan")])
def test_a_loss_out_of_bounds_is_refused(loss: float) -> None:
    with pytest.raises(ConfigurationError, match=r"\[0, 1\]"):
        WATCH.after(loss)


@pytest.mark.parametrize(
    ("target", "suspected"), [(0.0, 0.5), (1.0, 1.0), (0.2, 0.2), (0.2, 1.5), (float("nan"), 0.5)]
)
def test_a_target_or_suspicion_out_of_range_is_refused(target: float, suspected: float) -> None:
    with pytest.raises(ConfigurationError):
        ECusum(target=target, suspected=suspected)
