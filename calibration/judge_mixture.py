"""P(relevant) from a judge's verdicts, which are no labels: a mixture that knows how judges err.

Each verdict is a draw from P(yes | x) = fp + (tp − fp) · P(relevant | x). The regression of P on
the features is fitted by expectation and maximisation (Dempster, Laird and Rubin 1977; Raykar et
al. 2010 for a classifier under noisy labels): posterior relevance of each judged candidate, one
Newton step of the penalised regression on it, and so on. Grades of people enter as known. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.fit import REGULARISATION, folds, standardised
from ctxguard.core.types import FloatArray

ASSUMED_SENSITIVITY = 0.85
ASSUMED_FALSE_YES = 0.10
PSEUDO_VERDICTS = 8.0
"""Verdicts that the assumed rates are worth against those on passages that people graded."""

_LEAST_GAP = 0.1
"""P(yes) of a relevant passage is above that of any other by this: else a verdict says nothing."""

_ROUNDS = 60
_CONVERGED = 1e-4
_RIDGE = 1.0
_LARGEST_LOG_ODDS = 30.0


@dataclass(frozen=True)
class JudgeRates:
    """How a judge errs.

    Attributes:
        sensitivity: P(yes | relevant), in (0, 1).
        false_yes: P(yes | not relevant) of a passage of average P, in (0, 1).
        slope: Change of the log-odds of a false yes with one standard deviation of the passage's
            log-odds of relevance; 0 for errors that do not depend on how near a miss is.
        n_relevant: Graded relevant passages with a verdict that the rates were learned from.
        n_irrelevant: Likewise of the others.
    """

    sensitivity: float = ASSUMED_SENSITIVITY
    false_yes: float = ASSUMED_FALSE_YES
    slope: float = 0.0
    n_relevant: int = 0
    n_irrelevant: int = 0

    def of_irrelevant(self, nearness: FloatArray) -> FloatArray:
        """Return P(yes | not relevant) of passages by their standardised log-odds of relevance."""
        rates = _sigmoid(_logit(self.false_yes) + self.slope * nearness)
        capped: FloatArray = np.minimum(rates, self.sensitivity - _LEAST_GAP)
        return capped


DEFAULT_RATES = JudgeRates()


def fit_mixture(
    inputs: FloatArray,
    verdicts: NDArray[np.bool_],
    grades: NDArray[np.int8],
    query_ids: Sequence[str],
    assumed: JudgeRates = DEFAULT_RATES,
) -> tuple[FloatArray, JudgeRates]:
    """Fit P(relevant) and, where people graded some of the candidates, the judge's rates.

    Without grades the rates stay as given: nothing in verdicts alone tells a bad judge from a hard
    collection.

    Args:
        inputs: Shape (n, n_features), of judged candidates, finite.
        verdicts: Shape (n,), the judge's.
        grades: Shape (n,): 1 relevant, 0 not, −1 not graded by people.
        query_ids: Length n, the query of each candidate, which decides its fold.
        assumed: The judge's rates before people grade.

    Returns:
        Shape (n,), P(relevant) of each candidate given its features, verdict and grade; and how
        the judge errs.
    """
    x = np.column_stack([np.ones(len(inputs)), standardised(inputs.copy())[0]])
    nearness = np.zeros(len(x))
    known = grades >= 0
    if known.any():
        constant = _learned(assumed, verdicts, grades, nearness)
        nearness = _standardised_log_odds(x, verdicts, grades, query_ids, constant)
        assumed = _learned(assumed, verdicts, grades, nearness)
    _, relevance = _expectation_maximisation(x, verdicts, grades, assumed, nearness)
    return relevance, assumed


def _standardised_log_odds(
    x: FloatArray,
    verdicts: NDArray[np.bool_],
    grades: NDArray[np.int8],
    query_ids: Sequence[str],
    rates: JudgeRates,
) -> FloatArray:
    """Standardise log-odds of relevance out of fold, at mean 0 and deviation 1."""
    values = np.zeros(len(x))
    flat = np.zeros(len(x))
    for inside, outside in folds(query_ids):
        if not outside.size:
            continue
        weights, _ = _expectation_maximisation(
            x[outside], verdicts[outside], grades[outside], rates, flat[outside]
        )
        values[inside] = x[inside] @ weights
    spread = values.std()
    centred: FloatArray = (values - values.mean()) / (spread if spread > 1e-12 else 1.0)
    return centred


def _learned(
    assumed: JudgeRates, verdicts: NDArray[np.bool_], grades: NDArray[np.int8], nearness: FloatArray
) -> JudgeRates:
    """Learn rates from graded candidates, shrunk towards those assumed."""
    of_relevant, of_others = verdicts[grades == 1], verdicts[grades == 0]
    # A judge that hardly ever says yes leaves room for a rate below its own.
    sensitivity = max(_shrunk(of_relevant, assumed.sensitivity), 2.0 * _LEAST_GAP)
    false_yes = min(_shrunk(of_others, assumed.false_yes), sensitivity - _LEAST_GAP)
    slope = 0.0
    near = nearness[grades == 0]
    if near.any():
        # Logistic in the nearness; the ridge pulls its slope to 0 and its level to the constant.
        level, target = _logit(false_yes), of_others.astype(np.float64)
        change = np.zeros(2)
        design = np.column_stack([np.ones_like(near), near])
        for _ in range(_ROUNDS):
            step = _newton_step(design, target, change, np.full(2, _RIDGE), offset=level)
            change = change + step
            if np.abs(step).max() < _CONVERGED:
                break
        false_yes, slope = float(_sigmoid(np.array(level + change[0]))), float(change[1])
    return JudgeRates(sensitivity, false_yes, slope, of_relevant.size, of_others.size)


def _shrunk(verdicts: NDArray[np.bool_], assumed: float) -> float:
    yes = float(verdicts.sum()) + PSEUDO_VERDICTS * assumed
    return yes / (verdicts.size + PSEUDO_VERDICTS)


def _expectation_maximisation(
    x: FloatArray,
    verdicts: NDArray[np.bool_],
    grades: NDArray[np.int8],
    rates: JudgeRates,
    nearness: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Fit the regression's weights, and P(relevant) of each candidate given all that is known."""
    of_irrelevant = rates.of_irrelevant(nearness)
    likelihood_ratio = np.where(
        verdicts,
        np.log(rates.sensitivity / of_irrelevant),
        np.log((1.0 - rates.sensitivity) / (1.0 - of_irrelevant)),
    )
    penalty = np.full(x.shape[1], 1.0 / REGULARISATION)
    penalty[0] = 0.0
    weights = np.zeros(x.shape[1])
    base = np.clip(
        (verdicts.mean() - of_irrelevant.mean()) / (rates.sensitivity - of_irrelevant.mean()),
        0.01,
        0.9,
    )
    weights[0] = _logit(float(base))
    known, certain = grades >= 0, (grades == 1).astype(np.float64)
    for _ in range(_ROUNDS):
        relevance = np.where(known, certain, _sigmoid(x @ weights + likelihood_ratio))
        step = _newton_step(x, relevance, weights, penalty)
        weights = weights + step
        if np.abs(step).max() < _CONVERGED:
            break
    relevance = np.where(known, certain, _sigmoid(x @ weights + likelihood_ratio))
    return weights, relevance


def _newton_step(
    x: FloatArray,
    targets: FloatArray,
    weights: FloatArray,
    penalty: FloatArray,
    offset: float = 0.0,
) -> FloatArray:
    """Take one step of the ridge-penalised logistic regression of soft targets."""
    fitted = _sigmoid(x @ weights + offset)
    gradient = x.T @ (targets - fitted) - penalty * weights
    curvature = (x * (fitted * (1.0 - fitted))[:, None]).T @ x
    curvature[np.diag_indices_from(curvature)] += penalty + 1e-9
    return np.asarray(np.linalg.solve(curvature, gradient), dtype=np.float64)


def _sigmoid(values: FloatArray) -> FloatArray:
    bounded = np.clip(values, -_LARGEST_LOG_ODDS, _LARGEST_LOG_ODDS)
    odds: FloatArray = 1.0 / (1.0 + np.exp(-bounded))
    return odds


def _logit(probability: float) -> float:
    return float(np.log(probability / (1.0 - probability)))
