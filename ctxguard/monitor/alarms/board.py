"""The board: every watch of a profile, and the alarms that are raised. No I/O, no clock.

An alarm is active from the moment it is raised until someone acknowledges it or another profile
takes over; meanwhile the same one is counted, not raised again. A watch starts from nothing when
it rings, so that evidence gathered afterwards stands by itself, and again when its alarm is
acknowledged: a promise that is still broken rings again.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ctxguard.errors import ConfigurationError, DataError, ProfileError
from ctxguard.forks import start_afresh_in_children
from ctxguard.monitor.alarms.alarm import Alarm, AlarmKind, Severity
from ctxguard.monitor.alarms.drift import DriftWatch, Signal, Signals, Warned, drift_watches
from ctxguard.monitor.alarms.watches import LossWatch, Quantity, loss_watches
from ctxguard.profile import Profile, RouteProfile
from ctxguard.types import Route

FORMAT = 1


@dataclass(frozen=True, slots=True)
class ActiveAlarm:
    """An alarm that nobody has acknowledged yet.

    Attributes:
        alarm: As it was raised.
        repeats: How often the same was seen again since.
    """

    alarm: Alarm
    repeats: int = 0


@dataclass(frozen=True, slots=True)
class BoardReport:
    """Everything that the board can say at one moment, consistent in itself.

    Attributes:
        raised: Alarms raised so far, by kind; repeats are not counted.
        active: Those that nobody has acknowledged.
        losses: The watches on judged losses: target, evidence, losses seen.
        distances: By route and signal, how far the live distribution lies from the
            calibration's, in [0, 1], and how far is allowed; once it has been compared.
    """

    raised: Mapping[AlarmKind, int]
    active: tuple[ActiveAlarm, ...]
    losses: tuple[LossWatch, ...]
    distances: Mapping[tuple[Route, Signal], tuple[float, float]]


@dataclass(slots=True)
class _Book:
    raised: dict[AlarmKind, int] = field(default_factory=lambda: dict.fromkeys(AlarmKind, 0))
    active: dict[tuple[AlarmKind, Route | None, str | None], ActiveAlarm] = field(
        default_factory=dict
    )


class AlarmBoard:
    """Watches one profile's promises. Safe to use from several threads.

    Args:
        profile: Whose targets and reference are watched.
        drift: Whether label-free signals are watched too; needs river.

    Raises:
        MissingExtraError: ``drift`` without river.
    """

    def __init__(self, profile: Profile, *, drift: bool = True) -> None:
        self.profile = profile
        self.profile_id = profile.profile_id
        self._with_drift = drift
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Take every alarm down and forget what was seen; also in a forked child."""
        self._lock = threading.Lock()
        self._book = _Book()
        self._losses = {
            (watch.route, watch.quantity): watch for watch in loss_watches(self.profile)
        }
        self._drift: dict[Route, dict[Signal, DriftWatch]] = {
            route: drift_watches(calibrated) if self._with_drift else {}
            for route, calibrated in self.profile.routes.items()
        }

    def judged(
        self,
        route: Route,
        *,
        recall_loss: float | None,
        harm: float | None,
        time_seconds: float,
    ) -> list[Alarm]:
        """Take in one judged request.

        Requests must come with the same chance whatever their losses: recall loss only where
        all of the certificate's baseline was chosen to be judged beforehand.

        Args:
            recall_loss: In [0, 1]; None where it is undefined or was not judged.
            harm: ≥ 0; None where it was not judged.
            time_seconds: Of the request, in seconds since the epoch.

        Returns:
            The alarms that are new.

        Raises:
            ConfigurationError: a loss that is negative or not finite, or a recall loss above 1.
        """
        if recall_loss is not None and recall_loss > 1.0:
            raise ConfigurationError(f"recall_loss {recall_loss!r} must lie in [0, 1]")
        raised = []
        with self._lock:
            for quantity, loss in ((Quantity.RECALL_LOSS, recall_loss), (Quantity.HARM, harm)):
                watch = self._losses.get((route, quantity))
                if watch is None or loss is None:
                    continue
                watch = watch.after(loss)
                if watch.ringing:
                    alarm = _loss_alarm(watch, self.profile, self.profile_id, time_seconds)
                    watch = watch.restarted()
                    if self._raise(alarm):
                        raised.append(alarm)
                self._losses[route, quantity] = watch
        return raised

    def signals(self, route: Route, signals: Signals, *, time_seconds: float) -> list[Alarm]:
        """Take in the label-free signals of one sampled request, judged or not.

        Returns:
            The warnings that are new.
        """
        raised = []
        with self._lock:
            for signal, watch in self._drift.get(route, {}).items():
                value = signals.values()[signal]
                warned = None if value is None else watch.after(value)
                if warned is not None:
                    alarm = _drift_alarm(route, signal, warned, self.profile_id, time_seconds)
                    if self._raise(alarm):
                        raised.append(alarm)
        return raised

    def raise_(self, alarm: Alarm) -> bool:
        """Put up an alarm that something else found; whether it is new."""
        with self._lock:
            return self._raise(alarm)

    def acknowledge(
        self, kind: AlarmKind, route: Route | None = None, signal: str | None = None
    ) -> bool:
        """Take an alarm down: someone has seen it, or what it was about is over.

        Returns:
            Whether it was up.
        """
        with self._lock:
            found = self._book.active.pop((kind, route, signal), None)
            key = next(
                (key for key in self._losses if (key[0], key[1].value) == (route, kind.value)), None
            )
            if found is not None and key is not None:
                self._losses[key] = self._losses[key].restarted()
            return found is not None

    def active(self) -> tuple[Alarm, ...]:
        """The alarms that nobody has acknowledged, oldest first."""
        return tuple([active.alarm for active in self.report().active])

    def report(self) -> BoardReport:
        """Counts, active alarms and evidence of one moment."""
        with self._lock:
            return BoardReport(
                raised=dict(self._book.raised),
                active=tuple(self._book.active.values()),
                losses=tuple(self._losses.values()),
                distances={
                    (route, signal): (watch.distance, watch.allowed_distance or 0.0)
                    for route, signal, watch in self._drift_watches()
                    if watch.distance is not None
                },
            )

    def state(self) -> str:
        """Everything to go on with after a restart, as JSON; see ``restore``."""
        with self._lock:
            return json.dumps(
                {
                    "format": FORMAT,
                    "profile_id": self.profile_id,
                    "safe_profile_id": _safe_profile_id(self.profile),
                    "raised": {kind.value: count for kind, count in self._book.raised.items()},
                    "active": [
                        {"alarm": active.alarm.to_json(), "repeats": active.repeats}
                        for active in self._book.active.values()
                    ],
                    "losses": [watch.state() for watch in self._losses.values()],
                    "drift": [
                        {"route": route.value, "signal": signal.value, **watch.state()}
                        for route, signal, watch in self._drift_watches()
                    ],
                },
                allow_nan=False,
            )

    def restore(self, state: str) -> bool:
        """Go on where another board left off; all of it or, where it raises, nothing.

        For the same profile the watches go on and the alarms stay up. For its safe policy, to
        which an alarm may have switched, the alarms stay up and the watches start from nothing.
        For any other profile everything does.

        Args:
            state: What ``state`` gave.

        Returns:
            Whether anything of it was taken over.

        Raises:
            DataError: a state that no board wrote, or one of a newer release.
        """
        fresh = AlarmBoard(self.profile, drift=self._with_drift)
        try:
            data = json.loads(state)
            if data["format"] != FORMAT:
                raise DataError(
                    f"the alarms' state is of format {data['format']!r}; this release reads "
                    f"{FORMAT}: upgrade ctxguard, or remove the state to start afresh"
                )
            if self.profile_id not in (data["profile_id"], data["safe_profile_id"]):
                return False
            fresh._take_alarms(data)
            if self.profile_id == data["profile_id"]:
                fresh._take_watches(data)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DataError(
                f"the alarms' state cannot be read ({type(error).__name__}: {error}); remove it "
                "to start afresh"
            ) from error
        with self._lock:
            self._book, self._losses, self._drift = fresh._book, fresh._losses, fresh._drift
        return True

    def _take_alarms(self, data: Mapping[str, Any]) -> None:
        self._book.raised.update(
            {AlarmKind(kind): int(count) for kind, count in data["raised"].items()}
        )
        for entry in data["active"]:
            alarm = Alarm.from_json(entry["alarm"])
            self._book.active[alarm.key] = ActiveAlarm(alarm, int(entry["repeats"]))

    def _take_watches(self, data: Mapping[str, Any]) -> None:
        for entry in data["losses"]:
            key = Route(entry["route"]), Quantity(entry["quantity"])
            self._losses[key] = self._losses[key].resumed(entry)
        for entry in data["drift"]:
            watch = self._drift[Route(entry["route"])].get(Signal(entry["signal"]))
            if watch is not None:
                watch.resume(entry)

    def _drift_watches(self) -> Iterator[tuple[Route, Signal, DriftWatch]]:
        for route, watches in self._drift.items():
            for signal, watch in watches.items():
                yield route, signal, watch

    def _raise(self, alarm: Alarm) -> bool:
        active = self._book.active.get(alarm.key)
        if active is not None:
            self._book.active[alarm.key] = ActiveAlarm(active.alarm, active.repeats + 1)
            return False
        self._book.active[alarm.key] = ActiveAlarm(alarm)
        self._book.raised[alarm.kind] += 1
        return True


