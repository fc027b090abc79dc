"""Differences of means over collections, with intervals by resampling each one's queries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import _timing
from ctxguard.core.types import FloatArray
from ctxguard.measure.interval import RESAMPLES


@dataclass(frozen=True)
class Gain:
    """A difference of means with its 95% interval, over n queries (or sets)."""

    mean: float
    lower: float
    upper: float
    n: int


def gain(values: Sequence[FloatArray], seed: int) -> Gain:
    """The mean over sets of the mean over queries; queries are resampled within each set."""
    means = np.mean([_resampled(own, seed + row) for row, own in enumerate(values)], axis=0)
    lower, upper = np.quantile(means, (0.025, 0.975))
    return Gain(
        float(np.mean([own.mean() for own in values])),
        float(lower),
        float(upper),
        values[0].size if len(values) == 1 else len(values),
    )


def environment() -> dict[str, Any]:
    """What figures of quality depend on."""
    return _timing.environment(
        ("ctxguard-rag", "numpy", "scikit-learn", "sentence-transformers", "bm25s", "faiss-cpu")
    )


def _resampled(values: FloatArray, seed: int) -> FloatArray:
    counts = np.random.default_rng(seed).multinomial(
        values.size, np.full(values.size, 1.0 / values.size), size=RESAMPLES
    )
    means: FloatArray = counts @ values / values.size
    return means
