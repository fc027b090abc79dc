"""What judged losses are compared with: the promise, its image on the judge's scale, or a baseline.

A judge that errs finds losses where there are none, so its mean is above the true one even while
a promise holds. Losses here are divided by their bound and lie in [0, 1]. Pure: no I/O, no clock,
no logging.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError
from ctxguard.monitor.alarms.ecusum import Day
from ctxguard.monitor.estimation.ratio import t_quantile

FIRST_BASELINE = 400
"""Judged requests of a route after which its baseline is first known."""

LONGEST_BASELINE = 3200
"""Judged requests after which a baseline is no longer extended."""

LEAST_GRADED = 50
"""Effective number of graded requests below which no promise is translated."""

_LEAST_LOSSES = 5
"""Graded requests with a loss, below which nothing tells how the judge sees a loss."""
_CONFIDENCE = 0.95
"""Of the upper limit, one-sided. The margin counts as if one more request had been seen, with the
largest loss: otherwise a rare error of the judge that no request has shown would be left out."""


class ReferenceKind(StrEnum):
    """What a loss is compared with. A closed set: it labels a metric."""

    PROMISE = "promise"
    """The profile's own promise: the judge makes no errors."""
    CORRECTED = "corrected"
    """The promise on the judge's scale, from requests that people graded too."""
    BASELINE = "baseline"
    """The judge's own mean over the first requests: it says nothing about the promise."""

    @property
    def is_of_promise(self) -> bool:
        """Whether an alarm against it says that a promise is broken."""
        return self is not ReferenceKind.BASELINE


@dataclass(frozen=True, slots=True)
class Baseline:
    """A judge's own mean over its first days.

    It is known after ``FIRST_BASELINE`` questions. While nothing speaks for a rise it is extended
    to twice as many, up to ``LONGEST_BASELINE``: the more, the smaller the rise that is seen.

    Attributes:
        weight: Sum of the weights of the losses seen.
        squared_weight: Sum of their squares.
        total: Weighted sum of the losses.
        total_squares: Weighted sum of their squares.
        due: Losses after which the mean is taken next; above ``LONGEST_BASELINE`` it is final.

    >>> day = Day.of(np.full(FIRST_BASELINE, 0.25), np.ones(400), np.arange(400))
    >>> baseline = Baseline().after(day)
    >>> baseline.is_due, round(baseline.upper_limit, 3)
    (True, 0.255)
    """

    weight: float = 0.0
    squared_weight: float = 0.0
    total: float = 0.0
    total_squares: float = 0.0
    due: int = FIRST_BASELINE

    def after(self, day: Day) -> "Baseline":
        """With the losses of one more day, in [0, 1]; unchanged once it is final."""
        if self.due > LONGEST_BASELINE:
            return self
        return replace(
            self,
            weight=self.weight + float(day.weights.sum()),
            squared_weight=self.squared_weight + float(day.weights @ day.weights),
            total=self.total + float(day.weights @ day.losses),
            total_squares=self.total_squares + float(day.weights @ day.losses**2),
        )

    @property
    def n(self) -> float:
        """How many losses of equal weight would tell as much (Kish's effective number)."""
        return self.weight**2 / self.squared_weight if self.squared_weight else 0.0

    @property
    def is_due(self) -> bool:
        """Whether the mean is to be taken (again)."""
        return self.due <= min(self.n, LONGEST_BASELINE)

    @property
    def upper_limit(self) -> float:
        """One-sided upper confidence limit of the mean, by Student's t; 1.0 without losses."""
        n = self.n + 1.0
        mean = (self._share * self.total + 1.0) / n
        margin = t_quantile(_CONFIDENCE, max(int(n) - 1, 1)) * self.deviation / math.sqrt(n)
        return min(mean + margin, 1.0)

    @property
    def deviation(self) -> float:
        """Standard deviation of the losses, and of the one that is added."""
        n = self.n + 1.0
        squares = self._share * self.total_squares + 1.0
        squares -= (self._share * self.total + 1.0) ** 2 / n
        return math.sqrt(max(squares, 0.0) / max(n - 1.0, 1.0))

    @property
    def _share(self) -> float:
        return self.n / self.weight if self.weight else 0.0

    def extended(self) -> "Baseline":
        """The same, due again after twice as many losses as there are."""
        due = self.due
        while due <= self.n:
            due *= 2
        return replace(self, due=due)

    def final(self) -> "Baseline":
        """The same, never due again."""
        return replace(self, due=LONGEST_BASELINE + 1)


@dataclass(frozen=True, slots=True)
class Correction:
    """A promise on the judge's scale.

    Attributes:
        target: Upper confidence limit of the judge's mean loss where the true one is the promised.
        margin: How far it lies above the estimate.
        deviation: Standard deviation of the judge's losses.
        n: Graded requests that it was estimated from.
    """

    target: float
    margin: float
    deviation: float
    n: int


def corrected(
    human: FloatArray, judge: FloatArray, weights: FloatArray, promise: float
) -> Correction | None:
    """Translate a promised mean loss to the judge's scale, from requests that both have graded.

    The regression of the judge's loss on people's, weighted, moves each request to the promised
    loss; the mean of the moved losses is the target. A request in which people found no loss
    defined (nothing is relevant) and the judge did keeps the judge's. The variance is the
    linearised (sandwich) one of mean and slope.

    Args:
        human: Losses by the grades of people, shape (n,), in [0, 1]; NaN where undefined.
        judge: Losses of the same requests by the judge's verdicts; NaN where undefined.
        weights: 1 / the probability with which each was labelled, > 0, shape (n,).
        promise: The promised mean loss, in [0, 1].

    Returns:
        None where there are too few requests or too few losses among them, where the judge's
        losses do not rise with people's, or where the margin is more than half of what a promised
        loss that doubles would add: an alarm would then come late, if ever.

    Raises:
        ConfigurationError: a weight that is not > 0 and finite.
    """
    if not np.all((weights > 0.0) & np.isfinite(weights)):
        raise ConfigurationError("weights of graded requests must be > 0 and finite")
    seen = ~np.isnan(judge)
    human, judge, weights = human[seen], judge[seen], weights[seen]
    defined = ~np.isnan(human)
    paired = weights * defined
    human = np.where(defined, human, 0.0)
    if np.count_nonzero(human) < _LEAST_LOSSES:
        return None
    n = float(paired.sum() ** 2 / (paired**2).sum())
    if n < LEAST_GRADED:
        return None
    centred = np.where(defined, human - (paired @ human) / paired.sum(), 0.0)
    spread = float(paired @ centred**2)
    if spread <= 0.0:
        return None
    slope = float(paired @ (centred * judge)) / spread
    share = weights / weights.sum()
    away = np.where(defined, human - promise, 0.0)
    moved = judge - slope * away
    mean = float(share @ moved)
    residuals = np.where(defined, judge - (paired @ judge) / paired.sum() - slope * centred, 0.0)
    of_slope = paired * centred * residuals / spread
    errors = share * (moved - mean) - float(share @ away) * of_slope
    margin = t_quantile(_CONFIDENCE, int(n) - 2) * math.sqrt(errors @ errors) + 1.0 / n
    most = 0.5 * promise * slope * float(share @ defined)
    if margin > most:
        return None
    deviation = math.sqrt(share @ (judge - share @ judge) ** 2)
    return Correction(min(mean + margin, 1.0), margin, deviation, int(defined.sum()))