def _safe_profile_id(profile: Profile) -> str | None:
    try:
        return profile.safe().profile_id
    except ProfileError:
        return None


def _loss_alarm(watch: LossWatch, profile: Profile, profile_id: str, time_seconds: float) -> Alarm:
    calibrated = profile.routes[watch.route]
    promise = (
        "the certificate promises at most"
        if watch.source == "certificate"
        else "the held-out queries of calibration, for want of a promise, gave at most"
    )
    if watch.quantity is Quantity.RECALL_LOSS:
        against = "" if calibrated.certificate is None else f" against {_baseline(calibrated)}"
        what, advice = f"recall loss{against}", _recall_advice(calibrated)
    else:
        what = "harm"
        advice = (
            "No safe policy helps against harm, for more passages do more of it: recalibrate on "
            "judged traffic"
        )
    seen = watch.run_mean
    return Alarm(
        kind=AlarmKind(watch.quantity.value),
        severity=Severity.ALARM,
        message=(
            f"Route {watch.route.value}: judged {what} was about {seen or 0.0:.3g} over the last "
            f"{watch.run_n} judged requests; {promise} {watch.target:.3g}. {advice}. If the judge "
            "was changed of late, look there first."
        ),
        time_seconds=time_seconds,
        route=watch.route,
        value=seen,
        target=watch.target,
        n=watch.run_n,
        profile_id=profile_id,
    )


