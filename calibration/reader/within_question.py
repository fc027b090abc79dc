"""A logistic regression that compares the answers to one question with each other.

Pure: no I/O, no clock, no logging.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.reader.answers import IntArray, TermName
from calibration.reader.logistic import fit_logistic, probability, separated
from ctxguard._support.extras import require
from ctxguard.core.interval import Interval
from ctxguard.core.types import FloatArray

CONFIDENCE = 0.95

_EXACT = 1e-9

Weights = Mapping[TermName, float]
"""A linear combination of coefficients, by the names of their columns."""


@dataclass(frozen=True)
class WithinFit:
    """Effects of a context's columns on the log odds of a right answer, within questions.

    Attributes:
        names: The columns, length p.
        coefficients: Shape (p,), in log odds.
        covariance: Shape (p, p), clustered by question.
        quantile: Quantile of Student's t: the half-width of an interval in standard errors.
        n: Number of answers.
    """

    names: tuple[TermName, ...]
    coefficients: FloatArray
    covariance: FloatArray
    quantile: float
    n: int

    def combination(self, weights: Weights) -> Interval:
        """Estimate a sum of coefficients with its interval."""
        vector = self._vector(weights)
        value = float(vector @ self.coefficients)
        half = self.quantile * math.sqrt(max(self._covariance(vector, vector), 0.0))
        return Interval(value, value - half, value + half, self.n)

    def ratio(self, numerator: Weights, denominator: Weights) -> Interval:
        """Estimate the ratio of two sums of coefficients, with Fieller's interval.

        It has ends only if the denominator differs from 0 at the same confidence. Fieller,
        "Some problems in interval estimation", JRSS B 16, 1954.
        """
        above, below = self._vector(numerator), self._vector(denominator)
        a, b = float(above @ self.coefficients), float(below @ self.coefficients)
        squared = self.quantile**2
        leading = b * b - squared * self._covariance(below, below)
        value = a / b if b else math.nan
        if leading <= 0.0:
            return Interval(value, None, None, self.n)
        middle = a * b - squared * self._covariance(above, below)
        last = a * a - squared * self._covariance(above, above)
        half = math.sqrt(max(middle * middle - leading * last, 0.0))
        return Interval(value, (middle - half) / leading, (middle + half) / leading, self.n)

    def _vector(self, weights: Weights) -> FloatArray:
        return np.array([weights.get(name, 0.0) for name in self.names])

    def _covariance(self, first: FloatArray, second: FloatArray) -> float:
        return float(np.einsum("p,pq,q->", first, self.covariance, second))


def fit_within(
    columns: Mapping[TermName, FloatArray], question: IntArray, correct: NDArray[np.bool_]
) -> tuple[WithinFit, frozenset[TermName]]:
    """Estimate effects on answers that are compared within their questions.

    A column enters as its deviation from the mean over the question's answers, whose coefficient is
    its effect within questions, and the means enter as controls: a question that is easy and gets
    good contexts moves the means alone. Mundlak, "On the pooling of time series and cross section
    data", Econometrica 46, 1978; Neuhaus and Kalbfleisch, "Between- and within-cluster covariate
    effects in the analysis of clustered data", Biometrics 54, 1998.

    A likelihood that is conditional on the number of right answers compares within questions as
    well, but measures how consistently a passage changes answers and not how many it changes: for a
    reader that answers most questions always right or always wrong, it makes costs too large
    (``benchmarks.reader``).

    The covariance is robust to dependence of answers to a question. Liang and Zeger, "Longitudinal
    data analysis using generalized linear models", Biometrika 73, 1986.

    Args:
        columns: The columns, shape (n,) each.
        question: Shape (n,), the question that each row answers, from 0 without a gap.
        correct: Shape (n,), whether each answer is right.

    Returns:
        The effects; and the columns along which right and wrong answers are separated without
        exception, whose effects are not finite.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    names, rows = list(columns), _rows(columns, question)
    beta, inverse = fit_logistic(rows, correct)
    residual = correct - probability(rows, beta)
    n_questions, p = int(question.max()) + 1, len(names)
    scores = np.zeros((n_questions, rows.shape[1]))
    np.add.at(scores, question, rows * residual[:, None])
    # As many degrees of freedom as questions minus columns: otherwise small samples are narrow.
    factor = n_questions / max(n_questions - rows.shape[1], 1)
    middle = np.einsum("qp,qr->pr", scores, scores) * factor
    covariance = np.einsum("pq,qr,rs->ps", inverse, middle, inverse)
    freedom = max(compared_questions(columns, question) - p, 1)
    quantile = require("scipy.stats", "calibrate").t.ppf(0.5 + CONFIDENCE / 2, freedom)
    fitted = WithinFit(tuple(names), beta[:p], covariance[:p, :p], float(quantile), len(rows))
    return fitted, frozenset(names[at] for at in separated(rows, correct) if at < p)


def _rows(columns: Mapping[TermName, FloatArray], question: IntArray) -> FloatArray:
    """Rows (n, p + 1 + controls): deviations, 1, and a basis of the questions' means."""
    table = np.stack(list(columns.values()), axis=1)
    deviations = np.stack([centred(column, question) for column in table.T], axis=1)
    means = table - deviations
    spanned, sizes, _ = np.linalg.svd(means - means.mean(axis=0), full_matrices=False)
    controls = spanned[:, sizes > _EXACT * max(len(table), 1)] * math.sqrt(len(table))
    return np.concatenate([deviations, np.ones((len(table), 1)), controls], axis=1)


def centred(column: FloatArray, groups: IntArray) -> FloatArray:
    """Subtract from a column its mean over each group, shape (n,)."""
    means = np.bincount(groups, weights=column) / np.maximum(np.bincount(groups), 1)
    deviations: FloatArray = column - means[groups]
    return np.where(np.abs(deviations) > _EXACT, deviations, 0.0)


def compared_questions(columns: Mapping[TermName, FloatArray], question: IntArray) -> int:
    """Count the questions with answers to contexts that differ in some column."""
    differs = np.zeros(question.size, dtype=bool)
    for column in columns.values():
        differs |= centred(column, question) != 0.0
    return int(np.unique(question[differs]).size)
