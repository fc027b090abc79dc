"""Keeps the judging budget: its limits, and the resulting probability of judging a sample.

Whether a sample is judged is decided by a hash, at a probability set before the sample is read.
That probability is part of the sample's own, so that the judged samples stand for the skipped ones.
Reads the store and the clocks, and logs.
"""

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ctxguard._support.checks import check_positive
from ctxguard.monitor.store import SampleStore, State

_log = logging.getLogger(__name__)

_DAY_SECONDS = 86_400.0
_SECONDS = {"hour": 3600.0, "day": _DAY_SECONDS}
_CALLS, _COST = 0, 1
_QUEUE_SECONDS = 10.0
"""How often the queue is measured."""


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """The limits of judging; None for no limit. A call is one passage judged.

    Attributes:
        calls_per_hour: > 0.
        calls_per_day: > 0; days are those of UTC.
        cost_per_day: In the currency of the judge's prices, > 0. A sample's cost is known only when
            it is judged, so the last sample may exceed the limit.

    Raises:
        ConfigurationError: at construction, for a limit that is not finite and > 0.
    """

    calls_per_hour: float | None = None
    calls_per_day: float | None = None
    cost_per_day: float | None = None

    def __post_init__(self) -> None:
        check_positive(**asdict(self))


NO_LIMITS = BudgetLimits()
"""Limits that limit nothing: there is no budget."""


class JudgingBudget:
    """What judging has spent in one series, and what is left; for use by one thread.

    If the clock is set forward by a day, the next day's budget begins early; if it is set back by
    at most a day, the present period goes on.

    Attributes:
        probability: The probability with which the next sample is judged, as last computed; 0.0
            once a limit is used up.
    """

    def __init__(
        self, limits: BudgetLimits, store: SampleStore, series: str, clock: Callable[[], float]
    ) -> None:
        bounds = (
            ("hour", _CALLS, limits.calls_per_hour),
            ("day", _CALLS, limits.calls_per_day),
            ("day", _COST, limits.cost_per_day),
        )
        self._limits = [(kind, what, most) for kind, what, most in bounds if most is not None]
        self._store = store
        self._key = f"budget {series}"
        self._clock = clock
        self._spent: dict[str, tuple[int, float, float]] = {}
        """The current hour and day, numbered from the epoch, with the calls and the cost in
        each."""
        self._samples = 0
        self._totals = (0.0, 0.0)
        """The calls and the cost in these."""
        self._measured: tuple[float, int] | None = None
        self._arriving_per_second = 0.0
        self._waiting = 0
        self.probability = 1.0

    @property
    def kept(self) -> dict[str, str]:
        """The budget's values, by key, as the store keeps them."""
        return {self._key: json.dumps(self._spent)} if self._spent else {}

    def refresh(self) -> float:
        """Recompute ``probability`` for the next sample, and return it.

        Reads the store now and then.
        """
        self._measure_queue()
        self.probability = self.probability_for(self._waiting, self._arriving_per_second)
        self._waiting = max(self._waiting - 1, 0)
        return self.probability

    def probability_for(self, waiting: int, arriving_per_second: float) -> float:
        """Return the probability with which each of the next samples should be judged, in [0, 1].

        The remainder of each limit, divided by the cost of all samples that wait now or will arrive
        before its period ends. 0.0 once a limit is used up, until its period ends.
        """
        now = self._begin_periods()
        costs = [total / self._samples for total in self._totals] if self._samples else [1.0, 0.0]
        probability = 1.0
        for kind, what, limit in self._limits:
            spent, each = self._spent[kind][1 + what], costs[what]
            if spent + each > limit:
                return 0.0
            left_seconds = _SECONDS[kind] - now % _SECONDS[kind]
            needed = (max(waiting, 1) + arriving_per_second * left_seconds) * each
            probability = min(probability, (limit - spent) / needed if needed else 1.0)
        return probability

    def allows(self, calls: float) -> bool:
        """Whether the calls for the next sample would stay within the limits."""
        self._begin_periods()
        return all(
            self._spent[kind][1 + _CALLS] + calls <= limit
            if what == _CALLS
            else self._spent[kind][1 + _COST] < limit
            for kind, what, limit in self._limits
        )

    def spend(self, calls: float, cost: float) -> None:
        """Count one sample that was judged."""
        self._begin_periods()
        self._spent = {
            kind: (number, spent_calls + calls, spent_cost + cost)
            for kind, (number, spent_calls, spent_cost) in self._spent.items()
        }
        self._samples += 1
        self._totals = (self._totals[_CALLS] + calls, self._totals[_COST] + cost)

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

    def _begin_periods(self) -> float:
        """Start a new hour or day if the last one has ended; return the time now.

        A period more than a day ahead is discarded: a clock was wrong when it began.
        """
        if not self._spent:
            kept = json.loads(self._store.get_state(self._key) or "{}")
            self._spent = {kind: kept.get(kind, (-1, 0.0, 0.0)) for kind in _SECONDS}
        now = self._clock()
        for kind, (spent_in, *_) in self._spent.items():
            number = math.floor(now / _SECONDS[kind])
            ahead_seconds = (spent_in - number) * _SECONDS[kind]
            if ahead_seconds > _DAY_SECONDS:
                _log.warning(
                    "the judging budget was last spent %.1f days in the future, according to a "
                    "clock that was wrong: this %s starts again with nothing spent",
                    ahead_seconds / _DAY_SECONDS,
                    kind,
                )
            if spent_in < number or ahead_seconds > _DAY_SECONDS:
                self._spent[kind] = (number, 0.0, 0.0)
        return now
