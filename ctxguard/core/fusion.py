"""Fusion: combines the scores of several legs into one order.

``reciprocal_rank`` (Cormack, Clarke and Büttcher, SIGIR 2009) uses ranks only. ``convex`` is
w·dense + (1−w)·lexical after theoretical min-max (Bruch, Gai and Ingber, TOIS 2023, §4): each leg
is shifted by its scorer's own minimum, not the list's, so that a bad candidate at the tail changes
nothing. Pure: no I/O, no clock, no logging.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ctxguard.core.scores import INVALID_MAGNITUDE
from ctxguard.core.types import FloatArray, Leg, ScoreKind
from ctxguard.errors import ConfigurationError

RECIPROCAL_RANK_CONSTANT = 60

_THEORETICAL_MINIMUM = {ScoreKind.RATIO: 0.0, ScoreKind.COSINE: -1.0, ScoreKind.PROBABILITY: 0.0}


@dataclass(frozen=True, slots=True)
class Fusion:
    """The method that combines the legs' scores.

    Attributes:
        method: ``reciprocal_rank`` (rank only), ``convex``, or ``ranker``: the candidates that
            ``reciprocal_rank`` finds, ordered by the pooled ranker (`ctxguard.retrieval.signals`).
        weight: The dense leg's share in ``convex``, in [0, 1].
        constant: The constant of ``reciprocal_rank``, > 0.
    """

    method: Literal["reciprocal_rank", "convex", "ranker"] = "reciprocal_rank"
    weight: float = 0.5
    constant: int = RECIPROCAL_RANK_CONSTANT

    def __post_init__(self) -> None:
        if self.method not in ("reciprocal_rank", "convex", "ranker"):
            raise ConfigurationError(
                f"fusion method {self.method!r} is unknown; use 'reciprocal_rank', 'convex' or "
                "'ranker'"
            )
        if not 0.0 <= self.weight <= 1.0:
            raise ConfigurationError(f"fusion weight {self.weight!r} must lie in [0, 1]")
        if self.constant <= 0:
            raise ConfigurationError(f"reciprocal-rank constant {self.constant!r} must be > 0")

    @property
    def kind(self) -> ScoreKind:
        """The kind of the fused scores."""
        if self.method == "ranker":
            return ScoreKind.LOGIT
        return ScoreKind.RATIO if self.method == "convex" else ScoreKind.RANK

    @property
    def fingerprint(self) -> str:
        """The method and its parameter in words; for ``ranker``, those of its candidate search."""
        if self.method == "convex":
            return f"convex w={self.weight!r}"
        return f"reciprocal_rank c={self.constant}"


def fuse(legs: Mapping[str, Leg], fusion: Fusion) -> FloatArray:
    """Compute one score per candidate from the scores of the lexical and the dense leg.

    Args:
        legs: ``lexical`` and ``dense``, shape (n,) each, NaN where a leg has no score. A missing or
            garbage score counts as the scorer's minimum (convex) or as no rank (reciprocal rank,
            which also accepts a missing leg).
        fusion: The method; ``convex`` gives scores in [0, 1], others a sum of reciprocal ranks.

    Raises:
        ConfigurationError: ``convex``, but the scores of a leg have no theoretical minimum.
    """
    if fusion.method == "convex":
        return fusion.weight * _unit_interval(legs["dense"]) + (
            1.0 - fusion.weight
        ) * _unit_interval(legs["lexical"])
    ranked = []
    for leg in legs.values():
        # A BM25 score of zero is not a hit, and has no rank.
        least = 0.0 if leg.kind is ScoreKind.RATIO else -INVALID_MAGNITUDE
        ranked.append(reciprocal_rank(leg.scores, fusion.constant, above=least))
    fused: FloatArray = np.add.reduce(ranked, axis=0)
    return fused


def _unit_interval(leg: Leg) -> FloatArray:
    """Scale scores to (s − the scorer's minimum) / (top − minimum); NaN becomes 0."""
    minimum = _THEORETICAL_MINIMUM.get(leg.kind)
    if minimum is None:
        raise ConfigurationError(
            f"convex fusion requires scores with a theoretical minimum; {leg.kind.value!r} has "
            "none: use reciprocal_rank fusion"
        )
    scores = leg.scores
    # NaN fails both comparisons; an infinite score must not become a plausible top.
    usable = (scores > minimum) & (scores < INVALID_MAGNITUDE)
    shifted = np.where(usable, scores - minimum, 0.0)
    span = float(shifted.max(initial=0.0))
    return shifted / span if span > 0.0 else shifted


def reciprocal_rank(
    scores: FloatArray,
    constant: int = RECIPROCAL_RANK_CONSTANT,
    *,
    above: float = -INVALID_MAGNITUDE,
) -> FloatArray:
    """Compute 1 / (constant + rank) from each score's 1-based rank; 0 for unusable scores.

    Equal scores share the better rank, so the result does not depend on input order.

    Scores at or below ``above`` have no rank.

    >>> reciprocal_rank(np.array([3.0, np.nan, 5.0]), 60).round(5).tolist()
    [0.01613, 0.0, 0.01639]
    """
    # NaN fails both comparisons.
    ranked = (scores > above) & (scores < INVALID_MAGNITUDE)
    keys = np.where(ranked, scores, -np.inf)
    better = keys.size - np.sort(keys).searchsorted(keys, side="right")
    return ranked / (constant + 1.0 + better)
