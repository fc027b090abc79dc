"""Monitoring judged losses: an alarm where their mean is above what the profile promises.

Pure: no I/O, no clock, no logging.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from ctxguard.core.metrics import Utilities
from ctxguard.core.types import Route
from ctxguard.errors import ConfigurationError
from ctxguard.monitor.alarms.alarm import Alarm, AlarmKind, Severity
from ctxguard.monitor.alarms.ecusum import ECusum
from ctxguard.profile.schema import Profile, RouteProfile

LEAST_TARGET = 0.001
"""Of a loss in [0, 1]. Judges err: a promise of no loss at all would be broken by one error."""

_MIDDLE_BET = 1


class Quantity(StrEnum):
    """The loss that is monitored; lower is better. A closed set: it labels a metric."""

    RECALL_LOSS = "recall_loss"
    """Share of the relevant passages in the certificate's baseline that were not served."""
    HARM = "harm"
    """The negative part of strict UDCG, as a positive number."""


@dataclass(frozen=True, slots=True)
class LossMonitor:
    """An e-CUSUM over one route's judged losses, in the losses' own unit.

    Every request of the route must have the same probability of being judged for this, whatever
    its loss. While the mean loss is at most the target, alarms are on average at least 10,000
    judged losses apart, whatever the distribution (see ``ECusum``).

    Attributes:
        route: The stages that answered.
        quantity: The loss that is monitored.
        target: The promised mean loss, in [0, bound).
        bound: The largest possible loss, > 0.
        source: Where the target comes from: ``certificate`` or ``held-out evidence``.
        ecusum: The evidence; its losses are divided by the bound.
        run_n: Losses since the evidence was last at its floor, that is, since about when the
            losses rose.
        run_sum: Sum of these losses.

    >>> monitor = LossMonitor.of(Route.HYBRID, Quantity.RECALL_LOSS, target=0.12)
    >>> for _ in range(60):
    ...     monitor = monitor.after(0.5)
    >>> monitor.is_alarm, monitor.run_mean
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
    ) -> "LossMonitor":
        """A monitor without losses, tuned to a loss of twice the target.

        Raises:
            ConfigurationError: a bound that is not > 0 and finite, or a target outside [0, bound).
        """
        if not 0.0 < bound < math.inf:
            raise ConfigurationError(f"bound {bound!r} of {quantity.value} must be > 0 and finite")
        if not 0.0 <= target < bound:
            raise ConfigurationError(
                f"target {target!r} of {quantity.value} must lie in [0, bound = {bound:g})"
            )
        scaled = min(max(target / bound, LEAST_TARGET), 1.0 - LEAST_TARGET)
        suspected = min(2.0 * scaled, (1.0 + scaled) / 2.0)
        return cls(route, quantity, target, bound, source, ECusum(scaled, suspected))

    def after(self, loss: float) -> "LossMonitor":
        """The state after one more judged loss; a loss above the bound counts as the bound.

        Raises:
            ConfigurationError: a loss that is negative or not finite.
        """
        if not 0.0 <= loss < math.inf:
            raise ConfigurationError(
                f"{self.quantity.value} {loss!r} must be ≥ 0 and finite; leave out undefined ones"
            )
        logs = self.ecusum.log_e_values
        at_floor = not logs or logs[_MIDDLE_BET] <= 0.0
        return replace(
            self,
            ecusum=self.ecusum.after(min(loss / self.bound, 1.0)),
            run_n=1 if at_floor else self.run_n + 1,
            run_sum=loss if at_floor else self.run_sum + loss,
        )

    @property
    def is_alarm(self) -> bool:
        """Whether the e-value has reached the threshold; to be checked after each loss."""
        return self.ecusum.alarm()

    @property
    def e_value(self) -> float | None:
        """Evidence against the promise, about 1 or less while it holds; None before any loss."""
        return self.ecusum.e_value if self.ecusum.n else None

    @property
    def run_mean(self) -> float | None:
        """Mean loss since about when the losses rose; None before the first loss.

        The run is selected for being high, so its mean somewhat overstates the loss.
        """
        return self.run_sum / self.run_n if self.run_n else None

    def restarted(self) -> "LossMonitor":
        """The same monitor without losses."""
        fresh = replace(self.ecusum, n=0, log_e_values=())
        return replace(self, ecusum=fresh, run_n=0, run_sum=0.0)

    def state(self) -> dict[str, Any]:
        """What it has seen, as values that JSON can hold."""
        return {
            "route": self.route.value,
            "quantity": self.quantity.value,
            "n": self.ecusum.n,
            "logs": list(self.ecusum.log_e_values),
            "run_n": self.run_n,
            "run_sum": self.run_sum,
        }

    def resumed(self, state: Mapping[str, Any]) -> "LossMonitor":
        """This monitor with what ``state`` says that it has seen.

        Raises:
            KeyError, TypeError, ValueError: ``state`` has another form.
        """
        logs = tuple([float(log) for log in state["logs"]])
        if len(logs) not in (0, len(self.ecusum.bets)) or not all(map(math.isfinite, logs)):
            raise ValueError(f"{len(logs)} log e-values, which must be 3 or none, and finite")
        ecusum = replace(self.ecusum, n=int(state["n"]), log_e_values=logs)
        return replace(
            self, ecusum=ecusum, run_n=int(state["run_n"]), run_sum=float(state["run_sum"])
        )

    def to_alarm(self, profile: Profile, profile_id: str, time_seconds: float) -> Alarm:
        """The alarm that this monitor raises; ``time_seconds`` is the time of the last loss."""
        calibrated = profile.routes[self.route]
        promise = (
            "the certificate promises at most"
            if self.source == "certificate"
            else "there is no promise, and the held-out queries of calibration gave at most"
        )
        if self.quantity is Quantity.RECALL_LOSS:
            quantity, advice = f"recall loss{_baseline(calibrated)}", _recall_advice(calibrated)
        else:
            quantity = "harm"
            advice = (
                "Recalibrate on judged traffic; no safe policy helps, since more passages do more "
                "harm"
            )
        return Alarm(
            kind=AlarmKind(self.quantity.value),
            severity=Severity.ALARM,
            message=(
                f"Route {self.route.value}: judged {quantity} was about {self.run_mean or 0.0:.3g} "
                f"over the last {self.run_n} judged requests; {promise} {self.target:.3g}. "
                f"{advice}. If the judge was changed recently, check it first."
            ),
            time_seconds=time_seconds,
            route=self.route,
            value=self.run_mean,
            target=self.target,
            n=self.run_n,
            profile_id=profile_id,
        )


def _baseline(calibrated: RouteProfile) -> str:
    certificate = calibrated.certificate
    if certificate is None:
        return ""
    if certificate.baseline == "pool":
        return " against the whole pool"
    return f" against the retriever's first {certificate.baseline.removeprefix('k=')}"


def _recall_advice(calibrated: RouteProfile) -> str:
    if calibrated.safe_policy is None:
        return "Recalibrate on judged traffic; this profile has no safe policy to serve meanwhile"
    return (
        f"Recalibrate on judged traffic; meanwhile the safe policy, the retriever's first "
        f"{calibrated.safe_policy.k}, loses the least recall"
    )


def loss_monitors(profile: Profile) -> tuple[LossMonitor, ...]:
    """The monitors that a profile has targets for.

    The target of recall loss is the certificate's alpha. The target of harm is the certificate's
    beta or, without one, the upper end of the interval from the held-out evidence. A quantity
    without a target, or with one that no loss can exceed, has no monitor.
    """
    monitors = []
    for route, calibrated in sorted(profile.routes.items()):
        certificate = calibrated.certificate
        if certificate is not None and certificate.alpha < 1.0:
            monitors.append(
                LossMonitor.of(route, Quantity.RECALL_LOSS, target=max(certificate.alpha, 0.0))
            )
        target, source = _harm_target(calibrated)
        bound = _harm_bound(calibrated, profile.utilities)
        if target is not None and 0.0 <= target < bound:
            monitors.append(
                LossMonitor.of(route, Quantity.HARM, target=target, bound=bound, source=source)
            )
    return tuple(monitors)


def _harm_target(calibrated: RouteProfile) -> tuple[float | None, str]:
    certificate = calibrated.certificate
    if certificate is not None and certificate.beta is not None:
        return certificate.beta, "certificate"
    held_out = calibrated.held_out
    harm = None if held_out is None else held_out.metrics.get("harm")
    return None if harm is None else harm.upper, "held-out evidence"


def _harm_bound(calibrated: RouteProfile, utilities: Utilities) -> float:
    """The harm of a full context of the worst passages; 0 where no passage can harm."""
    policies = [calibrated.policy, *[own.policy for own in calibrated.segments.values()]]
    k = max([policy.k for policy in policies])
    return -utilities.worst * math.fsum([1.0 / math.log2(rank + 1) for rank in range(1, k + 1)])
