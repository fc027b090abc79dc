"""A logistic regression that compares the answers to one question with each other.

Sums run in numpy's own loops, not in a threaded library, so that a result does not depend on the
number of threads. Pure: no I/O, no clock, no logging.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calibration.reader.answers import COSTS, TERMS, IntArray
from ctxguard._support.extras import require
from ctxguard.core.interval import Interval
from ctxguard.core.types import FloatArray

CONFIDENCE = 0.95

MIN_OWN_VARIATION = 0.05
"""Minimum share of a term's variance that other terms do not explain (inflation 20)."""

MIN_CARRYING_QUESTIONS = 10

_EXACT = 1e-9
_DIGITS = 9
_RIDGE = 1e-6
_STEPS = 60
_TOLERANCE = 1e-8
_LONGEST_STEP = 2.0
_DIRECTION = 1e-6

Weights = Mapping[str, float]
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

    names: tuple[str, ...]
    coefficients: FloatArray
    covariance: FloatArray
    quantile: float
    n: int

    def ratio(self, numerator: Weights, denominator: Weights | None = None) -> Interval:
        """Estimate the ratio of two sums of coefficients, with Fieller's interval.

        It has ends only if the denominator differs from 0 at the same confidence. Fieller,
        "Some problems in interval estimation", JRSS B 16, 1954. Without a denominator it is the
        sum itself.
        """
        above = np.array([numerator.get(name, 0.0) for name in self.names])
        below = np.array([(denominator or {}).get(name, 0.0) for name in self.names])
        a = float(above @ self.coefficients)
        b = 1.0 if denominator is None else float(below @ self.coefficients)
        both = np.stack([above, below])
        spread = self.quantile**2 * np.einsum("ip,pq,jq->ij", both, self.covariance, both)
        leading, middle, last = b * b - spread[1, 1], a * b - spread[0, 1], a * a - spread[0, 0]
        value = a / b if b else math.nan
        if leading <= 0.0:
            return Interval(value, None, None, self.n)
        half = math.sqrt(max(middle * middle - leading * last, 0.0))
        lower, upper = float((middle - half) / leading), float((middle + half) / leading)
        return Interval(value, lower, upper, self.n)


def fit_within(
    columns: Mapping[str, FloatArray], question: IntArray, correct: NDArray[np.bool_]
) -> WithinFit | None:
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
        The effects; None if right and wrong answers are separated without exception, so that
        some effect is not finite.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    table = np.stack(list(columns.values()), axis=1)
    deviations = np.stack([centred(column, question) for column in table.T], axis=1)
    means = table - deviations
    spanned, sizes, _ = np.linalg.svd(means - means.mean(axis=0), full_matrices=False)
    controls = spanned[:, sizes > _EXACT * max(len(table), 1)] * math.sqrt(len(table))
    rows = np.concatenate([deviations, np.ones((len(table), 1)), controls], axis=1)
    if separated(rows, correct):
        return None
    beta, inverse = fit_logistic(rows, correct)
    residual = correct - probability(rows, beta)
    n_questions, p = int(question.max()) + 1, len(columns)
    scores = np.zeros((n_questions, rows.shape[1]))
    np.add.at(scores, question, rows * residual[:, None])
    # As many degrees of freedom as questions minus columns: otherwise small samples are narrow.
    factor = n_questions / max(n_questions - rows.shape[1], 1)
    middle = np.einsum("qp,qr->pr", scores, scores) * factor
    covariance = np.einsum("pq,qr,rs->ps", inverse, middle, inverse)
    freedom = max(compared_questions(columns, question) - p, 1)
    quantile = require("scipy.stats", "calibrate").t.ppf(0.5 + CONFIDENCE / 2, freedom)
    return WithinFit(tuple(columns), beta[:p], covariance[:p, :p], float(quantile), len(rows))


