"""e-CUSUM: rings when the mean of a bounded loss has risen above a target, at any time.

Pure: no I/O, no clock, no logging.
"""

import math
from dataclasses import dataclass, field, replace

from ctxguard.errors import ConfigurationError

DEFAULT_THRESHOLD = 1e4
"""False alarms are at least this many in-control losses apart on average."""

_MULTIPLES = (0.5, 1.0, 2.0)
"""Losses are seldom 0 or 1 only, and the rise is seldom the one suspected."""


@dataclass(frozen=True, slots=True)
class ECusum:
    """Evidence that losses in [0, 1] have a mean above the target since some time.

    The e-CUSUM of Shin, Ramdas and Rinaldo, "E-detectors: a nonparametric framework for
    sequential change detection", NEJSDS 2024: for each of a few bets b, M ← max(1, M) ·
    (1 + b·(loss − target)); the evidence is their mean. While the mean loss given the past is at
    most the target, the expected number of losses to evidence A is at least A, whatever the
    distribution and the dependence.

    Attributes:
        target: The mean loss that is promised, in (0, 1).
        suspected: The mean loss that should be noticed soonest, in (target, 1]. The promise on
            false alarms does not depend on it.
        n: Losses seen.
        log_evidence_by_bet: log M of each bet.

    Raises:
        ConfigurationError: at construction, for a target or suspicion out of range.

    >>> watch = ECusum(target=0.12, suspected=0.2)
    >>> for _ in range(60):
    ...     watch = watch.after(0.5)
    >>> watch.alarm()
    True
    """

    target: float
    suspected: float
    n: int = 0
    log_evidence_by_bet: tuple[float, ...] = field(default=())

    def __post_init__(self) -> None:
        if not 0.0 < self.target < 1.0:
            raise ConfigurationError(f"target {self.target!r} must lie in (0, 1)")
        if not self.target < self.suspected <= 1.0:
            raise ConfigurationError(
                f"suspected {self.suspected!r} must lie in (target = {self.target}, 1]"
            )

    def after(self, loss: float) -> "ECusum":
        """The state after one more loss.

        Raises:
            ConfigurationError: a loss outside [0, 1].
        """
        if not 0.0 <= loss <= 1.0:
            raise ConfigurationError(f"loss {loss!r} must lie in [0, 1]: scale it by its bound")
        before = self.log_evidence_by_bet or (0.0,) * len(_MULTIPLES)
        return replace(
            self,
            n=self.n + 1,
            log_evidence_by_bet=tuple(
                [
                    max(0.0, log) + math.log1p(bet * (loss - self.target))
                    for log, bet in zip(before, self.bets, strict=True)
                ]
            ),
        )

    @property
    def bets(self) -> tuple[float, ...]:
        """The stakes, around the one that grows fastest on 0/1 losses of the suspected mean."""
        best = (self.suspected - self.target) / (self.target * (1.0 - self.target))
        # A stake of 1 / target would lose everything on a single loss of 0.
        return tuple([min(multiple * best, 0.99 / self.target) for multiple in _MULTIPLES])

    @property
    def evidence(self) -> float:
        """How strongly the losses speak for a rise; about 1 or less while all is well."""
        logs = self.log_evidence_by_bet
        if not logs:
            return 1.0
        # Beyond any threshold in use, and far from overflow.
        return math.fsum([math.exp(min(log, 500.0)) for log in logs]) / len(logs)

    def alarm(self, threshold: float = DEFAULT_THRESHOLD) -> bool:
        """Whether the evidence has reached the threshold now; ask after each loss."""
        return self.evidence >= threshold
