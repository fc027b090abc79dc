"""Measures of use and harm for one query: the utility of a passage to the reader, and UDCG.

Pure: no I/O, no clock, no logging.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ctxguard.core.metrics.arithmetic import discounted_sum, share
from ctxguard.core.metrics.relevance import Gain
from ctxguard.errors import ConfigurationError

UNDISCOUNTED_PENALTY = 0.5
"""Harm of one distractor in ``harm_undiscounted``."""

_MOST = 1e6
"""Utilities are no larger, so that no sum of them overflows."""

REFERENCE_PENALTY = 0.333
"""Weight of an irrelevant passage in the UDCG paper's published figures; not 1/3."""


class Negative(StrEnum):
    """The label of a passage that is known to mislead."""

    HARD_NEGATIVE = "hard_negative"
    DISTRACTOR = "distractor"


@dataclass(frozen=True, slots=True)
class Utilities:
    """Utilities of passages to the reader, and when an unlabelled one is taken to mislead.

    Attributes:
        relevant: Utility of a passage of the collection's highest grade, ≥ 0.
        partial: Utility at a lower positive grade, ≥ 0.
        hard_negative: Utility of a labelled hard negative, ≤ 0.
        distractor: Utility of a known distractor, ≤ 0.
        irrelevant: Utility of a passage that is not relevant, ≤ 0: any such passage in the strict
            form, only those that the heuristics suspect in the heuristic form.
        unjudged: Utility of a passage that was not judged, ≤ 0, if the labels also include
            passages that are not relevant; in the heuristic form only if the heuristics suspect
            it. If only relevant passages are labelled, an unlabelled one has ``irrelevant``.
        score_ratio: The heuristics suspect relative scores above this, in [0, 1].
        rank_limit: The heuristics suspect ranks up to this, ≥ 0.
        by_grade: Utility by grade: replaces ``relevant`` and ``partial`` for the grades that it
            names, and ``irrelevant`` if it names 0 (judged not relevant).
        gain: Of a grade in nDCG; see ``dcg``.
    """

    relevant: float = 1.0
    partial: float = 0.5
    hard_negative: float = -0.5
    distractor: float = -1.0
    irrelevant: float = -0.5
    unjudged: float = -0.2
    score_ratio: float = 0.7
    rank_limit: int = 3
    by_grade: Mapping[int, float] | None = field(default=None, hash=False)
    gain: Gain = "linear"

    def __post_init__(self) -> None:
        for name in ("relevant", "partial"):
            if not 0.0 <= getattr(self, name) <= _MOST:
                raise ConfigurationError(
                    f"utility {name} {getattr(self, name)!r} must be ≥ 0, at most {_MOST:g}: it is "
                    "a gain"
                )
        for name in ("hard_negative", "distractor", "irrelevant", "unjudged"):
            if not -_MOST <= getattr(self, name) <= 0.0:
                raise ConfigurationError(
                    f"utility {name} {getattr(self, name)!r} must be ≤ 0, at least {-_MOST:g}: it "
                    "is a penalty, written as a negative number"
                )
        if not 0.0 <= self.score_ratio <= 1.0:
            raise ConfigurationError(f"score_ratio {self.score_ratio!r} must lie in [0, 1]")
        if self.rank_limit < 0:
            raise ConfigurationError(f"rank_limit {self.rank_limit!r} must be at least 0")
        for grade, worth in (self.by_grade or {}).items():
            if not abs(worth) <= _MOST:
                raise ConfigurationError(
                    f"utility {worth!r} of grade {grade} must lie in [{-_MOST:g}, {_MOST:g}]"
                )

    @property
    def worst(self) -> float:
        """The lowest utility that any passage can have, ≤ 0."""
        return min(
            self.hard_negative,
            self.distractor,
            self.irrelevant,
            self.unjudged,
            *(self.by_grade or {}).values(),
        )


DEFAULT_UTILITIES = Utilities()
STRICT_UTILITIES = Utilities(score_ratio=0.5, irrelevant=-1.0, unjudged=-0.4, hard_negative=-1.0)
"""If a wrong passage does real damage (medicine, law). A labelled hard negative costs no less
than one that is only suspected."""
RELAXED_UTILITIES = Utilities(score_ratio=0.9, irrelevant=-0.2, unjudged=-0.08)
"""If a stray passage hardly matters (creative writing)."""
PRESETS: Mapping[str, Utilities] = {
    "default": DEFAULT_UTILITIES,
    "strict": STRICT_UTILITIES,
    "relaxed": RELAXED_UTILITIES,
}


