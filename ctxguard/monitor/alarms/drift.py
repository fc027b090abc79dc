"""Drift of signals that need no label: whether live rankings still look as at calibration.

An early warning only: scores can change without recall falling, and recall can fall without
scores changing. Every value is replaced by its position among the calibration's values, so that
all signals have one scale.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from heapq import nlargest
from typing import Any, NamedTuple

from ctxguard._support.extras import require
from ctxguard.core.scores import is_valid
from ctxguard.core.types import Route
from ctxguard.errors import ConfigurationError
from ctxguard.monitor.alarms.alarm import Alarm, AlarmKind, Severity
from ctxguard.profile.schema import RouteProfile

DELTA = 0.002
"""ADWIN's confidence, divided among the signals of a route."""

COMPARED_REQUESTS = 500
"""Live requests of a route after which they are compared with the calibration's, once."""

COMPARISON_LEVEL = 0.001
"""Probability of a false warning by that comparison, divided among the signals of a route."""

REMEMBERED = 500
"""Values of a signal that are kept to rebuild ADWIN's window after a restart."""

_DECILES = 11
_LATEST = 100


class Signal(StrEnum):
    """What is monitored without labels. The names are those of the profile's reference."""

    TOP_SCORE = "top_score"
    SCORE_GAP = "score_gap"
    """The best score minus the second best."""
    KEPT = "kept"
    EMPTY = "empty"
    """Whether no passage was kept: 0 or 1."""
    INSUFFICIENT = "insufficient"
    """Whether what was kept was called insufficient: 0 or 1."""


_SHARES = frozenset({Signal.EMPTY, Signal.INSUFFICIENT})
"""Signals that are 0 or 1 by themselves, without a reference."""


class Signals(NamedTuple):
    """One request's signals.

    Attributes:
        top_score: The best score; None where the retriever returned nothing.
        score_gap: The best score minus the second best; None below two candidates.
        kept: How many passages the policy kept.
        insufficient: Whether they were called insufficient.
    """

    top_score: float | None
    score_gap: float | None
    kept: int
    insufficient: bool = False

    @classmethod
    def of(
        cls, scores: Iterable[float | None], kept: int, *, insufficient: bool = False
    ) -> "Signals":
        """The signals of a ranking's scores, in any order; invalid scores are ignored.

        >>> Signals.of([0.5, None, 2.0, float("nan")], kept=1)
        Signals(top_score=2.0, score_gap=1.5, kept=1, insufficient=False)
        """
        best = nlargest(2, [float(score) for score in scores if is_valid(score)])  # type: ignore[arg-type]
        top = best[0] if best else None
        return cls(top, best[0] - best[1] if len(best) == 2 else None, kept, insufficient)

    def values(self) -> dict[Signal, float | None]:
        """By signal; None where undefined."""
        return {
            Signal.TOP_SCORE: self.top_score,
            Signal.SCORE_GAP: self.score_gap,
            Signal.KEPT: float(self.kept),
            Signal.EMPTY: float(self.kept == 0),
            Signal.INSUFFICIENT: float(self.insufficient),
        }


@dataclass(frozen=True, slots=True)
class Reference:
    """The distribution of a signal at calibration.

    Attributes:
        deciles: Its 0, 10, …, 100% quantiles, ascending.
        n: How many queries they were taken from; None where unknown.
    """

    deciles: tuple[float, ...]
    n: int | None = None

    def position(self, value: float) -> float:
        """About the share of the calibration's values below ``value``, in [0, 1].

        Equal values share the middle of their range, so that counts work as well as scores.

        >>> Reference(tuple(range(11))).position(7.5)
        0.75
        """
        left, right = bisect_left(self.deciles, value), bisect_right(self.deciles, value)
        if left < right:
            return (left + right - 1) / 2.0 / (_DECILES - 1)
        if left in (0, _DECILES):
            return 0.0 if left == 0 else 1.0
        below, above = self.deciles[left - 1], self.deciles[left]
        return (left - 1 + (value - below) / (above - below)) / (_DECILES - 1)


class DriftWarning(NamedTuple):
    """The figures of a warning.

    Attributes:
        value: ADWIN: mean position of the latest requests. Comparison: the distance.
        before: ADWIN: mean position before them. Comparison: the allowed distance.
        n: Requests that ``value`` is taken from.
        at_start: Whether the comparison with the calibration gave it, and not ADWIN.
    """

    value: float
    before: float
    n: int
    at_start: bool

    def to_alarm(self, route: Route, signal: Signal, profile_id: str, time_seconds: float) -> Alarm:
        """This warning as an alarm; ``time_seconds`` is the time of the last request."""
        if self.at_start:
            change = (
                f"{signal.value} was distributed otherwise over the first {self.n} requests than "
                f"at calibration: the distance is {self.value:.3g}, and chance gives at most "
                f"{self.before:.3g}"
            )
        else:
            scale = (
                "share of requests"
                if signal in _SHARES
                else "mean position among the calibration's values"
            )
            change = (
                f"{signal.value} has changed: its {scale} went from {self.before:.3g} to "
                f"{self.value:.3g} over the last {self.n} requests"
            )
        return Alarm(
            kind=AlarmKind.DRIFT,
            severity=Severity.WARNING,
            message=(
                f"Route {route.value}: {change}. This is an early warning: only labels and judged "
                "requests show whether recall has fallen."
            ),
            time_seconds=time_seconds,
            route=route,
            signal=signal.value,
            value=self.value,
            target=self.before,
            n=self.n,
            profile_id=profile_id,
        )


