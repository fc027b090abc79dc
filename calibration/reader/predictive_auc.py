"""Predictive AUC: how often a metric ranks the right one of two answers to a question first."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from calibration.data.dataset import Dataset
from calibration.evaluate import bootstrap_ratio
from calibration.reader.answers import Answer, LabelledContext, MarkedContexts, mark
from calibration.reader.utilities import (
    ReaderEstimate,
    ReaderFit,
    cost_by_kind,
    fit_terms,
    penalties,
)
from ctxguard.core import metrics
from ctxguard.core.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.core.types import FloatArray

FOLDS = 5
MIN_QUESTIONS = 10

DESCRIPTIONS: Mapping[str, str] = {
    "recall": "share of the question's relevant passages that the context holds",
    "ndcg": "nDCG of the context, over all judged passages",
    "mrr": "reciprocal rank of the first relevant passage",
    "precision": "share of the context that is relevant",
    "udcg": "heuristic UDCG, by rank alone: answers carry no scores",
    "udcg_strict": "strict UDCG, every passage not known to be relevant negative",
    "udcg_reference": "the reference form, no passage's abstention probability known, so 0",
    "udcg_fitted": "strict UDCG with the reader's own costs, fitted to other questions",
}

_DIGITS = 6
_TIE_DIGITS = 9


def predictive_aucs(
    answers: Sequence[Answer],
    dataset: Dataset,
    fit: ReaderFit,
    *,
    seed: int,
    utilities: Utilities = DEFAULT_UTILITIES,
) -> dict[str, ReaderEstimate]:
    """Compute how often each metric of ``DESCRIPTIONS`` is higher for the right of two answers.

    Ties count half, so 0.5 is chance. Answers to different questions are not compared: a question
    that is hard both to retrieve for and to answer would make every metric look good. The costs of
    ``udcg_fitted`` come from the questions of the other ``FOLDS`` − 1 folds.
    The terms of the model were chosen on all questions.

    Args:
        answers: The answers that ``fit`` was fitted to.
        fit: The fitted utilities.
        utilities: The preset that the unfitted metrics use.

    Returns:
        Shares in [0, 1], with bootstrap intervals over questions; n counts questions with a right
        and a wrong answer.

    Raises:
        CalibrationError: no answer belongs to a question with a relevant passage.
    """
    marked = mark(answers, dataset)
    by_name: dict[str, Callable[[LabelledContext], float | None]] = {
        "recall": lambda c: metrics.context_recall(c.grades, c.judged),
        "ndcg": lambda c: metrics.ndcg(c.grades, c.judged),
        "mrr": lambda c: metrics.reciprocal_rank(c.grades, c.judged),
        "precision": lambda c: metrics.precision_at_k(c.grades),
        "udcg": lambda c: _udcg(c, marked.top_grade, utilities, strict=False),
        "udcg_strict": lambda c: _udcg(c, marked.top_grade, utilities),
        "udcg_reference": lambda c: metrics.udcg_reference(
            [grade > 0 for grade in c.grades], [0.0] * len(c.grades)
        ),
    }
    found = {
        name: _concordance(np.array(list(map(metric, marked.contexts)), dtype=float), marked, seed)
        for name, metric in by_name.items()
    }
    reason = "the answers do not identify a cost of the reader"
    found["udcg_fitted"] = ReaderEstimate(None, None, None, 0, reason)
    if fit.identified_costs:
        fitted = _cross_fitted(marked, fit, utilities, seed)
        found["udcg_fitted"] = _concordance(fitted, marked, seed)
    return found


def _udcg(
    context: LabelledContext, top_grade: int, utilities: Utilities, *, strict: bool = True
) -> float:
    grades, negatives, known, _ = context
    rules: dict[str, Any] = {"negatives": negatives, "judged": known}
    rules |= {"top_grade": top_grade, "utilities": utilities}
    if strict:
        return metrics.udcg(metrics.strict_utilities(grades, **rules)).value
    return metrics.udcg(metrics.heuristic_utilities(grades, None, **rules)).value


def _cross_fitted(
    marked: MarkedContexts, fit: ReaderFit, utilities: Utilities, seed: int
) -> FloatArray:
    """Compute each answer's strict UDCG with costs from the questions of the other folds.

    The result is NaN if these questions identify no cost.
    """
    fold = np.random.default_rng(seed).permutation(len(marked.query_ids)) % FOLDS
    scores = np.full(len(marked), np.nan)
    for own in range(FOLDS):
        costs = cost_by_kind(fit_terms(marked.part(fold != own), fit.columns)[1])
        if costs:
            worth = penalties(utilities, costs)
            for row in np.flatnonzero(fold[marked.question] == own).tolist():
                scores[row] = _udcg(marked.contexts[row], marked.top_grade, worth)
    return scores


def _concordance(scores: FloatArray, marked: MarkedContexts, seed: int) -> ReaderEstimate:
    concordant, pairs = np.zeros((2, len(marked.query_ids)))
    # Rounded, so that equal contexts tie whatever the order of summation.
    values, defined = scores.round(_TIE_DIGITS), ~np.isnan(scores)
    for q in range(pairs.size):
        own = defined & (marked.question == q)
        difference = values[own & marked.correct][:, None] - values[own & ~marked.correct][None, :]
        concordant[q] = (1.0 + np.sign(difference)).sum() / 2.0
        pairs[q] = difference.size
    n = int((pairs > 0).sum())
    if n < MIN_QUESTIONS:
        reason = f"{n} questions have a right and a wrong answer; {MIN_QUESTIONS} are needed"
        return ReaderEstimate(None, None, None, n, reason)
    share = bootstrap_ratio(concordant, pairs, seed=seed)
    value, lower, upper = (
        None if figure is None else round(figure, _DIGITS)
        for figure in (share.value, share.lower, share.upper)
    )
    return ReaderEstimate(value, lower, upper, n)
