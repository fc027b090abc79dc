"""What an alarm says: which kind, about which route, on what evidence.

Pure: no I/O, no clock, no logging.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from ctxguard.types import Route


class AlarmKind(StrEnum):
    """What happened. A closed set: it labels a metric."""

    RECALL_LOSS = "recall_loss"
    """Judged recall loss lies above what the certificate promises."""
    HARM = "harm"
    """Judged harm lies above what the certificate promises, or the held-out evidence showed."""
    DRIFT = "drift"
    """A signal that needs no label has moved: an early warning."""
    STORE_QUARANTINED = "store_quarantined"
    """The sample store was damaged, moved aside, and begun anew."""
    JUDGE_DOWN = "judge_down"
    """The judge gives no verdicts, so nothing is watched."""


class Severity(StrEnum):
    """How sure it is that something must be done. A closed set: it labels a metric."""

    ALARM = "alarm"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm or warning. Holds no text of a user's: only names, ids and numbers.

    Attributes:
        message: What happened and what to do, in words for an operator.
        time_seconds: Of what set it off, in seconds since the epoch.
        route: Which it is about; None for the monitor as a whole.
        signal: Which signal drifted; None for other kinds.
        value: What was seen, in the unit of what is watched; None where nothing was measured.
        target: What the value is compared with; None where there is nothing to compare with.
        n: Requests that the value is taken over.
        profile_id: Of the profile that was in force; empty where it does not matter.
    """

    kind: AlarmKind
    severity: Severity
    message: str
    time_seconds: float
    route: Route | None = None
    signal: str | None = None
    value: float | None = None
    target: float | None = None
    n: int = 0
    profile_id: str = ""

    @property
    def key(self) -> tuple[AlarmKind, Route | None, str | None]:
        """What it is about: of one key at most one alarm is active."""
        return self.kind, self.route, self.signal

    def to_json(self) -> dict[str, Any]:
        """Plain values, as a webhook and the board's state carry them."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Alarm":
        """From what ``to_json`` gave.

        Raises:
            KeyError, TypeError, ValueError: data of another shape.
        """
        route = data["route"]
        return cls(
            **{
                **data,
                "kind": AlarmKind(data["kind"]),
                "severity": Severity(data["severity"]),
                "route": None if route is None else Route(route),
            }
        )
