"""Fit what passages are worth to one reader, from answers marked right or wrong.

A logistic regression of correctness on what the context held, clustered by question
(DESIGN.md §5, §9). A term that the answers cannot identify has no value but a reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibration.data.dataset import Dataset
from calibration.evaluate import CONFIDENCE, RESAMPLES, interval_bounds
from calibration.reader.answers import (
    COSTS,
    TERMS,
    Answer,
    Context,
    IntArray,
    MarkedContexts,
    TermName,
    mark,
    term_columns,
)
from calibration.reader.identification import (
    MIN_CARRYING_QUESTIONS,
    MIN_OWN_VARIATION,
    unidentified,
    varies,
)
from calibration.reader.logistic import fit_logistic, probability, separated
from ctxguard.core.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.core.types import FloatArray
from ctxguard.errors import CalibrationError

DESCRIPTIONS: Mapping[TermName, str] = {
    "relevant": "log odds of a right answer that a relevant passage gains, on average",
    "irrelevant": "cost of a passage that is not relevant, as a share of that gain",
    "hard_negative": "cost of a labelled hard negative, as a share of that gain",
    "distractor": "cost of a known distractor, as a share of that gain",
    "position": "rank discount of the first relevant passage: 0 none, 1 as UDCG's",
    "completeness": "share of the gain that comes only once every relevant passage is there",
}

MIN_QUESTIONS = 20
MIN_MINORITY_PER_COLUMN = 5
MAX_WIDTH = 1.0
RULES: tuple[str, ...] = (
    f"at least {MIN_QUESTIONS} questions",
    f"{MIN_MINORITY_PER_COLUMN} questions with a right and as many with a wrong answer per column",
    (
        "a term varies; counts of passages that are not relevant, among contexts that hold as many "
        "of as many relevant ones"
    ),
    (
        f"at least {MIN_OWN_VARIATION:.0%} of a term's variation is its own, not shared with other "
        f"terms, and it rests on the equivalent of at least {MIN_CARRYING_QUESTIONS} questions"
    ),
    "right and wrong answers are not separated without exception along the term",
    "the gain of a relevant passage, which is the unit, has its whole interval above 0",
    f"the interval is at most {MAX_WIDTH:g} wide, which is the whole gain that it is a share of",
)

_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a context's utility.

    Attributes:
        value: The estimate; None if the answers do not identify it.
        lower: Lower end of its interval; also given if the interval is too wide for a value.
        upper: Upper end, as ``lower``.
        n: How many answers it was estimated from.
        reason_if_none: Why there is no value.
    """

    value: float | None
    lower: float | None
    upper: float | None
    n: int
    reason_if_none: str | None = None


@dataclass(frozen=True)
class ReaderFit:
    """What passages are worth to one reader.

    The estimates describe the answers as recorded: if easier questions got better contexts, part
    of that difference is in them. Only the number of needed passages is held fixed. Unobserved
    differences between questions shrink all log odds alike, so ``relevant`` is an average over
    questions and the ratios hardly change.

    Attributes:
        terms: By name, see ``DESCRIPTIONS``. ``relevant`` is in log odds; costs are positive if
            a passage does harm, negative if it helps.
        coefficients: Of the model's columns, in log odds; empty if nothing could be fitted.
        n_answers: How many answers were used.
        n_queries: How many questions they answer.
        confidence: Confidence level of every interval.
        seed: Random seed of the bootstrap.
        notes: What was left out, one readable line each.
    """

    terms: Mapping[TermName, Term]
    coefficients: Mapping[str, float]
    n_answers: int
    n_queries: int
    confidence: float
    seed: int
    notes: tuple[str, ...]

    @property
    def identified_costs(self) -> tuple[TermName, ...]:
        """The costs that have a value; ``utilities`` uses these."""
        return tuple([name for name in COSTS if self.terms[name].value is not None])

    def utilities(self, base: Utilities = DEFAULT_UTILITIES) -> Utilities:
        """``base`` with the identified costs, as penalties in units of its ``relevant``.

        A passage that helps although it is not relevant gets 0: the utility of a passage that is
        not relevant is never positive.

        Raises:
            CalibrationError: no cost was identified.
        """
        if not self.identified_costs:
            reasons = "; ".join(f"{name}: {self.terms[name].reason_if_none}" for name in COSTS)
            raise CalibrationError(
                f"the answers identify no cost, so the reader has no fitted utilities ({reasons})"
            )
        return penalties(base, {name: self.terms[name].value for name in self.identified_costs})


