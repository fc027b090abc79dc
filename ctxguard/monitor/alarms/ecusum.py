"""e-CUSUM: detects, day by day, that the mean of a bounded loss has risen above a target.

Pure: no I/O, no clock, no logging.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from ctxguard.core.betting import Evidence
from ctxguard.errors import ConfigurationError
from ctxguard.monitor.alarms.days import Day

DEFAULT_THRESHOLD = 2e3
"""The e-value of an alarm; false alarms are about this many days apart or more, on average."""

STAKES = np.array([0.35, 0.75])
"""Shares of the stake that grows fastest at the suspected rise: a smaller rise is seen too."""
_SMALL_RISE = 0.25
"""In standard deviations: a judge that errs dilutes a rise."""
_MOST = 0.99
"""Of the stake that would lose everything on a single loss of 0."""


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
    log_e_values: tuple[float, ...] = field(default=())

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
            day: Losses in [0, 1].
            variance: Of a group's loss within a day, by the days before, > 0.
            between: τ², of the days' means, by the days before.

        Raises:
            ConfigurationError: a loss above 1.
        """
        if not day.n:
            return self
        if not day.losses.max() <= 1.0:
            raise ConfigurationError("losses must lie in [0, 1]: divide them by their bound")
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
        """Whether nothing speaks for a rise: the next day begins the evidence anew."""
        return not self.log_e_values or self.log_e_values[-1] <= 0.0

    @property
    def e_value(self) -> float:
        """Evidence of a rise: about 1 or less while the mean is at most the target."""
        return Evidence(np.array(self.log_e_values)).e_value if self.log_e_values else 1.0

    def alarm(self, threshold: float = DEFAULT_THRESHOLD) -> bool:
        """Tell whether the e-value has reached the threshold; to be checked after each day."""
        return self.e_value >= threshold
