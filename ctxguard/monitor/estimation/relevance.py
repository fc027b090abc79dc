"""Predicts the relevance of judged passages from the grades of people.

A ridge-penalised logistic regression of people's verdict on the judge's and its score, on where the
passage stands and on how many of the request's other served passages the judge calls relevant: a
judge that misunderstands a question is wrong about all of its passages. It is fitted five times,
each without a fifth of the graded requests, so that no passage is predicted by its own grade. Pure:
no I/O, no clock, no logging.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray

IntArray = NDArray[np.intp]

NO, YES, MISSING = 0, 1, 2
"""The judge's verdict on a passage; ``MISSING`` where it gave none that was valid."""

N_VERDICTS = 3
N_GROUPS = 5
NEAR, FAR = 3, 4
"""Groups of dropped passages: the first ``NEAR_DROPPED`` of them, and the others."""
NEAR_DROPPED = 5

FOLDS = 5
MOST_SERVED = 62
"""Served passages of a request that are told apart; verdicts are kept as the bits of a number."""

_PRIOR = np.array([-0.8, 2.2, 1.0, 0.0, 0.0, -1.5, -2.0, 1.0, 0.0, 0.3])
"""Coefficients before anybody graded anything: a judge of about 0.85 and 0.9."""
_PENALTY = np.array([0.1, 0.5, 0.5, 1.0, 1.0, 0.3, 0.3, 0.5, 1.0, 1.0])
_ROUNDS = 12


def rank_group(rank: NDArray[np.int64]) -> IntArray:
    """Return the group of served ranks, 1-based: the first, the next two, the rest.

    >>> rank_group(np.array([1, 2, 3, 4, 9])).tolist()
    [0, 1, 1, 2, 2]
    """
    return np.where(rank <= 1, 0, np.where(rank <= 3, 1, 2))


class JudgedPassages(NamedTuple):
    """Judged passages, m of them.

    Attributes:
        verdict: Shape (m,), the judge's.
        group: Shape (m,), the rank group.
        n_served: Shape (m,), passages that the request served.
        n_yes: Shape (m,), how many of these the judge calls relevant.
        score: Shape (m,), the judge's log-odds of a served passage; 0 where it gave none.
    """

    verdict: IntArray
    group: IntArray
    n_served: IntArray
    n_yes: IntArray
    score: FloatArray


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
    def fitted(cls, graded: JudgedPassages, fold: IntArray, relevant: FloatArray) -> "Model":
        """Fit the regression; without grades it is the prior.

        Args:
            fold: Shape (m,), below ``FOLDS``, the same for all passages of a request.
            relevant: Shape (m,), 0 or 1, by people.
        """
        columns = _columns(graded)
        used = [fold != one for one in range(FOLDS)]
        return cls(np.array([_fit(columns[own], relevant[own], _PRIOR) for own in used]))

    def of(self, passages: JudgedPassages, fold: IntArray | None = None) -> FloatArray:
        """Predict P(relevant) of passages.

        Args:
            fold: The fold that is left out of each; None for the mean of all fits.
        """
        verdict, group, _, _, score = passages
        share = _share(passages)
        of_verdict, of_group, slopes = np.split(self.coefficients, [3, 2 + N_GROUPS], axis=1)
        constant = np.zeros((FOLDS, N_VERDICTS, N_GROUPS)) + of_verdict[:, :1, None]
        constant[:, 1:] += of_verdict[:, 1:, None]
        constant[:, :, 1:] += of_group[:, None, :]
        slope = slopes[:, 0, None] + slopes[:, 1, None] * (np.arange(N_VERDICTS) == YES)
        if fold is not None:
            own = constant[fold, verdict, group] + slope[fold, verdict] * share
            return _logistic(own + slopes[fold, 2] * score)
        cell = verdict * N_GROUPS + group
        total = np.zeros(cell.shape)
        for one in range(FOLDS):
            own = constant[one].ravel()[cell]
            own += slope[one][verdict] * share
            own += slopes[one, 2] * score
            total += _logistic(own)
        return np.asarray(total / FOLDS)


def _share(passages: JudgedPassages) -> FloatArray:
    """Return the share of the other served passages that the judge calls relevant, less 1/2."""
    verdict, group, n_served, n_yes, _ = passages
    is_served = (group < NEAR) * 1.0
    share = (n_yes - (verdict == YES) * is_served + 0.5) / np.maximum(n_served + 1.0 - is_served, 1)
    return np.asarray(np.clip(share, 0.0, 1.0) - 0.5)


def _columns(passages: JudgedPassages) -> FloatArray:
    verdict, group, _, _, score = passages
    is_yes, share = (verdict == YES) * 1.0, _share(passages)
    return np.column_stack(
        [
            np.ones(len(verdict)),
            is_yes,
            verdict == MISSING,
            *[group == one for one in range(1, N_GROUPS)],
            share,
            share * is_yes,
            score,
        ]
    )


def _fit(columns: FloatArray, relevant: FloatArray, prior: FloatArray) -> FloatArray:
    """Fit by Newton's method, with steps halved until the penalised likelihood rises."""

    def loss(coefficients: FloatArray) -> float:
        odds = columns @ coefficients
        apart = coefficients - prior
        likelihood = np.logaddexp(0.0, odds).sum() - relevant @ odds
        return float(likelihood + 0.5 * _PENALTY @ apart**2)

    coefficients = prior.copy()
    for _ in range(_ROUNDS):
        p = _logistic(columns @ coefficients)
        gradient = columns.T @ (relevant - p) - _PENALTY * (coefficients - prior)
        curvature = (columns.T * (p * (1.0 - p))) @ columns + np.diag(_PENALTY)
        step, before = np.linalg.solve(curvature, gradient), loss(coefficients)
        while loss(coefficients + step) > before and np.abs(step).max() >= 1e-6:
            step = step / 2.0
        coefficients = coefficients + step
        if np.abs(step).max() < 1e-6:
            break
    return coefficients


def _logistic(x: FloatArray) -> FloatArray:
    return np.asarray(1.0 / (1.0 + np.exp(np.clip(-x, -30.0, 30.0))))
