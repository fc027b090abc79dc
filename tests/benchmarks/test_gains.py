"""Means over collections."""

import numpy as np

from benchmarks._gains import gain


def test_mean_weighs_sets_alike() -> None:
    found = gain([np.full(1_000, 1.0), np.full(10, 0.0)], seed=0)
    assert (found.mean, found.lower, found.upper, found.n) == (0.5, 0.5, 0.5, 2)
