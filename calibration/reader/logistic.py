"""Logistic regression with Jeffreys' prior, and a test of separation.

Sums run in numpy's own loops, not in a threaded library, so that a result does not depend on the
number of threads.
"""

import numpy as np
from numpy.typing import ArrayLike

from ctxguard._support.extras import require
from ctxguard.core.types import FloatArray

_RIDGE = 1e-6
_STEPS = 60
_TOLERANCE = 1e-8
_LONGEST_STEP = 2.0
_DIRECTION = 1e-6


def fit_logistic(rows: ArrayLike, right: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Fit coefficients of log odds with Jeffreys' prior.

    Maximum likelihood with Firth's correction: finite also if the outcomes are separated, and
    without the bias of order 1/n of plain coefficients. Heinze and Schemper, Statistics in Medicine
    21, 2002.

    Args:
        rows: Shape (n, p), one column usually 1.
        right: Shape (n,), whether each outcome is 1.

    Returns:
        The coefficients, shape (p,), and the inverse of their information, shape (p, p).

    >>> fit_logistic([[1.0]] * 4, [True, True, True, False])[0].round(4).tolist()
    [0.8473]
    """
    table, outcome = np.asarray(rows, dtype=np.float64), np.asarray(right, dtype=np.float64)
    beta = np.zeros(table.shape[1])
    for _ in range(_STEPS):
        mean = probability(table, beta)
        weight = mean * (1.0 - mean)
        inverse = _inverse_information(table, weight)
        leverage = weight * np.einsum("rp,pq,rq->r", table, inverse, table)
        residual = outcome - mean + leverage * (0.5 - mean)
        step = np.einsum("pq,q->p", inverse, np.einsum("r,rp->p", residual, table) - _RIDGE * beta)
        longest = float(np.abs(step).max())
        beta += step * (_LONGEST_STEP / max(longest, _LONGEST_STEP))
        if longest < _TOLERANCE:
            break
    mean = probability(table, beta)
    return beta, _inverse_information(table, mean * (1.0 - mean))


def _inverse_information(rows: FloatArray, weight: FloatArray) -> FloatArray:
    information = np.einsum("r,rp,rq->pq", weight, rows, rows)
    inverse: FloatArray = np.linalg.inv(information + _RIDGE * np.eye(rows.shape[1]))
    return inverse


def probability(rows: FloatArray, coefficients: FloatArray) -> FloatArray:
    """Compute P(outcome 1), shape (n,)."""
    log_odds = np.einsum("rp,p->r", rows, coefficients)
    # Beyond 35 a double cannot tell the probability from 0 or 1, and a weight of 0 has no inverse.
    mean: FloatArray = 1.0 / (1.0 + np.exp(-np.clip(log_odds, -35.0, 35.0)))
    return mean


def separated(rows: ArrayLike, right: ArrayLike) -> tuple[int, ...]:
    """Find the columns whose maximum-likelihood coefficient is infinite.

    The likelihood rises without end along a direction in which no right answer becomes less
    probable, no wrong one more, and some change. Linear programming finds such directions exactly:
    Konis, "Linear programming algorithms for detecting separated data", 2007.

    Args:
        rows: Shape (n, p), of full column rank.
        right: Shape (n,), whether each outcome is 1.

    Returns:
        Indices of columns, ascending; empty if the estimate is finite.

    Raises:
        MissingExtraError: scipy is not installed.

    >>> separated([[1, 0], [1, 0], [1, 1]], [True, False, True]), separated([[1]] * 2, [1, 0])
    ((1,), ())
    """
    table, outcome = np.asarray(rows, dtype=np.float64), np.asarray(right, dtype=bool)
    signed = np.unique(np.where(outcome[:, None], table, -table), axis=0)
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
