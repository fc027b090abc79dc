"""The features of a candidate, and P(relevant) from a model's plain coefficients.

For each leg that scored the candidates: its value, the gap to the leg's best, its z-score in
the list, the logarithm of its rank, and the leg's best value; where there are several, the sum
of reciprocal ranks and whether every leg matched (DESIGN.md §5). Pure; numpy alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ctxguard.core.fusion import RECIPROCAL_RANK_CONSTANT
from ctxguard.core.scores import INVALID_MAGNITUDE
from ctxguard.core.types import FloatArray, Leg, ScoreKind
from ctxguard.errors import ConfigurationError

PER_LEG = ("value", "gap", "z", "log_rank", "top")
ACROSS_LEGS = ("reciprocal_ranks", "in_all_legs")

_PROBABILITY_EDGE = 1e-9


def signal_names(legs: Sequence[str]) -> tuple[str, ...]:
    """The names of the signals of a set of legs, in the order of ``signals``' rows.

    >>> signal_names(["dense"])
    ('dense.value', 'dense.gap', 'dense.z', 'dense.log_rank', 'dense.top')
    """
    names = [f"{leg}.{signal}" for leg in sorted(legs) for signal in PER_LEG]
    return (*names, *(ACROSS_LEGS if len(legs) > 1 else ()))


def signals(legs: Mapping[str, Leg]) -> FloatArray:
    """The signals of every candidate of one ranking.

    Args:
        legs: Each stage's scores, shape (n,) each. One that is missing or garbage makes its
            leg's gap and top NaN for every candidate, since the leg's best is then unknown: a
            missing score is another signal set, with its own model.

    Returns:
        Shape (n_signals, n), rows in the order of ``signal_names``.

    Raises:
        ConfigurationError: a leg whose scores carry rank only.

    >>> legs = {"dense": Leg(np.array([0.9, 0.5]), ScoreKind.COSINE)}
    >>> signals(legs).round(2).tolist()
    [[0.9, 0.5], [0.0, -0.4], [1.0, -1.0], [0.0, 0.69], [0.9, 0.9]]
    """
    names = sorted(legs)
    n = legs[names[0]].scores.shape[0] if names else 0
    rows = np.empty((len(signal_names(names)), n))
    if n == 0:
        return rows
    reciprocal, matched, row = np.zeros(n), np.ones(n, dtype=bool), 0
    for name in names:
        leg = legs[name]
        value = _additive(leg)
        ascending = np.sort(value)
        top, centred = ascending[-1], value - value.mean()
        spread = float(np.sqrt(centred @ centred / n))
        rank = n + 1.0 - np.searchsorted(ascending, value, side="right")
        rows[row] = value
        rows[row + 1] = value - top
        # Of equal values, rounding alone would make a spread.
        rows[row + 2] = centred / spread if top > ascending[0] and spread > 0.0 else 0.0
        rows[row + 3] = np.log(rank)
        rows[row + 4] = top
        reciprocal += 1.0 / (RECIPROCAL_RANK_CONSTANT + rank)
        if leg.kind is ScoreKind.RATIO:
            matched &= value > 0.0
        row += len(PER_LEG)
    if len(names) > 1:
        rows[row] = reciprocal
        rows[row + 1] = matched
    return rows


def _additive(leg: Leg) -> FloatArray:
    """Scores on a scale where differences mean the same everywhere; NaN for garbage."""
    scores = np.where(np.abs(leg.scores) < INVALID_MAGNITUDE, leg.scores, np.nan)
    if leg.kind is ScoreKind.RATIO:
        return np.log1p(np.maximum(scores, 0.0))
    if leg.kind is ScoreKind.PROBABILITY:
        clipped = np.clip(scores, _PROBABILITY_EDGE, 1.0 - _PROBABILITY_EDGE)
        return np.log(clipped / (1.0 - clipped))
    if leg.kind is ScoreKind.RANK:
        raise ConfigurationError(
            "scores of kind 'rank' carry order only and give no signal; hand the legs over apart"
        )
    return scores


@dataclass(frozen=True)
class RelevanceModel:
    """Logistic regression over the signals of one set of legs, as plain numbers.

    P(relevant) = 1 / (1 + exp(−(intercept + Σ coefficient · (signal − mean) / scale))).

    Attributes:
        legs: The legs that it was fitted on, sorted: it serves no other set.
        coefficients: One per signal, in the order of ``signal_names(legs)``.
        means: The mean of each signal in the data that it was fitted on.
        scales: The scale of each signal in that data, > 0.
        intercept: Log-odds of a candidate with average signals.
    """

    legs: tuple[str, ...]
    coefficients: tuple[float, ...]
    means: tuple[float, ...]
    scales: tuple[float, ...]
    intercept: float

    def __post_init__(self) -> None:
        names = signal_names(self.legs)
        if not self.legs or list(self.legs) != sorted(set(self.legs)):
            raise ConfigurationError(f"legs {self.legs!r} must be distinct, sorted names")
        for field, values in (
            ("coefficients", self.coefficients),
            ("means", self.means),
            ("scales", self.scales),
        ):
            if len(values) != len(names):
                raise ConfigurationError(
                    f"{field} has {len(values)} numbers for {len(names)} signals"
                )
            if not np.isfinite(values).all():
                raise ConfigurationError(f"{field} {values!r} must be finite numbers")
        if not math.isfinite(self.intercept):
            raise ConfigurationError(f"intercept {self.intercept!r} must be a finite number")
        if min(self.scales) <= 0.0:
            raise ConfigurationError(f"scale {min(self.scales)!r} must be > 0")
        # The standardisation is folded into the coefficients once, not on every request.
        weights = np.asarray(self.coefficients) / np.asarray(self.scales)
        object.__setattr__(self, "_weights", weights)
        object.__setattr__(
            self, "_offset", float(self.intercept - weights @ np.asarray(self.means))
        )

    def probabilities(self, legs: Mapping[str, Leg]) -> FloatArray | None:
        """P(relevant) of every candidate, shape (n,).

        Returns:
            None if the legs are not those that the model was fitted on, carry rank only, or lack a
            score: a probability from other signals would be a guess.
        """
        if tuple(sorted(legs)) != self.legs:
            return None
        if any(leg.kind is ScoreKind.RANK for leg in legs.values()):
            return None
        weights: FloatArray = self._weights  # type: ignore[attr-defined]
        # Not a matrix product, which rounds equal candidates apart by where they stand.
        log_odds: FloatArray = np.einsum("s,sn->n", weights, signals(legs))
        log_odds += self._offset  # type: ignore[attr-defined]
        if not np.isfinite(log_odds).all():
            return None
        with np.errstate(over="ignore"):
            return 1.0 / (1.0 + np.exp(-log_odds))
