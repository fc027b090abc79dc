"""Fits the utility of passages to one reader, from answers marked right or wrong.

A logistic regression of correctness on the context's passages, which compares the answers to one
question with each other (DESIGN.md §5). A term that the answers cannot identify has a reason
instead of a value, and kinds of passages that they cannot tell apart share one value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibration.data.dataset import Dataset
from calibration.reader.answers import (
    COSTS,
    TERMS,
    Answer,
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
)
from calibration.reader.within_question import CONFIDENCE, compared_questions, fit_within
from ctxguard.core.interval import Interval
from ctxguard.core.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.core.types import FloatArray
from ctxguard.errors import CalibrationError

DESCRIPTIONS: Mapping[TermName, str] = {
    "relevant": "log odds of a right answer that a relevant passage gains, on average",
    "unjudged": "cost of a passage without a label, as a share of that gain",
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
    f"at least {MIN_QUESTIONS} questions with answers to different contexts",
    f"{MIN_MINORITY_PER_COLUMN} questions with a right and as many with a wrong answer per column",
    (
        "a term varies between the contexts of one question; counts of passages that are not "
        "relevant, also among contexts that hold as many of as many relevant ones"
    ),
    (
        f"at least {MIN_OWN_VARIATION:.0%} of a term's variation is its own, not shared with other "
        f"terms, and it rests on the equivalent of at least {MIN_CARRYING_QUESTIONS} questions"
    ),
    "right and wrong answers are not separated without exception along the term",
    "the gain of a relevant passage, which is the unit, has its whole interval above 0",
    f"the interval is at most {MAX_WIDTH:g} wide, which is the whole gain that it is a share of",
    (
        "kinds of passages whose costs the answers cannot tell apart, or put in the wrong order, "
        "have one cost together"
    ),
)

_DIGITS = 6


@dataclass(frozen=True)
class ReaderEstimate(Interval):
    """An estimate from a reader's answers, or the reason why they do not identify it.

    Attributes:
        reason_if_none: Why there is no value; the interval is still given if it is too wide.
    """

    reason_if_none: str | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one kind of passages, or of several that the answers cannot tell apart.

    Attributes:
        kinds: One or more of ``COSTS``.
        cost: A share of the gain, with its interval.
    """

    kinds: tuple[TermName, ...]
    cost: ReaderEstimate


@dataclass(frozen=True, slots=True)
class Pooling:
    """Two kinds of passages, or groups of kinds, whose costs the answers do not tell apart.

    Attributes:
        milder, harsher: The kinds; the harsher ones should cost more.
        more: Cost of the harsher minus that of the milder, as a share of the gain.
    """

    milder: tuple[TermName, ...]
    harsher: tuple[TermName, ...]
    more: Interval

    @property
    def sentence(self) -> str:
        """The finding and its consequence, for people."""
        milder, harsher = " and ".join(self.milder), " and ".join(self.harsher)
        ends = self.more.bounds
        bounds = "no interval" if ends is None else "[{:.3f}, {:.3f}]".format(*ends)
        found = f"{harsher} costs {self.more.value:+.3f} {bounds} more than {milder}"
        if self.more.side == "lower":
            return f"{found}, which is the wrong way round: check the labels. One cost is fitted"
        return f"{found}: the answers cannot tell which costs more, so one cost is fitted"


@dataclass(frozen=True)
class ReaderFit:
    """The utility of passages to one reader.

    The estimates compare answers to one question with each other, so that easy questions with
    good contexts do not count as evidence. ``relevant`` is an average over questions: differences
    between them that no column explains shrink all log odds alike, and hardly change the ratios.

    Attributes:
        columns: The terms of the model; empty if nothing could be fitted.
        terms: By name, see ``DESCRIPTIONS``. ``relevant`` is in log odds; costs are positive if
            a passage does harm, negative if it helps. Every kind of passage is separate.
        costs: The kinds again, with one cost for those that the answers cannot tell apart.
        pooled: Evidence of the answers on these kinds, in the order of pooling.
        n_answers: Number of answers used.
        n_queries: Number of questions that they answer.
        n_compared: Number of these with answers to different contexts, which are compared.
        confidence: Confidence level of every interval.
        notes: Omissions, one readable line each.
    """

    columns: tuple[TermName, ...]
    terms: Mapping[TermName, ReaderEstimate]
    costs: tuple[Cost, ...]
    pooled: tuple[Pooling, ...]
    n_answers: int
    n_queries: int
    n_compared: int
    confidence: float
    notes: tuple[str, ...]

    @property
    def identified_costs(self) -> tuple[TermName, ...]:
        """The kinds whose cost has a value, alone or pooled; ``utilities`` uses these."""
        return tuple(
            [name for each in self.costs if each.cost.value is not None for name in each.kinds]
        )

    def utilities(self, base: Utilities = DEFAULT_UTILITIES) -> Utilities:
        """Return ``base`` with the identified costs, as penalties in units of its ``relevant``.

        Raises:
            CalibrationError: no cost was identified.
        """
        if not self.identified_costs:
            reasons = "; ".join(f"{name}: {self.terms[name].reason_if_none}" for name in COSTS)
            raise CalibrationError(
                f"the answers identify no cost, so the reader has no fitted utilities ({reasons})"
            )
        return penalties(base, cost_by_kind(self.costs))


