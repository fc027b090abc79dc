"""Defines an alarm as a value: its kind, its route, its figures. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from ctxguard.core.types import Route
from ctxguard.monitor.alarms.reference import ReferenceKind


class AlarmKind(StrEnum):
    """The kind of event that raised an alarm. A closed set: it labels a metric."""

    RECALL_LOSS = "recall_loss"
    """Judged recall loss, the share of the relevant passages in the certificate's baseline that
    were not served, is above what the certificate promises, or above the judge's own mean."""
    HARM = "harm"
    """Judged harm, the negative part of UDCG as a positive number, is above what the
    certificate promises or the held-out evidence showed, or above the judge's own mean."""
    CORPUS_CHANGED = "corpus_changed"
    """More of the corpus has changed since calibration than a profile holds for."""
    PROMISE_NOT_MONITORED = "promise_not_monitored"
    """The judged passages do not show the loss that the certificate bounds."""
    JUDGE_DOWN = "judge_down"
    """The judge gives no grades, so no promise is monitored."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm about a loss, or a warning about the monitor. It never holds a user's text.

    Attributes:
        message: What happened and what to do, for an operator.
        time_seconds: Time of the request that raised it, in seconds since the epoch.
        route: The route it is about; None for the monitor itself.
        value: The figure observed, in the unit of ``target``; None where nothing was measured.
        target: The figure that ``value`` is compared with; None without one.
        n: Requests that ``value`` is a mean of.
        profile_id: The profile in force.
        reference: The kind of target that a judged loss was compared with; None for a warning.
    """

    kind: AlarmKind
    message: str
    time_seconds: float
    route: Route | None = None
    value: float | None = None
    target: float | None = None
    n: int = 0
    profile_id: str = ""
    reference: ReferenceKind | None = None

    @property
    def key(self) -> tuple[AlarmKind, Route | None]:
        """Identifies its subject; at most one alarm per key is active."""
        return self.kind, self.route
