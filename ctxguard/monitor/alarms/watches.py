"""The watch on judged losses: rings when their mean lies above what the profile promises.

Pure: no I/O, no clock, no logging.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from ctxguard.errors import ConfigurationError
from ctxguard.metrics import Utilities
from ctxguard.monitor.ecusum import ECusum
from ctxguard.profile import Profile, RouteProfile
from ctxguard.types import Route

LEAST_TARGET = 0.001
"""Of a loss in [0, 1]. Judges err: a promise of no loss at all would ring at the first slip."""

_MIDDLE_BET = 1


class Quantity(StrEnum):
    """What is watched, lower is better. A closed set: it labels a metric."""

    RECALL_LOSS = "recall_loss"
    """Share of the relevant passages in the certificate's baseline that were not served."""
    HARM = "harm"
    """The negative part of strict UDCG, as a positive number."""


@dataclass(frozen=True, slots=True)
class LossWatch:
    """An e-CUSUM over one route's judged losses, in the unit in which they are judged.

    Every request of the route must have the same chance of being judged for this, whatever its
    loss. While the mean loss is at most the target, alarms are on average at least 10,000 judged
    losses apart, whatever the distribution (see ``ECusum``).

    Attributes:
        target: The mean loss that is promised, in [0, bound).
        bound: The largest loss that is possible, > 0.
        source: Where the target is from: ``certificate`` or ``held-out evidence``.
        ecusum: The evidence; in units of the bound.
        run_n: Losses since the evidence last was at its floor: since about when they rose.
        run_sum: Their sum.

    Raises:
        ConfigurationError: at construction, for a bound that is not > 0 or a target outside it.

    >>> watch = LossWatch.of(Route.HYBRID, Quantity.RECALL_LOSS, target=0.12)
    >>> for _ in range(60):
    ...     watch = watch.after(0.5)
    >>> watch.ringing, watch.run_mean
    (True, 0.5)
    """

    route: Route
    quantity: Quantity
    target: float
    bound: float
    source: str
    ecusum: ECusum
    run_n: int = 0
    run_sum: float = 0.0

    @classmethod
    def of(
        cls,
        route: Route,
        quantity: Quantity,
        *,
        target: float,
        bound: float = 1.0,
        source: str = "certificate",
    ) -> "LossWatch":
        """A watch that has seen nothing; it looks soonest for a loss of twice the target."""
        if not 0.0 < bound < math.inf:
            raise ConfigurationError(f"bound {bound!r} of {quantity.value} must be > 0 and finite")
        if not 0.0 <= target < bound:
            raise ConfigurationError(
                f"target {target!r} of {quantity.value} must lie in [0, bound = {bound:g})"
            )
        scaled = min(max(target / bound, LEAST_TARGET), 1.0 - LEAST_TARGET)
        suspected = min(2.0 * scaled, (1.0 + scaled) / 2.0)
        return cls(route, quantity, target, bound, source, ECusum(scaled, suspected))

    def after(self, loss: float) -> "LossWatch":
        """The state after one more judged loss; one above the bound counts as the bound.

        Raises:
            ConfigurationError: a loss that is negative or not finite.
        """
        if not 0.0 <= loss < math.inf:
            raise ConfigurationError(
                f"{self.quantity.value} {loss!r} must be ≥ 0 and finite; leave out undefined ones"
            )
        logs = self.ecusum.log_evidence_by_bet
        at_floor = not logs or logs[_MIDDLE_BET] <= 0.0
        return replace(
            self,
            ecusum=self.ecusum.after(min(loss / self.bound, 1.0)),
            run_n=1 if at_floor else self.run_n + 1,
            run_sum=loss if at_floor else self.run_sum + loss,
        )

    @property
    def ringing(self) -> bool:
        """Whether the evidence has reached the threshold; ask after each loss."""
        return self.ecusum.alarm()

    @property
    def run_mean(self) -> float | None:
        """Mean loss since about when it rose; None before the first.

        The run is chosen for being high, so its mean overstates the loss somewhat.
        """
        return self.run_sum / self.run_n if self.run_n else None

    def restarted(self) -> "LossWatch":
        """The same watch without evidence."""
        fresh = replace(self.ecusum, n=0, log_evidence_by_bet=())
        return replace(self, ecusum=fresh, run_n=0, run_sum=0.0)

    def state(self) -> dict[str, Any]:
        """What it has seen, as plain values."""
        return {
            "route": self.route.value,
            "quantity": self.quantity.value,
            "n": self.ecusum.n,
            "logs": list(self.ecusum.log_evidence_by_bet),
            "run_n": self.run_n,
            "run_sum": self.run_sum,
        }

    def resumed(self, state: Mapping[str, Any]) -> "LossWatch":
        """This watch having seen what ``state`` says.

        Raises:
            KeyError, TypeError, ValueError: a state of another shape.
        """
        logs = tuple([float(log) for log in state["logs"]])
        if len(logs) not in (0, len(self.ecusum.bets)) or not all(map(math.isfinite, logs)):
            raise ValueError(f"evidence of {len(logs)} bets, of which some may not be finite")
        ecusum = replace(self.ecusum, n=int(state["n"]), log_evidence_by_bet=logs)
        return replace(
            self, ecusum=ecusum, run_n=int(state["run_n"]), run_sum=float(state["run_sum"])
        )


def loss_watches(profile: Profile) -> tuple[LossWatch, ...]:
    """The watches that a profile gives targets for.

    Recall loss is watched against the certificate's alpha. Harm is watched against its beta, and
    where it has none against the upper end of the interval that the held-out evidence gives it.
    What has no target, or one that no loss can pass, is not watched.
    """
    watches = []
    for route, calibrated in sorted(profile.routes.items()):
        certificate = calibrated.certificate
        if certificate is not None and certificate.alpha < 1.0:
            watches.append(
                LossWatch.of(route, Quantity.RECALL_LOSS, target=max(certificate.alpha, 0.0))
            )
        target, source = _harm_target(calibrated)
        bound = _harm_bound(calibrated, profile.utilities)
        if target is not None and 0.0 <= target < bound:
            watches.append(
                LossWatch.of(route, Quantity.HARM, target=target, bound=bound, source=source)
            )
    return tuple(watches)


def _harm_target(calibrated: RouteProfile) -> tuple[float | None, str]:
    certificate = calibrated.certificate
    if certificate is not None and certificate.beta is not None:
        return certificate.beta, "certificate"
    held_out = calibrated.held_out
    harm = None if held_out is None else held_out.metrics.get("harm")
    return None if harm is None else harm.upper, "held-out evidence"


def _harm_bound(calibrated: RouteProfile, utilities: Utilities) -> float:
    """The harm of a full context of nothing but the worst passages, 0 where none can harm."""
    policies = [calibrated.policy, *[own.policy for own in calibrated.segments.values()]]
    k = max([policy.k for policy in policies])
    worst = min(
        utilities.irrelevant,
        utilities.hard_negative,
        utilities.distractor,
        *(utilities.by_grade or {}).values(),
    )
    return -worst * math.fsum([1.0 / math.log2(rank + 1) for rank in range(1, k + 1)])
