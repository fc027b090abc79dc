"""Which requests are watched, and the bounded queue that they wait in.

The only part of the monitor that runs on the request path: one hash before retrieval and one
append after the decision. No lock, no I/O, nothing that raises (DESIGN.md §8).
"""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ctxguard.errors import ConfigurationError
from ctxguard.forks import start_afresh_in_children
from ctxguard.monitor.chance import Draw, check_probability
from ctxguard.monitor.counts import Counts

if TYPE_CHECKING:
    from ctxguard.context import Context

_log = logging.getLogger(__name__)

DEFAULT_CAPACITY = 10_000


class Sample(NamedTuple):
    """A request that was selected, as the request path leaves it: references, no copies.

    Attributes:
        context: What the request was answered with.
        probability: π, the probability with which the request was selected; 0.0 for one that
            was put in by hand, which no estimate counts.
        time_seconds: When it was answered, in seconds since the epoch.
    """

    context: "Context"
    probability: float
    time_seconds: float


class LostReason(StrEnum):
    """Why a sample was never stored. A closed set: it labels a metric."""

    QUEUE_FULL = "queue_full"
    CLOSED = "closed"
    """Still waiting when the process ended, or offered after that."""
    UNREADABLE = "unreadable"
    """It could not be written down: a passage or a score that raises."""
    REDACTION_FAILED = "redaction_failed"
    """The redactor raised, so nothing was written."""
    STORE_FAILED = "store_failed"
    """The store refused it, or stayed away until the process ended."""
    QUARANTINED = "quarantined"
    """It was stored in a database that was damaged later, and moved aside."""
    KILLED = "killed"
    """Its process died before it was stored."""


REASONS = tuple(LostReason)
_SAMPLED = len(REASONS)
_COUNTER = {reason: counter for counter, reason in enumerate(REASONS)}


@dataclass(frozen=True, slots=True)
class Accounts:
    """Where every sample of a process is; ``sampled == stored + pending + sum(lost.values())``."""

    sampled: int
    stored: int
    pending: int
    lost: Mapping[LostReason, int]


