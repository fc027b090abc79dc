"""Defines a value with its interval and n, and computes means with bootstrap intervals. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, Self

import numpy as np

from ctxguard.core.types import FloatArray

CONFIDENCE = 0.95
"""Confidence level of an interval unless stated otherwise."""
RESAMPLES = 2_000
_RESAMPLED = 200


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval.

    Attributes:
        value: None where it is undefined, or must not be shown.
        lower, upper: The ends of the interval; None without one.
        n: Observations on which the value is defined, usually queries.
    """

    value: float | None
    lower: float | None
    upper: float | None
    n: int

    @classmethod
    def undefined(cls, n: int = 0) -> Self:
        return cls(None, None, None, n)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Both ends; None unless there are two.

        >>> Interval(0.5, 0.25, 0.75, 9).bounds
        (0.25, 0.75)
        """
        return None if self.lower is None or self.upper is None else (self.lower, self.upper)

    @property
    def side(self) -> Literal["higher", "lower"] | None:
        """The side of 0 on which the whole interval lies; None if it contains 0, or has no ends.

        >>> Interval(0.5, 0.25, 0.75, 9).side, Interval(0.1, -0.2, 0.4, 9).side
        ('higher', None)
        """
        if self.bounds is None or self.bounds[0] <= 0.0 <= self.bounds[1]:
            return None
        return "higher" if self.bounds[0] > 0.0 else "lower"


def t_quantile(p: float, df: float) -> float:
    """Compute a quantile of Student's t by the expansion in 1/df around the normal one.

    Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.5. Within 0.1% for
    df ≥ 6 at p = 0.975, for df ≥ 9 at 0.995; scipy would be a large dependency for one number.

    >>> round(t_quantile(0.975, 29), 3)
    2.045
    """
    z = NormalDist().inv_cdf(p)
    return (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
    )


def bootstrap_interval(
    values: FloatArray, *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Compute the mean of the defined values with its percentile interval, resampling queries.

    Efron and Tibshirani, An Introduction to the Bootstrap, 1993, §13. One value cannot be
    resampled: its bounds are None.

    >>> interval = bootstrap_interval(np.array([0.0, 1.0, np.nan, 1.0]))
    >>> round(interval.value, 4), interval.n
    (0.6667, 3)
    """
    return bootstrap_intervals([values], seed=seed, resamples=resamples)[0]


def bootstrap_intervals(
    columns: Iterable[FloatArray], *, seed: int = 0, resamples: int = RESAMPLES
) -> list[Interval]:
    """Compute ``bootstrap_interval`` of several columns of the same queries.

    Columns that are defined on the same queries are resampled together, which is faster.
    """
    columns = list(columns)
    defined = [~np.isnan(column) for column in columns]
    groups: dict[bytes, list[int]] = {}
    for place, known in enumerate(defined):
        groups.setdefault(known.tobytes(), []).append(place)
    found = [Interval.undefined()] * len(columns)
    for places in groups.values():
        known = defined[places[0]]
        n = int(known.sum())
        if n == 0:
            continue
        values = [columns[place][known] for place in places]
        ends: list[list[float | None]] = [[None, None]] * len(places)
        if n > 1:
            table = np.column_stack(values)
            samples = resampled_means(table, seed=seed, resamples=resamples)
            ends = interval_bounds(samples).T.tolist()
        for place, column, (lower, upper) in zip(places, values, ends, strict=True):
            found[place] = Interval(float(column.mean()), lower, upper, n)
    return found


def bootstrap_ratio(parts: FloatArray, wholes: FloatArray, *, seed: int = 0) -> Interval:
    """Compute Σ parts / Σ wholes and its percentile interval, over the queries that have a whole.

    >>> ratio = bootstrap_ratio(np.array([1.0, 0.0]), np.array([2.0, 2.0]))
    >>> ratio.value, ratio.n
    (0.25, 2)
    """
    some = wholes > 0
    n = int(some.sum())
    if n == 0:
        return Interval.undefined()
    value = float(parts[some].sum() / wholes[some].sum())
    if n == 1:
        return Interval(value, None, None, n)
    means = resampled_means(np.column_stack([parts[some], wholes[some]]), seed=seed)
    lower, upper = interval_bounds(means[:, 0] / means[:, 1]).tolist()
    return Interval(value, lower, upper, n)


def interval_bounds(samples: FloatArray) -> FloatArray:
    """Return the ends of the percentile interval of bootstrap samples, along the first axis."""
    tail = (1.0 - CONFIDENCE) / 2.0
    return np.asarray(np.quantile(samples, [tail, 1.0 - tail], axis=0))


def resampled_means(values: FloatArray, *, seed: int = 0, resamples: int = RESAMPLES) -> FloatArray:
    """Return the means of columns over resampled rows, shape (resamples, n_columns).

    The columns of a row are resampled together, so that differences between columns are paired.
    """
    n = values.shape[0]
    random = np.random.default_rng(seed)
    # Drawing multinomial counts of the rows resamples them. The product is not a matrix product,
    # whose order of sums depends on the number of threads.
    shares, means = np.full(n, 1.0 / n), list[FloatArray]()
    for first in range(0, resamples, _RESAMPLED):
        size = min(_RESAMPLED, resamples - first)
        counts = random.multinomial(n, shares, size=size).astype(np.float64)
        means.append(np.einsum("rn,nc->rc", counts, values) / n)
    return np.concatenate(means)
