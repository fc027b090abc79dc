"""Which requests are sampled, and the bounded queue in which they wait.

The only part of the monitor that runs on the request path: one hash before retrieval and one
append after the decision. It takes no lock, does no I/O and never raises (DESIGN.md §8).
"""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ctxguard._support.fork_safety import reset_in_children
from ctxguard.errors import ConfigurationError
from ctxguard.monitor.sampling.counts import Counts
from ctxguard.monitor.sampling.inclusion import HashSampler, check_probability

if TYPE_CHECKING:
    from ctxguard.core.context import Context

_log = logging.getLogger(__name__)

DEFAULT_CAPACITY = 10_000


class Sample(NamedTuple):
    """A selected request, by reference: nothing is copied on the request path.

    Attributes:
        context: The answer to the request.
        probability: π, the probability with which the request was selected; 0.0 for one added
            by hand, which enters no estimate.
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
    """A passage or a score raised when it was read."""
    REDACTION_FAILED = "redaction_failed"
    """The redactor raised, so that nothing was written."""
    STORE_FAILED = "store_failed"
    """The store failed until the process ended."""
    QUARANTINED = "quarantined"
    """It was stored in a database that was later damaged and moved aside, or deleted in use."""
    KILLED = "killed"
    """Its process was killed before it was stored."""


REASONS = tuple(LostReason)
_SAMPLED = len(REASONS)
N_COUNTERS = _SAMPLED + 1
_COUNTER = {reason: counter for counter, reason in enumerate(REASONS)}


@dataclass(frozen=True, slots=True)
class Accounts:
    """Counts of the samples of one or many processes, each counted by itself.

    Attributes:
        sampled: All samples.
        stored: Those that are in the store.
        pending: Those in the memory of processes.
        lost: Those that will never be stored, by reason.
    """

    sampled: int
    stored: int
    pending: int
    lost: Mapping[LostReason, int]

    @property
    def unaccounted(self) -> int:
        """Samples that are neither stored nor pending nor lost: 0, or a count is wrong.

        Negative where some are counted twice.

        >>> Accounts(10, 7, 1, {LostReason.QUEUE_FULL: 1}).unaccounted
        1
        """
        return self.sampled - self.stored - self.pending - sum(self.lost.values())


class Sampler:
    """Selects requests by a hash of their id, and queues them for the store.

    At one rate, a request id is selected or not in every process and at every time; what a rate
    selects, every higher rate with the same seed selects too. Under a cap the rate falls while
    traffic is heavy. It depends on earlier requests only, never on the one being selected, so
    that weighting each sample by 1 / rate stays unbiased.

    In a forked child the queue starts empty and the counts at zero: pending samples belong to
    the parent.

    Args:
        rate: π, the probability that a request is selected, in [0, 1].
        max_per_second: Approximate cap on samples a second, > 0; a burst may exceed it by the
            logarithm of its size. None for no cap.
        capacity: How many samples may wait, ≥ 1; further ones are dropped and counted. Without a
            lock, threads that offer at the same moment may each exceed it by one.
        seed: Another seed selects other requests at the same rate.
        counts_folder: Folder in which this process keeps its counts, so that they survive if it
            is killed; None keeps them in memory.
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
        self._hash = HashSampler("sampling", seed)
        self.counts_folder = counts_folder
        self._process = os.getpid()
        self._counts = Counts(N_COUNTERS, counts_folder)
        self._begin()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        """Empty the queue and the counts, once in a forked child."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._counts.leave()
        try:
            self._counts = Counts(N_COUNTERS, self.counts_folder)
        except ConfigurationError as error:
            # A fork cannot be refused, and the parent's counts are not the child's.
            _log.warning("counts are kept in memory, and lost if this process is killed: %s", error)
            self._counts = Counts(N_COUNTERS)
        self._begin()

    def _begin(self) -> None:
        self._queue: deque[Sample] = deque()
        self._closed = False
        # Taken by whoever drains the queue, never on the request path.
        self._lock = threading.Lock()
        self._count = self._counts.count

    @property
    def worker_id(self) -> str:
        """The id of this process's samples in the store."""
        return self._counts.worker_id

    @property
    def rate_in_force(self) -> float:
        """The probability with which a request is selected at present."""
        return self.rate if self._cap is None else self._cap.rate

    def draw(self, request_id: str, /) -> float:
        """The probability with which the request was selected; 0.0 if it was not.

        To be called before anything is known of its answer.

        >>> sampler = Sampler(0.5, seed="docs")
        >>> [sampler.draw(f"request-{i}") for i in range(4)]
        [0.5, 0.0, 0.0, 0.5]
        """
        if self._cap is None:
            return self.rate if self._hash.selects(request_id, self.rate) else 0.0
        rate = self._cap.next_rate()
        if not self._hash.selects(request_id, rate):
            return 0.0
        self._cap.selected()
        return rate

    def offer(self, context: "Context", probability: float, time_seconds: float, /) -> bool:
        """Queue a selected request, or drop and count it; never blocks, never raises.

        Args:
            context: The answer to the request.
            probability: What ``draw`` returned; 0.0 for a request added by hand.
            time_seconds: When it was answered, in seconds since the epoch.

        Returns:
            Whether it was queued.
        """
        # Counted first, so that it is accounted for as killed if the process dies here.
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
        """Remove up to ``limit`` samples from the queue, oldest first."""
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
        self._counts.count(_COUNTER[reason], n)

    def close(self) -> None:
        """Refuse further samples; those still waiting are counted as lost."""
        self._closed = True
        self.lose(len(self.drain(self.capacity * 2)), LostReason.CLOSED)

    def lost(self) -> dict[LostReason, int]:
        """Samples of this process that were lost so far, by reason."""
        return counted(self._counts.totals())[1]

    def sampled(self) -> int:
        """Samples of this process that were offered so far."""
        return self._counts.total(_SAMPLED)

    @property
    def waiting(self) -> int:
        """How many samples are in the queue."""
        return len(self._queue)

    def leave(self) -> None:
        """Remove the file of the counts, once the store has all of them."""
        self._counts.leave(remove=True)


def counted(totals: Sequence[int]) -> tuple[int, dict[LostReason, int]]:
    """(sampled, lost by reason) from the totals of a process's counters."""
    return totals[_SAMPLED], {reason: totals[counter] for reason, counter in _COUNTER.items()}


def accounts(sampled: int, stored: int, lost: Mapping[str, int], pending: int = 0) -> Accounts:
    """Accounts with every reason, from counts by the reasons' names."""
    by_reason = {reason: lost.get(reason.value, 0) for reason in LostReason}
    return Accounts(sampled, stored, pending, by_reason)


class Cap:
    """A rate that falls when requests arrive faster than a cap on samples a second allows.

    Each second begins at the rate that would have suited the one before, and the rate halves
    whenever half of the second's remaining samples are taken. The rate of a request depends on
    earlier requests only, so that weighting by 1 / rate is unbiased. Threads may count a request
    twice or not at all, which changes the rate of later requests; theirs is recorded with them.
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
