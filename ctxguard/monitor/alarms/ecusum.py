"""e-CUSUM: detects, at any time, that the mean of a bounded loss has risen above a target.

Pure: no I/O, no clock, no logging.
"""

import math
from dataclasses import dataclass, field, replace

from ctxguard.errors import ConfigurationError

DEFAULT_THRESHOLD = 1e4
"""The e-value of an alarm; false alarms are at least this many losses apart on average."""

_MULTIPLES = (0.5, 1.0, 2.0)
"""Several bets, because losses are rarely 0 or 1 and the rise is rarely the suspected one."""


@dataclass(frozen=True, slots=True)
class ECusum:
    """Evidence that losses in [0, 1] have had a mean above the target since some time.

    The e-CUSUM of Shin, Ramdas and Rinaldo, "E-detectors: a nonparametric framework for
    sequential change detection", NEJSDS 2024: for each of a few bets b, M ← max(1, M) ·
    (1 + b·(loss − target)); the e-value is their mean. While the mean loss given the past is at
    most the target, the expected number of losses until the e-value reaches A is at least A,
    whatever the distribution and the dependence.

    Attributes:
        target: The promised mean loss, in (0, 1).
        suspected: The mean loss to be detected soonest, in (target, 1]. The bound on false alarms
            does not depend on it.
        n: Losses seen.
        log_e_values: log M of each bet; empty before the first loss.

    Raises:
        ConfigurationError: at construction, for ``target`` or ``suspected`` out of range.

    >>> ecusum = ECusum(target=0.12, suspected=0.2)
    >>> for _ in range(60):
    ...     ecusum = ecusum.after(0.5)
    >>> ecusum.alarm()
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

    def after(self, loss: float) -> "ECusum":
        """The state after one more loss.

        Raises:
            ConfigurationError: a loss outside [0, 1].
        """
        if not 0.0 <= loss <= 1.0:
            raise ConfigurationError(f"loss {loss!r} must lie in [0, 1]: divide it by its bound")
        before = self.log_e_values or (0.0,) * len(_MULTIPLES)
        return replace(
            self,
            n=self.n + 1,
            log_e_values=tuple(
                [
                    max(0.0, log) + math.log1p(bet * (loss - self.target))
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
    def e_value(self) -> float:
        """Evidence of a rise: about 1 or less while the mean is at most the target."""
        logs = self.log_e_values
        if not logs:
            return 1.0
        # Beyond any threshold in use, and far from overflow.
        return math.fsum([math.exp(min(log, 500.0)) for log in logs]) / len(logs)

    def alarm(self, threshold: float = DEFAULT_THRESHOLD) -> bool:
        """Whether the e-value has reached the threshold; to be checked after each loss."""
        return self.e_value >= threshold