class Sampler:
    """Selects requests by a hash of their id, and queues them for the store.

    A request id is selected or not wherever and whenever it is asked at one rate, and what a rate
    selects, every higher rate with the same seed selects too. Under a cap the rate falls while
    traffic is heavy, by what came before and never by the request in hand, so that one over the
    rate in force still weighs each sample rightly.

    In a forked child the queue starts empty and the counts at zero: what was pending belongs to
    the parent.

    Args:
        rate: π, the probability that a request is selected, in [0, 1].
        max_per_second: About the most samples a second, > 0; a burst may pass it by the logarithm
            of its size. None for no cap.
        capacity: The most samples that may wait, ≥ 1; more are dropped and counted. Threads
            that offer at the same moment may overshoot it by one each, the price of no lock.
        seed: Selects a different set of requests at the same rate.
        counts_folder: Where this process keeps its counts so that they outlive a sudden death;
            None for memory, with which they are gone.
        clock: Monotonic seconds.

    Raises:
        ConfigurationError: a rate outside [0, 1], a cap that is not > 0, a capacity below 1, or
            a folder that cannot be written to.
    """

    def __init__(
        self,
        rate: float,
        *,
        max_per_second: float | None = None,
        capacity: int = DEFAULT_CAPACITY,
        seed: str = "",
        counts_folder: Path | str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_probability("sampling rate", rate)
        if capacity < 1:
            raise ConfigurationError(f"sampler capacity {capacity!r} must be at least 1")
        self.rate = rate
        self.capacity = capacity
        self.seed = seed
        self._cap = None if max_per_second is None else Cap(rate, max_per_second, clock)
        self._draw = Draw("sampling", seed)
        self._folder = counts_folder
        self._counts: Counts | None = None
        self._process = 0
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Empty the queue and the counts, without counting; for a forked child, once."""
        if self._process == os.getpid():
            return
        is_forked, self._process = self._process != 0, os.getpid()
        if self._counts is not None:
            self._counts.leave()
        self._queue: deque[Sample] = deque()
        self._closed = False
        # Both sides of the queue's end: taken by whoever drains, never on the request path.
        self._lock = threading.Lock()
        try:
            self._counts = Counts(_SAMPLED + 1, self._folder)
        except ConfigurationError as error:
            if not is_forked:
                raise
            # A fork cannot be refused, and what the parent counted is not the child's.
            _log.warning("counts are kept in memory, and lost if this process is killed: %s", error)
            self._counts = Counts(_SAMPLED + 1)
        self._count = self._counts.count

    @property
    def worker_id(self) -> str:
        """Names this process's samples in the store."""
        return self._of_this_process().worker_id

    @property
    def rate_in_force(self) -> float:
        """The probability with which a request is selected at the moment."""
        return self.rate if self._cap is None else self._cap.rate

    def draw(self, request_id: str, /) -> float:
        """The probability with which the request was selected; 0.0 where it was not.

        Decided before anything is known of its answer.

        >>> sampler = Sampler(0.5, seed="docs")
        >>> [sampler.draw(f"request-{i}") for i in range(4)]
        [0.5, 0.0, 0.0, 0.5]
        """
        if self._cap is None:
            return self.rate if self._draw.chooses(request_id, self.rate) else 0.0
        rate = self._cap.next_rate()
        if not self._draw.chooses(request_id, rate):
            return 0.0
        self._cap.selected()
        return rate

    def offer(self, context: "Context", probability: float, time_seconds: float, /) -> bool:
        """Queue a selected request, or drop and count it; never blocks, never raises.

        Args:
            context: What the request was answered with.
            probability: As it was drawn; 0.0 for a request put in by hand.
            time_seconds: When it was answered, in seconds since the epoch.

        Returns:
            Whether it was queued.
        """
        # Counted before it is anywhere else, so that a death in between leaves it as killed.
        self._count(_SAMPLED)
        if self._closed:
            self._count(_COUNTER[LostReason.CLOSED])
        elif len(self._queue) < self.capacity:
            self._queue.append(Sample(context, probability, time_seconds))
            return True
        else:
            self._count(_COUNTER[LostReason.QUEUE_FULL])
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
        return taken

    def lose(self, n: int, reason: LostReason) -> None:
        """Count samples that were drained and will not be stored."""
        self._of_this_process().count(_COUNTER[reason], n)

    def close(self) -> None:
        """Refuse further samples; those still waiting are counted as lost."""
        self._closed = True
        self.lose(len(self.drain(self.capacity * 2)), LostReason.CLOSED)

    def lost(self) -> dict[LostReason, int]:
        """Samples of this process that were lost so far, by reason."""
        totals = self._of_this_process().totals()
        return {reason: totals[counter] for reason, counter in _COUNTER.items()}

    def sampled(self) -> int:
        """Samples of this process that were offered so far."""
        return self._of_this_process().total(_SAMPLED)

    def leave(self) -> None:
        """Let go of the counts, once the store knows all of them."""
        self._of_this_process().leave()

    def _of_this_process(self) -> Counts:
        if self._counts is None:
            raise ConfigurationError("the sampler was never started")
        return self._counts


def accounts(sampled: int, stored: int, lost: Mapping[str, int]) -> Accounts:
    """The accounts that counts of one process or of many amount to.

    >>> accounts(10, 7, {"queue_full": 2}).pending
    1
    """
    by_reason = {reason: lost.get(reason.value, 0) for reason in LostReason}
    return Accounts(sampled, stored, sampled - stored - sum(by_reason.values()), by_reason)


def of_the_dead(totals: tuple[int, ...], stored: int) -> tuple[int, dict[str, int]]:
    """What a process that is gone had sampled and lost: the rest of what it held died with it."""
    lost = {reason.value: totals[counter] for reason, counter in _COUNTER.items()}
    sampled = totals[_SAMPLED]
    lost[LostReason.KILLED.value] += sampled - stored - sum(lost.values())
    return sampled, lost


class Cap:
    """A rate that falls as requests come faster than a number of samples a second allows.

    Each second begins at the rate that would have suited the one before, and halves whenever half
    of what the second has left is used up. The rate for a request depends on those before it
    alone, so weighing by 1/rate stays unbiased. Threads may count a request twice or not at all:
    that shifts the rate for those who come after, which is recorded with them.
    """

    def __init__(self, rate: float, per_second: float, clock: Callable[[], float]) -> None:
        if not 0.0 < per_second < math.inf:
            raise ConfigurationError(
                f"max_per_second {per_second!r} must be finite and > 0; rate 0.0 samples nothing"
            )
        self._most = rate
        self._per_second = per_second
        self._clock = clock
        self._second = math.floor(clock())
        self._seen = 0
        self.rate = rate
        self._begin()

    def _begin(self) -> None:
        self._selected = 0
        self._left = self._per_second
        self._halve_at = self._left / 2.0

    def next_rate(self) -> float:
        """The rate for the next request."""
        second = math.floor(self._clock())
        if second != self._second:
            last = self._seen / max(second - self._second, 1)
            self._second, self._seen = second, 0
            # A fifth is left free: seconds differ.
            fitting = self._most if last == 0 else 0.8 * self._per_second / last
            self.rate = min(self._most, fitting)
            self._begin()
        self._seen += 1
        return self.rate

    def selected(self) -> None:
        """The request was selected."""
        self._selected += 1
        if self._selected >= self._halve_at:
            self.rate /= 2.0
            self._left /= 2.0
            self._halve_at += max(self._left / 2.0, 1.0)
