"""The state of the alarms: every detector of a profile, and the alarms that are active.

An alarm about a profile is active until another profile takes over, an alarm about the monitor
itself until its cause has ended. While an alarm is active, the same one is not raised again. A
loss monitor starts again without losses when it raises an alarm. No I/O, no clock.
"""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctxguard._support.fork_safety import reset_in_children
from ctxguard.core.types import Route
from ctxguard.errors import ConfigurationError, DataError, ProfileError
from ctxguard.monitor.alarms.alarm import Alarm, AlarmKind
from ctxguard.monitor.alarms.drift import DriftDetector, Signal, Signals, drift_detectors
from ctxguard.monitor.alarms.loss_monitor import LossMonitor, Quantity, loss_monitors
from ctxguard.profile.schema import Profile

FORMAT = 1


@dataclass(frozen=True, slots=True)
class AlarmReport:
    """The state of the alarms at one moment.

    Attributes:
        profile_id: The profile whose promises are monitored.
        raised: Alarms raised so far, by kind.
        active: The active alarms, oldest first.
        losses: The loss monitors: target, e-value, losses seen.
    """

    profile_id: str
    raised: Mapping[AlarmKind, int]
    active: tuple[Alarm, ...]
    losses: tuple[LossMonitor, ...]


class AlarmState:
    """The detectors and alarms of one profile. Safe to use from several threads.

    Args:
        profile: The profile whose promises and signals are monitored.
        drift: Whether signals without labels are monitored too; needs river.

    Raises:
        MissingExtraError: ``drift`` without river.
    """

    def __init__(self, profile: Profile, *, drift: bool = True) -> None:
        self.profile = profile
        self.profile_id = profile.profile_id
        self._with_drift = drift
        self._reset_after_fork()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        """Forget all alarms, losses and signals; also called in a forked child."""
        self._lock = threading.Lock()
        self._raised = dict.fromkeys(AlarmKind, 0)
        self._active: dict[tuple[AlarmKind, Route | None, str | None], Alarm] = {}
        self._losses = {
            (monitor.route, monitor.quantity): monitor for monitor in loss_monitors(self.profile)
        }
        self._drift: dict[tuple[Route, Signal], DriftDetector] = {
            (route, signal): detector
            for route, calibrated in self.profile.routes.items()
            if self._with_drift
            for signal, detector in drift_detectors(calibrated).items()
        }

    def add_losses(
        self,
        route: Route,
        *,
        recall_loss: float | None,
        harm: float | None,
        time_seconds: float,
    ) -> list[Alarm]:
        """Add the losses of one judged request.

        The probability of being added must not depend on a request's losses. So add a recall loss
        only where it was decided beforehand that all of the certificate's baseline is judged.

        Args:
            route: The stages that answered.
            recall_loss: In [0, 1]; None where it is undefined or was not judged.
            harm: ≥ 0; None where it was not judged.
            time_seconds: Time of the request, in seconds since the epoch.

        Returns:
            The alarms that this raises.

        Raises:
            ConfigurationError: a loss that is negative or not finite, or a recall loss above 1.
        """
        if recall_loss is not None and recall_loss > 1.0:
            raise ConfigurationError(f"recall_loss {recall_loss!r} must lie in [0, 1]")
        raised = []
        with self._lock:
            for quantity, loss in ((Quantity.RECALL_LOSS, recall_loss), (Quantity.HARM, harm)):
                monitor = self._losses.get((route, quantity))
                if monitor is None or loss is None:
                    continue
                monitor = monitor.after(loss)
                if monitor.is_alarm:
                    alarm = monitor.to_alarm(self.profile, self.profile_id, time_seconds)
                    monitor = monitor.restarted()
                    if self._add(alarm):
                        raised.append(alarm)
                self._losses[route, quantity] = monitor
        return raised

    def add_signals(self, route: Route, signals: Signals, *, time_seconds: float) -> list[Alarm]:
        """Add the signals of one sampled request, judged or not.

        Returns:
            The warnings that this raises.
        """
        raised = []
        with self._lock:
            for signal, value in signals.values().items():
                detector = self._drift.get((route, signal))
                warning = None if detector is None or value is None else detector.update(value)
                if warning is not None:
                    alarm = warning.to_alarm(route, signal, self.profile_id, time_seconds)
                    if self._add(alarm):
                        raised.append(alarm)
        return raised

    def add(self, alarm: Alarm) -> bool:
        """Raise an alarm that was detected elsewhere; return whether it was not yet active."""
        with self._lock:
            return self._add(alarm)

    def clear(self, kind: AlarmKind) -> None:
        """End an alarm about the monitor itself, whose cause has ended."""
        with self._lock:
            self._active.pop((kind, None, None), None)

    def active(self) -> tuple[Alarm, ...]:
        """The active alarms, oldest first."""
        return self.report().active

    def report(self) -> AlarmReport:
        """Counts, active alarms and loss monitors at one moment."""
        with self._lock:
            return AlarmReport(
                profile_id=self.profile_id,
                raised=dict(self._raised),
                active=tuple(self._active.values()),
                losses=tuple(self._losses.values()),
            )

    def to_json(self) -> str:
        """The whole state as JSON, for ``restore`` after a restart."""
        with self._lock:
            return json.dumps(
                {
                    "format": FORMAT,
                    "profile_id": self.profile_id,
                    "safe_profile_id": _safe_profile_id(self.profile),
                    "raised": {kind.value: count for kind, count in self._raised.items()},
                    "active": [alarm.to_json() for alarm in self._active.values()],
                    "losses": [monitor.state() for monitor in self._losses.values()],
                    "drift": [
                        {"route": route.value, "signal": signal.value, **detector.state()}
                        for (route, signal), detector in self._drift.items()
                    ],
                },
                allow_nan=False,
            )

    def restore(self, text: str) -> bool:
        """Continue from a saved state; where it cannot be read, nothing changes.

        For the same profile, losses, signals and alarms are restored. For its safe policy, which
        an alarm may have switched to, only the alarms are. For any other profile nothing is.

        Args:
            text: What ``to_json`` returned.

        Returns:
            Whether anything was restored.

        Raises:
            DataError: ``text`` is not such a state, or one of a newer release.
        """
        restored = AlarmState(self.profile, drift=self._with_drift)
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise DataError(
                    f"the alarms' state has format {data['format']!r}; this release reads "
                    f"{FORMAT}: upgrade ctxguard, or remove the state to start afresh"
                )
            if self.profile_id not in (data["profile_id"], data["safe_profile_id"]):
                return False
            restored._read_alarms(data)
            if self.profile_id == data["profile_id"]:
                restored._read_detectors(data)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DataError(
                f"the alarms' state cannot be read ({type(error).__name__}: {error}); remove it "
                "to start afresh"
            ) from error
        with self._lock:
            self._raised, self._active = restored._raised, restored._active
            self._losses, self._drift = restored._losses, restored._drift
        return True

    def _read_alarms(self, data: Mapping[str, Any]) -> None:
        self._raised.update({AlarmKind(kind): int(count) for kind, count in data["raised"].items()})
        alarms = [Alarm.from_json(entry) for entry in data["active"]]
        self._active = {alarm.key: alarm for alarm in alarms}

    def _read_detectors(self, data: Mapping[str, Any]) -> None:
        for entry in data["losses"]:
            key = Route(entry["route"]), Quantity(entry["quantity"])
            self._losses[key] = self._losses[key].resumed(entry)
        for entry in data["drift"]:
            detector = self._drift.get((Route(entry["route"]), Signal(entry["signal"])))
            if detector is not None:
                detector.resume(entry)

    def _add(self, alarm: Alarm) -> bool:
        if alarm.key in self._active:
            return False
        self._active[alarm.key] = alarm
        self._raised[alarm.kind] += 1
        return True


def _safe_profile_id(profile: Profile) -> str | None:
    try:
        return profile.safe().profile_id
    except ProfileError:
        return None
