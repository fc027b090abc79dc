"""Fits the utility of passages to one reader, from answers marked right or wrong.

A logistic regression of correctness on the context's passages, which compares the answers to one
question with each other (DESIGN.md §5). A term that the answers cannot identify has a reason
instead of a value, and kinds of passages that they cannot tell apart share one value.
``ctxguard fit utilities`` writes a fit, and ``calibrate`` reads it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import AliasPath, BaseModel, ConfigDict, Field

from calibration.data.dataset import Dataset
from calibration.data.text_files import read_model
from calibration.reader.answers import (
    COSTS,
    TERMS,
    Answer,
    MarkedContexts,
    mark,
    term_columns,
)
from calibration.reader.within_question import (
    CONFIDENCE,
    MIN_CARRYING_QUESTIONS,
    MIN_OWN_VARIATION,
    compared_questions,
    fit_within,
    unidentified,
)
from ctxguard.core.interval import Interval
from ctxguard.core.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.errors import CalibrationError, DataError

DESCRIPTIONS: Mapping[str, str] = {
    "relevant": "log odds of a right answer that a relevant passage gains, on average",
    "unjudged": "cost of a passage without a label, as a share of that gain",
    "irrelevant": "cost of a passage that is not relevant, as a share of that gain",
    "hard_negative": "cost of a labelled hard negative, as a share of that gain",
    "distractor": "cost of a known distractor, as a share of that gain",
    "position": "rank discount of the first relevant passage: 0 none, 1 as UDCG's",
    "completeness": "share of the gain that comes only once every relevant passage is there",
}

FORMAT = "ctxguard utilities 1"
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
    "right and wrong answers are not separated without exception",
    "the gain of a relevant passage, which is the unit, has its whole interval above 0",
    f"the interval is at most {MAX_WIDTH:g} wide, which is the whole gain that it is a share of",
    (
        "kinds of passages whose costs the answers cannot tell apart, or put in the wrong order, "
        "have one cost together"
    ),
)

_TOGETHER = " + "
_DIGITS = 6
_MAX_BYTES = 16 * 2**20


@dataclass(frozen=True)
class ReaderEstimate(Interval):
    """An estimate from a reader's answers, or the reason why they do not identify it.

    Attributes:
        reason_if_none: Why there is no value; the interval is still given if it is too wide.
    """

    reason_if_none: str | None = None


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
        costs: The kinds again, as shares of the gain, with one cost for those that the answers
            cannot tell apart, whose names are joined by `` + ``.
        pooled: What the answers say of these kinds, one sentence each, in the order of pooling.
        n_answers: Number of answers used.
        n_queries: Number of questions that they answer.
        n_compared: Number of these with answers to different contexts, which are compared.
        confidence: Confidence level of every interval.
        notes: Omissions, one readable line each.
    """

    columns: tuple[str, ...]
    terms: Mapping[str, ReaderEstimate]
    costs: Mapping[str, ReaderEstimate]
    pooled: tuple[str, ...]
    n_answers: int
    n_queries: int
    n_compared: int
    confidence: float
    notes: tuple[str, ...]

    @property
    def identified_costs(self) -> tuple[str, ...]:
        """The kinds whose cost has a value, alone or pooled; ``utilities`` uses these."""
        return tuple(cost_by_kind(self.costs))

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


def cost_by_kind(costs: Mapping[str, ReaderEstimate]) -> dict[str, float]:
    """Return the costs that have a value, by kind."""
    return {
        kind: cost.value
        for name, cost in costs.items()
        if cost.value is not None
        for kind in name.split(_TOGETHER)
    }


def penalties(base: Utilities, costs: Mapping[str, float]) -> Utilities:
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
    none = _too_few(marked, n_compared, n_columns=len(used))
    if none is None and "relevant" in reasons:
        none = f"the unit is not identified: {reasons['relevant']}"
    if none is not None:
        used, reasons = [], {name: reasons.get(name, none) for name in TERMS}
    found: dict[str, ReaderEstimate] = {
        name: _refused(marked, why) for name, why in reasons.items()
    }
    costs: dict[str, ReaderEstimate] = {}
    pooled: tuple[str, ...] = ()
    notes = marked.notes
    if used:
        terms, costs, pooled = fit_terms(marked, used)
        found |= terms
        if "unjudged" in reasons and "irrelevant" in reasons:
            displaced = (
                "the cost of an irrelevant passage is not in the model, so the gain of a relevant "
                "one includes that of not having an irrelevant one in its place"
            )
            notes = (*notes, displaced)
    return ReaderFit(
        columns=tuple(used),
        terms={name: found[name] for name in TERMS},
        costs=costs,
        pooled=pooled,
        n_answers=len(marked),
        n_queries=len(marked.query_ids),
        n_compared=n_compared,
        confidence=CONFIDENCE,
        notes=notes,
    )


