"""Which requests are watched, and the bounded queue that they wait in.

The only part of the monitor that runs on the request path: one hash before retrieval and one
append after the decision. No lock, no I/O, nothing that raises (DESIGN.md §8).
"""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.chance import Chance
from ctxguard.monitor.forks import start_afresh_in_children

if TYPE_CHECKING:
    from ctxguard.context import Context

DEFAULT_CAPACITY = 10_000


class Sample(NamedTuple):
    """A request that was selected, as the request path leaves it: references, no copies.

    Attributes:
        context: What the request was answered with.
        probability: π, the probability with which the request was selected; > 0 unless forced.
        time_seconds: When it was answered, in seconds since the epoch.
        forced: Put in by hand, for debugging: marked, and left out of every estimate.
    """

    context: "Context"
    probability: float
    time_seconds: float
    forced: bool


class LostReason(StrEnum):
    """Why a sample was never drained. A closed set: it labels a metric."""

    QUEUE_FULL = "queue_full"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Accounts:
    """Where every offered sample is; ``sampled == drained + pending + sum(lost.values())``."""

    sampled: int
    drained: int
    pending: int
    lost: Mapping[LostReason, int]


class Sampler:
    """Selects requests by a hash of their id, and queues them for the monitor.

    A request id is selected or not wherever and whenever it is asked, and what a rate selects,
    every higher rate with the same seed selects too. In a forked child the queue starts empty
    and the accounts at zero: what was pending belongs to the parent.

    Args:
        rate: π, the probability that a request is selected, in [0, 1].
        capacity: The most samples that may wait, ≥ 1; more are dropped and counted. Threads
            that offer at the same moment may overshoot it by one each, the price of no lock.
        seed: Selects a different set of requests at the same rate.

    Raises:
        ConfigurationError: a rate outside [0, 1] or a capacity below 1.
    """

    def __init__(self, rate: float, *, capacity: int = DEFAULT_CAPACITY, seed: str = "") -> None:
        if capacity < 1:
            raise ConfigurationError(f"sampler capacity {capacity!r} must be at least 1")
        self.rate = rate
        self.capacity = capacity
        self.seed = seed
        self._chance = Chance(rate, purpose="sampling", seed=seed)
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Empty the queue and the accounts, without counting; for a forked child."""
        self._queue: deque[Sample] = deque()
        self._closed = False
        self._drained = 0
        self._discarded = 0
        # Taken by the draining side and by accounts(), never on the request path.
        self._lock = threading.Lock()
        # Each thread writes its own entry only, so that counting needs no lock either.
        self._refused: dict[LostReason, dict[int, int]] = {reason: {} for reason in LostReason}

    def selects(self, request_id: str, /) -> bool:
        """Whether a request is sampled; decided before anything is known of its answer.

        >>> sampler = Sampler(0.5, seed="docs")
        >>> [sampler.selects(f"request-{i}") for i in range(4)]
        [True, False, False, True]
        """
        return self._chance.chooses(request_id)

    def offer(self, context: "Context", time_seconds: float, /, *, forced: bool = False) -> bool:
        """Queue a selected request, or drop and count it; never blocks, never raises.

        Returns:
            Whether it was queued.
        """
        if self._closed:
            reason = LostReason.CLOSED
        elif len(self._queue) < self.capacity:
            self._queue.append(Sample(context, self.rate, time_seconds, forced))
            return True
        else:
            reason = LostReason.QUEUE_FULL
        refused, thread = self._refused[reason], get_ident()
        refused[thread] = refused.get(thread, 0) + 1
        return False

    def drain(self, limit: int) -> list[Sample]:
        """Take up to ``limit`` samples, oldest first, off the queue."""
        taken: list[Sample] = []
        with self._lock:
            try:
                while len(taken) < limit:
                    taken.append(self._queue.popleft())
            except IndexError:
                pass
            self._drained += len(taken)
        return taken

    def close(self) -> None:
        """Refuse further samples; those still pending are counted as lost."""
        with self._lock:
            self._closed = True
            while self._queue:
                self._queue.popleft()
                self._discarded += 1

    def accounts(self) -> Accounts:
        """Where every sample offered so far is; exact whatever other threads do meanwhile."""
        with self._lock:
            lost = {reason: sum(list(self._refused[reason].values())) for reason in LostReason}
            lost[LostReason.CLOSED] += self._discarded
            drained, pending = self._drained, len(self._queue)
        return Accounts(drained + pending + sum(lost.values()), drained, pending, lost)
