"""Confidence sequences: the truth stays inside at every look, with the probability claimed."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.alarms import gamblers_get_rich
from ctxguard.errors import ConfigurationError
from ctxguard.monitor.sequences import BettingSequence
from ctxguard.types import FloatArray

Draw = Callable[[np.random.Generator, int], FloatArray]
DISTRIBUTIONS: dict[str, tuple[Draw, float]] = {
    "rare": (lambda rng, n: (rng.random(n) < 0.05).astype(float), 0.05),
    "even": (lambda rng, n: (rng.random(n) < 0.5).astype(float), 0.5),
    "smooth": (lambda rng, n: rng.beta(2.0, 6.0, n), 0.25),
}


def excludes_at_some_look(values: FloatArray, mean: float) -> bool:
    sequence = BettingSequence()
    for value in values:
        sequence.add(value)
    # What was excluded once stays excluded: the last look tells of every look.
    interval = sequence.interval
    return interval is None or not interval[0] <= mean <= interval[1]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_truth_is_excluded_only_where_a_gambler_against_it_gets_rich(name: str) -> None:
    draw, mean = DISTRIBUTIONS[name]
    streams = draw(np.random.default_rng(1), 600 * 400).reshape(600, 400)
    rich = gamblers_get_rich(streams, mean)
    # All streams where one does, and as many where none does.
    poor = np.flatnonzero(~rich)[: max(rich.sum(), 10)]
    assert not any(excludes_at_some_look(streams[i], mean) for i in poor)
    # And far from the truth is excluded, so that this is not for want of betting.
    assert all(excludes_at_some_look(streams[i], mean + 0.4) for i in poor)


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_truth_is_seldom_excluded_at_any_of_ten_thousand_looks(name: str) -> None:
    # 5% of 4,000 has a standard error of 0.3%, so that the bound itself can be asked for.
    draw, mean = DISTRIBUTIONS[name]
    rng = np.random.default_rng(2)
    rich = [
        gamblers_get_rich(draw(rng, 1_000 * 10_000).reshape(1_000, 10_000), mean) for _ in range(4)
    ]
    assert np.concatenate(rich).mean() <= 0.05


def test_it_narrows_and_never_widens() -> None:
    rng = np.random.default_rng(3)
    sequence = BettingSequence()
    widths = []
    for _ in range(2_000):
        sequence.add(float(rng.random() < 0.3))
        lower, upper = sequence.interval
        widths.append(upper - lower)
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.13


def test_little_spread_gives_a_narrow_interval() -> None:
    rng = np.random.default_rng(4)
    narrow, wide = BettingSequence(), BettingSequence()
    for _ in range(500):
        narrow.add(0.5 + 0.02 * float(rng.standard_normal()))
        wide.add(float(rng.random() < 0.5))
    widths = [upper - lower for lower, upper in (narrow.interval, wide.interval)]
    assert widths[0] < 0.4 * widths[1]


def test_before_the_first_value_every_mean_is_possible() -> None:
    assert BettingSequence().interval == (0.0, 1.0)


def test_a_mean_that_moves_far_enough_excludes_every_single_mean() -> None:
    sequence = BettingSequence()
    for value in [0.0] * 500 + [1.0] * 500:
        sequence.add(value)
    assert sequence.interval is None


@given(st.lists(st.floats(0.0, 1.0), max_size=40))
def test_the_interval_lies_in_the_unit_interval(values: list[float]) -> None:
    sequence = BettingSequence()
    for value in values:
        sequence.add(value)
    interval = sequence.interval
    assert interval is None or 0.0 <= interval[0] <= interval[1] <= 1.0


@pytest.mark.parametrize("value", [-0.01, 1.01, float("nan")])
def test_a_value_out_of_bounds_is_refused(value: float) -> None:
    with pytest.raises(ConfigurationError, match=r"\[0, 1\]"):
        BettingSequence().add(value)


def test_a_confidence_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="confidence"):
        BettingSequence(confidence=1.0)