def cost_by_kind(costs: Sequence[Cost]) -> dict[TermName, float]:
    """Return the costs that have a value, by kind."""
    return {
        name: each.cost.value
        for each in costs
        if each.cost.value is not None
        for name in each.kinds
    }


def penalties(base: Utilities, costs: Mapping[TermName, float]) -> Utilities:
    """Return ``base`` with these costs, each a share of a relevant passage's gain, on one scale.

    A passage that helps although it is not relevant gets 0: the utility of a passage that is not
    relevant is never positive. A kind without a cost takes that of the nearest kind with one, the
    milder if there is one, times the ratio of their utilities in ``base``; and never a higher cost
    than the next harsher kind.

    Args:
        base: The preset; its ``relevant`` is the unit.
        costs: By kind, at least one.

    >>> fitted = penalties(DEFAULT_UTILITIES, {"irrelevant": 0.15, "hard_negative": -0.1})
    >>> fitted.unjudged, fitted.irrelevant, fitted.hard_negative, fitted.distractor
    (-0.06, -0.15, 0.0, 0.0)
    """
    known = {name: max(cost, 0.0) for name, cost in costs.items()}
    worth: dict[str, float] = {}
    for position, name in enumerate(COSTS):
        before = [each for each in COSTS[:position] if each in known]
        after = [each for each in COSTS[position + 1 :] if each in known]
        nearest = name if name in known else before[-1] if before else after[0]
        preset = getattr(base, nearest)
        cost = known[nearest] * (getattr(base, name) / preset if preset else 1.0)
        if name not in known and after:
            cost = min(cost, known[after[0]])
        worth[name] = round(-base.relevant * cost, _DIGITS) + 0.0
    return replace(
        base,
        unjudged=worth["unjudged"],
        irrelevant=worth["irrelevant"],
        hard_negative=worth["hard_negative"],
        distractor=worth["distractor"],
    )


def fit_utilities(answers: Sequence[Answer], dataset: Dataset) -> ReaderFit:
    """Fit the utility of passages to the reader that gave these answers.

    Correctness is regressed on ``answers.term_columns`` within questions, see ``fit_within``.
    The unit is the gain of a relevant passage: log odds with all needed passages minus those with
    none, divided by the number needed, averaged over questions. It is defined even if
    completeness cannot be told from the share held. Answers to one question count as one
    observation in every interval. ``RULES`` say when a term has a value.

    Args:
        answers: The answers of one reader.

    Raises:
        CalibrationError: no answer belongs to a question with a relevant passage.
        MissingExtraError: scipy is not installed.
    """
    marked = mark(answers, dataset)
    columns = term_columns(marked.contexts)
    needed = np.array([context.n_needed for context in marked.contexts], dtype=np.int64)
    reasons = unidentified(columns, needed, marked.question)
    used = [name for name in TERMS if name not in reasons]
    n_compared = compared_questions(columns, marked.question)
    if too_few := _too_few(marked, n_compared, n_columns=len(used)):
        reasons = {name: reasons.get(name, too_few) for name in TERMS}
    elif "relevant" in reasons:
        unit = f"the unit is not identified: {reasons['relevant']}"
        reasons = {name: reasons.get(name, unit) for name in TERMS}
    terms = {
        name: ReaderEstimate(None, None, None, len(marked), why) for name, why in reasons.items()
    }
    costs: tuple[Cost, ...] = ()
    pooled: tuple[Pooling, ...] = ()
    notes = marked.notes
    if len(reasons) < len(TERMS):
        found, costs, pooled = fit_terms(marked, used)
        terms |= found
        if "unjudged" in reasons and "irrelevant" in reasons:
            displaced = (
                "the cost of an irrelevant passage is not in the model, so the gain of a relevant "
                "one includes that of not having an irrelevant one in its place"
            )
            notes = (*notes, displaced)
    return ReaderFit(
        columns=tuple(used) if len(reasons) < len(TERMS) else (),
        terms={name: terms[name] for name in TERMS},
        costs=costs,
        pooled=pooled,
        n_answers=len(marked),
        n_queries=len(marked.query_ids),
        n_compared=n_compared,
        confidence=CONFIDENCE,
        notes=notes,
    )


def fit_terms(
    marked: MarkedContexts, used: Sequence[TermName]
) -> tuple[dict[TermName, ReaderEstimate], tuple[Cost, ...], tuple[Pooling, ...]]:
    """Return a model's terms with these columns, the costs after pooling, and the poolings."""
    columns = term_columns(marked.contexts)
    model = _Model({name: columns[name] for name in used}, marked)
    terms = model.terms()
    pooled: list[Pooling] = []
    while pooling := model.indistinct():
        pooled.append(pooling)
        model = model.pool(pooling)
    return terms, model.costs(), tuple(pooled)


