"""Collects evidence, day by day, that the mean of a bounded loss has risen above a target.

A day's losses are one step of it, and how much days have differed so far says how large a step.
Pure.
"""

import math
from dataclasses import astuple, dataclass, replace
from operator import add
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError
from ctxguard.measure.betting import Evidence

_PRIOR_LOSSES = 20.0
"""How many losses of 0 or 1 are treated as already seen: they scatter as much as losses can."""
_LEAST_SCATTER = 0.25
"""The least variance, as a share of that of 0/1 losses with the same mean: rising losses may
scatter more."""
WEEK = 7
"""Days in a week; weekends may differ."""
_PRIOR_CHANGE = 0.25
"""Share of the target by which days are taken to differ until a week was seen; counts as one
day."""

DEFAULT_THRESHOLD = 2e3
"""The e-value that raises an alarm; false alarms are at least about this many days apart on
average."""
STAKES = np.array([0.35, 0.75])
"""Shares of the stake that grows fastest at the suspected rise; smaller ones show smaller rises."""
_SMALL_RISE = 0.25
"""The suspected rise in standard deviations: a judge that errs dilutes a rise."""
_MOST = 0.99
"""Share of the stake that would lose everything on a single loss of 0."""


class Day(NamedTuple):
    """The losses of one day, one for each group of requests that fail together.

    Attributes:
        losses: Shape (m,), the mean loss of each group.
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
    def of(cls, losses: FloatArray, probability: FloatArray, group: NDArray[np.int64]) -> "Day":
        """Make a day from its losses, with their weights.

        A request counts 1/π, and those of one group together at most 1/c:
        ``weight = min(c · Σ 1/π, 1)``. The weight cut off counts as traffic without any loss, hence
        ``raise_by``. So neither a question asked a thousand times can break a promise by itself,
        nor the few samples of a burst that stand for thousands of requests. The c is chosen by the
        weights alone, for the quickest alarm if losses double.

        Args:
            losses: Shape (n,), ≥ 0.
            probability: Shape (n,), π of each request, in (0, 1].
            group: Shape (n,), as ``groups`` numbers them.

        >>> viral = [7] * 40
        >>> day = Day.of(np.ones(100), np.ones(100), np.array([*viral, *range(100, 160)]))
        >>> len(day.losses), float(day.weights.max()), round(day.raise_by, 2)
        (61, 1.0, 1.64)
        """
        if not len(losses):
            return cls(losses, losses, 1.0, 0)
        _, place = np.unique(group, return_inverse=True)
        stands_for: FloatArray = np.bincount(place, 1.0 / probability).astype(np.float64)
        means = np.bincount(place, losses / probability) / stands_for
        most = _most(stands_for)
        weights = np.minimum(stands_for / most, 1.0)
        raise_by = float(stands_for.sum() / most / weights.sum())
        return cls(means, weights, max(raise_by, 1.0), len(losses))

    @property
    def weight(self) -> float:
        """Sum of the weights."""
        return float(self.weights.sum())

    @property
    def effective(self) -> float:
        """Effective number of equally weighted groups (Kish)."""
        return self.weight**2 / float(self.weights @ self.weights)


def groups(session: NDArray[np.int64], question: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the groups of requests that fail together.

    A request joins its session's requests or its question's, whichever are more.

    Args:
        session: Shape (n,), 0 for a request without one.
        question: Shape (n,), a number for each different question.

    >>> groups(np.array([5, 5, 0, 6, 7]), np.array([1, 2, 3, 4, 4])).tolist()
    [6, 6, 2, 3, 3]
    """
    _, by_session, alike = np.unique(session, return_inverse=True, return_counts=True)
    _, by_question, asked = np.unique(question, return_inverse=True, return_counts=True)
    is_question = (session == 0) | (asked[by_question] > alike[by_session])
    found: NDArray[np.int64] = np.where(is_question, by_question, len(session) + by_session)
    return found


def _most(stands_for: FloatArray) -> float:
    """Return the largest number of requests that one group may stand for."""
    caps = np.sort(stands_for)
    total = caps.sum()
    # With each as the cap: the sum of the weights, and by how much a promise is raised.
    weight = np.cumsum(caps) / caps + np.arange(len(caps) - 1, -1, -1)
    left = 2.0 - total / caps / weight
    return float(caps[np.argmax(weight * np.maximum(left, 0.0) ** 2)])