def heuristic_utilities(
    ranked_grades: Sequence[int],
    relative_scores: Sequence[float] | None,
    *,
    top_grade: int,
    negatives: Sequence[Negative | None] | None = None,
    judged: Sequence[bool] | None = None,
    utilities: Utilities = DEFAULT_UTILITIES,
) -> list[float]:
    """Return the utility of each passage, for collections that label few of their distractors.

    The first rule that matches wins: a positive grade; a labelled negative; a relative score
    above ``score_ratio``; a rank up to ``rank_limit``; otherwise 0. A long tail of low-scored
    junk therefore costs nothing: report ``strict_utilities`` beside it (DESIGN.md §5).

    Args:
        ranked_grades: Shape (n,), grades in rank order.
        relative_scores: Shape (n,), each passage against the top of its ranking, in [0, 1], from
            ``ctxguard.core.scores.relative_scores``; on a ratio scale it is score / top. None if
            scores carry rank only: the score rule is then left out, because a ratio of
            reciprocal-rank scores measures the fusion constant.
        top_grade: The collection's highest grade, ≥ 1.
        negatives: Shape (n,), the label of each passage that is known to mislead.
        judged: Shape (n,), whether each passage has a label; None if only relevant passages are
            labelled, so that an unlabelled one counts as not relevant.
        utilities: The utility of each case, and the thresholds.

    Returns:
        Utilities of shape (n,), for ``udcg``.

    Raises:
        ConfigurationError: lengths differ, or a grade lies above ``top_grade``.

    >>> heuristic_utilities([1, 0, 0, 0, 0], [1.0, 0.9, 0.4, 0.8, 0.3], top_grade=1)
    [1.0, -0.5, -0.5, -0.5, 0.0]
    """
    worths = _labelled_utilities(ranked_grades, top_grade, negatives, judged, utilities)
    if relative_scores is None:
        relative_scores = [0.0] * len(worths)
    _check_length("relative_scores", len(relative_scores), len(worths))
    return [
        worth
        if is_certain or relative > utilities.score_ratio or rank <= utilities.rank_limit
        else 0.0
        for rank, ((worth, is_certain), relative) in enumerate(
            zip(worths, relative_scores, strict=True), start=1
        )
    ]


def strict_utilities(
    ranked_grades: Sequence[int],
    *,
    top_grade: int,
    negatives: Sequence[Negative | None] | None = None,
    judged: Sequence[bool] | None = None,
    utilities: Utilities = DEFAULT_UTILITIES,
) -> list[float]:
    """Return the utility of each passage, with a cost for each that is not relevant.

    Args:
        ranked_grades: Shape (n,), grades in rank order.
        top_grade: The collection's highest grade, ≥ 1.
        negatives: Shape (n,), the label of each passage that is known to mislead; it determines
            the utility of such a passage.
        judged: Shape (n,), whether each passage has a label; None if only relevant passages are
            labelled, so that an unlabelled one counts as not relevant.
        utilities: The utility of each case.

    Returns:
        Utilities of shape (n,), for ``udcg``.

    Raises:
        ConfigurationError: lengths differ, or a grade lies above ``top_grade``.

    >>> labels = [None, None, None, Negative.DISTRACTOR]
    >>> strict_utilities([2, 1, 0, 0], top_grade=2, negatives=labels)
    [1.0, 0.5, -0.5, -1.0]
    >>> strict_utilities([1, 0, 0], top_grade=1, judged=[True, True, False])
    [1.0, -0.5, -0.2]
    """
    worths = _labelled_utilities(ranked_grades, top_grade, negatives, judged, utilities)
    return [worth for worth, _ in worths]


@dataclass(frozen=True, slots=True)
class Udcg:
    """UDCG of one context, with gain and harm separate.

    Attributes:
        gain: The discounted sum of the positive utilities, ≥ 0.
        harm: The discounted sum of the negative utilities, as a positive number.
    """

    gain: float
    harm: float

    @property
    def value(self) -> float:
        """gain − harm."""
        return self.gain - self.harm


def udcg(utilities: Sequence[float]) -> Udcg:
    """Utility- and distraction-aware cumulative gain: Σ u_i / log2(i + 1) (DESIGN.md §9).

    An empty context scores 0: it neither helps nor harms. ``udcg_reference`` is the form of the
    paper that named the measure.

    Args:
        utilities: The utility of each passage, in rank order.

    >>> result = udcg([1.0, 0.5, -0.5])
    >>> round(result.gain, 4), result.harm, round(result.value, 4)
    (1.3155, 0.25, 1.0655)
    """
    return Udcg(
        gain=discounted_sum([max(utility, 0.0) for utility in utilities]),
        harm=discounted_sum([max(-utility, 0.0) for utility in utilities]),
    )


