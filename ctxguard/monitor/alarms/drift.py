"""The watch on what needs no label: whether live rankings still look like those at calibration.

An early warning only: scores can move without recall falling, and the other way round. Every
value is turned into its position among the calibration's, so that all signals have one scale.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from heapq import nlargest
from typing import Any, NamedTuple

from ctxguard._extras import require
from ctxguard.errors import ConfigurationError
from ctxguard.profile import RouteProfile
from ctxguard.scores import is_valid

DELTA = 0.002
"""ADWIN's confidence, shared out between the signals of a route."""

COMPARED_REQUESTS = 500
"""Live requests of a route after which they are compared with the calibration's, once."""

COMPARISON_LEVEL = 0.001
"""Chance of a false warning by that comparison, shared out between the signals of a route."""

REMEMBERED = 500
"""Values of a signal that are kept to rebuild its window after a restart."""

_DECILES = 11
_LATEST = 100


class Signal(StrEnum):
    """What is watched without labels. The names are those of the profile's reference."""

    TOP_SCORE = "top_score"
    LEAD = "lead"
    """The best score minus the second best."""
    KEPT = "kept"
    EMPTY = "empty"
    """Whether no passage was kept: 0 or 1."""


class Signals(NamedTuple):
    """One request's signals.

    Attributes:
        top_score: None where the retriever found nothing.
        lead: None below two candidates.
        kept: How many passages the policy kept.
    """

    top_score: float | None
    lead: float | None
    kept: int

    @classmethod
    def of(cls, scores: Iterable[float | None], kept: int) -> "Signals":
        """From a ranking's scores, in any order; garbage among them is passed over.

        >>> Signals.of([0.5, None, 2.0, float("nan")], kept=1)
        Signals(top_score=2.0, lead=1.5, kept=1)
        """
        best = nlargest(2, [float(score) for score in scores if is_valid(score)])  # type: ignore[arg-type]
        top = best[0] if best else None
        return cls(top, best[0] - best[1] if len(best) == 2 else None, kept)

    def values(self) -> dict[Signal, float | None]:
        """By signal; None where undefined."""
        return {
            Signal.TOP_SCORE: self.top_score,
            Signal.LEAD: self.lead,
            Signal.KEPT: float(self.kept),
            Signal.EMPTY: float(self.kept == 0),
        }


@dataclass(frozen=True, slots=True)
class Reference:
    """How a signal was distributed at calibration.

    Attributes:
        deciles: Its 0, 10, …, 100% quantiles, ascending.
        n: Queries that they were taken over; None where unknown.
    """

    deciles: tuple[float, ...]
    n: int | None = None

    def position(self, value: float) -> float:
        """About the share of the calibration's values that lie below, in [0, 1].

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


class Warned(NamedTuple):
    """What set a warning off.

    Attributes:
        value: ADWIN: mean position of the latest requests. Comparison: the distance.
        before: ADWIN: mean position up to them. Comparison: the distance that is allowed.
        n: Requests that ``value`` is taken over.
        at_start: Whether it was the comparison with the calibration.
    """

    value: float
    before: float
    n: int
    at_start: bool


class DriftWatch:
    """Watches one signal of one route, with ADWIN and one comparison with the calibration.

    ADWIN (Bifet and Gavaldà, SDM 2007; river's) warns when the mean position has changed. It
    presumes requests that do not depend on each other: traffic with a daily rhythm will set it
    off, and should. The comparison looks once, after ``COMPARED_REQUESTS``, at the largest
    distance between the two distribution functions at the deciles, against Smirnov's bound
    √(½·ln(2/level)·(1/n + 1/m)) for two samples; of a live distribution that differed from the
    first day ADWIN alone would see nothing.

    ADWIN's own state is not kept over a restart: its window is rebuilt from the last
    ``REMEMBERED`` values, so a slow change that was half seen may be noticed later.

    Args:
        reference: Of the signal at calibration; None for a signal that is 0 or 1 by itself and
            is compared with nothing.
        share: The share of the allowed false warnings that is this signal's, in (0, 1].

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

    def after(self, value: float) -> Warned | None:
        """Take one value in; what it set off, if anything."""
        if not is_valid(value):
            return None
        value = float(value)
        self.n += 1
        position = value if self.reference is None else self.reference.position(value)
        # As it is written down, so that what is rebuilt is what was seen.
        position = round(position, 3)
        warned = self._compare(value)
        before = float(self._adwin.estimation)
        self._adwin.update(position)
        self._recent.append(position)
        if self._adwin.drift_detected:
            latest = list(self._recent)[-_LATEST:]
            # river begins a new window at the next value.
            self._recent.clear()
            return Warned(math.fsum(latest) / len(latest), before, len(latest), False)
        return warned

    @property
    def allowed_distance(self) -> float | None:
        """The distance beyond which the comparison warns; None where it cannot be made."""
        if self.reference is None or not self.reference.n:
            return None
        return math.sqrt(
            0.5 * math.log(2.0 / self._level) * (1.0 / COMPARED_REQUESTS + 1.0 / self.reference.n)
        )

    def _compare(self, value: float) -> Warned | None:
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
        return Warned(self.distance, allowed, self.n, True)

    def state(self) -> dict[str, Any]:
        """What it remembers, as plain values."""
        return {
            "n": self.n,
            "below": self._below,
            "up_to": self._up_to,
            "distance": self.distance,
            "recent": list(self._recent),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state`` gave; warnings that it leads to were given before.

        Raises:
            KeyError, TypeError, ValueError: a state of another shape.
        """
        below, up_to = ([int(count) for count in state[name]] for name in ("below", "up_to"))
        recent = [float(position) for position in state["recent"]]
        if len(below) != _DECILES or len(up_to) != _DECILES or not all(map(math.isfinite, recent)):
            raise ValueError("counts by decile or positions that no watch writes")
        n, distance = int(state["n"]), state["distance"]
        self._below, self._up_to, self.n = below, up_to, n
        self.distance = None if distance is None else float(distance)
        for position in recent[-REMEMBERED:]:
            self._adwin.update(position)
            self._recent.append(position)


def drift_watches(calibrated: RouteProfile) -> dict[Signal, DriftWatch]:
    """The watches of one route: whether contexts are empty, and every signal with a reference."""
    n = None if calibrated.chosen_on is None else calibrated.chosen_on.queries
    references: dict[Signal, Reference | None] = {
        signal: Reference(calibrated.reference[signal.value], n)
        for signal in Signal
        if signal.value in calibrated.reference
    }
    references[Signal.EMPTY] = None
    share = 1.0 / len(references)
    return {signal: DriftWatch(found, share=share) for signal, found in references.items()}