class _Model:
    """The regression with some kinds of passages pooled.

    Args:
        columns: The terms of the model.
        marked: The answers.
        groups: Kinds that share a coefficient, the mildest first; separate unless given.
    """

    def __init__(
        self,
        columns: Mapping[TermName, FloatArray],
        marked: MarkedContexts,
        groups: tuple[tuple[TermName, ...], ...] | None = None,
    ) -> None:
        self._columns, self._marked = columns, marked
        self._groups = (
            tuple([(name,) for name in COSTS if name in columns]) if groups is None else groups
        )
        sums: dict[TermName, FloatArray] = {
            group[0]: np.sum([columns[name] for name in group], axis=0) for group in self._groups
        }
        others = {name: column for name, column in columns.items() if name not in COSTS}
        together = {**others, **sums}
        self._fit, self._infinite = fit_within(together, marked.question, marked.correct)
        one_each: IntArray = np.unique(marked.question, return_index=True)[1]
        per_passage = float(np.mean([1.0 / marked.contexts[row].n_needed for row in one_each]))
        whole: list[TermName] = ["relevant", "completeness"]
        self._whole = {name: 1.0 for name in whole if name in columns}
        self._unit = dict.fromkeys(self._whole, per_passage)
        self._gain = self._fit.combination(self._unit)

    def indistinct(self) -> Pooling | None:
        """Return the neighbouring groups least clearly in order; None if all clearly are."""
        if self._no_unit() is not None:
            return None
        doubtful = []
        for milder, harsher in zip(self._groups, self._groups[1:], strict=False):
            if self._infinite & {milder[0], harsher[0]}:
                continue
            more = self._fit.ratio({harsher[0]: -1.0, milder[0]: 1.0}, self._unit)
            if more.lower is None or more.lower <= 0.0:
                doubtful.append(Pooling(milder, harsher, _rounded(more)))
        return min(doubtful, key=lambda pooling: pooling.more.value or 0.0, default=None)

    def pool(self, pooling: Pooling) -> "_Model":
        """Build the model in which two neighbouring groups share a coefficient."""
        together = (*pooling.milder, *pooling.harsher)
        groups = [
            together if group == pooling.milder else group
            for group in self._groups
            if group != pooling.harsher
        ]
        return _Model(self._columns, self._marked, tuple(groups))

    def terms(self) -> dict[TermName, ReaderEstimate]:
        """Estimate every term of the model in its unit."""
        terms: dict[TermName, ReaderEstimate] = {"relevant": self._term("relevant", self._gain)}
        terms |= {name: each.cost for each in self.costs() for name in each.kinds}
        signs: dict[TermName, float] = {"position": -1.0, "completeness": 1.0}
        for name, sign in signs.items():
            if name in self._columns:
                terms[name] = self._term(name, self._fit.ratio({name: sign}, self._whole))
        return terms

    def costs(self) -> tuple[Cost, ...]:
        """Estimate the cost of each group in units of the gain."""
        return tuple(
            [
                Cost(group, self._term(group[0], self._fit.ratio({group[0]: -1.0}, self._unit)))
                for group in self._groups
            ]
        )

    def _term(self, name: TermName, found: Interval) -> ReaderEstimate:
        gain_infinite = bool(self._infinite & {"relevant", "completeness"})
        if name in self._infinite or (name == "relevant" and gain_infinite):
            reason = "right and wrong answers are separated along it without exception"
            return ReaderEstimate(None, None, None, found.n, reason)
        no_unit = self._no_unit()
        if name != "relevant" and no_unit is not None:
            return ReaderEstimate(None, None, None, found.n, no_unit)
        found = _rounded(found)
        ends = found.bounds
        if name != "relevant" and ends is not None and ends[1] - ends[0] > MAX_WIDTH:
            reason = f"the interval [{ends[0]:.2f}, {ends[1]:.2f}] is wider than {MAX_WIDTH:g}"
            return ReaderEstimate(None, *ends, found.n, reason)
        return ReaderEstimate(found.value, found.lower, found.upper, found.n)

    def _no_unit(self) -> str | None:
        """Explain why nothing can be measured in units of the gain; None if it can."""
        if self._infinite & {"relevant", "completeness"}:
            return "the gain of a relevant passage, its unit, has no finite estimate"
        if self._gain.lower is None or self._gain.lower <= 0.0:
            return "the gain of a relevant passage, its unit, is not clearly above 0"
        return None


def _rounded(found: Interval) -> Interval:
    value, lower, upper = (
        None if figure is None else round(figure, _DIGITS) + 0.0
        for figure in (found.value, found.lower, found.upper)
    )
    return Interval(value, lower, upper, found.n)


def _too_few(marked: MarkedContexts, n_compared: int, n_columns: int) -> str | None:
    if n_compared < MIN_QUESTIONS:
        return (
            f"only {n_compared} questions have answers to different contexts; at least "
            f"{MIN_QUESTIONS} must"
        )
    for outcome, word in ((True, "right"), (False, "wrong")):
        n = np.unique(marked.question[marked.correct == outcome]).size
        if n == 0:
            return f"no answer is {word}, so nothing tells contexts apart"
        if n < (needed := MIN_MINORITY_PER_COLUMN * n_columns):
            return f"only {n} questions have a {word} answer; {n_columns} columns need {needed}"
    return None
