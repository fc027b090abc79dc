"""Predicts the relevance of judged passages from the grades of people.

A ridge-penalised logistic regression of people's verdict on the judge's and its score, on where the
passage stands and on how many of the request's other served passages the judge calls relevant: a
judge that misunderstands a question is wrong about all of its passages. It is fitted five times,
each without a fifth of the graded requests, so that no passage is predicted by its own grade. Pure:
no I/O, no clock, no logging.
"""

from dataclasses import dataclass

import numpy as np

from ctxguard.core.types import FloatArray
from ctxguard.monitor.estimation.rows import MISSING, N_GROUPS, YES, IntArray, Rows

FOLDS = 5

_PRIOR = np.array([-0.8, 2.2, 1.0, 0.0, 0.0, -1.5, -2.0, 1.0, 0.0, 0.3])
"""Coefficients before anybody graded anything: a judge of about 0.85 and 0.9."""
_PENALTY = np.array([0.1, 0.5, 0.5, 1.0, 1.0, 0.3, 0.3, 0.5, 1.0, 1.0])
_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Model:
    """Predicts P(relevant) by the judge's verdict and score, rank group and the other verdicts.

    Attributes:
        coefficients: Shape (FOLDS, 10); each row was fitted without one fold.
        gain: Mean gain of a passage that people call relevant.
        harm: Mean harm of one that they do not.
    """

    coefficients: FloatArray
    gain: float = 1.0
    harm: float = 0.5

    @classmethod
    def fitted(cls, graded: Rows, fold: IntArray) -> "Model":
        """Fit the regression to the passages that a draw had graded; without any it is the prior.

        Args:
            graded: Requests, n of them.
            fold: Shape (n,), below ``FOLDS``.
        """
        own = graded.passages["chance"] > 0.0
        if not own.any():
            return cls(np.tile(_PRIOR, (FOLDS, 1)))
        columns, relevant = _columns(graded)[own], (graded.passages["grade"][own] > 0) * 1.0
        of_passage = fold[graded.request[own]]
        worth = graded.passages["people_worth"][own].astype(np.float64)
        gains, harms = worth[relevant > 0.0], -worth[relevant == 0.0]
        return cls(
            np.array(
                [
                    _fit(columns[of_passage != one], relevant[of_passage != one])
                    for one in range(FOLDS)
                ]
            ),
            gain=float(gains.mean()) if len(gains) else 1.0,
            harm=float(harms.mean()) if len(harms) else 0.5,
        )

    def of(self, rows: Rows, fold: IntArray | None = None) -> FloatArray:
        """Predict P(relevant) of every passage, shape (m,).

        Args:
            fold: Shape (n,), the fold that is left out of each request; None for the mean of all
                fits.
        """
        columns = _columns(rows)
        if fold is None:
            return np.asarray(_logistic(self.coefficients @ columns.T).mean(axis=0))
        own = self.coefficients[fold[rows.request]]
        return _logistic((columns * own).sum(axis=1))


def _columns(rows: Rows) -> FloatArray:
    passages = rows.passages
    is_served, is_yes = (passages["rank"] > 0) * 1.0, (passages["verdict"] == YES) * 1.0
    n_yes = rows.total(is_yes * is_served)[rows.request]
    n_others = rows.requests["n_served"][rows.request] - is_served
    share = (n_yes - is_yes * is_served + 0.5) / np.maximum(n_others + 1.0, 1.0)
    share = np.clip(share, 0.0, 1.0) - 0.5
    columns = np.empty((len(_PRIOR), len(passages)))
    columns[:3] = np.ones(len(passages)), is_yes, passages["verdict"] == MISSING
    columns[3 : 2 + N_GROUPS] = passages["group"] == np.arange(1, N_GROUPS)[:, None]
    columns[2 + N_GROUPS :] = share, share * is_yes, passages["score"]
    return columns.T


def _fit(columns: FloatArray, relevant: FloatArray) -> FloatArray:
    """Fit by Newton's method, with steps halved until the penalised likelihood rises."""

    def loss(coefficients: FloatArray) -> float:
        odds = columns @ coefficients
        apart = coefficients - _PRIOR
        likelihood = np.logaddexp(0.0, odds).sum() - relevant @ odds
        return float(likelihood + 0.5 * _PENALTY @ apart**2)

    coefficients = _PRIOR.copy()
    for _ in range(_ROUNDS):
        p = _logistic(columns @ coefficients)
        gradient = columns.T @ (relevant - p) - _PENALTY * (coefficients - _PRIOR)
        curvature = (columns.T * (p * (1.0 - p))) @ columns + np.diag(_PENALTY)
        step, before = np.linalg.solve(curvature, gradient), loss(coefficients)
        while loss(coefficients + step) > before and np.abs(step).max() >= 1e-6:
            step = step / 2.0
        coefficients = coefficients + step
        if np.abs(step).max() < 1e-6:
            break
    return coefficients


def _logistic(x: FloatArray) -> FloatArray:
    odds = np.exp(np.clip(x, -30.0, 30.0))
    return np.asarray(odds / (1.0 + odds))
