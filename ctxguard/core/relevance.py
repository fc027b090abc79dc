"""Computes P(relevant) of candidates from a model's plain numbers. Pure; needs only numpy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ctxguard.core.scores import logistic
from ctxguard.core.signals import NO_SIGNALS, feature_names, features, signal_of
from ctxguard.core.types import FloatArray, Leg, ScoreKind
from ctxguard.errors import ConfigurationError


@dataclass(frozen=True)
class RelevanceModel:
    """Logistic regression over candidates' features, stored as plain numbers.

    P(relevant) = 1 / (1 + exp(−l)), with l = intercept + Σ coefficient · (feature − mean) / scale.

    Attributes:
        legs: The legs that it was fitted on, sorted; it applies to no other set. ``ranking`` alone
            means the scores of a ranking without legs.
        coefficients: One per feature, in the order of ``feature_names(legs, features)``.
        means: Of each feature in the training data; ``scales`` likewise, > 0.
        features: The features of named signals, as ``named_features`` names them.
        clip: Maximum magnitude of a standardised feature, > 0; None disables it.

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

    def __post_init__(self) -> None:
        if not self.legs or list(self.legs) != sorted(set(self.legs)):
            raise ConfigurationError(f"legs {self.legs!r} must be distinct, sorted names")
        for feature in self.features:
            signal_of(feature)  # raises for what is not a feature
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

    @cached_property
    def signals(self) -> tuple[str, ...]:
        """The named signals that the model requires."""
        return tuple(dict.fromkeys(map(signal_of, self.features)))

    @cached_property
    def _folded(self) -> tuple[FloatArray, float, tuple[FloatArray, FloatArray] | None]:
        """The weights and offset with the standardisation folded in, and the clipping bounds."""
        means, scales = np.asarray(self.means), np.asarray(self.scales)
        weights = np.asarray(self.coefficients) / scales
        reach = None if self.clip is None else self.clip * scales
        bounds = None if reach is None else ((means - reach)[:, None], (means + reach)[:, None])
        return weights[:, None], float(self.intercept - weights @ means), bounds

    def probabilities(
        self,
        legs: Mapping[str, Leg],
        signals: Mapping[str, FloatArray] = NO_SIGNALS,
        positions: Sequence[int] | None = None,
    ) -> FloatArray | None:
        """Compute P(relevant) of the candidates at these positions, or of all, in that order.

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
        return self.from_features(features(legs, signals, self.features))

    def from_features(self, values: FloatArray) -> FloatArray | None:
        """Compute P(relevant) of every candidate, shape (n,), from features (n_features, n).

        None if a feature is not finite.
        """
        weights, offset, bounds = self._folded
        near = values if bounds is None else values.clip(*bounds)
        # Not a matrix product, which rounds equal candidates apart by where they stand.
        log_odds: FloatArray = np.add.reduce(weights * near, axis=0, initial=offset)
        if not math.isfinite(np.add.reduce(log_odds)):
            return None
        return logistic(log_odds)
