"""Decides whether an alarm rings: whether the mean judged loss has risen above its reference.

Pure.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from ctxguard.core.scores import discounts
from ctxguard.core.types import Route
from ctxguard.monitor.alarms.alarm import Alarm, AlarmKind
from ctxguard.monitor.alarms.ecusum import WEEK, Day, Days, ECusum
from ctxguard.monitor.alarms.reference import (
    FIRST_BASELINE,
    LONGEST_BASELINE,
    LONGEST_WEEKS,
    ReferenceKind,
    upper_limit,
)
from ctxguard.profile.schema import Profile, RouteProfile

LEAST_TARGET = 0.001
"""The smallest target of a loss in [0, 1]. Judges err: one error would break a promise of no
loss."""

SAME_TARGET = 0.05
"""Two targets within this share of each other count as the same."""
QUIET_E_VALUE = 10.0
"""From this e-value on a baseline is not extended, because it would absorb the rise."""


@dataclass(frozen=True, slots=True)
class PromisedLoss:
    """The mean loss that a profile promises for one route.

    Attributes:
        quantity: The loss, ``RECALL_LOSS`` or ``HARM``.
        at_most: The promised mean loss, in [0, bound).
        bound: The largest possible loss, > 0.
        source: Where the promise comes from: ``certificate`` or ``evidence of calibration``.
    """

    route: Route
    quantity: AlarmKind
    at_most: float
    bound: float = 1.0
    source: str = "certificate"


_NO_DAYS = Days()


@dataclass(frozen=True, slots=True)
class LossMonitor:
    """Watches one route's judged losses, day by day.

    While the mean loss over each day's traffic is at most the target, or differs from it from day
    to day as it did before, alarms are on average about 2,000 days apart (see ``ECusum``).

    Attributes:
        n: Losses seen.
        n_reference: Requests that the target was estimated from; 0 for a promise.
        ecusum: The evidence of a rise; its losses are divided by the bound. None while the baseline
            is not known.
        past: The days before ``run``: how much days differ, and the baseline.
        run: The days since the evidence was last at its floor, that is, since about when the
            losses rose.
        due: Days of judged losses after which a baseline is taken next; 0 where it is final, and
            for the other references.
        recovery: The evidence that the mean is below the target again; None unless an alarm was
            raised.

    >>> promise = PromisedLoss(Route.HYBRID, AlarmKind.RECALL_LOSS, at_most=0.12)
    >>> monitor = LossMonitor.of_exact_judge(promise)
    >>> day = Day.of(np.full(60, 0.5), np.ones(60), np.arange(60))
    >>> monitor = monitor.after(day)
    >>> monitor.is_alarm, monitor.run_mean
    (True, 0.5)
    """

    promise: PromisedLoss
    reference: ReferenceKind
    n: int = 0
    n_reference: int = 0
    ecusum: ECusum | None = None
    past: Days = _NO_DAYS
    run: Days = _NO_DAYS
    due: int = 0
    recovery: ECusum | None = None

    @classmethod
    def of_exact_judge(cls, promise: PromisedLoss) -> "LossMonitor":
        """Make a monitor that compares with the promise, tuned to detect twice its loss."""
        target = _within(promise.at_most / promise.bound)
        rise = min(target, (1.0 - target) / 2.0)
        return cls(promise, ReferenceKind.PROMISE, ecusum=ECusum(target, rise))

    @classmethod
    def of_corrected(
        cls, promise: PromisedLoss, target: float, n: int, past: Days = _NO_DAYS
    ) -> "LossMonitor":
        """Make one that compares with the promise as ``reference.corrected`` translates it."""
        ecusum = ECusum(_within(target))
        return cls(promise, ReferenceKind.CORRECTED, n_reference=n, ecusum=ecusum, past=past)

    @classmethod
    def of_baseline(cls, promise: PromisedLoss) -> "LossMonitor":
        """Make one that compares with the judge's own mean, which it learns in the first weeks."""
        return cls(promise, ReferenceKind.BASELINE, due=WEEK)

    @property
    def route(self) -> Route:
        return self.promise.route

    @property
    def quantity(self) -> AlarmKind:
        return self.promise.quantity

    @property
    def key(self) -> tuple[Route, AlarmKind, ReferenceKind]:
        """A key that identifies it among a profile's monitors."""
        return self.route, self.quantity, self.reference

    @property
    def target(self) -> float | None:
        """The mean to compare losses with; None until the baseline is known."""
        if self.reference is ReferenceKind.PROMISE:
            return self.promise.at_most
        return None if self.ecusum is None else self.ecusum.target * self.promise.bound

    @property
    def n_needed(self) -> int:
        """About how many more losses are needed until the target is known; 0 once it is."""
        if self.ecusum is not None:
            return 0
        seen = self.past.plus(self.run)
        a_day = seen.n / max(seen.days, 1)
        return math.ceil(max(FIRST_BASELINE - seen.n, a_day * (self.due - seen.days), 1.0))

    def after(self, day: Day) -> "LossMonitor":
        """Add a day; a loss above the bound counts as the bound."""
        if not day.n:
            return self
        scaled = day._replace(losses=np.minimum(day.losses / self.promise.bound, 1.0))
        # The weight cut off a question is evidence neither of a rise nor of a fall.
        kept = scaled._replace(losses=1.0 - scaled.losses, raise_by=1.0)
        past, run = self.past, self.run
        if self.ecusum is None or self.ecusum.is_at_floor:
            past, run = past.plus(run), Days()
        ecusum, recovery = self.ecusum, self.recovery
        if ecusum is not None:
            differ = past.variance(ecusum.target), past.between(ecusum.target)
            ecusum = ecusum.after(scaled, *differ)
            recovery = None if recovery is None else recovery.after(kept, *differ)
        seen = replace(
            self,
            n=self.n + day.n,
            ecusum=ecusum,
            past=past,
            run=run.plus(Days.of(scaled)),
            recovery=recovery,
        )
        return seen._with_baseline() if seen.due else seen

    def _with_baseline(self) -> "LossMonitor":
        """Set the target from the baseline, if that is due and there is no evidence of a rise."""
        seen = self.past.plus(self.run)
        # Weekdays repeat after a week.
        is_due = seen.days >= self.due and seen.days % WEEK == 0 and seen.n >= FIRST_BASELINE
        if not is_due or (self.e_value or 0.0) >= QUIET_E_VALUE:
            return self
        due = WEEK * 2 ** math.ceil(math.log2((seen.days + 1) / WEEK))
        if seen.n >= LONGEST_BASELINE and seen.days >= LONGEST_WEEKS * WEEK:
            due = 0
        target = _within(upper_limit(seen))
        # Each factor of the evidence was fair against the target of its time.
        former = ECusum(target) if self.ecusum is None else self.ecusum
        return replace(self, ecusum=replace(former, target=target), n_reference=seen.n, due=due)

    @property
    def is_alarm(self) -> bool:
        """Whether the e-value has reached the threshold; to be checked after each day."""
        return self.ecusum is not None and self.ecusum.alarm()

    @property
    def has_recovered(self) -> bool:
        """Whether the evidence of a mean below the target is as strong as that of the alarm."""
        return self.recovery is not None and self.recovery.alarm()

    @property
    def e_value(self) -> float | None:
        """Evidence of a rise, about 1 or less without one; None before any loss was compared."""
        return self.ecusum.e_value if self.ecusum is not None and self.ecusum.n else None

    @property
    def run_mean(self) -> float | None:
        """Mean loss since about when the losses rose; None before the first loss.

        The run is selected for being high, so its mean somewhat overstates the loss.
        """
        return self.run.mean * self.promise.bound if self.run.n else None

    def alarmed(self) -> "LossMonitor":
        """Drop the evidence of a rise after an alarm, and watch for the end of the rise.

        The baseline is final then: what follows may be the rise. Nor does the rise tell how much
        days differ.
        """
        if self.ecusum is None:
            return self
        target = self.ecusum.target
        return replace(
            self,
            ecusum=replace(self.ecusum, n=0, log_e_values=()),
            run=Days(),
            due=0,
            recovery=self.recovery or ECusum(1.0 - target, target / 2.0),
        )

    def to_alarm(self, profile: Profile, profile_id: str, time_seconds: float) -> Alarm:
        """Make the alarm that this monitor raises; ``time_seconds`` is the end of the last day."""
        calibrated = profile.routes[self.route]
        if self.quantity is AlarmKind.RECALL_LOSS:
            quantity, advice = _about_recall(calibrated)
        else:
            quantity = "harm"
            advice = (
                "Recalibrate on judged traffic; no safe policy helps, since more passages do more "
                "harm"
            )
        return Alarm(
            kind=self.quantity,
            message=(
                f"Route {self.route.value}: judged {quantity} was about {self.run_mean or 0.0:.3g} "
                f"over the last {self.run.n} judged requests{self._comparison()} "
                f"{advice}. If the judge was changed recently, check it first."
            ),
            time_seconds=time_seconds,
            route=self.route,
            value=self.run_mean,
            target=self.target,
            n=self.run.n,
            profile_id=profile_id,
            reference=self.reference,
        )

    def _comparison(self) -> str:
        """Name the reference of the loss."""
        promised = "; the certificate promises"
        if self.promise.source != "certificate":
            promised = "; the evidence of calibration is"
        promised += f" at most {self.promise.at_most:.3g}"
        if self.reference is ReferenceKind.PROMISE:
            return f"{promised}."
        if self.reference is ReferenceKind.CORRECTED:
            return (
                f"{promised}. The judge makes errors: a true loss of that size is at most "
                f"{self.target:.3g} by this judge, according to {self.n_reference} requests that "
                "people graded too."
            )
        learned = (
            f", compared with this judge's own mean over its first {self.n_reference} requests (at "
            f"most {self.target:.3g}), because there are too few human labels to correct the judge "
            "with. This does not show that the promise is broken"
        )
        if self.quantity is AlarmKind.RECALL_LOSS:
            learned += ", so switch-to-safe does not act on it"
        return f"{learned}. Grade what the console's page Wrong drops shows to see."


