"""The alarms benchmark simulates what the monitor runs, and holds it to its bars."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import alarms
from benchmarks._alarm_designs import DESIGNS, Design, tell
from benchmarks._alarm_designs import missed_bars as missed_design_bars
from benchmarks._alarm_judges import Comparing, recall_losses
from benchmarks._alarm_rhythms import NEW, RHYTHMS, Rhythm, ring_in
from benchmarks._alarm_rhythms import missed_bars as missed_rhythm_bars
from benchmarks.alarms import LOSSES, Ringing, main, missed_bars, missed_judge_bars, ring
from ctxguard.monitor.alarms import ReferenceKind


@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design.name)
def test_mixed_sessions_ring_rarely_at_promise(design: Design) -> None:
    """Sessions and days that differ ring seldom at the promise, and soon at a doubled loss."""
    told = [tell(design, 1_000, 40, 3)]
    assert missed_design_bars(told, 0.05) == []


@pytest.mark.parametrize("reference", NEW)
@pytest.mark.parametrize("rhythm", RHYTHMS, ids=lambda rhythm: rhythm.name)
def test_rhythms_ring_rarely_at_promise(rhythm: Rhythm, reference: ReferenceKind) -> None:
    rungs = [ring_in(rhythm, reference, per_day, 40, 1) for per_day in (200, 1_000)]
    assert missed_rhythm_bars(rungs, alarms.MOST_FALSE_ALARMS) == []


def test_erring_judge_shifts_the_mean() -> None:
    losses = recall_losses(0.1, 0.85, 0.9)
    assert np.nanmean(losses.true) == pytest.approx(0.1, abs=0.005)
    assert np.nanmean(losses.judged) > 0.25


@pytest.mark.parametrize("losses", LOSSES)
def test_simulated_losses_have_their_mean(losses: str) -> None:
    values = LOSSES[losses](np.random.default_rng(2), 0.2, (100, 2_000))
    assert values.mean() == pytest.approx(0.2, abs=0.01)
    assert 0.0 <= values.min() <= values.max() <= 1.0


def test_the_alarm_keeps_its_bars() -> None:
    repeats = 40
    ringings = [ring(name, draw, repeats, 3) for name, draw in LOSSES.items()]
    assert missed_bars(ringings, repeats) == []


def test_a_missed_bar_is_named() -> None:
    slow = Ringing("0 or 1", 100, 5, 10, 0, 0, 600.0, 700.0)
    assert missed_bars([slow], 100) == ["0 or 1: 5 false alarms", "0 or 1: median delay 600.0"]


def test_missed_bar_of_judge_is_named() -> None:
    exact = Comparing("harm", 1.0, 1.0, "promise", 0, 0, 0.1, 100, 0, 0, 100.0, 200.0, 100.0, 80.0)
    erring = replace(
        exact, sensitivity=0.9, reference="baseline", false_alarms=3, known_delay=151.0
    )
    assert missed_judge_bars([exact, erring]) == [
        "harm, judge 0.9/1.0, baseline: 3 false alarms",
        "harm, judge 0.9/1.0, baseline: delay 151.0 with a known target",
    ]


def test_no_repeats_are_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--repeats", "0"])