class DriftDetector:
    """Detects drift of one signal of one route: by ADWIN, and by one comparison at the start.

    ADWIN (Bifet and Gavaldà, SDM 2007; river's) warns when the mean position has changed. It
    assumes independent requests: traffic with a daily rhythm sets it off, and should. ADWIN sees
    no difference that was there from the first request, so after ``COMPARED_REQUESTS`` the
    largest distance between the live and the calibration's distribution function at the deciles
    is compared once with Smirnov's bound for two samples, √(½·ln(2/level)·(1/n + 1/m)).

    ADWIN's own state is not kept over a restart: its window is rebuilt from the last
    ``REMEMBERED`` values, so that a slow change may be detected later.

    Args:
        reference: The signal's distribution at calibration; None for a signal that is 0 or 1 by
            itself and is not compared.
        share: This signal's share of the allowed false warnings, in (0, 1].

    Attributes:
        n: Values seen.
        distance: The distance found by the comparison; None before it, or without a reference.

    Raises:
        MissingExtraError: river is not installed.
        ConfigurationError: a reference without 11 ascending deciles.
    """

    def __init__(self, reference: Reference | None = None, *, share: float = 1.0) -> None:
        if reference is not None and (
            len(reference.deciles) != _DECILES
            or any(a > b for a, b in zip(reference.deciles, reference.deciles[1:], strict=False))
        ):
            raise ConfigurationError(
                f"reference {reference.deciles!r} must be 11 ascending deciles; calibrate again"
            )
        self.reference = reference
        self._level = COMPARISON_LEVEL * share
        self._adwin = require("river.drift", "monitor").ADWIN(delta=DELTA * share)
        self._recent: deque[float] = deque(maxlen=REMEMBERED)
        self._below = [0] * _DECILES
        self._up_to = [0] * _DECILES
        self.n = 0
        self.distance: float | None = None

    def update(self, value: float) -> DriftWarning | None:
        """Add one value; return the warning that it causes, if any. Invalid values are ignored."""
        if not is_valid(value):
            return None
        value = float(value)
        self.n += 1
        position = value if self.reference is None else self.reference.position(value)
        # As it is saved, so that a rebuilt window is the same.
        position = round(position, 3)
        warning = self._compare(value)
        before = float(self._adwin.estimation)
        self._adwin.update(position)
        self._recent.append(position)
        if self._adwin.drift_detected:
            latest = list(self._recent)[-_LATEST:]
            # river begins a new window at the next value.
            self._recent.clear()
            return DriftWarning(math.fsum(latest) / len(latest), before, len(latest), False)
        return warning

    @property
    def allowed_distance(self) -> float | None:
        """The distance above which the comparison warns; None where it cannot be made."""
        if self.reference is None or not self.reference.n:
            return None
        return math.sqrt(
            0.5 * math.log(2.0 / self._level) * (1.0 / COMPARED_REQUESTS + 1.0 / self.reference.n)
        )

    def _compare(self, value: float) -> DriftWarning | None:
        allowed = self.allowed_distance
        if self.reference is None or allowed is None or self.n > COMPARED_REQUESTS:
            return None
        for index, decile in enumerate(self.reference.deciles):
            self._below[index] += value < decile
            self._up_to[index] += value <= decile
        if self.n < COMPARED_REQUESTS:
            return None
        # Of a quantile q at level p, P(X < q) ≤ p ≤ P(X ≤ q), also where values repeat.
        self.distance = max(
            max(below / self.n - level, level - up_to / self.n)
            for below, up_to, level in zip(
                self._below, self._up_to, [i / (_DECILES - 1) for i in range(_DECILES)], strict=True
            )
        )
        if self.distance <= allowed:
            return None
        return DriftWarning(self.distance, allowed, self.n, True)

    def state(self) -> dict[str, Any]:
        """What it has seen, as values that JSON can hold."""
        return {
            "n": self.n,
            "below": self._below,
            "up_to": self._up_to,
            "distance": self.distance,
            "recent": list(self._recent),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state`` returned. The values restored cause no warning again.

        Raises:
            KeyError, TypeError, ValueError: ``state`` has another form.
        """
        below, up_to = ([int(count) for count in state[name]] for name in ("below", "up_to"))
        recent = [float(position) for position in state["recent"]]
        if len(below) != _DECILES or len(up_to) != _DECILES or not all(map(math.isfinite, recent)):
            raise ValueError("counts that are not by decile, or positions that are not finite")
        n, distance = int(state["n"]), state["distance"]
        self._below, self._up_to, self.n = below, up_to, n
        self.distance = None if distance is None else float(distance)
        for position in recent[-REMEMBERED:]:
            self._adwin.update(position)
            self._recent.append(position)


def drift_detectors(calibrated: RouteProfile) -> dict[Signal, DriftDetector]:
    """The detectors of one route: of empty and insufficient contexts, and of its references."""
    n = None if calibrated.chosen_on is None else calibrated.chosen_on.queries
    references: dict[Signal, Reference | None] = {
        signal: Reference(calibrated.reference[signal.value], n)
        for signal in Signal
        if signal.value in calibrated.reference
    }
    references[Signal.EMPTY] = None
    if calibrated.sufficiency is not None and calibrated.sufficiency.model.threshold is not None:
        references[Signal.INSUFFICIENT] = None
    share = 1.0 / len(references)
    return {
        signal: DriftDetector(reference, share=share) for signal, reference in references.items()
    }