def _within(target: float) -> float:
    return min(max(target, LEAST_TARGET), 1.0 - LEAST_TARGET)


def _about_recall(calibrated: RouteProfile) -> tuple[str, str]:
    """Describe the quantity, and the advice, in words."""
    promise, safe = calibrated.recall_promise, calibrated.safe_policy
    against = ""
    if promise is not None:
        _, baseline_k, _ = promise
        against = f" against the retriever's first {baseline_k}"
    advice = (
        "this profile has no safe policy to serve meanwhile"
        if safe is None
        else f"meanwhile the safe policy, the retriever's first {safe.k}, loses the least recall"
    )
    return f"recall loss{against}", f"Recalibrate on judged traffic; {advice}"


def promises(profile: Profile) -> tuple[PromisedLoss, ...]:
    """List the promises of a profile that can be monitored.

    For recall loss it is the certificate's alpha or, without one, the bound of the evidence. For
    harm it is the upper end of the evidence's interval. A quantity without a promise, or with one
    that no loss can exceed, is left out.
    """
    found = []
    for route, calibrated in sorted(profile.routes.items()):
        promise, evidence = calibrated.recall_promise, calibrated.evidence
        if promise is not None:
            loss, _, source = promise
            if loss < 1.0:
                loss = max(loss, 0.0)
                found.append(PromisedLoss(route, AlarmKind.RECALL_LOSS, loss, source=source))
        harm = None if evidence is None else evidence.metrics.get("harm")
        # The harm of a full context of the worst passages; 0 where no passage can harm.
        bound = -profile.utilities.worst * float(discounts(calibrated.policy.k).sum())
        if harm is not None and harm.upper is not None and 0.0 <= harm.upper < bound:
            source = "evidence of calibration"
            found.append(PromisedLoss(route, AlarmKind.HARM, harm.upper, bound, source))
    return tuple(found)
