"""Sufficiency: the probability that at least one kept passage is relevant.

A logistic model of plain coefficients reads signals of the whole list (DESIGN.md §5). The signals
are not the passages' own probabilities: those judge each passage against its list, where the best
of a bad list looks as good as the best of a good one. Pure: no I/O, no clock, no logging; a few
microseconds a request.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np

from ctxguard.core.decision import Decision
from ctxguard.core.scores import INVALID_MAGNITUDE
from ctxguard.core.signals import RANKING
from ctxguard.core.types import Flag, FloatArray, Ranking, ScoreKind
from ctxguard.errors import ConfigurationError

PER_LEG = ("top", "gap", "first")

_GAP_RANK = 5
_PROBABILITY_EDGE = 1e-9
_NOT_AS_CALIBRATED = frozenset({Flag.DOMAIN_VIOLATION, Flag.MISSING_SIGNALS})


def list_signal_names(legs: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a list's signals, in the order of ``list_signals``.

    >>> list_signal_names(["dense"])
    ('kept', 'dense.top', 'dense.gap', 'dense.first')
    """
    return ("kept", *[f"{leg}.{signal}" for leg in legs for signal in PER_LEG])


def legs_of(ranking: Ranking) -> tuple[str, ...]:
    """Return the legs whose scores are signals of this ranking's list, sorted.

    Returns ``RANKING`` alone if the ranking has no legs. Scores that carry rank only say nothing
    about a whole list and are left out.
    """
    if ranking.legs:
        legs = ranking.legs.items()
        return tuple(sorted(name for name, leg in legs if leg.kind is not ScoreKind.RANK))
    return () if ranking.kind is ScoreKind.RANK else (RANKING,)


def list_signals(decision: Decision, legs: Sequence[str]) -> list[float] | None:
    """Compute the signals of one decision's list.

    They are the logarithm of the number of kept passages, and for each leg its best score over all
    candidates, the gap from that to its fifth best (or its worst, if fewer), and its score of the
    best passage. Scores enter as their logarithm (``ratio``), their log-odds (``probability``) or
    themselves.

    Args:
        decision: At least one passage must be kept.
        legs: The legs, from ``legs_of``.

    Returns:
        Signals in the order of ``list_signal_names``. None if the ranking lacks one of the legs,
        or a leg lacks a valid best score or a score of the best passage.
    """
    ranking, first = decision.ranking, decision.order[0]
    values = [math.log(decision.n_kept)]
    for name in legs:
        if name == RANKING:
            # Without legs the candidates are ordered by these scores.
            usable = decision.order[:_GAP_RANK]
            best = [ranking.scores[position] for position in usable]
            leg_values = (best[0], best[-1], best[0])
            kind = ranking.kind
        elif name in ranking.legs:
            leg = ranking.legs[name]
            leg_values = (*_top_and_fifth(leg.scores), float(leg.scores[first]))
            kind = leg.kind
        else:
            return None
        top, fifth, own = [_additive(score, kind) for score in leg_values]
        if top is None or fifth is None or own is None:
            return None
        values += (top, top - fifth, own)
    return values


def _top_and_fifth(scores: FloatArray) -> tuple[float, float]:
    """Return the best and the fifth best score, or the worst of fewer; ignores NaN."""
    n = min(_GAP_RANK, scores.shape[0])
    best: list[float] = np.partition(scores, -n)[-n:].tolist()
    if math.isnan(sum(best)):  # NaN counts as the largest: candidates that this leg did not score
        scored = scores[~np.isnan(scores)]
        return _top_and_fifth(scored) if scored.shape[0] else (math.nan, math.nan)
    return max(best), best[0]


def _additive(score: float | None, kind: ScoreKind) -> float | None:
    """Put a score on a scale where equal differences have equal meaning; None for garbage."""
    if score is None or not abs(score) < INVALID_MAGNITUDE or kind is ScoreKind.RANK:
        return None
    if kind is ScoreKind.RATIO:
        return math.log1p(max(score, 0.0))
    if kind is ScoreKind.PROBABILITY:
        clipped = min(max(score, _PROBABILITY_EDGE), 1.0 - _PROBABILITY_EDGE)
        return math.log(clipped / (1.0 - clipped))
    return float(score)


@dataclass(frozen=True)
class SufficiencyModel:
    """Logistic regression over the signals of a list, as plain numbers.

    P(sufficient) = 1 / (1 + exp(−(intercept + Σ coefficient · (signal − mean) / scale))).

    Attributes:
        legs: The legs whose scores it reads, sorted.
        coefficients: One per signal, in the order of ``list_signal_names``.
        means: The mean of each signal in the training data.
        scales: The scale of each signal in the training data, > 0.
        intercept: Log-odds of a list with average signals.
        threshold: Kept passages are called insufficient below this probability; None if no
            threshold could be certified.
    """

    legs: tuple[str, ...]
    coefficients: tuple[float, ...]
    means: tuple[float, ...]
    scales: tuple[float, ...]
    intercept: float
    threshold: float | None = None

    def __post_init__(self) -> None:
        if not self.legs or list(self.legs) != sorted(set(self.legs)):
            raise ConfigurationError(f"legs {self.legs!r} must be distinct, sorted names")
        n = len(list_signal_names(self.legs))
        for field in ("coefficients", "means", "scales"):
            values = getattr(self, field)
            if len(values) != n:
                raise ConfigurationError(f"{field} has {len(values)} numbers for {n} signals")
            if not all(map(math.isfinite, values)):
                raise ConfigurationError(f"{field} {values!r} must be finite numbers")
        if not math.isfinite(self.intercept):
            raise ConfigurationError(f"intercept {self.intercept!r} must be a finite number")
        if min(self.scales) <= 0.0:
            raise ConfigurationError(f"scale {min(self.scales)!r} must be > 0")
        if self.threshold is not None and not 0.0 <= self.threshold <= 1.0:
            raise ConfigurationError(f"threshold {self.threshold!r} must lie in [0, 1]")
        # The standardisation is folded into the coefficients once, not on every request.
        weights = [a / b for a, b in zip(self.coefficients, self.scales, strict=True)]
        object.__setattr__(self, "_weights", weights)
        offset = self.intercept - sum(map(mul, weights, self.means))
        object.__setattr__(self, "_offset", offset)

    def probability(self, decision: Decision) -> float | None:
        """P(at least one kept passage is relevant).

        Returns:
            0.0 if nothing is kept. None if the policy was not applied as calibrated (a score
            outside its domain, a missing signal), or a signal of the list is missing.
        """
        if decision.n_kept == 0:
            return 0.0
        if decision.flags and not _NOT_AS_CALIBRATED.isdisjoint(decision.flags):
            return None
        signals = list_signals(decision, self.legs)
        if signals is None:
            return None
        log_odds: float = sum(map(mul, self._weights, signals), self._offset)  # type: ignore[attr-defined]
        return 1.0 / (1.0 + math.exp(-min(max(log_odds, -700.0), 700.0)))

    def suffices(self, probability: float | None) -> bool | None:
        """Tell whether this probability reaches the threshold; None without either.

        Returns False if nothing is kept, whatever the threshold.
        """
        if probability is None or self.threshold is None:
            return None
        return probability > 0.0 and probability >= self.threshold
