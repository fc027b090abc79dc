"""Signals that need no label, counted against their distribution at calibration.

Prometheus compares the counts (rule ``CtxguardDrift``), so that it chooses the window and no state
outlives a process. An early warning only: scores can change without recall falling, and recall can
fall without scores changing. Pure: no I/O, no clock, no logging.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import nlargest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.scores import is_valid
from ctxguard.core.types import Route
from ctxguard.errors import ConfigurationError
from ctxguard.profile.schema import Profile

_DECILES = 11


class Signal(StrEnum):
    """A number that each request has without labels, named as in the profile. A closed set."""

    TOP_SCORE = "top_score"
    SCORE_GAP = "score_gap"
    """The best score minus the second best."""
    KEPT = "kept"


class Signals(NamedTuple):
    """One request's signals.

    Attributes:
        top_score: The best score; None where the retriever returned nothing.
        score_gap: The best score minus the second best; None below two candidates.
        kept: How many passages the policy kept.
    """

    top_score: float | None
    score_gap: float | None
    kept: int

    @classmethod
    def of(cls, scores: Iterable[float | None], kept: int) -> "Signals":
        """The signals of a ranking's scores, in any order; invalid scores are ignored.

        >>> Signals.of([0.5, None, 2.0, float("nan")], kept=1)
        Signals(top_score=2.0, score_gap=1.5, kept=1)
        """
        best = nlargest(2, [float(score) for score in scores if is_valid(score)])  # type: ignore[arg-type]
        top = best[0] if best else None
        return cls(top, best[0] - best[1] if len(best) == 2 else None, kept)


@dataclass(frozen=True, slots=True)
class SignalCounts:
    """How many live requests of a route lie beyond each decile of the calibration's distribution.

    At a decile of level p at most p of the calibration's values lie below it and at most 1 − p
    above it, also where values repeat.

    Attributes:
        route: The stages that answered.
        signal: The signal.
        n_reference: Queries that the deciles were taken from; None where unknown.
        n: Live requests.
        below: Shape (11,), those whose value is below the 0, 10, …, 100% quantile.
        above: Shape (11,), those whose value is above it.
    """

    route: Route
    signal: Signal
    n_reference: int | None
    n: int
    below: tuple[int, ...]
    above: tuple[int, ...]


class SignalCounter:
    """Counts the signals of a profile's routes that have a reference distribution.

    Args:
        profile: The profile whose references are compared with.

    Raises:
        ConfigurationError: a reference without 11 ascending deciles.
    """

    def __init__(self, profile: Profile) -> None:
        self._deciles: dict[tuple[Route, Signal], NDArray[np.float64]] = {}
        self._queries: dict[Route, int | None] = {}
        for route, calibrated in profile.routes.items():
            chosen_on = calibrated.chosen_on
            self._queries[route] = None if chosen_on is None else chosen_on.queries
            for signal in Signal:
                if signal.value in calibrated.reference:
                    self._deciles[route, signal] = _checked(calibrated.reference[signal.value])
        self._n = dict.fromkeys(self._deciles, 0)
        self._beyond = {key: np.zeros((2, _DECILES), np.int64) for key in self._deciles}

    def add(self, route: Route, signals: Signals) -> None:
        """Count one request; a signal that is undefined or has no reference is left out."""
        for signal, value in zip(Signal, signals, strict=True):
            deciles = self._deciles.get((route, signal))
            if deciles is None or value is None:
                continue
            self._n[route, signal] += 1
            self._beyond[route, signal] += np.stack([value < deciles, value > deciles])

    def counts(self) -> tuple[SignalCounts, ...]:
        """The counts so far."""
        return tuple(
            [
                SignalCounts(route, signal, self._queries[route], n, *map(tuple, beyond.tolist()))
                for (route, signal), n in self._n.items()
                for beyond in [self._beyond[route, signal]]
            ]
        )


def _checked(deciles: Sequence[float]) -> NDArray[np.float64]:
    checked = np.array(deciles, np.float64)
    if checked.shape != (_DECILES,) or not np.all(np.diff(checked) >= 0.0):
        raise ConfigurationError(
            f"reference {tuple(deciles)!r} must be 11 ascending deciles; calibrate again"
        )
    return checked
