"""Defines the worth of passages to the reader, according to their labels. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.checks import check_at_least
from ctxguard.errors import ConfigurationError

Gain = Literal["linear", "exponential"]
"""The nDCG gain of a grade: ``linear`` is the grade itself (Järvelin and Kekäläinen, TOIS 2002),
``exponential`` 2^grade − 1 (Burges et al., ICML 2005)."""

_MOST = 1e6
"""The largest absolute utility, so that no sum of utilities overflows."""


class Negative(StrEnum):
    """The label of a passage that is known to mislead."""

    HARD_NEGATIVE = "hard_negative"
    DISTRACTOR = "distractor"


@dataclass(frozen=True, slots=True)
class Utilities:
    """The worth of a passage to the reader, in units of a fully relevant passage's gain.

    The defaults are what recorded answers of language models show: a passage that is not relevant
    costs about a fiftieth of what a relevant one gains (``benchmarks.readers``).

    Attributes:
        relevant: Utility at the collection's highest grade, ≥ 0.
        partial: Utility at a lower positive grade, ≥ 0.
        hard_negative, distractor: Utility of a passage with that label, ≤ 0.
        irrelevant: Utility of a passage that is not relevant, ≤ 0.
        unjudged: Utility of a passage that was not judged, ≤ 0, if the labels also include
            passages that are not relevant. If only relevant passages are labelled, an unlabelled
            one has ``irrelevant``.
        score_ratio: If given, only a passage that is suspected to mislead costs something where no
            label says so: one of a relative score above this, in [0, 1], or of the first
            ``rank_limit`` ranks. None where every passage costs what it is worth.
        rank_limit: Ranks up to this are suspected, ≥ 0; without ``score_ratio`` it has no effect.
        by_grade: Utility by grade: replaces ``relevant`` and ``partial`` for the grades that it
            names, and ``irrelevant`` if it names 0 (judged not relevant).
        gain: How grades gain in nDCG; see ``Gain``.
    """

    relevant: float = 1.0
    partial: float = 0.5
    hard_negative: float = -0.1
    distractor: float = -0.2
    irrelevant: float = -0.02
    unjudged: float = -0.02
    score_ratio: float | None = None
    rank_limit: int = 3
    by_grade: Mapping[int, float] | None = field(default=None, hash=False)
    gain: Gain = "linear"

    def __post_init__(self) -> None:
        for name in ("relevant", "partial"):
            if not 0.0 <= getattr(self, name) <= _MOST:
                raise ConfigurationError(
                    f"utility {name} {getattr(self, name)!r} must be between 0 and {_MOST:g}: "
                    "it is a gain"
                )
        for name in ("hard_negative", "distractor", "irrelevant", "unjudged"):
            if not -_MOST <= getattr(self, name) <= 0.0:
                raise ConfigurationError(
                    f"utility {name} {getattr(self, name)!r} must be between {-_MOST:g} and 0: "
                    "it is a penalty, written as a negative number"
                )
        if self.score_ratio is not None and not 0.0 <= self.score_ratio <= 1.0:
            raise ConfigurationError(f"score_ratio {self.score_ratio!r} must lie in [0, 1]")
        check_at_least(0, rank_limit=self.rank_limit)
        for grade, worth in (self.by_grade or {}).items():
            if not abs(worth) <= _MOST:
                raise ConfigurationError(
                    f"utility {worth!r} of grade {grade} must lie in [{-_MOST:g}, {_MOST:g}]"
                )

    def of(
        self,
        grade: int,
        *,
        top_grade: int,
        negative: Negative | None = None,
        is_judged: bool = True,
    ) -> float:
        """Return the worth of a passage according to its label.

        Args:
            top_grade: The collection's highest grade, ≥ 1.
            negative: How it misleads, which counts if its grade is not above 0.
            is_judged: Whether it has a label; also True for an unlabelled one if only relevant
                passages are labelled, so that it counts as not relevant.

        Raises:
            ConfigurationError: the grade lies above ``top_grade``.

        >>> READERS.of(2, top_grade=2), READERS.of(1, top_grade=2), READERS.of(0, top_grade=2)
        (1.0, 0.5, -0.02)
        >>> STRICT.of(0, top_grade=2, negative=Negative.DISTRACTOR)
        -1.0
        """
        if grade > top_grade:
            raise ConfigurationError(
                f"grade {grade} is above top_grade {top_grade}, the collection's highest"
            )
        by_grade = self.by_grade or {}
        if grade > 0:
            return by_grade.get(grade, self.relevant if grade == top_grade else self.partial)
        if negative is not None:
            is_distractor = negative is Negative.DISTRACTOR
            return self.distractor if is_distractor else self.hard_negative
        return by_grade.get(grade, self.irrelevant) if is_judged else self.unjudged

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


def gains(grades: NDArray[np.int64], form: Gain) -> NDArray[Any]:
    """Return the nDCG gains of grades."""
    return grades if form == "linear" else np.exp2(grades) - 1.0


READERS = Utilities()
"""The worth measured on readers; the default."""
STRICT = Utilities(hard_negative=-0.5, distractor=-1.0, irrelevant=-0.5, unjudged=-0.2)
"""For fields where every irrelevant passage does damage (medicine, law)."""
BLOG = replace(STRICT, score_ratio=0.7)
"""The numbers and heuristics of the article from which UDCG's discounted form comes."""
PRESETS: Mapping[str, Utilities] = {"readers": READERS, "blog": BLOG, "strict": STRICT}
