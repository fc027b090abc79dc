"""Logistic regression for many weightings of one small table at once, and a test of separation.

Sums run in numpy's own loops, not in a threaded library, so that a result does not depend on the
number of threads.
"""

import numpy as np
from numpy.typing import ArrayLike

from ctxguard._support.extras import require
from ctxguard.core.types import FloatArray

_RIDGE = 1e-6
_STEPS = 60
_TOLERANCE = 1e-7
_LONGEST_STEP = 2.0
_CELLS_AT_ONCE = 1_000_000
_DIRECTION = 1e-6


def fit_logistic(rows: ArrayLike, right: ArrayLike, total: ArrayLike) -> FloatArray:
    """Coefficients of log odds with Jeffreys' prior, one set for each weighting of the rows.

    Maximum likelihood with Firth's correction: finite in every resample, also if the outcomes
    are separated, and without the bias of order 1/n of plain coefficients. Heinze and Schemper,
    Statistics in Medicine 21, 2002.

    Args:
        rows: Shape (n_rows, p), the first column usually 1.
        right: Shape (n_fits, n_rows), how many answers with these columns were right.
        total: Shape (n_fits, n_rows), how many there were, ≥ ``right``.

    Returns:
        Shape (n_fits, p).

    >>> fit_logistic([[1.0]], right=[[3.0]], total=[[4.0]]).round(4).tolist()
    [[0.8473]]
    """
    table = np.asarray(rows, dtype=np.float64)
    right, total = np.asarray(right, dtype=np.float64), np.asarray(total, dtype=np.float64)
    at_once = max(_CELLS_AT_ONCE // max(table.shape[0], 1), 1)
    parts = [
        _newton(table, right[start : start + at_once], total[start : start + at_once])
        for start in range(0, len(right), at_once)
    ]
    return np.concatenate(parts)


def _newton(rows: FloatArray, right: FloatArray, total: FloatArray) -> FloatArray:
    n_fits, p = len(right), rows.shape[1]
    products = (rows[:, :, None] * rows[:, None, :]).reshape(-1, p * p)
    beta = np.zeros((n_fits, p))
    for _ in range(_STEPS):
        mean = probability(rows, beta)
        weight = total * mean * (1.0 - mean)
        information = np.einsum("fr,rk->fk", weight, products).reshape(n_fits, p, p)
        inverse = np.linalg.inv(information + _RIDGE * np.eye(p))
        spread = np.einsum("fk,rk->fr", inverse.reshape(n_fits, p * p), products)
        residual = right - total * mean + weight * spread * (0.5 - mean)
        score = np.einsum("fr,rp->fp", residual, rows) - _RIDGE * beta
        step = np.einsum("fpq,fq->fp", inverse, score)
        longest = np.abs(step).max(axis=1, keepdims=True)
        beta += step * (_LONGEST_STEP / np.maximum(longest, _LONGEST_STEP))
        if longest.max() < _TOLERANCE:
            break
    return beta


def probability(rows: FloatArray, coefficients: FloatArray) -> FloatArray:
    """P(right answer), shape (n_fits, n_rows), for coefficients of shape (n_fits, p)."""
    log_odds = np.einsum("fp,rp->fr", coefficients, rows)
    # Beyond 35 a double cannot tell the probability from 0 or 1, and a weight of 0 has no inverse.
    mean: FloatArray = 1.0 / (1.0 + np.exp(-np.clip(log_odds, -35.0, 35.0)))
    return mean


def separated(rows: ArrayLike, right: ArrayLike, total: ArrayLike) -> tuple[int, ...]:
    """Columns whose maximum-likelihood coefficient is infinite.

    The likelihood rises without end along a direction in which no right answer becomes less
    probable, no wrong one more, and some change. Such directions are found exactly by linear
    programming: Konis, "Linear programming algorithms for detecting separated data", 2007.

    Args:
        rows: Shape (n_rows, p), of full column rank.
        right: Shape (n_rows,), how many answers with these columns were right.
        total: Shape (n_rows,), how many there were.

    Returns:
        Indices of columns, ascending; empty if the estimate is finite.

    Raises:
        MissingExtraError: scipy is not installed.

    >>> separated([[1, 0], [1, 1]], right=[2, 5], total=[4, 5]), separated([[1]], [1], [2])
    ((1,), ())
    """
    table = np.asarray(rows, dtype=np.float64)
    right, total = np.asarray(right), np.asarray(total)
    signed = np.concatenate([table[right > 0], -table[right < total]])
    linprog = require("scipy.optimize", "calibrate").linprog

    def furthest(objective: FloatArray) -> float:
        result = linprog(
            -objective, A_ub=-signed, b_ub=np.zeros(len(signed)), bounds=(-1.0, 1.0), method="highs"
        )
        return -float(result.fun)

    if furthest(signed.sum(axis=0)) <= _DIRECTION:
        return ()
    axes = np.eye(table.shape[1])
    return tuple(
        [
            column
            for column, axis in enumerate(axes)
            if max(furthest(axis), furthest(-axis)) > _DIRECTION
        ]
    )
