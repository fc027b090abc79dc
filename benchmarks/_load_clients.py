"""Clients that ask a guard one request after the other for a while, and what they saw."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

Ask = Callable[[str], object]
AwaitedAsk = Callable[[str], Awaitable[object]]


@dataclass(frozen=True)
class Load:
    """What a number of clients saw.

    Attributes:
        rate: Requests a second, all clients together.
        p50: Milliseconds from asking to the answer or the error, the median.
        p99: The 99th percentile.
        slowest: The slowest of all.
        ends: Requests by what came back: the name of the answer's or the error's type.
    """

    rate: float
    p50: float
    p99: float
    slowest: float
    ends: dict[str, int]

    @property
    def answered_rate(self) -> float:
        """Requests a second that were answered with a context."""
        return self.rate * self.ends.get("Context", 0) / sum(self.ends.values())

    @classmethod
    def of(cls, seconds: Sequence[float], ends: Mapping[str, int], elapsed: float) -> "Load":
        """From the seconds that every request took, and the seconds that all took together."""
        ordered = sorted(seconds)
        at = partial(_at, ordered)
        return cls(len(ordered) / elapsed, at(0.5), at(0.99), at(1.0), dict(ends))


def _at(ordered: Sequence[float], share: float) -> float:
    return 1e3 * ordered[int(share * (len(ordered) - 1))]


def in_threads(ask: Ask, queries: Sequence[str], clients: int, seconds: float) -> Load:
    """Clients on threads of their own, each asking again as soon as it has its answer."""
    return in_turns([ask], queries, clients, seconds, turns=1)[0]


def in_turns(
    asks: Sequence[Ask], queries: Sequence[str], clients: int, seconds: float, *, turns: int
) -> list[Load]:
    """`in_threads` for several that are compared, in turns: a busy spell falls on all of them."""
    taken: list[list[float]] = [[] for _ in asks]
    ends: list[Counter[str]] = [Counter() for _ in asks]
    elapsed = [0.0 for _ in asks]
    for _ in range(turns):
        for which, ask in enumerate(asks):
            turn = _turn(ask, queries, clients, seconds / turns)
            taken[which] += turn[0]
            ends[which] += turn[1]
            elapsed[which] += turn[2]
    return [Load.of(*each) for each in zip(taken, ends, elapsed, strict=True)]


def _turn(
    ask: Ask, queries: Sequence[str], clients: int, seconds: float
) -> tuple[list[float], Counter[str], float]:
    """Seconds of each request, what came back, and seconds in all."""
    taken: list[list[float]] = [[] for _ in range(clients)]
    ends: list[Counter[str]] = [Counter() for _ in range(clients)]
    together = threading.Barrier(clients + 1)

    def client(number: int) -> None:
        together.wait()
        until = time.perf_counter() + seconds
        request = number
        while (started := time.perf_counter()) < until:
            ends[number][end_of(ask, queries[request % len(queries)])] += 1
            taken[number].append(time.perf_counter() - started)
            request += clients

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    together.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    return list(chain.from_iterable(taken)), sum(ends, Counter()), elapsed


def in_a_loop(ask: AwaitedAsk, queries: Sequence[str], clients: int, seconds: float) -> Load:
    """Clients as tasks of one event loop."""

    async def main() -> Load:
        taken: list[float] = []
        ends: Counter[str] = Counter()
        started = time.perf_counter()

        async def client(number: int) -> None:
            request = number
            while (asked := time.perf_counter()) < started + seconds:
                ends[await awaited_end_of(ask, queries[request % len(queries)])] += 1
                taken.append(time.perf_counter() - asked)
                request += clients

        await asyncio.gather(*[client(number) for number in range(clients)])
        return Load.of(taken, ends, time.perf_counter() - started)

    return asyncio.run(main())


def end_of(ask: Ask, query: str) -> str:
    try:
        return type(ask(query)).__name__
    except Exception as error:
        return type(error).__name__


async def awaited_end_of(ask: AwaitedAsk, query: str) -> str:
    try:
        return type(await ask(query)).__name__
    except Exception as error:
        return type(error).__name__
