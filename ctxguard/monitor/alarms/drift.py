"""Signals that need no label, counted against their distribution at calibration.

Prometheus compares the counts (rule ``CtxguardDrift``), so that it chooses the window and no state
is kept over a restart. An early warning only: scores can change without recall falling, and recall
can fall without scores changing. Pure: no I/O, no clock, no logging.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import nlargest
from operator import le

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


def signals_of(scores: Iterable[float | None], kept: int) -> dict[Signal, float]:
    """Return the signals of one request; without those that need more candidates than it has.

    Args:
        scores: Those of its ranking, in any order; invalid ones are ignored.
        kept: How many passages the policy kept.

    >>> {each.value: n for each, n in signals_of([0.5, None, 2.0, float("nan")], kept=1).items()}
    {'kept': 1, 'top_score': 2.0, 'score_gap': 1.5}
    """
    found: dict[Signal, float] = {Signal.KEPT: kept}
    best = nlargest(2, [float(score) for score in scores if is_valid(score)])  # type: ignore[arg-type]
    if best:
        found[Signal.TOP_SCORE] = best[0]
    if len(best) == 2:
        found[Signal.SCORE_GAP] = best[0] - best[1]
    return found


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
        """Add one more request."""
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
        n = None if calibrated.evidence is None else calibrated.evidence.queries
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