def penalties(base: Utilities, costs: Mapping[TermName, float | None]) -> Utilities:
    """``base`` with these costs, each a share of what a relevant passage gains.

    >>> penalties(DEFAULT_UTILITIES, {"irrelevant": 0.15, "hard_negative": -0.1}).irrelevant
    -0.15
    """
    worth = {
        name: -base.relevant * max(cost, 0.0) + 0.0
        for name, cost in costs.items()
        if cost is not None
    }
    return replace(
        base,
        irrelevant=worth.get("irrelevant", base.irrelevant),
        hard_negative=worth.get("hard_negative", base.hard_negative),
        distractor=worth.get("distractor", base.distractor),
    )


def fit_utilities(
    answers: Sequence[Answer], dataset: Dataset, *, seed: int, resamples: int = RESAMPLES
) -> ReaderFit:
    """Fit what passages are worth to the reader that gave these answers.

    Correctness is regressed on ``answers.term_columns`` with Firth's correction. The unit is
    the gain of a relevant passage: log odds with all needed passages less those with none,
    divided by how many are needed, averaged over questions. It is defined even if completeness
    cannot be told from the share held. Intervals are percentiles of a bootstrap over whole
    questions, so that several answers to one question count as one question. ``RULES`` say when
    a term has a value.

    Args:
        answers: The answers of one reader.
        dataset: Labels of the questions.
        seed: Random seed of the bootstrap; the same seed gives the same fit.
        resamples: Bootstrap samples.

    Raises:
        CalibrationError: no answer belongs to a question with a relevant passage.
        MissingExtraError: scipy is not installed.
    """
    marked = mark(answers, dataset)
    columns = term_columns(marked.contexts)
    reasons = unidentified(columns, marked.question)
    used: list[str] = [name for name in TERMS if name not in reasons]
    if varies(columns["needed"]):
        used.append("needed")
    if too_few := _too_few(marked, n_columns=len(used)):
        reasons = {name: reasons.get(name, too_few) for name in TERMS}
    elif "relevant" in reasons:
        unit = f"the unit is not identified: {reasons['relevant']}"
        reasons = {name: reasons.get(name, unit) for name in TERMS}
    if len(reasons) == len(TERMS):
        terms = {name: Term(None, None, None, len(marked), reasons[name]) for name in TERMS}
        coefficients: dict[str, float] = {}
    else:
        model = Model(marked, tuple(used))
        terms = _terms(model, reasons, seed, resamples)
        coefficients = model.coefficients
    return ReaderFit(
        terms=terms,
        coefficients=coefficients,
        n_answers=len(marked),
        n_queries=len(marked.query_ids),
        confidence=CONFIDENCE,
        seed=seed,
        notes=(*marked.notes, *_displaced(reasons, coefficients)),
    )


class Model:
    """The regression, to be fitted to any number of samples of questions.

    Attributes:
        columns: Names of its columns, the intercept first.
        marked: Its rows.
    """

    def __init__(self, marked: MarkedContexts, columns: Sequence[str]) -> None:
        self.marked = marked
        self.columns = ("intercept", *[name for name in columns if name != "intercept"])
        table = term_columns(marked.contexts) | {"intercept": np.ones(len(marked))}
        rows = np.stack([table[name] for name in self.columns], axis=1)
        self._patterns, pattern = np.unique(rows, axis=0, return_inverse=True)
        self._pattern = pattern.ravel()
        shape = (len(marked.query_ids), len(self._patterns))
        # Counts by question and pattern are whole numbers, so sums are exact in any order.
        self._total, self._right = np.zeros(shape), np.zeros(shape)
        np.add.at(self._total, (marked.question, self._pattern), 1.0)
        np.add.at(self._right, (marked.question, self._pattern), marked.correct)
        self._mean_share = float(np.mean([1.0 / c.n_needed for c in _one_per_question(marked)]))

    def fit(self, counts: IntArray) -> FloatArray:
        """Coefficients, shape (n_fits, p), of samples with question q ``counts[:, q]`` times."""
        return fit_logistic(self._patterns, counts @ self._right, counts @ self._total)

    @property
    def coefficients(self) -> dict[str, float]:
        """Coefficients by column, with every question once."""
        beta = self.fit(np.ones((1, len(self.marked.query_ids)), dtype=np.int64))[0]
        return {
            name: round(float(value), _DIGITS)
            for name, value in zip(self.columns, beta, strict=True)
        }

    def separated(self) -> tuple[str, ...]:
        """Columns along which right and wrong answers are separated."""
        found = separated(self._patterns, self._right.sum(axis=0), self._total.sum(axis=0))
        return tuple([self.columns[column] for column in found])

    def probability(self, coefficients: FloatArray) -> FloatArray:
        """P(right answer), shape (n_fits, n_answers)."""
        by_pattern = probability(self._patterns, coefficients)
        return by_pattern[:, self._pattern]

    def values(self, coefficients: FloatArray) -> dict[TermName, FloatArray]:
        """The model's terms in their units, shape (n_fits,) each."""
        table: dict[str, FloatArray] = dict(zip(self.columns, coefficients.T, strict=True))
        whole = table["relevant"] + table.get("completeness", 0.0)
        unit = whole * self._mean_share
        values: dict[TermName, FloatArray] = {"relevant": unit}
        with np.errstate(divide="ignore", invalid="ignore"):
            for name in COSTS:
                if name in table:
                    values[name] = -table[name] / unit
            if "position" in table:
                values["position"] = -table["position"] / whole
            if "completeness" in table:
                values["completeness"] = table["completeness"] / whole
        return values


