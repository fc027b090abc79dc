"""Predictive AUC: how well a metric of a context predicts whether the answer is right."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.data.dataset import Dataset
from calibration.evaluate import RESAMPLES, interval_bounds
from calibration.reader.answers import Answer, Context, IntArray, MarkedContexts, mark
from calibration.reader.utilities import Model, ReaderFit, penalties
from ctxguard.core.metrics import (
    DEFAULT_UTILITIES,
    Utilities,
    context_recall,
    heuristic_utilities,
    ndcg,
    precision_at_k,
    reciprocal_rank,
    strict_utilities,
    udcg,
    udcg_reference,
)
from ctxguard.core.types import FloatArray

FOLDS = 5
MIN_QUESTIONS = 10

DESCRIPTIONS: Mapping[str, str] = {
    "recall": "share of the question's relevant passages that the context holds",
    "ndcg": "nDCG of the context, over all judged passages",
    "mrr": "reciprocal rank of the first relevant passage",
    "precision": "share of the context that is relevant",
    "udcg": "heuristic UDCG, by rank alone: answers carry no scores",
    "udcg_strict": "strict UDCG, every irrelevant passage negative",
    "udcg_reference": "the reference form, no passage's abstention probability known, so 0",
    "udcg_fitted": "strict UDCG with the reader's own costs, fitted to other questions",
    "reader_model": "the fitted probability of a right answer, fitted to other questions",
}

_DIGITS = 6
_TIE_DIGITS = 9
_CELLS_AT_ONCE = 2_000_000


@dataclass(frozen=True, slots=True)
class PredictiveAuc:
    """How often a metric is higher for the right one of two answers; ties count half.

    It is the area under the ROC curve of the metric as a predictor of correctness: 0.5 is chance.

    Attributes:
        value: In [0, 1]; None if it is undefined or rests on too few questions.
        lower: Lower end of its bootstrap interval over questions.
        upper: Upper end, as ``lower``.
        n: For all answers, those on which the metric is defined; within questions, the questions
            with a right and a wrong answer.
        reason_if_none: Why there is no value.
    """

    value: float | None
    lower: float | None
    upper: float | None
    n: int
    reason_if_none: str | None = None


@dataclass(frozen=True, slots=True)
class MetricAucs:
    """Predictive AUC of one metric.

    Attributes:
        overall: Over pairs of a right and a wrong answer to any questions. A question that is
            hard both to retrieve for and to answer raises it.
        within: Over pairs of answers to the same question, which differ by their contexts alone.
    """

    overall: PredictiveAuc
    within: PredictiveAuc


def predictive_aucs(
    answers: Sequence[Answer],
    dataset: Dataset,
    fit: ReaderFit,
    *,
    utilities: Utilities = DEFAULT_UTILITIES,
    resamples: int = RESAMPLES,
) -> dict[str, MetricAucs]:
    """Predictive AUC of every metric of ``DESCRIPTIONS``.

    Fitted scores come from the questions of the other folds, of ``FOLDS`` in all. Which terms
    have a value was decided on all questions. A cost without a value keeps that of ``utilities``.

    Args:
        answers: The answers that ``fit`` was fitted to.
        dataset: Their labels.
        fit: The fitted utilities.
        utilities: The preset that the unfitted metrics use.
        resamples: Bootstrap samples of questions.

    Raises:
        CalibrationError: no answer belongs to a question with a relevant passage.
    """
    marked = mark(answers, dataset)
    scores = _presets(marked, utilities) | _cross_fitted(marked, fit, utilities)
    counts = marked.resamples(resamples, fit.seed)
    return {name: _compared(scores.get(name), marked, counts, fit) for name in DESCRIPTIONS}


def _presets(marked: MarkedContexts, utilities: Utilities) -> dict[str, FloatArray]:
    top_grade = marked.top_grade
    metrics: dict[str, Callable[[Context], float | None]] = {
        "recall": lambda c: context_recall(c.grades, c.judged),
        "ndcg": lambda c: ndcg(c.grades, c.judged),
        "mrr": lambda c: reciprocal_rank(c.grades, c.judged),
        "precision": lambda c: precision_at_k(c.grades),
        "udcg": lambda c: (
            udcg(
                heuristic_utilities(
                    c.grades, None, top_grade=top_grade, negatives=c.negatives, utilities=utilities
                )
            ).value
        ),
        "udcg_strict": lambda c: _strict(c, top_grade, utilities),
        "udcg_reference": lambda c: udcg_reference(
            [grade > 0 for grade in c.grades], [0.0] * len(c.grades)
        ),
    }
    return {
        name: np.array([metric(context) for context in marked.contexts], dtype=np.float64)
        for name, metric in metrics.items()
    }


def _strict(context: Context, top_grade: int, utilities: Utilities) -> float:
    worth = strict_utilities(
        context.grades, top_grade=top_grade, negatives=context.negatives, utilities=utilities
    )
    return udcg(worth).value


def _cross_fitted(
    marked: MarkedContexts, fit: ReaderFit, utilities: Utilities
) -> dict[str, FloatArray]:
    """Each answer's fitted scores, from questions of the other folds; NaN where undefined."""
    if not fit.coefficients:
        return {}
    model = Model(marked, tuple(fit.coefficients))
    n_queries = len(marked.query_ids)
    fold = np.random.default_rng(fit.seed).permutation(n_queries) % FOLDS
    coefficients = model.fit((fold[None, :] != np.arange(FOLDS)[:, None]).astype(np.int64))
    own_fold = fold[marked.question]
    rows = np.arange(len(marked))
    scores = {"reader_model": model.probability(coefficients)[own_fold, rows]}
    if fit.identified_costs:
        values = model.values(coefficients)
        by_fold = [
            penalties(utilities, {name: float(values[name][f]) for name in fit.identified_costs})
            if values["relevant"][f] > 0.0
            else None
            for f in range(FOLDS)
        ]
        fitted = np.full(len(marked), np.nan)
        for row, context in enumerate(marked.contexts):
            if (own := by_fold[own_fold[row]]) is not None:
                fitted[row] = _strict(context, marked.top_grade, own)
        scores["udcg_fitted"] = fitted
    return scores