def fit_terms(
    marked: MarkedContexts, used: Sequence[str]
) -> tuple[dict[str, ReaderEstimate], dict[str, ReaderEstimate], tuple[str, ...]]:
    """Fit a model with these columns, and pool neighbouring kinds until all are clearly in order.

    Returns:
        The terms with every kind apart; the costs after pooling, and a sentence for each pooling,
        as ``ReaderFit`` has them.
    """
    columns = term_columns(marked.contexts)
    one_each = np.unique(marked.question, return_index=True)[1]
    per_passage = float(np.mean([1.0 / marked.contexts[row].n_needed for row in one_each]))
    whole = {name: 1.0 for name in ("relevant", "completeness") if name in used}
    unit = dict.fromkeys(whole, per_passage)
    groups = [[name] for name in COSTS if name in used]
    terms: dict[str, ReaderEstimate] = {}
    pooled: list[str] = []
    while True:
        table = {name: columns[name] for name in used if name not in COSTS}
        names = [_TOGETHER.join(group) for group in groups]
        sums = [np.sum([columns[name] for name in group], axis=0) for group in groups]
        model = fit_within(
            {**table, **dict(zip(names, sums, strict=True))}, marked.question, marked.correct
        )
        if model is None:
            why = "right and wrong answers are separated without exception"
            return {name: _refused(marked, why) for name in used}, {}, ()
        gain = _rounded(model.ratio(unit))
        if gain.lower is None or gain.lower <= 0.0:
            why = "the gain of a relevant passage, its unit, is not clearly above 0"
            refused = {name: _refused(marked, why) for name in (*used, *names)}
            terms = terms or {**{name: refused[name] for name in used}, "relevant": gain}
            return terms, {name: refused[name] for name in names}, tuple(pooled)
        costs = {name: _narrow(model.ratio({name: -1.0}, unit)) for name in names}
        terms = terms or {
            "relevant": gain,
            **costs,
            **{
                name: _narrow(model.ratio({name: sign}, whole))
                for name, sign in (("position", -1.0), ("completeness", 1.0))
                if name in used
            },
        }
        doubtful = []
        for place, (milder, harsher) in enumerate(pairwise(names)):
            more = _rounded(model.ratio({harsher: -1.0, milder: 1.0}, unit))
            if more.lower is None or more.lower <= 0.0:
                doubtful.append((more.value or 0.0, place, more))
        if not doubtful:
            return terms, costs, tuple(pooled)
        _, place, more = min(doubtful, key=lambda each: each[:2])
        pooled.append(_told_apart(groups[place], groups[place + 1], more))
        groups[place : place + 2] = [groups[place] + groups[place + 1]]


def _told_apart(milder: Sequence[str], harsher: Sequence[str], more: Interval) -> str:
    """Say of two groups of kinds what the answers tell of their order, and what follows."""
    ends = more.bounds
    bounds = "no interval" if ends is None else "[{:.3f}, {:.3f}]".format(*ends)
    first, second = " and ".join(milder), " and ".join(harsher)
    found = f"{second} costs {more.value:+.3f} {bounds} more than {first}"
    if more.side == "lower":
        return f"{found}, which is the wrong way round: check the labels. One cost is fitted"
    return f"{found}: the answers cannot tell which costs more, so one cost is fitted"


def _refused(marked: MarkedContexts, reason: str) -> ReaderEstimate:
    return ReaderEstimate(None, None, None, len(marked), reason)


def _rounded(found: Interval) -> ReaderEstimate:
    value, lower, upper = (
        None if figure is None else round(figure, _DIGITS) + 0.0
        for figure in (found.value, found.lower, found.upper)
    )
    return ReaderEstimate(value, lower, upper, found.n)


def _narrow(found: Interval) -> ReaderEstimate:
    """Refuse an estimate whose interval is too wide to conclude from."""
    found = _rounded(found)
    ends = found.bounds
    if ends is None or ends[1] - ends[0] <= MAX_WIDTH:
        return found
    reason = f"the interval [{ends[0]:.2f}, {ends[1]:.2f}] is wider than {MAX_WIDTH:g}"
    return replace(found, value=None, reason_if_none=reason)


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


class _File(BaseModel):
    """The fields that are read from the file; the others are for people."""

    model_config = ConfigDict(frozen=True)

    format: Literal["ctxguard utilities 1"]
    reader: str
    utilities: Utilities | None
    fitted: tuple[str, ...]
    n_answers: Annotated[int, Field(ge=0, validation_alias=AliasPath("fit", "n_answers"))]
    n_queries: Annotated[int, Field(ge=0, validation_alias=AliasPath("fit", "n_queries"))]


def utilities_document(fit: ReaderFit, reader: str) -> dict[str, object]:
    """Return a fit as JSON, which ``load_utilities`` reads back.

    Args:
        fit: The fit.
        reader: Name of the reader; empty if unknown.
    """
    return {
        "format": FORMAT,
        "reader": reader,
        "utilities": asdict(fit.utilities()) if fit.identified_costs else None,
        "fitted": list(fit.identified_costs),
        "fit": asdict(fit),
        "rules": list(RULES),
    }


def load_utilities(path: Path | str) -> tuple[Utilities, str]:
    """Read utilities that ``ctxguard fit utilities`` wrote.

    Returns:
        The utilities of passages, a relevant one having 1; and the reader whose answers they were
        fitted to, in words, with the file's digest.

    Raises:
        DataError: the file cannot be read, has another format, or gives a relevant passage another
            utility than 1, so that its values have another unit.
        CalibrationError: the answers identified no cost.
    """
    saved = read_model(_File, path, _MAX_BYTES, "what `ctxguard fit utilities --out` writes")
    reader = f"reader {saved.reader}" if saved.reader else "a reader without a name"
    if saved.utilities is None:
        raise CalibrationError(
            f"{path}: the answers of {reader} identified no cost, so there are no utilities; leave "
            "utilities out to use the preset"
        )
    if saved.utilities.relevant != DEFAULT_UTILITIES.relevant:
        raise DataError(
            f"gives a relevant passage the utility {saved.utilities.relevant:g}, and every utility "
            "is a share of that of a relevant passage, which is 1; divide all of them by it",
            path=path,
        )
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return saved.utilities, (
        f"fitted to {saved.n_answers:,} answers of {reader} to {saved.n_queries:,} questions "
        f"({', '.join(saved.fitted)}; file {digest[:12]})"
    )