def _one_per_question(marked: MarkedContexts) -> list[Context]:
    first = np.unique(marked.question, return_index=True)[1]
    return [marked.contexts[row] for row in first]


def _too_few(marked: MarkedContexts, n_columns: int) -> str | None:
    n_queries = len(marked.query_ids)
    if n_queries < MIN_QUESTIONS:
        return f"only {n_queries} questions have an answer here; at least {MIN_QUESTIONS} do"
    for outcome, word in ((True, "right"), (False, "wrong")):
        n = np.unique(marked.question[marked.correct == outcome]).size
        if n == 0:
            return f"no answer is {word}, so nothing tells contexts apart"
        if n < (needed := MIN_MINORITY_PER_COLUMN * n_columns):
            return f"only {n} questions have a {word} answer; {n_columns} columns need {needed}"
    return None


def _terms(
    model: Model, reasons: Mapping[TermName, str], seed: int, resamples: int
) -> dict[TermName, Term]:
    n = len(model.marked)
    once = np.ones((1, len(model.marked.query_ids)), dtype=np.int64)
    estimates = model.values(model.fit(once))
    samples = model.values(model.fit(model.marked.resamples(resamples, seed)))
    intervals = {name: interval_bounds(sample) for name, sample in samples.items()}
    infinite = set(model.separated())
    terms: dict[TermName, Term] = {}
    for name in TERMS:
        if name in reasons:
            terms[name] = Term(None, None, None, n, reasons[name])
        elif reason := _unbounded(name, infinite, bool(intervals["relevant"][0] > 0.0)):
            terms[name] = Term(None, None, None, n, reason)
        else:
            lower, upper = (round(float(edge), _DIGITS) for edge in intervals[name])
            value = round(float(estimates[name][0]), _DIGITS)
            if name == "relevant" or upper - lower <= MAX_WIDTH:
                terms[name] = Term(value, lower, upper, n)
            else:
                reason = f"the interval [{lower:.2f}, {upper:.2f}] is wider than {MAX_WIDTH:g}"
                terms[name] = Term(None, lower, upper, n, reason)
    return terms


def _unbounded(name: TermName, infinite: set[str], gain_above_0: bool) -> str | None:
    """Why a term of the model has no interval; None if it has one."""
    gain_infinite = bool(infinite & {"relevant", "completeness"})
    if name in infinite or (name == "relevant" and gain_infinite):
        return "right and wrong answers are separated along it without exception"
    if gain_infinite:
        return "the gain of a relevant passage, its unit, has no finite estimate"
    if name != "relevant" and not gain_above_0:
        return "the gain of a relevant passage, its unit, is not clearly above 0"
    return None


def _displaced(
    reasons: Mapping[TermName, str], coefficients: Mapping[str, float]
) -> tuple[str, ...]:
    if not coefficients or "irrelevant" not in reasons:
        return ()
    return (
        (
            "the cost of an irrelevant passage is not in the model, so the gain of a relevant one "
            "includes that of not having an irrelevant one in its place"
        ),
    )
