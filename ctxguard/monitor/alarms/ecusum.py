"""e-CUSUM: detects, day by day, that the mean of a bounded loss has risen above a target.

The losses of a day are weighted by what each stands for, and no question counts for too much. Pure:
no I/O, no clock, no logging.
"""

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError

DEFAULT_THRESHOLD = 1e3
"""The e-value of an alarm; false alarms are at least this many days apart on average."""

_MULTIPLES = (0.5, 1.0, 2.0)
"""Several bets, because losses are rarely 0 or 1 and the rise is rarely the suspected one."""


class Day(NamedTuple):
    """The losses of one day, question by question.

    Attributes:
        losses: Shape (m,), the mean loss of each question.
        weights: Shape (m,), in (0, 1].
        raise_by: ≥ 1; a promise times this is what the mean of the weighted losses must exceed
            before the mean over all traffic exceeds the promise.
        n: Judged requests.
    """

    losses: FloatArray
    weights: FloatArray
    raise_by: float
    n: int

    @classmethod
    def of(cls, losses: FloatArray, probability: FloatArray, question: NDArray[np.int64]) -> "Day":
        """Weigh the losses of one day.

        A request counts 1/π, and the requests of one question together at most 1/c:
        ``weight = min(c · Σ 1/π, 1)``. What is cut off counts as traffic without any loss, hence
        ``raise_by``: a question that is asked a thousand times cannot break a promise by itself,
        nor can the few samples of a burst that stand for thousands of requests. The c is chosen by
        the weights alone, for the quickest alarm if losses double.

        Args:
            losses: Shape (n,), ≥ 0.
            probability: Shape (n,), π of each request, in (0, 1].
            question: Shape (n,), a number for each different question.

        Raises:
            ConfigurationError: a loss that is negative or not finite, or no probability.

        >>> viral = [7] * 40
        >>> day = Day.of(np.ones(100), np.ones(100), np.array([*viral, *range(100, 160)]))
        >>> len(day.losses), float(day.weights.max()), round(day.raise_by, 2)
        (61, 1.0, 1.64)
        """
        if not np.all((losses >= 0.0) & np.isfinite(losses)):
            raise ConfigurationError("losses must be ≥ 0 and finite; leave out undefined ones")
        if not np.all((probability > 0.0) & (probability <= 1.0)):
            raise ConfigurationError("probabilities of judging must lie in (0, 1]")
        if not len(losses):
            return cls(losses, losses, 1.0, 0)
        _, place = np.unique(question, return_inverse=True)
        stands_for: FloatArray = np.bincount(place, 1.0 / probability).astype(np.float64)
        means = np.bincount(place, losses / probability) / stands_for
        most = _most(stands_for)
        weights = np.minimum(stands_for / most, 1.0)
        raise_by = float(stands_for.sum() / most / weights.sum())
        return cls(means, weights, max(raise_by, 1.0), len(losses))


def _most(stands_for: FloatArray) -> float:
    """How many requests one question may stand for."""
    caps = np.sort(stands_for)
    total = caps.sum()
    # With each as the cap: the sum of the weights, and by how much a promise is raised.
    weight = np.cumsum(caps) / caps + np.arange(len(caps) - 1, -1, -1)
    left = 2.0 - total / caps / weight
    return float(caps[np.argmax(weight * np.maximum(left, 0.0) ** 2)])


@dataclass(frozen=True, slots=True)
class ECusum:
    """Evidence that losses in [0, 1] have had a mean above the target since some day.

    The e-CUSUM of Shin, Ramdas and Rinaldo, "E-detectors: a nonparametric framework for
    sequential change detection", NEJSDS 2024, over days: for each of a few bets b,
    M ← max(1, M) · Π (1 + b·w·(loss − target)), the product over the questions of a day; the
    e-value is their mean. It is compared with the threshold after each day, so that the order
    within the day, and with it the rhythm of a day, does not matter: with π_i the probability that
    request i is judged and w_i = c/π_i (betting on importance-weighted losses: Waudby-Smith, Wu,
    Ramdas, Karampatziakis and Mineiro, "Anytime-valid off-policy inference for contextual bandits",
    2024), the expected product is Π (1 + b·c·(mean_i − target)) ≤ (1 + b·c·(mean − target))^n by
    the inequality of the means: at most 1 while the mean over the day's traffic is at most the
    target. The expected number of days until the e-value reaches A is then at least A.

    Attributes:
        target: The promised mean loss, in (0, 1).
        suspected: The mean loss to be detected soonest, in (target, 1]. The bound on false alarms
            does not depend on it.
        n: Losses seen.
        log_e_values: log M of each bet; empty before the first loss.

    Raises:
        ConfigurationError: at construction, for ``target`` or ``suspected`` out of range.

    >>> ecusum = ECusum(target=0.12, suspected=0.2)
    >>> day = Day.of(np.full(60, 0.5), np.ones(60), np.arange(60))
    >>> ecusum.after(day).alarm()
    True
    """

    target: float
    suspected: float
    n: int = 0
    log_e_values: tuple[float, ...] = field(default=())

    def __post_init__(self) -> None:
        if not 0.0 < self.target < 1.0:
            raise ConfigurationError(f"target {self.target!r} must lie in (0, 1)")
        if not self.target < self.suspected <= 1.0:
            raise ConfigurationError(
                f"suspected {self.suspected!r} must lie in (target = {self.target}, 1]"
            )
        logs = self.log_e_values
        if len(logs) not in (0, len(_MULTIPLES)) or not all(map(math.isfinite, logs)):
            raise ConfigurationError(f"log_e_values {logs!r} must be a finite number for each bet")

    def after(self, day: Day) -> "ECusum":
        """The state after one more day.

        Raises:
            ConfigurationError: a loss above 1.
        """
        if not day.n:
            return self
        if not day.losses.max() <= 1.0:
            raise ConfigurationError("losses must lie in [0, 1]: divide them by their bound")
        target = self.target * day.raise_by
        before = self.log_e_values or (0.0,) * len(_MULTIPLES)
        gains = day.weights * (day.losses - target)
        return replace(
            self,
            n=self.n + day.n,
            log_e_values=tuple(
                [
                    max(0.0, log) + float(np.log1p(min(bet, 0.99 / target) * gains).sum())
                    for log, bet in zip(before, self.bets, strict=True)
                ]
            ),
        )

    @property
    def bets(self) -> tuple[float, ...]:
        """The bets, around the one that grows fastest on 0/1 losses of the suspected mean."""
        best = (self.suspected - self.target) / (self.target * (1.0 - self.target))
        # A bet of 1 / target would lose everything on a single loss of 0.
        return tuple([min(multiple * best, 0.99 / self.target) for multiple in _MULTIPLES])

    @property
    def is_at_floor(self) -> bool:
        """Whether nothing speaks for a rise: the next day begins the evidence anew."""
        return not self.log_e_values or self.log_e_values[1] <= 0.0

    @property
    def e_value(self) -> float:
        """Evidence of a rise: about 1 or less while the mean is at most the target."""
        logs = self.log_e_values
        if not logs:
            return 1.0
        # Beyond any threshold in use, and far from overflow.
        return math.fsum([math.exp(min(log, 500.0)) for log in logs]) / len(logs)

    def alarm(self, threshold: float = DEFAULT_THRESHOLD) -> bool:
        """Whether the e-value has reached the threshold; to be checked after each day."""
        return self.e_value >= threshold
