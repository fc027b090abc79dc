"""The evidence of a rise: seldom while the promise holds, soon once it does not."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.alarms.ecusum import Day, ECusum

WATCH = ECusum(target=0.12, suspected=0.2)


def day_of(losses: list[float], probability: list[float] | None = None) -> Day:
    """A day of requests that each ask another question."""
    n = len(losses)
    return Day.of(np.array(losses), np.array(probability or [1.0] * n), np.arange(n))


def test_at_the_target_itself_alarms_are_as_many_days_apart_as_the_threshold() -> None:
    rng = np.random.default_rng(3)
    lengths = []
    for _ in range(100):
        watch, days = WATCH, 0
        while not watch.alarm(threshold=20.0):
            watch = watch.after(day_of((rng.random(50) < 0.12).astype(float).tolist()))
            days += 1
        lengths.append(days)
    assert np.mean(lengths) >= 20.0


def test_a_quiet_past_does_not_delay_the_alarm() -> None:
    quiet = WATCH.after(day_of([0.0] * 5_000))
    bad = day_of([0.5] * 20)
    fresh = WATCH.after(bad)
    assert quiet.after(bad).log_e_values == fresh.log_e_values


def test_before_any_loss_there_is_no_evidence() -> None:
    assert (WATCH.e_value, WATCH.n, WATCH.alarm()) == (1.0, 0, False)
    assert WATCH.after(day_of([])) == WATCH


@given(st.floats(0.001, 0.98), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=50))
def test_no_loss_can_break_the_bank(target: float, losses: list[float]) -> None:
    watch = ECusum(target=target, suspected=1.0).after(day_of(losses))
    assert 0.0 <= watch.e_value < float("inf")
    assert all(map(math.isfinite, watch.log_e_values))


def test_losses_above_one_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"\[0, 1\]"):
        WATCH.after(day_of([1.1]))


@pytest.mark.parametrize(
    ("target", "suspected"), [(0.0, 0.5), (1.0, 1.0), (0.2, 0.2), (0.2, 1.5), (float("nan"), 0.5)]
)
def test_a_target_or_suspicion_out_of_range_is_refused(target: float, suspected: float) -> None:
    with pytest.raises(ConfigurationError):
        ECusum(target=target, suspected=suspected)


class TestDay:
    @pytest.mark.parametrize("loss", [-0.1, math.nan, math.inf])
    def test_a_loss_that_is_none_is_refused(self, loss: float) -> None:
        with pytest.raises(ConfigurationError, match="losses"):
            day_of([loss])

    def test_requests_that_were_judged_alike_count_alike(self) -> None:
        day = day_of([0.0, 1.0, 0.5], [0.2, 0.2, 0.2])
        assert (day.weights.tolist(), day.raise_by, day.n) == ([1.0, 1.0, 1.0], 1.0, 3)

    def test_the_weighted_mean_is_that_of_the_traffic(self) -> None:
        # A hundred requests without a loss stand for a thousand, fifty with one for a hundred.
        day = day_of([0.0] * 100 + [1.0] * 50, [0.1] * 100 + [0.5] * 50)
        mean = float(day.weights @ day.losses) / float(day.weights.sum())
        assert mean == pytest.approx(50 / 0.5 / (1_000 + 100))

    def test_a_burst_of_few_samples_does_not_silence_the_rest(self) -> None:
        day = day_of([0.2] * 1_000 + [1.0] * 3, [0.05] * 1_000 + [1e-3] * 3)
        assert day.weights.sum() > 900.0
        assert 1.0 < day.raise_by < 1.2

    @given(
        st.lists(
            st.tuples(st.floats(0.001, 1.0), st.integers(0, 5), st.floats(0.0, 1.0)),
            min_size=1,
            max_size=40,
        )
    )
    def test_what_is_cut_off_counts_as_traffic_without_a_loss(
        self, rows: list[tuple[float, int, float]]
    ) -> None:
        probability, question, losses = (np.array(column) for column in zip(*rows, strict=True))
        day = Day.of(losses, probability, question)
        assert day.weights.max() <= 1.0
        all_of_it = float((losses / probability).sum() / (1.0 / probability).sum())
        kept = float(day.weights @ day.losses) / float(day.weights.sum())
        assert kept / day.raise_by <= all_of_it + 1e-9