def _compared(
    scores: FloatArray | None, marked: MarkedContexts, counts: IntArray, fit: ReaderFit
) -> MetricAucs:
    if scores is None:
        missing = "a cost of the reader" if fit.coefficients else "anything of the reader"
        reason = f"the answers do not identify {missing}"
        nothing = PredictiveAuc(None, None, None, 0, reason)
        return MetricAucs(nothing, nothing)
    defined = ~np.isnan(scores)
    # Rounded, so that equal contexts tie whatever the order of summation.
    values = scores[defined].round(_TIE_DIGITS)
    correct, question = marked.correct[defined], marked.question[defined]
    return MetricAucs(
        _overall(values, correct, question, counts), _within(values, correct, question, counts)
    )


def _overall(
    values: FloatArray, correct: NDArray[np.bool_], question: IntArray, counts: IntArray
) -> PredictiveAuc:
    n = values.size
    for outcome, word in ((True, "right"), (False, "wrong")):
        n_questions = np.unique(question[correct == outcome]).size
        if n_questions < MIN_QUESTIONS:
            reason = f"{n_questions} questions have a {word} answer; {MIN_QUESTIONS} are needed"
            return PredictiveAuc(None, None, None, n, reason)
    once = np.ones((1, counts.shape[1]), dtype=np.int64)
    estimate = _areas(values, correct, question, once)[0]
    return _with_interval(float(estimate), _areas(values, correct, question, counts), n)


def _areas(
    values: FloatArray, correct: NDArray[np.bool_], question: IntArray, counts: IntArray
) -> FloatArray:
    """Area under the ROC curve when question q counts ``counts[:, q]`` times; NaN if undefined."""
    order = np.argsort(values, kind="stable")
    right = correct[order].astype(np.int64)
    starts = np.flatnonzero(np.diff(values[order], prepend=-np.inf))
    rows_at_once = max(_CELLS_AT_ONCE // values.size, 1)
    areas = []
    for start in range(0, len(counts), rows_at_once):
        weights = counts[start : start + rows_at_once, question[order]]
        n_right = np.add.reduceat(weights * right, starts, axis=1)
        n_wrong = np.add.reduceat(weights * (1 - right), starts, axis=1)
        # Twice the concordant pairs, in whole numbers: exact in any order.
        twice = (n_right * (2 * np.cumsum(n_wrong, axis=1) - n_wrong)).sum(axis=1)
        pairs = n_right.sum(axis=1) * n_wrong.sum(axis=1)
        areas.append(twice / np.where(pairs > 0, 2 * pairs, np.nan))
    return np.concatenate(areas)


def _within(
    values: FloatArray, correct: NDArray[np.bool_], question: IntArray, counts: IntArray
) -> PredictiveAuc:
    n_queries = counts.shape[1]
    twice, pairs = np.zeros(n_queries, dtype=np.int64), np.zeros(n_queries, dtype=np.int64)
    for q in np.unique(question):
        right = values[(question == q) & correct]
        wrong = values[(question == q) & ~correct]
        difference = right[:, None] - wrong[None, :]
        twice[q] = (1 + np.sign(difference)).sum()
        pairs[q] = difference.size
    mixed = int((pairs > 0).sum())
    if mixed < MIN_QUESTIONS:
        reason = f"{mixed} questions have a right and a wrong answer; {MIN_QUESTIONS} are needed"
        return PredictiveAuc(None, None, None, mixed, reason)
    all_pairs = counts @ pairs
    samples = (counts @ twice) / np.where(all_pairs > 0, 2 * all_pairs, np.nan)
    return _with_interval(float(twice.sum() / (2 * pairs.sum())), samples, mixed)


def _with_interval(estimate: float, samples: FloatArray, n: int) -> PredictiveAuc:
    lower, upper = interval_bounds(samples[~np.isnan(samples)]).round(_DIGITS).tolist()
    return PredictiveAuc(round(estimate, _DIGITS), lower, upper, n)
