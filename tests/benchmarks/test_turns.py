"""The interval of a median ratio between two checkouts."""

import numpy as np

from benchmarks.turns import of_turns

TURNS = 15


def test_interval_lies_between_order_statistics() -> None:
    former = [100.0] * TURNS
    here = [100.0 + turn for turn in range(TURNS)]

    ratio = of_turns(here, former)

    assert ratio.median == 1.07
    # Of 15 ordered values the 4th and the 12th hold the median with a chance of 96.5%.
    assert (ratio.lower, ratio.upper) == (1.03, 1.11)


def test_interval_covers_median_95_percent() -> None:
    chance = np.random.default_rng(0)
    held = [
        (found := of_turns(chance.lognormal(0.0, 0.2, TURNS).tolist(), [1.0] * TURNS)).lower
        <= 1.0
        <= found.upper
        for _ in range(2_000)
    ]

    assert np.mean(held) >= 0.95
