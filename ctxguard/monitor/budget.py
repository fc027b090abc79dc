"""How much judging may cost, and with what probability a sample is therefore taken up.

A sample that the budget passes over is passed over by a hash, at a rate set before it is looked
at: the rate is part of the sample's probability, and those that are judged stand for it.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

from ctxguard.errors import ConfigurationError

_HOUR_SECONDS = 3600.0
_DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that judging may take; None for no limit. A call is one passage judged.

    Attributes:
        calls_per_hour: > 0.
        calls_per_day: > 0.
        cost_per_day: In the currency of the judge's prices, > 0.
    """

    calls_per_hour: float | None = None
    calls_per_day: float | None = None
    cost_per_day: float | None = None

    def __post_init__(self) -> None:
        for name in ("calls_per_hour", "calls_per_day", "cost_per_day"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ConfigurationError(f"judging budget {name} {value!r} must be finite and > 0")


@dataclass(slots=True)
class _Spent:
    """Since the period of this number began."""

    period: int = -1
    calls: float = 0.0
    cost: float = 0.0


class Spending:
    """What a series of judgments has taken of its budget.

    Args:
        budget: The most.
        clock: Seconds since the epoch. Set forward by a day, the next day's budget begins early;
            set back, the former period goes on.
    """

    def __init__(self, budget: Budget, clock: Callable[[], float]) -> None:
        self._budget = budget
        self._clock = clock
        self._hour = _Spent()
        self._day = _Spent()
        self._samples = 0
        self._calls = 0.0
        self._cost = 0.0

    def spend(self, calls: float, cost: float) -> None:
        """One sample was judged."""
        self._turn()
        for period in (self._hour, self._day):
            period.calls += calls
            period.cost += cost
        self._samples += 1
        self._calls += calls
        self._cost += cost

    def affords(self, calls: float) -> bool:
        """Whether a sample that may take so many calls keeps within the limits."""
        self._turn()
        budget = self._budget
        limits = ((budget.calls_per_hour, self._hour), (budget.calls_per_day, self._day))
        return all(limit is None or spent.calls + calls <= limit for limit, spent in limits)

    def share(self, waiting: int, arriving_per_second: float) -> float:
        """The probability with which the next samples should be taken up, in [0, 1].

        What is left of each limit, over what all samples that wait now or will come until its
        period ends would take. 0.0 once a limit is used up, until its period ends: nothing
        should be claimed then.

        Args:
            waiting: Samples in the queue.
            arriving_per_second: About how many come.
        """
        now = self._turn()
        calls = self._calls / self._samples if self._samples else 1.0
        cost = self._cost / self._samples if self._samples else 0.0
        budget = self._budget
        share = 1.0
        for limit, spent, each, seconds in (
            (budget.calls_per_hour, self._hour.calls, calls, _HOUR_SECONDS),
            (budget.calls_per_day, self._day.calls, calls, _DAY_SECONDS),
            (budget.cost_per_day, self._day.cost, cost, _DAY_SECONDS),
        ):
            if limit is None:
                continue
            if spent + each > limit:
                return 0.0
            left_seconds = seconds - now % seconds
            wanted = (max(waiting, 1) + arriving_per_second * left_seconds) * each
            share = min(share, (limit - spent) / wanted if wanted else 1.0)
        return share

    def to_json(self) -> str:
        """To go on after a restart."""
        return json.dumps(
            {
                name: [spent.period, spent.calls, spent.cost]
                for name, spent in (("hour", self._hour), ("day", self._day))
            }
        )

    def restore(self, text: str) -> None:
        """Go on from what ``to_json`` said; what cannot be read is as if nothing were spent."""
        try:
            known = json.loads(text)
            self._hour, self._day = _known(*known["hour"]), _known(*known["day"])
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return

    def _turn(self) -> float:
        now = self._clock()
        for spent, seconds in ((self._hour, _HOUR_SECONDS), (self._day, _DAY_SECONDS)):
            period = math.floor(now / seconds)
            if period > spent.period:
                spent.period, spent.calls, spent.cost = period, 0.0, 0.0
        return now


def _known(period: object, calls: object, cost: object) -> _Spent:
    """Raises TypeError or ValueError for what nobody can have spent."""
    numbers = [float(one) for one in (period, calls, cost) if isinstance(one, (int, float))]
    if len(numbers) < 3 or not all(0.0 <= one < math.inf for one in numbers):
        raise ValueError("no period, calls and cost")
    return _Spent(int(numbers[0]), numbers[1], numbers[2])
