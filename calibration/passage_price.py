"""Prices an irrelevant passage by a reader's answers to two contexts per question.

Pure. The answers of one question are compared with each other, so that its difficulty cancels out.
"""

import math

import numpy as np

from calibration.fit import significant
from ctxguard.core.types import FloatArray
from ctxguard.measure.interval import Interval, t_quantile

FEWEST_QUESTIONS, FEWEST_DIFFERENT = 100, 30
"""The fewest questions for a price: with marked answers, and of those with different contexts."""

CONFIDENCE = 0.95


def irrelevant_utility(correct: FloatArray, relevant: FloatArray, others: FloatArray) -> Interval:
    """Estimate the utility of a passage that is not relevant if a relevant one is worth 1.

    Fits correct = gain · relevant + cost · others by least squares to the differences; the utility
    is cost / gain, negative where such a passage harms. The interval (95%) is Fieller's, with
    variances that hold whatever the noise of each question (HC1).

    Source: Fieller, "Some Problems in Interval Estimation", JRSS B 16, 1954.

    Args:
        correct, relevant, others: Shape (n,) each: one context's mark less the other's, and
            likewise its passages that are relevant, and that are not.

    Returns:
        ``n`` counts the questions with marks. The value is None below 100 of them or below 30
        whose contexts differ in these numbers, and where the answers do not show that a relevant
        passage gains anything.
    """
    design = np.column_stack([relevant, others])
    marked = np.isfinite(correct)
    differs, n = design.any(axis=1) & marked, int(marked.sum())
    design, marks = design[differs], correct[differs]
    different = len(marks)
    if n < FEWEST_QUESTIONS or different < FEWEST_DIFFERENT:
        return Interval.undefined(n)
    if np.linalg.matrix_rank(design) < design.shape[1]:
        return Interval.undefined(n)
    inverse = np.linalg.inv(design.T @ design)
    gain, cost = inverse @ (design.T @ marks)
    errors = design * (marks - design @ (gain, cost))[:, None]
    variances = inverse @ (errors.T @ errors) @ inverse * different / (different - 2)
    squared = t_quantile((1.0 + CONFIDENCE) / 2.0, different - 2.0) ** 2
    # The utilities u for which cost − u · gain may be 0: a quadratic in u, at most 0.
    second = gain**2 - squared * variances[0, 0]
    if gain <= 0.0 or second <= 0.0:
        return Interval.undefined(n)
    first = gain * cost - squared * variances[0, 1]
    last = cost**2 - squared * variances[1, 1]
    half = math.sqrt(max(first**2 - second * last, 0.0))
    lower, upper = (significant((first + sign * half) / second) for sign in (-1.0, 1.0))
    return Interval(significant(cost / gain), lower, upper, n)
