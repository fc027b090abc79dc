"""Arithmetic shared by the measures: means of defined values, shares, logarithmic discount.

Pure: no I/O, no clock, no logging.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ctxguard.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over queries.

    Attributes:
        value: The mean of the defined values; None if there are none.
        n: Number of defined values.
    """

    value: float | None
    n: int


def mean(values: Iterable[float | None]) -> Mean:
    """Average the defined values and count them; NaN where they hold infinities of both signs.

    >>> mean([1.0, None, 0.5])
    Mean(value=0.75, n=2)
    >>> mean([None])
    Mean(value=None, n=0)
    """
    defined = [value for value in values if value is not None]
    if not defined:
        return Mean(None, 0)
    return Mean(_sum(defined) / len(defined), len(defined))


def share(part: float, whole: int) -> float | None:
    """part / whole; None if ``whole`` is 0."""
    return part / whole if whole else None


def discounted_sum(values: Sequence[float]) -> float:
    """Return Σ value_i / log2(i + 1) over the 1-based ranks i."""
    return _sum(value / math.log2(rank + 1) for rank, value in enumerate(values, start=1))


def _sum(values: Iterable[float]) -> float:
    try:
        return math.fsum(values)
    except ValueError:
        # −inf + inf
        return math.nan


def check_k(k: int) -> None:
    """Check that a cut-off leaves at least one rank."""
    if k < 1:
        raise ConfigurationError(f"k {k!r} must be at least 1: ranks start at 1")