@dataclass(frozen=True, slots=True)
class Days:
    """Sums over days of losses in [0, 1], which show how much days differ.

    Attributes:
        n: Judged requests.
        weight: Sum of the groups' weights.
        total: Weighted sum of their losses.
        means, squared_means: Sums of the days' means, and of their squares.
        thinness: Sum over days of 1 / the effective number of groups.
        within: Squared deviations from the day's mean, in effective groups.
        freedom: Sum of the effective numbers, each less 1.

    >>> seen = Days()
    >>> for mean in (0.05, 0.2) * 5:
    ...     lost = np.arange(100) < 100 * mean
    ...     seen = seen.plus(Days.of(Day.of(lost.astype(float), np.ones(100), np.arange(100))))
    >>> round(seen.between(0.12) ** 0.5, 2), round(seen.variance(0.12), 2)
    (0.07, 0.1)
    """

    days: int = 0
    n: int = 0
    weight: float = 0.0
    total: float = 0.0
    means: float = 0.0
    squared_means: float = 0.0
    thinness: float = 0.0
    within: float = 0.0
    freedom: float = 0.0

    @classmethod
    def of(cls, day: Day) -> "Days":
        """Sum one day's losses in [0, 1], of which there is at least one."""
        weight, effective = day.weight, day.effective
        mean = float(day.weights @ day.losses) / weight
        spread = float(day.weights @ (day.losses - mean) ** 2) / weight
        return cls(
            days=1,
            n=day.n,
            weight=weight,
            total=weight * mean,
            means=mean,
            squared_means=mean**2,
            thinness=1.0 / effective,
            within=effective * spread,
            freedom=effective - 1.0,
        )

    def plus(self, other: "Days") -> "Days":
        """Add further days."""
        return Days(*map(add, astuple(self), astuple(other)))

    @property
    def mean(self) -> float:
        """The mean loss; 0 if there are no losses."""
        return self.total / self.weight if self.weight else 0.0

    def variance(self, target: float) -> float:
        """Predict the variance of a group's loss while the mean is ``target``.

        Losses in [0, 1] have at most the variance of 0/1 losses; the share is learned.
        """
        largest = target * (1.0 - target)
        prior, usual = _PRIOR_LOSSES * largest, self.mean * (1.0 - self.mean)
        scatter = (self.within + prior) / (self.freedom * usual + prior)
        return largest * min(max(scatter, _LEAST_SCATTER), 1.0)

    def between(self, target: float) -> float:
        """Estimate the variance of the days' means beyond the noise of their few losses."""
        assumed = 1 if self.days < WEEK else 0
        found = assumed * (_PRIOR_CHANGE * target) ** 2
        if self.days > 1:
            noise = self.within / self.freedom * self.thinness if self.freedom > 0.0 else 0.0
            spread = self.squared_means - self.means**2 / self.days
            found += spread - noise * (self.days - 1) / self.days
        return max(found / max(assumed + self.days - 1, 1), 0.0)


@dataclass(frozen=True, slots=True)
class ECusum:
    """Evidence that losses in [0, 1] have had a mean above the target since some day.

    The wealth of two gamblers who stake on each group of a day being lost more than the target
    says, and who begin each day with at least 1 (``Evidence.from_best``); the e-value is their mean
    and is looked at after each day, so that the rhythm of a day does not matter: with π_i the
    probability that request i is judged and w_i = c/π_i (betting on importance-weighted losses:
    Waudby-Smith, Wu, Ramdas, Karampatziakis and Mineiro, "Anytime-valid off-policy inference for
    contextual bandits", 2024), the expected product is Π (1 + b·c·(mean_i − target)) ≤
    (1 + b·c·(mean − target))^n by the inequality of the means: at most 1 while the mean over the
    day's traffic is at most the target.

    Days differ. A day whose mean is off by δ moves the log wealth by about W·δ, with W the sum of
    its stakes; so if δ has variance τ², exp(W²τ²/2) is what it costs to be fair on average. That
    toll is taken each day, and stakes are divided by the day's variance with τ² over that without:
    the best that can then be done. As τ² is estimated and δ taken to be normal, the expected number
    of days until the e-value reaches A is about A or more, and at least A where τ² is 0.

    Attributes:
        target: The promised mean loss, in (0, 1).
        rise: The rise to be detected soonest, > 0; None for a small one by the losses' scatter.
        n: Losses seen.
        log_e_values: Log wealth of each gambler; empty before the first loss.

    Raises:
        ConfigurationError: at construction, for a target, rise or wealth out of range.

    >>> ecusum = ECusum(target=0.12, rise=0.12)
    >>> day = Day.of(np.full(60, 0.5), np.ones(60), np.arange(60))
    >>> ecusum.after(day, variance=0.1, between=0.0).alarm()
    True
    """

    target: float
    rise: float | None = None
    n: int = 0
    log_e_values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 < self.target < 1.0:
            raise ConfigurationError(f"target {self.target!r} must lie in (0, 1)")
        if self.rise is not None and not 0.0 < self.rise <= 1.0:
            raise ConfigurationError(f"rise {self.rise!r} must lie in (0, 1]")
        logs = self.log_e_values
        if len(logs) not in (0, len(STAKES)) or not all(map(math.isfinite, logs)):
            raise ConfigurationError(f"log_e_values {logs!r} must be a finite number for each bet")

    def after(self, day: Day, variance: float, between: float) -> "ECusum":
        """Return the state after one more day.

        Args:
            day: Losses in [0, 1], at least one.
            variance: Variance of a group's loss within a day, from earlier days, > 0.
            between: τ², the variance of the days' means, from earlier days.
        """
        target = self.target * day.raise_by
        rise = _SMALL_RISE * math.sqrt(variance) if self.rise is None else self.rise
        stakes = np.minimum(STAKES * rise / variance, _MOST / target)
        stakes = stakes / (1.0 + between * day.effective / variance)
        found = Evidence(np.array(self.log_e_values or np.zeros(len(STAKES)))).from_best()
        found = found.after(
            (day.losses - target)[:, None],
            day.weights[:, None],
            stakes=stakes,
            toll=between * (stakes * day.weight) ** 2 / 2.0,
        )
        return replace(self, n=self.n + day.n, log_e_values=tuple(found.log_wealth.tolist()))

    @property
    def is_at_floor(self) -> bool:
        """Whether there is no evidence of a rise, so that the next day starts afresh."""
        return not self.log_e_values or self.log_e_values[-1] <= 0.0

    @property
    def e_value(self) -> float:
        """Evidence of a rise: about 1 or less while the mean is at most the target."""
        return Evidence(np.array(self.log_e_values)).e_value if self.log_e_values else 1.0

    def alarm(self, threshold: float = DEFAULT_THRESHOLD) -> bool:
        """Return whether the e-value has reached the threshold; to be checked after each day."""
        return self.e_value >= threshold
