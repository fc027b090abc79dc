"""Chooses which requests are sampled and which of their passages are judged, and queues samples.

Every choice is made by a hash of an id, so it is the same wherever, whenever and in whatever order
it is made. ``Sampler`` is the only part of the monitor that runs on the request path: one hash
before retrieval and one append after the decision. It takes no lock, does no I/O and never raises
(DESIGN.md §8). Reads the monotonic clock; a sampler gets a random id, and another in a forked
child.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING
from uuid import uuid4

from ctxguard._support.checks import check_at_least, check_positive
from ctxguard._support.fork_safety import reset_in_children
from ctxguard.core.types import DEFAULT_K
from ctxguard.errors import ConfigurationError

if TYPE_CHECKING:
    from ctxguard.core.context import Context

_WHOLE = 2**64

DEFAULT_CAPACITY = 10_000
HOUR_SECONDS = 3600.0
_HOURS_KEPT = 48

Sampled = tuple["Context", float, float]
"""The answer to a sampled request, by reference, so that nothing is copied on the request path; π,
the probability with which it was sampled (0.0 for one added by hand, which enters no estimate); and
when it was answered, in seconds since the epoch."""


class LostReason(StrEnum):
    """Why a sample was never stored. A closed set: it labels a metric."""

    QUEUE_FULL = "queue_full"
    CLOSED = "closed"
    """The sample was still waiting when the process ended, or was offered later."""
    UNREADABLE = "unreadable"
    """Reading a passage or a score raised an error."""
    REDACTION_FAILED = "redaction_failed"
    """The redactor raised, so nothing was written."""
    STORE_FAILED = "store_failed"
    """The store failed until the process ended."""


@dataclass(frozen=True, slots=True)
class Accounts:
    """Counts of samples, from one process or summed over many.

    Attributes:
        pending: Those in the memory of processes.
        lost: Those that will never be stored, by reason.
    """

    sampled: int
    stored: int
    pending: int
    lost: Mapping[LostReason, int]

    @property
    def unaccounted(self) -> int:
        """Samples that processes held when they were killed; 0 while a process lives.

        Negative if some are counted twice.

        >>> Accounts(10, 7, 1, {LostReason.QUEUE_FULL: 1}).unaccounted
        1
        """
        return self.sampled - self.stored - self.pending - sum(self.lost.values())


class HashSampler:
    """Selects texts at random, by a hash of each, independently of all other texts.

    Selections for different purposes are independent; another seed selects other texts.

    >>> sampler = HashSampler("doctest")
    >>> [round(sampler.uniform(f"request-{i}"), 2) for i in range(3)]
    [0.23, 0.22, 0.53]
    >>> [sampler.selects(f"request-{i}", 0.5) for i in range(3)]
    [True, True, False]
    """

    def __init__(self, purpose: str, seed: str = "") -> None:
        key = blake2b(f"{purpose}\0{seed}".encode("utf-8", "surrogatepass"), digest_size=32)
        self._keyed = blake2b(key=key.digest(), digest_size=8)

    def uniform(self, text: str) -> float:
        """Hash ``text`` to a number that is uniform in [0, 1)."""
        return self._number(text) / _WHOLE

    def selects(self, text: str, probability: float) -> bool:
        """Return whether ``text`` is selected; if so, every higher probability selects it too."""
        return self._number(text) < round(probability * _WHOLE)

    def _number(self, text: str) -> int:
        hashed = self._keyed.copy()
        hashed.update(text.encode("utf-8", "surrogatepass"))
        return int.from_bytes(hashed.digest(), "big")


def _check_probability(name: str, probability: float) -> None:
    try:
        is_one = 0.0 <= probability <= 1.0
    except TypeError:
        is_one = False
    if not is_one:
        raise ConfigurationError(f"{name} {probability!r} must lie in [0, 1]: it is a probability")


@dataclass(frozen=True, slots=True)
class JudgingRates:
    """The probabilities, in [0, 1], with which dropped passages are judged; served ones always are.

    Attributes:
        dropped_rate: Of each by itself. Pooled recall rests on it.
        full_pool_rate: Of all of a request's. The mean recall of requests and the rise of a policy
            in shadow rest on it.
        full_pool_rate_if_no_hit: The same for a request that was served nothing relevant, no
            lower: whether the pool held anything can only be told from all of it. These are few.
        baseline_rate: Of all of the retriever's first ``baseline_k``. The recall loss that a
            certificate bounds, and so the alarm, rests on it.
        baseline_k: The certificate's recall loss is relative to the retriever's first so many, ≥ 1.

    Raises:
        ConfigurationError: at construction, for a value out of its range.
    """

    dropped_rate: float = 0.2
    full_pool_rate: float = 0.05
    full_pool_rate_if_no_hit: float = 1.0
    baseline_rate: float = 0.2
    baseline_k: int = DEFAULT_K

    def __post_init__(self) -> None:
        for name in ("dropped_rate", "full_pool_rate", "full_pool_rate_if_no_hit", "baseline_rate"):
            _check_probability(f"judging rate {name}", getattr(self, name))
        if self.full_pool_rate_if_no_hit < self.full_pool_rate:
            raise ConfigurationError(
                f"judging rate full_pool_rate_if_no_hit {self.full_pool_rate_if_no_hit!r} must be "
                f"at least full_pool_rate {self.full_pool_rate!r}"
            )
        check_at_least(1, baseline_k=self.baseline_k)

    def full_pool_probability(self, *, has_hit: bool) -> float:
        """Return the probability with which all dropped passages of a request are judged."""
        if self.dropped_rate == 1.0:
            return 1.0
        return self.full_pool_rate if has_hit else self.full_pool_rate_if_no_hit

    def first_probability(self, k: int) -> float:
        """Return the probability with which the retriever's first k are all judged by design.

        A pool that is judged because nothing relevant was served does not count.
        """
        if self.dropped_rate == 1.0:
            return 1.0
        baseline = self.baseline_rate if k <= self.baseline_k else 0.0
        return 1.0 - (1.0 - self.full_pool_rate) * (1.0 - baseline)

    def dropped_probability(self, *, has_hit: bool, in_baseline: bool) -> float:
        """Return the probability with which a dropped passage is judged, in any of the three ways.

        ``in_baseline`` tells whether it is one of the retriever's first ``baseline_k``.
        """
        full_pool = self.full_pool_probability(has_hit=has_hit)
        otherwise = full_pool + (1.0 - full_pool) * self.dropped_rate
        return otherwise + (1.0 - otherwise) * self.baseline_rate if in_baseline else otherwise


DEFAULT_RATES = JudgingRates()


class Tally:
    """Counts without a lock: adding one is a single call in C, so no thread's count is lost.

    >>> tally = Tally()
    >>> tally.add(), tally.total(), tally.total()
    (0, 1, 1)
    """

    def __init__(self) -> None:
        self.add = count().__next__
        self._lock = threading.Lock()
        self._looks = 0

    def total(self) -> int:
        """Count the calls of ``add``."""
        with self._lock:
            # Reading adds one as well.
            self._looks += 1
            return self.add() - self._looks + 1


class Sampler:
    """Selects requests by a hash of their id, and queues them for the store.

    At one rate, a request id is selected or not in every process and at every time; what a rate
    selects, every higher rate with the same seed selects too.

    In a forked child the queue starts empty and the counts at zero: pending samples belong to
    the parent. ``worker_id`` is the id of one process's samples in the store.

    Args:
        rate: π, the probability that a request is selected, in [0, 1].
        max_per_second: Approximate cap on samples a second, > 0, as ``Cap`` keeps it; a burst may
            exceed it by the logarithm of its size. None for no cap.
        capacity: How many samples may wait, ≥ 1; further ones are dropped and counted. Without a
            lock, threads that offer at the same moment may each exceed it by one.
        clock: Monotonic seconds.

    Raises:
        ConfigurationError: a rate outside [0, 1], a cap that is not > 0, or a capacity below 1.
    """

    def __init__(
        self,
        rate: float,
        *,
        max_per_second: float | None = None,
        capacity: int = DEFAULT_CAPACITY,
        seed: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_probability("sampling rate", rate)
        check_at_least(1, capacity=capacity)
        self.rate = rate
        self.capacity = capacity
        self.seed = seed
        self._cap = None if max_per_second is None else Cap(rate, max_per_second, clock)
        self._hash = HashSampler("sampling", seed)
        self._reset_after_fork()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        """Begin with an empty queue, and counts of zero."""
        self.worker_id = uuid4().hex
        self._queue: deque[Sampled] = deque()
        self._closed = False
        # Held while draining the queue, never on the request path.
        self._lock = threading.Lock()
        self._offered, self._refused, self._late = Tally(), Tally(), Tally()
        self._hours: dict[float, Tally] = {}
        """Offered samples by hour, because losses are not spread evenly over hours."""
        self._lost = dict.fromkeys(LostReason, 0)

    def draw(self, request_id: str, /) -> float:
        """Return the probability of selection if the request was selected, else 0.0.

        Call this before anything is known of the answer.

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

        For arguments see ``Sampled``; returns whether it was queued.
        """
        self._offered.add()
        hour = time_seconds // HOUR_SECONDS
        (self._hours.get(hour) or self._hours.setdefault(hour, Tally())).add()
        if self._closed:
            self._late.add()
        elif len(self._queue) < self.capacity:
            self._queue.append((context, probability, time_seconds))
            return True
        else:
            self._refused.add()
        return False

    def drain(self, limit: int) -> list[Sampled]:
        """Remove up to ``limit`` samples from the queue, oldest first."""
        taken: list[Sampled] = []
        with self._lock, suppress(IndexError):
            while len(taken) < limit:
                taken.append(self._queue.popleft())
        return taken

    def lose(self, n: int, reason: LostReason) -> None:
        """Count samples that were drained and will not be stored."""
        with self._lock:
            self._lost[reason] += n

    def close(self) -> None:
        """Refuse further samples, and count those still waiting as lost."""
        self._closed = True
        self.lose(len(self.drain(self.capacity * 2)), LostReason.CLOSED)

    def lost(self) -> dict[LostReason, int]:
        """Count the samples of this process that were lost so far, by reason."""
        with self._lock:
            lost = dict(self._lost)
        lost[LostReason.QUEUE_FULL] += self._refused.total()
        lost[LostReason.CLOSED] += self._late.total()
        return lost

    def sampled(self) -> int:
        """Count the samples of this process that were offered so far."""
        return self._offered.total()

    def sampled_by_hour(self) -> dict[int, int]:
        """Count the samples of the last two days, by hour since the epoch."""
        for hour in sorted(self._hours)[:-_HOURS_KEPT]:
            del self._hours[hour]
        return {int(hour): tally.total() for hour, tally in list(self._hours.items())}

    @property
    def waiting(self) -> int:
        """The number of samples in the queue."""
        return len(self._queue)


class Cap:
    """A sampling rate that falls when requests arrive too fast for a cap on samples per second.

    Each second begins at the rate that would have suited the one before, and the rate halves
    whenever half of the second's remaining samples are taken. It depends on earlier requests only,
    never on the one being selected, so that weighting each by 1 / rate is unbiased. Threads may
    count a request twice or not at all, which changes the rate of later requests; theirs is
    recorded with them.
    """

    def __init__(self, rate: float, per_second: float, clock: Callable[[], float]) -> None:
        check_positive(max_per_second=per_second)
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
        """Return the rate for the next request."""
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
        """Note that the request was selected."""
        self._selected += 1
        if self._selected >= self._halve_at:
            self.rate /= 2.0
            self._left /= 2.0
            self._halve_at += max(self._left / 2.0, 1.0)
