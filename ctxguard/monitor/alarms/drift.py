"""Signals that need no label, counted against their distribution at calibration.

Prometheus compares the counts (rule ``CtxguardDrift``), so that it chooses the window and no state
outlives a process. An early warning only: scores can change without recall falling, and recall can
fall without scores changing. Pure: no I/O, no clock, no logging.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import nlargest
from operator import le
from typing import NamedTuple

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
        deciles: Of the calibration.
        n: Live requests.
        below: Shape (11,), those whose value is below the 0, 10, …, 100% quantile.
        above: Shape (11,), those whose value is above it.
    """

    route: Route
    signal: Signal
    n_reference: int | None
    deciles: tuple[float, ...]
    n: int = 0
    below: tuple[int, ...] = (0,) * _DECILES
    above: tuple[int, ...] = (0,) * _DECILES

    def after(self, value: float) -> "SignalCounts":
        """With one more request."""
        beyond = zip(self.deciles, self.below, self.above, strict=True)
        counts = [(low + (value < each), high + (value > each)) for each, low, high in beyond]
        below, above = map(tuple, zip(*counts, strict=True))
        return replace(self, n=self.n + 1, below=below, above=above)


def signal_counts(profile: Profile) -> dict[tuple[Route, Signal], SignalCounts]:
    """Begin to count the signals of a profile's routes that have a reference distribution.

    Raises:
        ConfigurationError: a reference without 11 ascending deciles.
    """
    found = {}
    for route, calibrated in profile.routes.items():
        n = None if calibrated.chosen_on is None else calibrated.chosen_on.queries
        for signal in Signal:
            if signal.value not in calibrated.reference:
                continue
            deciles = tuple(map(float, calibrated.reference[signal.value]))
            if len(deciles) != _DECILES or not all(map(le, deciles, deciles[1:])):
                raise ConfigurationError(
                    f"reference {deciles!r} must be 11 ascending deciles; calibrate again"
                )
            found[route, signal] = SignalCounts(route, signal, n, deciles)
    return found
