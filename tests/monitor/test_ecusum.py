"""The evidence of a rise: seldom while the promise holds, soon once it does not."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.core.types import FloatArray, Route
from ctxguard.monitor.alarms import AlarmKind, LossMonitor, PromisedLoss
from ctxguard.monitor.alarms.ecusum import Day, Days, ECusum, groups

WATCH = ECusum(target=0.12, rise=0.08)


def day_of(losses: list[float], probability: list[float] | None = None) -> Day:
    """A day of requests that each ask another question."""
    n = len(losses)
    return Day.of(np.array(losses), np.array(probability or [1.0] * n), np.arange(n))


def after(watch: ECusum, day: Day) -> ECusum:
    """A day of 0/1 losses at the target, where days are alike."""
    return watch.after(day, variance=watch.target * (1.0 - watch.target), between=0.0)


def test_alarms_at_target_keep_threshold_days() -> None:
    """At the target itself alarms are as many days apart as the threshold."""
    rng = np.random.default_rng(3)
    lengths = []
    for _ in range(100):
        watch, days = WATCH, 0
        while not watch.alarm(threshold=20.0):
            watch = after(watch, day_of((rng.random(50) < 0.12).astype(float).tolist()))
            days += 1
        lengths.append(days)
    assert np.mean(lengths) >= 20.0


def test_quiet_past_delays_no_alarm() -> None:
    quiet = after(WATCH, day_of([0.0] * 5_000))
    bad = day_of([0.5] * 20)
    fresh = after(WATCH, bad)
    assert after(quiet, bad).log_e_values == fresh.log_e_values


def test_no_loss_is_no_evidence() -> None:
    assert (WATCH.e_value, WATCH.n, WATCH.alarm()) == (1.0, 0, False)


@given(st.floats(0.001, 0.98), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=50))
def test_no_loss_can_break_the_bank(target: float, losses: list[float]) -> None:
    watch = after(ECusum(target=target, rise=1.0), day_of(losses))
    assert 0.0 <= watch.e_value < float("inf")
    assert all(map(math.isfinite, watch.log_e_values))


def losses_of_sessions(rng: np.random.Generator, day: int) -> tuple[FloatArray, int]:
    """200 losses in sessions of 4 that correlate with 0.5."""
    of_session = np.repeat(rng.random(50) < 0.12, 4)
    alone = rng.random(200) < 0.12
    return np.where(rng.random(200) < 0.5**0.5, of_session, alone).astype(float), 4


def losses_of_weekdays(rng: np.random.Generator, day: int) -> tuple[FloatArray, int]:
    """Weekends lose half as much; the mean over a week is that promised."""
    return (rng.random(200) < (0.07 if day % 7 > 4 else 0.14)).astype(float), 1


def losses_of_moods(rng: np.random.Generator, day: int) -> tuple[FloatArray, int]:
    """Each day is off by a quarter."""
    return (rng.random(200) < 0.12 * (1.0 + 0.25 * rng.standard_normal())).astype(float), 1


@pytest.mark.parametrize(
    ("draw", "most"), [(losses_of_sessions, 1), (losses_of_weekdays, 1), (losses_of_moods, 6)]
)
def test_correlated_losses_seldom_ring_at_promise(
    draw: Callable[[np.random.Generator, int], tuple[FloatArray, int]], most: int
) -> None:
    """What correlates within sessions or days seldom rings at the promise itself."""
    rng, rang = np.random.default_rng(4), 0
    for _ in range(60):
        monitor = LossMonitor.of_exact_judge(
            PromisedLoss(Route.HYBRID, AlarmKind.RECALL_LOSS, 0.12)
        )
        for day in range(50):
            losses, size = draw(rng, day)
            number = np.arange(len(losses))
            monitor = monitor.after(
                Day.of(losses, np.ones(len(losses)), groups(1 + number // size, number))
            )
            if monitor.is_alarm:
                rang += 1
                break
    assert rang <= most


class TestDays:
    def test_how_much_days_differ_is_learned(self) -> None:
        rng = np.random.default_rng(5)
        alike, differ = Days(), Days()
        for day in range(60):
            lost = rng.random((2, 100)) < np.array([[0.12], [0.07 if day % 2 else 0.17]])
            alike = alike.plus(Days.of(day_of(lost[0].astype(float).tolist())))
            differ = differ.plus(Days.of(day_of(lost[1].astype(float).tolist())))
        assert alike.between(0.12) < 0.02**2
        assert differ.between(0.12) == pytest.approx(0.05**2, rel=0.4)

    def test_days_differ_by_quarter_at_first(self) -> None:
        assert Days().between(0.12) == pytest.approx(0.03**2)
        assert Days().variance(0.12) == pytest.approx(0.12 * 0.88)

    def test_little_scattered_losses_are_seen_so(self) -> None:
        seen = Days.of(day_of([0.2, 0.1] * 500))
        assert seen.variance(0.12) == pytest.approx(0.25 * 0.12 * 0.88)


class TestDay:
    def test_equal_judgments_count_alike(self) -> None:
        day = day_of([0.0, 1.0, 0.5], [0.2, 0.2, 0.2])
        assert (day.weights.tolist(), day.raise_by, day.n) == ([1.0, 1.0, 1.0], 1.0, 3)

    def test_small_burst_silences_nobody(self) -> None:
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
    def test_cut_off_counts_as_lossless_traffic(self, rows: list[tuple[float, int, float]]) -> None:
        probability, question, losses = (np.array(column) for column in zip(*rows, strict=True))
        day = Day.of(losses, probability, question)
        assert day.weights.max() <= 1.0
        all_of_it = float((losses / probability).sum() / (1.0 / probability).sum())
        kept = float(day.weights @ day.losses) / float(day.weights.sum())
        assert kept / day.raise_by <= all_of_it + 1e-9