def udcg_reference(
    relevant: Sequence[bool], abstain: Sequence[float], penalty: float = REFERENCE_PENALTY
) -> float | None:
    """Compute UDCG as the paper's authors do, without a rank discount.

    sigmoid of the mean over all passages of 1 − a for a relevant passage and −penalty·(1 − a)
    for another, where a is the probability that the reader abstains given that passage alone:
    Trappolini, Cuconasu, Filice, Maarek and Silvestri, "Redefining Retrieval Evaluation in the
    Era of LLMs", EACL 2026, arXiv 2510.21440, in the form of the authors' published program
    (whose summary speaks of two means; the program and its sample take one, over all passages).

    Args:
        relevant: Shape (n,).
        abstain: Shape (n,), probabilities in [0, 1].
        penalty: Weight of an irrelevant passage, as a positive number.

    Returns:
        A value in (0, 1), 0.5 for a context that neither helps nor harms; None if it is empty.

    Raises:
        ConfigurationError: lengths differ, or a value of ``abstain`` is not a probability.

    >>> round(udcg_reference([True, False], [0.0, 0.5]), 4)
    0.6027
    """
    _check_length("abstain", len(abstain), len(relevant))
    if not relevant:
        return None
    for probability in abstain:
        if not 0.0 <= probability <= 1.0:
            raise ConfigurationError(
                f"abstain {probability!r} must lie in [0, 1]: it is a probability"
            )
    total = sum(
        (1.0 - probability) * (1.0 if is_relevant else -penalty)
        for is_relevant, probability in zip(relevant, abstain, strict=True)
    )
    return 1.0 / (1.0 + math.exp(-total / len(relevant)))


def distractor_rate(utilities: Sequence[float]) -> float | None:
    """Return the share of the kept passages with a negative utility; None for an empty context.

    >>> distractor_rate([1.0, -0.5, 0.0, -1.0])
    0.5
    """
    return share(sum(utility < 0.0 for utility in utilities), len(utilities))


def harm_undiscounted(utilities: Sequence[float]) -> float:
    """Return half the number of kept passages that mislead: kept × distractor rate × 0.5.

    Each counts the same at every rank and at any utility, unlike ``Udcg.harm``. 0 for an
    empty context.

    >>> harm_undiscounted([1.0, -0.5, 0.0, -1.0])
    1.0
    """
    return UNDISCOUNTED_PENALTY * sum(utility < 0.0 for utility in utilities)


def _labelled_utilities(
    ranked_grades: Sequence[int],
    top_grade: int,
    negatives: Sequence[Negative | None] | None,
    judged: Sequence[bool] | None,
    utilities: Utilities,
) -> list[tuple[float, bool]]:
    """Return the utility of each passage, and whether its label alone determines it."""
    if top_grade < 1:
        raise ConfigurationError(f"top_grade {top_grade!r} must be at least 1")
    if negatives is None:
        negatives = [None] * len(ranked_grades)
    if judged is None:
        judged = [True] * len(ranked_grades)
    _check_length("negatives", len(negatives), len(ranked_grades))
    _check_length("judged", len(judged), len(ranked_grades))
    by_grade = utilities.by_grade or {}
    worth_of = {
        Negative.HARD_NEGATIVE: utilities.hard_negative,
        Negative.DISTRACTOR: utilities.distractor,
    }
    worths: list[tuple[float, bool]] = []
    for grade, negative, is_judged in zip(ranked_grades, negatives, judged, strict=True):
        if grade > top_grade:
            raise ConfigurationError(
                f"grade {grade} lies above top_grade {top_grade}, the collection's highest"
            )
        if grade > 0:
            preset = utilities.relevant if grade == top_grade else utilities.partial
            worths.append((by_grade.get(grade, preset), True))
        elif negative is not None:
            worths.append((worth_of[negative], True))
        elif is_judged:
            worths.append((by_grade.get(grade, utilities.irrelevant), grade in by_grade))
        else:
            worths.append((utilities.unjudged, False))
    return worths


def _check_length(name: str, length: int, expected: int) -> None:
    if length != expected:
        raise ConfigurationError(f"{name} has {length} values for {expected} passages")
