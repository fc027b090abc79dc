"""How much each query counts: means over requests where a query stands for several.

Pure. A weight is in (0, 1], in units of the weight of the query that counts most; where all are 1,
every figure is that of the plain formula, to the last bit.
"""

import numpy as np

from ctxguard.core.types import FloatArray


def weighted_mean(values: FloatArray, weights: FloatArray) -> FloatArray:
    """Average along the first axis, of shape (n,) or (n, n_columns), with n ≥ 1 weights.

    >>> float(weighted_mean(np.array([0.0, 1.0]), np.array([1.0, 0.5])))
    0.3333333333333333
    """
    column = weights.reshape(-1, *[1] * (values.ndim - 1))
    mean: FloatArray = (column * values).sum(axis=0) / weights.sum()
    return mean


def significant(value: float, digits: int = 6) -> float:
    """Round to so many significant digits, more than labels support: files stay short.

    >>> significant(0.123456789), significant(1234.5678, 5)
    (0.123457, 1234.6)
    """
    return float(f"{value:.{digits}g}")


def pair_share(above: FloatArray, below: FloatArray) -> float:
    """Return the share of pairs in which a value of the first is higher, ties half.

    >>> pair_share(np.array([2.0, 1.0]), np.array([1.0]))
    0.75
    """
    wins = sum(np.searchsorted(np.sort(below), above, side).sum() for side in ("left", "right"))
    return float(wins / 2.0 / (above.size * below.size))


def effective_number(weights: FloatArray) -> float:
    """Count how many of equal weight would give as precise a mean: (Σ w)² / Σ w².

    Source: Kish, Survey Sampling, 1965, §8.2.

    >>> effective_number(np.full(8, 0.5)), effective_number(np.array([1.0, 0.5, 0.5]))
    (8.0, 2.6666666666666665)
    """
    return float(weights.sum() ** 2 / (weights**2).sum()) if weights.size else 0.0


def n_equivalent(weights: FloatArray) -> float | None:
    """Count queries of the largest weight that these weigh together; None for equal weights.

    A bound by betting is about as wide as one from so many queries of equal weight.
    """
    return None if (weights == 1.0).all() else significant(weights.sum())


def counted(weights: FloatArray) -> FloatArray:
    """Scale weights to sum to their effective number: each query's share of it."""
    if not weights.size:
        return weights
    shares: FloatArray = weights * (weights.sum() / (weights**2).sum())
    return shares


def with_lost_queries(
    differences: FloatArray, weights: FloatArray, lost: float
) -> tuple[FloatArray, FloatArray]:
    """Return mean and standard error, with ``lost`` queries of difference −1 added.

    Where nothing was lost on any query, a plain standard error of 0 would say that nothing ever is.

    >>> mean, error = with_lost_queries(np.zeros(9), np.ones(9), 1.0)
    >>> round(float(mean), 3), round(float(error), 3)
    (-0.1, 0.095)
    """
    column = weights.reshape(-1, *[1] * (differences.ndim - 1))
    n = weights.sum() + lost
    mean = ((column * differences).sum(axis=0) - lost) / n
    squares = (column * (differences - mean) ** 2).sum(axis=0) + lost * (-1.0 - mean) ** 2
    return mean, np.sqrt(squares) / n


def deciles(values: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the 0, 10, …, 100% quantiles of the values that are defined; at least one is.

    Of unequal weights each is the least value that such a share of the weight does not exceed.
    """
    shares = np.linspace(0.0, 1.0, 11)
    defined = ~np.isnan(values)
    values, weights = values[defined], weights[defined]
    if (weights == weights[0]).all():
        quantiles: FloatArray = np.quantile(values, shares)
        return quantiles
    order = np.argsort(values, kind="stable")
    reached = weights[order].cumsum() / weights.sum()
    return values[order][np.searchsorted(reached[:-1], shares)]