def _baseline(calibrated: RouteProfile) -> str:
    certificate = calibrated.certificate
    if certificate is None or certificate.baseline == "pool":
        return "the whole pool"
    return f"the retriever's first {certificate.baseline.removeprefix('k=')}"


def _recall_advice(calibrated: RouteProfile) -> str:
    if calibrated.safe_policy is None:
        return "Recalibrate on judged traffic; this profile names no safe policy to serve meanwhile"
    return (
        f"Recalibrate on judged traffic; meanwhile the safe policy, the retriever's first "
        f"{calibrated.safe_policy.k}, gives up the least recall"
    )


def _drift_alarm(
    route: Route, signal: Signal, warned: Warned, profile_id: str, time_seconds: float
) -> Alarm:
    if warned.at_start:
        what = (
            f"{signal.value} was distributed otherwise over the first {warned.n} requests than at "
            f"calibration: {warned.value:.3g} apart, where chance gives {warned.before:.3g}"
        )
    else:
        scale = (
            "share of requests"
            if signal is Signal.EMPTY
            else "mean position among the calibration's values"
        )
        what = (
            f"{signal.value} has moved: its {scale} went from {warned.before:.3g} to "
            f"{warned.value:.3g} over the last {warned.n} requests"
        )
    return Alarm(
        kind=AlarmKind.DRIFT,
        severity=Severity.WARNING,
        message=(
            f"Route {route.value}: {what}. An early warning: whether recall has fallen, only "
            "labels and judged requests tell."
        ),
        time_seconds=time_seconds,
        route=route,
        signal=signal.value,
        value=warned.value,
        target=warned.before,
        n=warned.n,
        profile_id=profile_id,
    )