def fit_logistic(rows: ArrayLike, right: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Fit coefficients of log odds with Jeffreys' prior.

    Maximum likelihood with Firth's correction, without the bias of order 1/n of plain
    coefficients. Heinze and Schemper, Statistics in Medicine 21, 2002.

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
    ridge = _RIDGE * np.eye(beta.size)
    for _ in range(_STEPS):
        mean = probability(table, beta)
        weight = mean * (1.0 - mean)
        inverse = np.linalg.inv(np.einsum("r,rp,rq->pq", weight, table, table) + ridge)
        leverage = weight * np.einsum("rp,pq,rq->r", table, inverse, table)
        residual = outcome - mean + leverage * (0.5 - mean)
        step = np.einsum("pq,q->p", inverse, np.einsum("r,rp->p", residual, table) - _RIDGE * beta)
        longest = float(np.abs(step).max())
        beta += step * (_LONGEST_STEP / max(longest, _LONGEST_STEP))
        if longest < _TOLERANCE:
            break
    return beta, inverse


def probability(rows: FloatArray, coefficients: FloatArray) -> FloatArray:
    """Compute P(outcome 1), shape (n,)."""
    log_odds = np.einsum("rp,p->r", rows, coefficients)
    # Beyond 35 a double cannot tell the probability from 0 or 1, and a weight of 0 has no inverse.
    mean: FloatArray = 1.0 / (1.0 + np.exp(-np.clip(log_odds, -35.0, 35.0)))
    return mean


def separated(rows: ArrayLike, right: ArrayLike) -> bool:
    """Tell whether the maximum-likelihood estimate is infinite.

    The likelihood rises without end along a direction in which no right answer becomes less
    probable, no wrong one more, and some change. Linear programming finds such directions exactly:
    Konis, "Linear programming algorithms for detecting separated data", 2007.

    Args:
        rows: Shape (n, p), of full column rank.
        right: Shape (n,), whether each outcome is 1.

    Raises:
        MissingExtraError: scipy is not installed.

    >>> separated([[1, 0], [1, 0], [1, 1]], [True, False, True]), separated([[1]] * 2, [1, 0])
    (True, False)
    """
    table, outcome = np.asarray(rows, dtype=np.float64), np.asarray(right, dtype=bool)
    signed = np.unique(np.where(outcome[:, None], table, -table), axis=0)
    furthest = require("scipy.optimize", "calibrate").linprog(
        -signed.sum(axis=0), A_ub=-signed, b_ub=np.zeros(len(signed)), bounds=(-1.0, 1.0)
    )
    return -float(furthest.fun) > _DIRECTION


def centred(column: FloatArray, groups: IntArray) -> FloatArray:
    """Subtract from a column its mean over each group, shape (n,)."""
    means = np.bincount(groups, weights=column) / np.maximum(np.bincount(groups), 1)
    deviations: FloatArray = column - means[groups]
    return np.where(np.abs(deviations) > _EXACT, deviations, 0.0)


def compared_questions(columns: Mapping[str, FloatArray], question: IntArray) -> int:
    """Count the questions with answers to contexts that differ in some column."""
    differs = np.any([centred(column, question) != 0.0 for column in columns.values()], axis=0)
    return int(np.unique(question[differs]).size)


def unidentified(
    columns: Mapping[str, FloatArray], needed: IntArray, question: IntArray
) -> dict[str, str]:
    """Return the terms that these contexts cannot identify, whatever the answers, with the reason.

    Only differences between the contexts of one question count. Counts of passages that are not
    relevant must also differ among contexts with the same numbers of held and needed passages: if
    all contexts of a question have one size, these counts follow from the number of relevant
    passages, and only an assumed curve could tell the two apart. ``relevant`` and ``completeness``
    form the unit together, so ``relevant`` need not be told from it, nor from a count that is
    refused, which leaves the model.

    Args:
        columns: From ``answers.term_columns``, shape (n,) each.
        needed: Shape (n,), number of relevant passages of each row's question.
        question: Shape (n,), the question that each row answers.
    """
    within = {name: centred(column, question) for name, column in columns.items()}
    varying = [name for name in TERMS if within[name].any()]
    pairs = np.stack([columns["relevant"].round(_DIGITS), needed], axis=1)
    values, own = np.unique(pairs, axis=0, return_inverse=True)
    each_pair = [centred((own.ravel() == value) * 1.0, question) for value in range(len(values))]
    reasons: dict[str, str] = {}
    for name in (*COSTS, "position", "relevant", "completeness"):
        others = [other for other in varying if other != name]
        if name in ("relevant", "completeness"):
            others = [other for other in others if other not in reasons]
        if name == "relevant":
            others = [other for other in others if other != "completeness"]
        reason: str | None = "it is the same in every context of a question"
        if name in varying:
            held = each_pair if name in COSTS else []
            reason = _shared(within[name], [*held, *[within[each] for each in others]], question)
        elif name in COSTS and not columns[name].any():
            reason = "the number of such passages is 0 in every context"
        if reason is not None:
            reasons[name] = reason
    return reasons


def _shared(column: FloatArray, others: list[FloatArray], question: IntArray) -> str | None:
    """Explain why a column has too little variation beside others; None if it has enough."""
    residual = column
    if others:
        table = np.stack(others, axis=1)
        residual = column - table @ np.linalg.lstsq(table, column, rcond=None)[0]
    if (residual**2).sum() < MIN_OWN_VARIATION * (column**2).sum():
        return (
            f"within questions under {MIN_OWN_VARIATION:.0%} of its variation is its own: it "
            "cannot be told from the other terms and the number of relevant passages (contexts of "
            "one size?)"
        )
    by_question = np.bincount(question, weights=residual**2)
    carrying = float(by_question.sum() ** 2 / (by_question**2).sum())
    if carrying < MIN_CARRYING_QUESTIONS:
        return (
            f"its own variation rests on the equivalent of {carrying:.0f} questions; "
            f"{MIN_CARRYING_QUESTIONS} are needed"
        )
    return None
