"""Holds the state of the alarms: every detector of a profile, and the active alarms.

An alarm about a loss ends with another profile, or once the evidence that the mean loss is below
its target is as strong as the alarm's was; an alarm about the monitor itself ends with its cause.
While an alarm is active, the same one is not raised again, unless against the promise where the
active one was against a baseline. A loss monitor starts again without evidence when it raises an
alarm. Pure, except that a forked child begins without alarms.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from pydantic import TypeAdapter

from ctxguard._support.fork_safety import reset_in_children
from ctxguard.core.types import Route
from ctxguard.errors import DataError, ProfileError
from ctxguard.measure.metrics import Metric, losses
from ctxguard.measure.rows import ROUTES, Rows
from ctxguard.monitor.alarms.alarm import Alarm, AlarmKind
from ctxguard.monitor.alarms.decision import SAME_TARGET, LossMonitor, PromisedLoss, promises
from ctxguard.monitor.alarms.ecusum import Day, groups
from ctxguard.monitor.alarms.reference import ReferenceKind
from ctxguard.profile.schema import Profile

FORMAT = 7


@dataclass(frozen=True, slots=True)
class AlarmReport:
    """The state of the alarms at one moment, as the store keeps it.

    Attributes:
        profile_id: The profile whose promises are monitored.
        safe_profile_id: Its safe policy's; None without one.
        raised: Alarms raised so far, by kind.
        active: The active alarms, oldest first.
        evaluated_until: The end of the last day that was added; None before the first.
    """

    profile_id: str
    safe_profile_id: str | None
    raised: dict[AlarmKind, int]
    active: tuple[Alarm, ...]
    losses: tuple[LossMonitor, ...]
    evaluated_until: float | None
    format: int = FORMAT


@cache
def _form() -> TypeAdapter[AlarmReport]:
    return TypeAdapter(AlarmReport)


class AlarmState:
    """The detectors and alarms of one profile; one thread changes them, any may read the report.

    Args:
        exact: Whether the judge never errs. Losses of an exact judge are compared with the promise;
            those of a judge that errs with its own mean and, once there is a correction, with the
            promise on its scale.
    """

    def __init__(self, profile: Profile, *, exact: bool = True) -> None:
        self.profile = profile
        self.profile_id = profile.profile_id
        self.promises = promises(profile)
        self.is_exact = exact
        self._reset_after_fork()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        """Forget all alarms and losses; also called in a forked child."""
        safe_profile_id = None
        with suppress(ProfileError):
            safe_profile_id = self.profile.safe().profile_id
        new = LossMonitor.of_exact_judge if self.is_exact else LossMonitor.of_baseline
        self._report = AlarmReport(
            profile_id=self.profile_id,
            safe_profile_id=safe_profile_id,
            raised=dict.fromkeys(AlarmKind, 0),
            active=(),
            losses=tuple(map(new, self.promises)),
            evaluated_until=None,
        )

    def report(self) -> AlarmReport:
        """Return counts, active alarms and loss monitors at one moment."""
        return self._report

    def correct(self, promise: PromisedLoss, target: float, n: int) -> None:
        """From now on, also compare losses with a promise on the scale of a judge that errs.

        The evidence starts again where the target is not about the same as before. For target and
        n see ``reference.corrected``.
        """
        by_key = {monitor.key: monitor for monitor in self._report.losses}
        learned = by_key[promise.route, promise.quantity, ReferenceKind.BASELINE]
        new = LossMonitor.of_corrected(promise, target, n, learned.past)
        former = by_key.get(new.key)
        if former is not None and former.ecusum is not None:
            known = former.ecusum.target
            if abs(target - known) <= SAME_TARGET * known:
                return
            if former.recovery is not None:
                new = new.alarmed()
        by_key[new.key] = new
        self._report = replace(self._report, losses=tuple(by_key.values()))

    def add_day(self, rows: Rows, end_seconds: float) -> tuple[list[Alarm], list[Alarm]]:
        """Add one whole day's judged losses, of any route.

        The probability of being among them must not depend on a request's losses. Returns the
        alarms that this raises, and those that it ends.
        """
        found, ended, losses = list[Alarm](), list[Alarm](), list[LossMonitor]()
        days: dict[tuple[Route, AlarmKind], Day] = {}
        for former in self._report.losses:
            about = former.route, former.quantity
            if about not in days:
                days[about] = _day(rows, *about)
            monitor = former.after(days[about])
            if monitor.is_alarm:
                found.append(monitor.to_alarm(self.profile, self.profile_id, end_seconds))
                monitor = monitor.alarmed()
            elif monitor.has_recovered:
                monitor = replace(monitor, recovery=None)
                alarm = self._active(monitor.quantity, monitor.route)
                if alarm is not None and alarm.reference is monitor.reference:
                    self.clear(*alarm.key)
                    ended.append(alarm)
            losses.append(monitor)
        self._report = replace(self._report, losses=tuple(losses), evaluated_until=end_seconds)
        # A broken promise says more than a rise above a baseline.
        found.sort(key=lambda alarm: alarm.reference is ReferenceKind.BASELINE)
        return [alarm for alarm in found if self.add(alarm)], ended

    def add(self, alarm: Alarm) -> bool:
        """Raise an alarm; return whether it was not yet active."""
        active, report = self._active(*alarm.key), self._report
        # Evidence against the promise says more than a rise above a baseline.
        if active is not None and not (
            active.reference is ReferenceKind.BASELINE
            and alarm.reference is not None
            and alarm.reference.is_of_promise
        ):
            return False
        self.clear(*alarm.key)
        self._report = replace(
            self._report,
            active=(*self._report.active, alarm),
            raised={**report.raised, alarm.kind: report.raised[alarm.kind] + 1},
        )
        return True

    def clear(self, kind: AlarmKind, route: Route | None = None) -> None:
        """End an alarm whose cause has ended."""
        others = [alarm for alarm in self._report.active if alarm.key != (kind, route)]
        self._report = replace(self._report, active=tuple(others))

    def _active(self, kind: AlarmKind, route: Route | None) -> Alarm | None:
        return next((each for each in self._report.active if each.key == (kind, route)), None)

    def to_json(self) -> str:
        """Return alarms and losses as JSON, for ``restore`` after a restart."""
        return json.dumps(_form().dump_python(self._report, mode="json"), allow_nan=False)

    def restore(self, text: str) -> bool:
        """Continue from the output of ``to_json``; return whether anything was restored.

        For the same profile, losses and alarms are restored. For its safe policy, which an alarm
        may have switched to, only the alarms are. For any other profile nothing is.

        Raises:
            DataError: ``text`` is not such a state; nothing changes.
        """
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise DataError(
                    f"the alarms' state has format {data['format']!r}; this release reads "
                    f"{FORMAT}: use the release that wrote it, or remove the state to start again"
                )
            saved = _form().validate_python(data)
            if _form().dump_python(saved, mode="json") != data:
                raise ValueError("a field is missing, unknown or of the wrong type")
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"the alarms' state cannot be read ({type(error).__name__}: {error}); remove it to "
                "start again"
            ) from error
        if self.profile_id not in (saved.profile_id, saved.safe_profile_id):
            return False
        self._reset_after_fork()
        losses = {monitor.key: monitor for monitor in self._report.losses}
        for monitor in saved.losses if self.profile_id == saved.profile_id else ():
            is_of_exact = monitor.reference is ReferenceKind.PROMISE
            if self.is_exact is is_of_exact and monitor.promise in self.promises:
                losses[monitor.key] = monitor
        self._report = replace(
            self._report,
            raised=self._report.raised | saved.raised,
            active=saved.active,
            losses=tuple(losses.values()),
            evaluated_until=saved.evaluated_until,
        )
        return True


def _day(rows: Rows, route: Route, quantity: AlarmKind) -> Day:
    """Return the defined losses of one route, without values that only damage can explain."""
    requests = rows.requests
    if quantity is AlarmKind.RECALL_LOSS:
        found, most = requests["recall_loss"], 1.0
        probability = requests["probability"] * requests["loss_probability"]
    else:
        found, most = losses(rows)[Metric.HARM], np.finfo(float).max
        probability = requests["probability"]
    is_usable = requests["route"] == ROUTES.index(route)
    is_usable &= (found >= 0.0) & (found <= most)
    is_usable &= (probability > 0.0) & (probability <= 1.0)
    own = requests[is_usable]
    alike = groups(own["session"], own["question"])
    return Day.of(found[is_usable], probability[is_usable], alike)
