"""Ways to fit the costs of passages that fit utilities is compared with."""

import numpy as np
from numpy.typing import NDArray

from calibration.reader.answers import IntArray
from calibration.reader.within_question import fit_logistic, probability
from ctxguard.core.types import FloatArray

BoolArray = NDArray[np.bool_]

_STEPS = 60
_TOLERANCE = 1e-8


def pooled(
    rows: FloatArray, question: IntArray, correct: BoolArray
) -> tuple[FloatArray, FloatArray]:
    """One logistic regression over all answers: how easy a question is confounds it.

    Returns:
        Coefficients, shape (p,), and their covariance, clustered by question, shape (p, p).
    """
    table = np.column_stack([rows, np.ones(len(rows))])
    beta, inverse = fit_logistic(table, correct)
    scores = _by_question(table * (correct - probability(table, beta))[:, None], question)
    p = rows.shape[1]
    return beta[:p], (inverse @ scores.T @ scores @ inverse)[:p, :p]


def conditional(
    rows: FloatArray, question: IntArray, correct: BoolArray
) -> tuple[FloatArray, FloatArray]:
    """Conditional on how many answers of a question are right, by pairs of a right and a wrong one.

    The pairwise form of conditional logistic regression: Liang and Qin, "Regression analysis under
    non-standard situations: a pairwise pseudolikelihood approach", JRSS B 62, 2000. For questions
    with two answers it is the conditional likelihood itself.

    Returns:
        As ``pooled``.
    """
    differences, weights, owners = [], [], []
    for q in np.unique(question):
        right, wrong = rows[(question == q) & correct], rows[(question == q) & ~correct]
        own = (right[:, None] - wrong[None, :]).reshape(-1, rows.shape[1])
        differences.append(own)
        weights.append(np.full(len(own), 2.0 / (len(right) + len(wrong))))
        owners.append(np.full(len(own), q))
    table, weight = np.concatenate(differences), np.concatenate(weights)
    beta = np.zeros(rows.shape[1])
    for _ in range(_STEPS):
        wrong_first = 1.0 - probability(table, beta)
        information = np.einsum(
            "n,np,nq->pq", weight * wrong_first * (1 - wrong_first), table, table
        )
        inverse = np.linalg.inv(information + 1e-6 * np.eye(len(beta)))
        step = inverse @ (table.T @ (weight * wrong_first))
        beta += step / max(float(np.abs(step).max()) / 2.0, 1.0)
        if float(np.abs(step).max()) < _TOLERANCE:
            break
    scores = _by_question(table * (weight * wrong_first)[:, None], np.concatenate(owners))
    return beta, inverse @ scores.T @ scores @ inverse


def _by_question(scores: FloatArray, question: IntArray) -> FloatArray:
    sums = np.zeros((int(question.max()) + 1, scores.shape[1]))
    np.add.at(sums, question, scores)
    return sums
