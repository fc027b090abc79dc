"""The judging budget: its limits, and the probability with which samples are therefore judged.

All monitors of a store spend from one budget: calls are reserved in the store before they are made.
Whether a sample is judged is decided by a hash, at a probability set before the sample is read.
That probability is part of the sample's own, so that the judged samples stand for the skipped ones.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.store import SampleStore, State

_SECONDS = {"hour": 3600.0, "day": 86_400.0}
_QUEUE_SECONDS = 10.0
"""How often the queue is measured, and what other monitors have spent."""


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """The most that judging may take; None for no limit. A call is one passage judged.

    Attributes:
        calls_per_hour: > 0.
        calls_per_day: > 0; days are those of UTC.
        cost_per_day: In the currency of the judge's prices, > 0. What a sample costs is known
            when it is judged: the limit may be passed by the samples in hand.

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


class _Spent(NamedTuple):
    """What all monitors have spent or reserved in the hour or day of a number since the epoch."""

    number: int
    calls: float = 0.0
    cost: float = 0.0


class JudgingBudget:
    """What judging in one series has spent, in all monitors together, and what it may still spend.

    For one thread. Calls that were reserved by a monitor that is killed stay spent.

    Args:
        limits: The most that judging may take.
        store: Whose samples wait, and where the spending is kept.
        clock: Seconds since the epoch. Set forward by a day, the next day's budget begins early;
            set back, the former period goes on. So it does for all monitors.

    Attributes:
        probability: With which the next sample is judged, as last computed; 0.0 once a limit is
            used up.
    """

    def __init__(
        self, limits: BudgetLimits, store: SampleStore, series: str, clock: Callable[[], float]
    ) -> None:
        self._limits = limits
        self._most = {
            "hour": (limits.calls_per_hour, None),
            "day": (limits.calls_per_day, limits.cost_per_day),
        }
        self._store = store
        self._series = series
        self._clock = clock
        self._spent: dict[str, _Spent] = {}
        """In the store, by kind of period; what is reserved here is part of it."""
        self._read_at = -math.inf
        self._reserved = 0.0
        """Calls of the sample in hand that are reserved and not made."""
        self._cost_since = 0.0
        """What was spent since the store was told."""
        self._samples = 0
        self._calls = 0.0
        self._cost = 0.0
        self._measured: tuple[float, int] | None = None
        self._arriving_per_second = 0.0
        self._waiting = 0
        self.probability = 1.0

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return self._limits != NO_LIMITS

    def refresh(self) -> float:
        """Compute ``probability`` anew, and return it. Reads the store now and then."""
        if self._limits == NO_LIMITS:
            return 1.0
        if time.monotonic() >= self._read_at + _QUEUE_SECONDS:
            self._exchange()
        self._measure_queue()
        self.probability = self.probability_for(self._waiting, self._arriving_per_second)
        return self.probability

    def probability_for(self, waiting: int, arriving_per_second: float) -> float:
        """Return the probability with which each of the next samples should be judged, in [0, 1].

        What is left of each limit, divided by what all samples would take that wait now or will
        arrive until its period ends. 0.0 once a limit is used up, until its period ends: nothing
        should be claimed then.

        Args:
            waiting: Samples in the queue.
            arriving_per_second: About how many arrive.
        """
        if self._limits == NO_LIMITS:
            return 1.0
        now = self._begin_periods()
        calls = self._calls / self._samples if self._samples else 1.0
        cost = self._cost / self._samples if self._samples else 0.0
        probability = 1.0
        for kind, own in self._spent.items():
            max_calls, max_cost = self._most[kind]
            for limit, spent, each in (
                (max_calls, own.calls - self._reserved, calls),
                (max_cost, own.cost + self._cost_since, cost),
            ):
                if limit is None:
                    continue
                if spent + each > limit:
                    return 0.0
                seconds = _SECONDS[kind]
                left_seconds = seconds - now % seconds
                needed = (max(waiting, 1) + arriving_per_second * left_seconds) * each
                probability = min(probability, (limit - spent) / needed if needed else 1.0)
        return probability

    def reserve(self, calls: float) -> bool:
        """Reserve the calls that the next sample may take; whether that keeps within the limits."""
        if self._limits == NO_LIMITS:
            return True
        if not self._exchange(calls):
            return False
        self._reserved = calls
        return True

    def spend(self, calls: float, cost: float) -> None:
        """Count one sample that was judged with reserved calls."""
        self._reserved -= calls
        self._cost_since += cost
        self._samples += 1
        self._calls += calls
        self._cost += cost

    def sample_finished(self) -> None:
        """Count one sample out of the queue."""
        self._waiting = max(self._waiting - 1, 0)

    def settle(self) -> None:
        """Return what is reserved and was not used, and tell the store of the cost."""
        if self._limits != NO_LIMITS and (self._reserved or self._cost_since):
            self._exchange()

    def _exchange(self, calls: float = 0.0) -> bool:
        """Settle with the store, learn what others have spent, and reserve calls if they fit."""
        # Given up first: should the answer be lost, too much counts as spent, not too little.
        returned, self._reserved = self._reserved, 0.0
        fits, self._spent = self._store.update_state(
            f"budget {self._series}", partial(self._settled, calls, returned)
        )
        self._read_at = time.monotonic()
        self._cost_since = 0.0
        return fits

    def _settled(
        self, calls: float, returned: float, kept: str | None
    ) -> tuple[tuple[bool, dict[str, _Spent]], str]:
        """Settle, in what the store keeps, what was reserved before, and reserve calls if they fit.

        A period that has begun for one monitor has begun for all of them.
        """
        former = {kind: _Spent(*own) for kind, own in json.loads(kept or "{}").items()}
        spent = {}
        for kind, number in self._periods().items():
            own, known = former.get(kind, _Spent(-1)), self._spent.get(kind)
            if known is not None and known.number == own.number:
                own = own._replace(calls=own.calls - returned, cost=own.cost + self._cost_since)
            spent[kind] = own if own.number >= number else _Spent(number)
        fits = all(self._allows(kind, own, calls) for kind, own in spent.items())
        if fits:
            spent = {kind: own._replace(calls=own.calls + calls) for kind, own in spent.items()}
        return (fits, spent), json.dumps(spent)

    def _allows(self, kind: str, own: _Spent, calls: float) -> bool:
        max_calls, max_cost = self._most[kind]
        if max_calls is not None and own.calls + calls > max_calls:
            return False
        return max_cost is None or own.cost < max_cost

    def _measure_queue(self) -> None:
        now = time.monotonic()
        if self._measured is not None and now - self._measured[0] < _QUEUE_SECONDS:
            return
        stored = self._store.accounts().stored
        if self._measured is not None:
            since, before = self._measured
            self._arriving_per_second = max(stored - before, 0) / (now - since)
        self._measured = (now, stored)
        self._waiting = self._store.states().get(State.PENDING, 0)

    def _periods(self) -> dict[str, int]:
        """Number the hour and the day by the clock; the store knows later ones that have begun."""
        now = self._clock()
        return {kind: math.floor(now / seconds) for kind, seconds in _SECONDS.items()}

    def _begin_periods(self) -> float:
        """Go on to a new hour or day where the clock has passed the last one's end; return now."""
        known = self._spent
        periods = self._periods().items()
        if any(kind not in known or number > known[kind].number for kind, number in periods):
            self._exchange()
        return self._clock()
