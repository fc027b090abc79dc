"""The judging budget: its limits, and the probability with which samples are therefore judged.

Whether a sample is judged is decided by a hash, at a probability set before the sample is read.
That probability is part of the sample's own, so that the judged samples stand for the skipped ones.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.store import SampleStore, State

_HOUR_SECONDS = 3600.0
_DAY_SECONDS = 86_400.0
_QUEUE_SECONDS = 10.0
"""How often the queue is measured."""


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """The most that judging may take; None for no limit. A call is one passage judged.

    Attributes:
        calls_per_hour: > 0.
        calls_per_day: > 0; days are those of UTC.
        cost_per_day: In the currency of the judge's prices, > 0.

    Raises:
        ConfigurationError: at construction, for a limit that is not finite and > 0.
    """

    calls_per_hour: float | None = None
    calls_per_day: float | None = None
    cost_per_day: float | None = None

    def __post_init__(self) -> None:
        for name in ("calls_per_hour", "calls_per_day", "cost_per_day"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ConfigurationError(f"judging budget {name} {value!r} must be finite and > 0")


NO_LIMITS = BudgetLimits()


@dataclass(slots=True)
class _Spent:
    """Since the hour or day of this number began."""

    period: int = -1
    calls: float = 0.0
    cost: float = 0.0


class JudgingBudget:
    """What one series of judgments has spent, and what it may still spend.

    Spending is saved in the store, so that the next process of the same judge goes on from it.

    Args:
        limits: The most that judging may take.
        store: Whose samples wait, and where the spending is saved.
        series: The judge's.
        clock: Seconds since the epoch. Set forward by a day, the next day's budget begins early;
            set back, the former period goes on.

    Attributes:
        probability: With which the next sample is judged, as last computed; 0.0 once a limit is
            used up.
    """

    def __init__(
        self, limits: BudgetLimits, store: SampleStore, series: str, clock: Callable[[], float]
    ) -> None:
        self._limits = limits
        self._store = store
        self._key = f"budget {series}"
        self._clock = clock
        self._hour = _Spent()
        self._day = _Spent()
        self._samples = 0
        self._calls = 0.0
        self._cost = 0.0
        self._is_restored = limits == NO_LIMITS
        self._is_saved = True
        self._measured: tuple[float, int] | None = None
        self._arriving_per_second = 0.0
        self._waiting = 0
        self.probability = 1.0

    def refresh(self) -> float:
        """Compute ``probability`` anew, and return it. Reads the store now and then."""
        if self._limits == NO_LIMITS:
            return 1.0
        if not self._is_restored:
            self._restore(self._store.get_state(self._key) or "")
            self._is_restored = True
        self._measure_queue()
        self.probability = self.probability_for(self._waiting, self._arriving_per_second)
        return self.probability

    def probability_for(self, waiting: int, arriving_per_second: float) -> float:
        """The probability with which each of the next samples should be judged, in [0, 1].

        What is left of each limit, divided by what all samples would take that wait now or will
        arrive until its period ends. 0.0 once a limit is used up, until its period ends: nothing
        should be claimed then.

        Args:
            waiting: Samples in the queue.
            arriving_per_second: About how many arrive.
        """
        now = self._begin_periods()
        calls = self._calls / self._samples if self._samples else 1.0
        cost = self._cost / self._samples if self._samples else 0.0
        limits = self._limits
        probability = 1.0
        for limit, spent, each, seconds in (
            (limits.calls_per_hour, self._hour.calls, calls, _HOUR_SECONDS),
            (limits.calls_per_day, self._day.calls, calls, _DAY_SECONDS),
            (limits.cost_per_day, self._day.cost, cost, _DAY_SECONDS),
        ):
            if limit is None:
                continue
            if spent + each > limit:
                return 0.0
            left_seconds = seconds - now % seconds
            needed = (max(waiting, 1) + arriving_per_second * left_seconds) * each
            probability = min(probability, (limit - spent) / needed if needed else 1.0)
        return probability

    def affords(self, calls: float) -> bool:
        """Whether a sample that may take so many calls keeps within the limits."""
        self._begin_periods()
        limits = self._limits
        return all(
            limit is None or spent.calls + calls <= limit
            for limit, spent in (
                (limits.calls_per_hour, self._hour),
                (limits.calls_per_day, self._day),
            )
        )

    def spend(self, calls: float, cost: float) -> None:
        """Count one judged sample."""
        self._begin_periods()
        for period in (self._hour, self._day):
            period.calls += calls
            period.cost += cost
        self._samples += 1
        self._calls += calls
        self._cost += cost
        self._is_saved = self._limits == NO_LIMITS

    def sample_finished(self) -> None:
        """Count one sample out of the queue."""
        self._waiting = max(self._waiting - 1, 0)

    def save(self) -> None:
        """Write what was spent since the last call to the store."""
        if self._is_saved:
            return
        periods = {"hour": self._hour, "day": self._day}
        state = {name: [one.period, one.calls, one.cost] for name, one in periods.items()}
        self._store.set_state(self._key, json.dumps(state))
        self._is_saved = True

    def _measure_queue(self) -> None:
        now = time.monotonic()
        if self._measured is not None and now - self._measured[0] < _QUEUE_SECONDS:
            return
        stored = sum(worker.stored for worker in self._store.workers())
        if self._measured is not None:
            since, before = self._measured
            self._arriving_per_second = max(stored - before, 0) / (now - since)
        self._measured = (now, stored)
        self._waiting = self._store.states().get(State.PENDING, 0)

    def _restore(self, text: str) -> None:
        """Go on from what ``save`` wrote; nothing was spent if it cannot be read."""
        try:
            state = json.loads(text)
            self._hour, self._day = _spent(*state["hour"]), _spent(*state["day"])
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return

    def _begin_periods(self) -> float:
        """Begin a new hour or day where the clock has passed the last one's end; return now."""
        now = self._clock()
        for spent, seconds in ((self._hour, _HOUR_SECONDS), (self._day, _DAY_SECONDS)):
            period = math.floor(now / seconds)
            if period > spent.period:
                spent.period, spent.calls, spent.cost = period, 0.0, 0.0
        return now


def _spent(period: object, calls: object, cost: object) -> _Spent:
    """Raises TypeError or ValueError for what nobody can have spent."""
    numbers = [float(one) for one in (period, calls, cost) if isinstance(one, (int, float))]
    if len(numbers) < 3 or not all(0.0 <= one < math.inf for one in numbers):
        raise ValueError("no period, calls and cost")
    return _Spent(int(numbers[0]), numbers[1], numbers[2])
