"""Predicts the relevance of judged passages from the grades of people.

A ridge-penalised logistic regression of people's verdict on the judge's, on where the passage
stands and on how many of the request's other served passages the judge calls relevant: a judge
that misunderstands a question is wrong about all of its passages. It is fitted five times, each
without a fifth of the graded requests, so that no passage is predicted by its own grade. All
columns are discrete, so a table holds every prediction. Pure: no I/O, no clock, no logging.
"""

from dataclasses import dataclass
from functools import cache
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

_PRIOR = np.array([-0.8, 2.2, 1.0, 0.0, 0.0, -1.5, -2.0, 1.0, 0.0])
"""Coefficients before anybody graded anything: a judge of about 0.85 and 0.9."""
_PENALTY = np.array([0.1, 0.5, 0.5, 1.0, 1.0, 0.3, 0.3, 0.5, 1.0])
_ROUNDS = 12


def rank_group(rank: NDArray[np.int64]) -> IntArray:
    """Return the group of served ranks, 1-based: the first, the next two, the rest.

    >>> rank_group(np.array([1, 2, 3, 4, 9])).tolist()
    [0, 1, 1, 2, 2]
    """
    return np.where(rank <= 1, 0, np.where(rank <= 3, 1, 2))


class PassageGrades(NamedTuple):
    """Grades of people on m judged passages.

    Attributes:
        verdict: Shape (m,), the judge's.
        group: Shape (m,), the rank group.
        n_served: Shape (m,), passages that the request served.
        n_yes: Shape (m,), how many of these the judge calls relevant.
        fold: Shape (m,), below ``FOLDS``, the same for all passages of a request.
        relevant: Shape (m,), 0 or 1, by people.
    """

    verdict: IntArray
    group: IntArray
    n_served: IntArray
    n_yes: IntArray
    fold: IntArray
    relevant: FloatArray


@dataclass(frozen=True, slots=True)
class Relevance:
    """P(relevant) by the judge's verdict, the rank group and the request's other verdicts.

    Attributes:
        coefficients: Shape (FOLDS, 9); each row was fitted without one fold.
    """

    coefficients: FloatArray

    @classmethod
    def fitted(cls, graded: PassageGrades, prior: "Relevance | None" = None) -> "Relevance":
        """Fit the regression; without grades it is the prior, last month's where there is one."""
        start = _PRIOR if prior is None else prior.coefficients.mean(axis=0)
        columns = _columns(graded.verdict, graded.group, graded.n_served, graded.n_yes)
        rows = []
        for fold in range(FOLDS):
            used = graded.fold != fold
            rows.append(_fit(columns[used], graded.relevant[used], start))
        return cls(np.array(rows))

    def table(self, most_served: int) -> FloatArray:
        """Return every prediction.

        Returns:
            Shape (FOLDS, n_served, n_yes, verdict, group), the first two up to ``most_served``.
        """
        counts = most_served + 1
        found: FloatArray = _logistic(self.coefficients @ _all_columns(most_served).T)
        return found.reshape(-1, counts, counts, N_VERDICTS, N_GROUPS)


@cache
def _all_columns(most_served: int) -> FloatArray:
    counts = np.arange(most_served + 1)
    n, yes, verdict, group = np.meshgrid(
        counts, counts, np.arange(N_VERDICTS), np.arange(N_GROUPS), indexing="ij"
    )
    return _columns(*(each.ravel() for each in (verdict, group, n, yes)))


def _columns(verdict: IntArray, group: IntArray, n_served: IntArray, n_yes: IntArray) -> FloatArray:
    is_yes = (verdict == YES) * 1.0
    is_served = group < NEAR
    others = n_served + 1.0 - is_served
    share = (n_yes - is_yes * is_served + 0.5) / np.maximum(others, 1.0)
    share = np.clip(share, 0.0, 1.0) - 0.5
    return np.column_stack(
        [
            np.ones(len(verdict)),
            is_yes,
            verdict == MISSING,
            *[group == one for one in range(1, N_GROUPS)],
            share,
            share * is_yes,
        ]
    )


def _fit(columns: FloatArray, relevant: FloatArray, prior: FloatArray) -> FloatArray:
    """Fit by Newton's method; the penalty keeps every step finite."""
    coefficients = prior.copy()
    for _ in range(_ROUNDS):
        p = _logistic(columns @ coefficients)
        gradient = columns.T @ (relevant - p) - _PENALTY * (coefficients - prior)
        curvature = (columns.T * (p * (1.0 - p))) @ columns + np.diag(_PENALTY)
        step = np.linalg.solve(curvature, gradient)
        coefficients = coefficients + np.clip(step, -2.0, 2.0)
        if np.abs(step).max() < 1e-6:
            break
    return coefficients


def _logistic(x: FloatArray) -> FloatArray:
    return 1.0 / (1.0 + np.exp(-np.clip(x, -30.0, 30.0)))
