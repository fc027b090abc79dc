"""P(relevant) of a candidate, from a model's plain numbers. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.signals import NO_SIGNALS, feature_names, features, signal_of
from ctxguard.core.trees import Trees
from ctxguard.core.types import FloatArray, Leg, ScoreKind
from ctxguard.errors import ConfigurationError


class ByProbability(NamedTuple):
    """Candidates ranked by P(relevant).

    Attributes:
        probabilities: Shape (n,), in the order in which the candidates were given.
        best_first: Shape (n,), their indices by probability, of equal ones the first given.
        n_worthwhile: Number of probabilities that are at least the least that was asked for.
    """

    probabilities: FloatArray
    best_first: NDArray[np.int64]
    n_worthwhile: int


@dataclass(frozen=True)
class RelevanceModel:
    """Logistic regression over candidates' features, optionally with boosted trees, as numbers.

    P(relevant) = 1 / (1 + exp(−l)), with l = intercept + Σ coefficient · (feature − mean) / scale,
    or, with trees, the mean of that and of their log-odds.

    Attributes:
        legs: The legs that it was fitted on, sorted; it serves no other set. ``ranking`` alone
            stands for the scores of a ranking without legs.
        coefficients: One per feature, in the order of ``feature_names(legs, features)``.
        means: The mean of each feature in the training data.
        scales: The scale of each feature in the training data, > 0.
        intercept: Log-odds of a candidate with average features.
        features: The features of named signals, as ``named_features`` names them.
        clip: Maximum magnitude of a standardised feature in the regression, > 0: larger values
            are clipped to it. None disables it.
        trees: Trees over the same features, not standardised; None uses the regression alone.

    Raises:
        ConfigurationError: at construction, for numbers that do not form one model.
    """

    legs: tuple[str, ...]
    coefficients: tuple[float, ...]
    means: tuple[float, ...]
    scales: tuple[float, ...]
    intercept: float
    features: tuple[str, ...] = ()
    clip: float | None = None
    trees: Trees | None = None

    def __post_init__(self) -> None:
        if not self.legs or list(self.legs) != sorted(set(self.legs)):
            raise ConfigurationError(f"legs {self.legs!r} must be distinct, sorted names")
        signals = tuple(dict.fromkeys(map(signal_of, self.features)))
        if len(set(self.features)) != len(self.features):
            raise ConfigurationError(f"features {self.features!r} must be distinct")
        names = feature_names(self.legs, self.features)
        for field, values in (
            ("coefficients", self.coefficients),
            ("means", self.means),
            ("scales", self.scales),
        ):
            if len(values) != len(names):
                raise ConfigurationError(
                    f"{field} has {len(values)} numbers for {len(names)} features"
                )
            if not np.isfinite(values).all():
                raise ConfigurationError(f"{field} {values!r} must be finite numbers")
        if not math.isfinite(self.intercept):
            raise ConfigurationError(f"intercept {self.intercept!r} must be a finite number")
        if min(self.scales) <= 0.0:
            raise ConfigurationError(f"scale {min(self.scales)!r} must be > 0")
        if self.clip is not None and not 0.0 < self.clip < math.inf:
            raise ConfigurationError(f"clip {self.clip!r} must be > 0 and finite, or null")
        if self.trees is not None and self.trees.n_features > len(names):
            raise ConfigurationError(
                f"the trees compare feature {self.trees.n_features - 1}, and there are only "
                f"{len(names)}, from 0"
            )
        # The standardisation is folded into the coefficients once, not on every request.
        means, scales = np.asarray(self.means), np.asarray(self.scales)
        weights = np.asarray(self.coefficients) / scales
        reach = None if self.clip is None else self.clip * scales
        bounds = None if reach is None else np.stack([means - reach, means + reach])
        offset = float(self.intercept - weights @ means)
        for name, value in (
            ("_signals", signals),
            ("_weights", weights),
            ("_offset", offset),
            ("_bounds", bounds),
        ):
            object.__setattr__(self, name, value)

    @property
    def signals(self) -> tuple[str, ...]:
        """The named signals that it needs."""
        signals: tuple[str, ...] = self.__dict__["_signals"]
        return signals

    def probabilities(
        self, legs: Mapping[str, Leg], signals: Mapping[str, FloatArray] = NO_SIGNALS
    ) -> FloatArray | None:
        """Compute P(relevant) of every candidate, shape (n,); None as `by_probability`."""
        found = self.by_probability(legs, signals)
        return None if found is None else found.probabilities

    def by_probability(
        self,
        legs: Mapping[str, Leg],
        signals: Mapping[str, FloatArray] = NO_SIGNALS,
        positions: Sequence[int] | None = None,
        least: float = 0.0,
    ) -> ByProbability | None:
        """Compute P(relevant) of candidates and rank them by it.

        Args:
            legs: Each stage's scores, shape (n,) each.
            signals: Named signals, shape (n,) each; the model ignores those that it does not use.
            positions: The candidates to rank, the others being no part of the list; None for all.
            least: The least worthwhile probability.

        Returns:
            None if the legs are not those that the model was fitted on, carry rank only, or lack a
            score, or if a signal is missing or lacks a value: a probability from other features
            would be a guess.
        """
        if tuple(sorted(legs)) != self.legs:
            return None
        if any(leg.kind is ScoreKind.RANK for leg in legs.values()):
            return None
        n = len(legs[self.legs[0]].scores)
        if any(name not in signals or len(signals[name]) != n for name in self.signals):
            return None
        if positions is not None:
            rows = list(positions)
            legs = {name: Leg(leg.scores[rows], leg.kind) for name, leg in legs.items()}
            signals = {name: signals[name][rows] for name in self.signals}
        probabilities = self.from_features(features(legs, signals, self.features))
        if probabilities is None:
            return None
        # Stable, so that equal probabilities keep the order of the scores.
        best_first = (-probabilities).argsort(kind="stable")
        return ByProbability(probabilities, best_first, int((probabilities >= least).sum()))

    def from_features(self, values: FloatArray) -> FloatArray | None:
        """Compute P(relevant) of every candidate, shape (n,), from features (n_features, n).

        Returns:
            None if a feature is not finite.
        """
        own = self.__dict__
        bounds = own["_bounds"]
        near = values if bounds is None else values.clip(bounds[0, :, None], bounds[1, :, None])
        # Not a matrix product, which rounds equal candidates apart by where they stand.
        log_odds: FloatArray = np.einsum("s,sn->n", own["_weights"], near)
        log_odds += own["_offset"]
        if not np.isfinite(log_odds).all():
            return None
        if self.trees is not None:
            log_odds = 0.5 * (log_odds + self.trees.log_odds(values))
        with np.errstate(over="ignore"):
            return 1.0 / (1.0 + np.exp(-log_odds))
