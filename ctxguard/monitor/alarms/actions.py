"""Acts on an alarm by a log line and the switch to the safe policy, and on a rise from shadow.

Notifying people is left to Prometheus and Alertmanager, which see the alarm as a metric.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from ctxguard.core.types import Route
from ctxguard.errors import CtxguardError, ProfileError
from ctxguard.monitor.alarms.alarm import Alarm, AlarmKind
from ctxguard.monitor.estimation.promotion import Rise
from ctxguard.profile.schema import Profile

_log = logging.getLogger(__name__)


def act_on(alarm: Alarm, profile: Profile, switch_path: Path | None = None) -> None:
    """Log a new alarm and, for recall loss, switch to the safe policy. Never raises.

    It switches only where the loss was compared with the promise, not with the judge's own mean.

    Args:
        alarm: An alarm that has just been raised.
        profile: The profile that the alarm is about.
        switch_path: The profile file that guards watch; None never switches.
    """
    _log.warning(
        "%s %s route=%s value=%s target=%s reference=%s n=%d profile=%s",
        alarm.severity.value,
        alarm.kind.value,
        None if alarm.route is None else alarm.route.value,
        _short(alarm.value),
        _short(alarm.target),
        None if alarm.reference is None else alarm.reference.value,
        alarm.n,
        alarm.profile_id,
    )
    # More passages lower recall loss and raise harm: safe against the first only.
    if switch_path is None or alarm.kind is not AlarmKind.RECALL_LOSS:
        return
    if alarm.reference is None or not alarm.reference.is_of_promise:
        _log.warning(
            "no switch to the safe policy: the loss rose above the judge's own mean, which does "
            "not show that the promise is broken"
        )
        return
    try:
        if switch_to_safe(switch_path, profile):
            _log.warning("switched %s to its safe policy", switch_path)
    except (CtxguardError, OSError) as error:
        _log.error("no switch to the safe policy: %s", error)


def switch_to_safe(path: Path | str, alarmed: Profile) -> bool:
    """Replace a profile file by the safe policy of its profile.

    Args:
        path: The profile file that guards watch.
        alarmed: The profile that the alarm is about.

    Returns:
        Whether the file was changed; False where it already holds the safe policy.

    Raises:
        ProfileFormatError: the file is absent or is not a profile.
        ProfileError: the file now holds another profile, which the alarm is not about, or the
            profile has no safe policy.
        OSError: the file or its folder cannot be written.
    """
    path = Path(path)
    safe = alarmed.safe()
    if Profile.load(path).profile_id == safe.profile_id:
        return False
    _check_unchanged(path, alarmed, "the alarm is about")
    safe.save(path)
    return True


def raise_verdict(path: Path | str, shadowed: Profile, rises: Mapping[Route, Rise]) -> Profile:
    """Replace a profile file by its profile with the verdicts raised that judged requests allow.

    Args:
        path: The profile file that guards watch.
        shadowed: The profile that the requests were decided by.
        rises: What they say of its routes; at least one has risen.

    Returns:
        The profile that the file now holds.

    Raises:
        ProfileFormatError: the file is absent or is not a profile.
        ProfileError: the file now holds another profile.
        OSError: the file or its folder cannot be written.
    """
    _check_unchanged(Path(path), shadowed, "the requests were decided by")
    raised = shadowed
    for route, rise in rises.items():
        if rise.risen and rise.difference is not None:
            raised = raised.risen(route, n=rise.n, value=rise.difference, why=rise.statement)
    raised.save(path)
    return raised


def _check_unchanged(path: Path, expected: Profile, what: str) -> None:
    current = Profile.load(path)
    if current.profile_id != expected.profile_id:
        raise ProfileError(
            f"{path} now holds profile {current.profile_id}, and {what} "
            f"{expected.profile_id}: the file was not changed"
        )


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
