"""The alarms benchmark simulates what the monitor runs, and holds it to its bars."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.alarms import (
    LOSSES,
    WATCHED,
    Ringing,
    early_warnings,
    ecusum,
    main,
    missed_bars,
    ring,
)


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("mean", [0.12, 0.3])
def test_many_streams_at_once_ring_when_the_watch_itself_does(losses: str, mean: float) -> None:
    streams = LOSSES[losses](np.random.default_rng(1), mean, (8, 400))
    expected = []
    for stream in streams.tolist():
        watch, rang = WATCHED, 0
        for n, loss in enumerate(stream, start=1):
            watch = watch.after(loss)
            if watch.alarm():
                rang = n
                break
        expected.append(rang)
    assert ecusum(streams).tolist() == expected
    assert any(expected) == (mean == 0.3)


@pytest.mark.parametrize("losses", LOSSES)
def test_simulated_losses_have_the_mean_they_are_said_to_have(losses: str) -> None:
    values = LOSSES[losses](np.random.default_rng(2), 0.2, (100, 2_000))
    assert values.mean() == pytest.approx(0.2, abs=0.01)
    assert 0.0 <= values.min() <= values.max() <= 1.0


def test_the_alarm_keeps_its_bars() -> None:
    repeats = 40
    ringings = [found for name, draw in LOSSES.items() for found in ring(name, draw, repeats, 3)]
    assert missed_bars(ringings, repeats) == []


def test_the_early_warning_is_soon_and_seldom_false() -> None:
    found = early_warnings(10, seed=5)
    assert sum(found.quiet_streams.values()) <= 1
    assert found.moved == found.other_from_start == 10
    assert found.median_delay is not None
    assert found.median_delay <= 400


def test_a_missed_bar_is_named() -> None:
    slow = Ringing("0 or 1", "e-CUSUM", 100, 5, 10, 0, 0, 400.0, 700.0)
    peer = Ringing("0 or 1", "ADWIN", 100, 50, 50, 0, 0, 900.0, None)
    assert missed_bars([slow, peer], 100) == [
        "e-CUSUM, 0 or 1: 5 false alarms",
        "e-CUSUM, 0 or 1: median delay 400.0",
    ]


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    file = tmp_path / "alarms.json"
    assert main(["--repeats", "1", "--json", str(file)]) == 0
    assert len(json.loads(file.read_text(encoding="utf-8"))["ringing"]) == 8


def test_no_repeats_are_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--repeats", "0"])
