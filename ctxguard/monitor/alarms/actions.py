"""What is done about an alarm beside showing it: log, webhook, switch to the safe policy."""

import logging
import threading
from enum import StrEnum
from pathlib import Path

from ctxguard.errors import CtxguardError
from ctxguard.monitor.alarms.alarm import Alarm, AlarmKind, Severity
from ctxguard.monitor.alarms.switching import switch_to_safe
from ctxguard.monitor.alarms.webhook import Webhook
from ctxguard.profile import Profile

_log = logging.getLogger(__name__)


class SwitchOutcome(StrEnum):
    """What became of the switch to the safe policy. A closed set: it labels a metric."""

    SWITCHED = "switched"
    ALREADY_SAFE = "already_safe"
    REFUSED = "refused"
    """Another profile is in force by now, none is safe, or the file could not be written."""
    NOT_MEANT = "not_meant"
    """Not asked for, or no help against this kind of alarm."""


class AlarmActions:
    """Acts on new alarms. Never raises: an alarm must not stop the monitor that found it.

    Args:
        webhook: Where alarms and warnings are sent; None sends none.
        switch_path: The profile file that guards watch, to be switched to the safe policy when
            recall loss rings; None leaves the switch to people.
    """

    def __init__(
        self, *, webhook: Webhook | None = None, switch_path: Path | str | None = None
    ) -> None:
        self.webhook = webhook
        self.switch_path = None if switch_path is None else Path(switch_path)
        self._lock = threading.Lock()
        self._switches = dict.fromkeys(SwitchOutcome, 0)

    def __call__(self, alarm: Alarm, profile: Profile) -> SwitchOutcome:
        """Act on one new alarm.

        Args:
            profile: The one that the alarm is about.
        """
        _log.warning(
            "%s %s route=%s signal=%s value=%s target=%s n=%d profile=%s",
            alarm.severity.value,
            alarm.kind.value,
            None if alarm.route is None else alarm.route.value,
            alarm.signal,
            _short(alarm.value),
            _short(alarm.target),
            alarm.n,
            alarm.profile_id,
        )
        outcome = self._switch(alarm, profile)
        with self._lock:
            self._switches[outcome] += 1
        if self.webhook is not None:
            self.webhook.send({**alarm.to_json(), "safe_policy": outcome.value})
        return outcome

    @property
    def switches(self) -> dict[SwitchOutcome, int]:
        """Alarms acted on so far, by what became of the switch."""
        with self._lock:
            return dict(self._switches)

    def _switch(self, alarm: Alarm, profile: Profile) -> SwitchOutcome:
        # More passages mean less recall loss and more harm: safe against the first only.
        meant = alarm.kind is AlarmKind.RECALL_LOSS and alarm.severity is Severity.ALARM
        if self.switch_path is None or not meant:
            return SwitchOutcome.NOT_MEANT
        try:
            changed = switch_to_safe(self.switch_path, profile)
        except (CtxguardError, OSError) as error:
            _log.error("no switch to the safe policy: %s", error)
            return SwitchOutcome.REFUSED
        if changed:
            _log.warning("switched %s to its safe policy", self.switch_path)
        return SwitchOutcome.SWITCHED if changed else SwitchOutcome.ALREADY_SAFE


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
