"""Bursts: thousands of requests at the same moment, each burst in a process of its own."""

import asyncio
import multiprocessing
import resource
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from benchmarks._load_clients import Ask, AwaitedAsk, Load, awaited_end_of, end_of
from benchmarks._load_system import guarded, stub_ranking
from ctxguard.core.types import Ranking
from ctxguard.resilience import RequestLimits

BURST_LATENCY_SECONDS = 0.002
BURST_DEADLINE_SECONDS = 0.25

_MEBIBYTE = 2**20
_THREAD_STACK_BYTES = 256 * 1024


@dataclass(frozen=True)
class Burst:
    """What a burst came to.

    Attributes:
        load: As for clients.
        grown_mebibytes: By how much the process's peak of resident memory grew.
    """

    load: Load
    grown_mebibytes: float


def burst_of_threads(ask: Ask, n: int) -> Burst:
    """``n`` threads that ask once, all at the same moment."""
    before = _peak_mebibytes()
    taken = [0.0] * n
    ends = [""] * n
    together = threading.Barrier(n + 1)

    def client(number: int) -> None:
        together.wait()
        started = time.perf_counter()
        ends[number] = end_of(ask, f"query {number}")
        taken[number] = time.perf_counter() - started

    threads = [threading.Thread(target=client, args=(number,)) for number in range(n)]
    usual = threading.stack_size(_THREAD_STACK_BYTES)
    for thread in threads:
        thread.start()
    threading.stack_size(usual)
    together.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    return Burst(Load.of(taken, Counter(ends), elapsed), _peak_mebibytes() - before)


def burst_of_tasks(ask: AwaitedAsk, n: int) -> Burst:
    """``n`` tasks of one event loop, gathered."""
    before = _peak_mebibytes()

    async def main() -> Load:
        taken: list[float] = []

        async def client(number: int) -> str:
            asked = time.perf_counter()
            end = await awaited_end_of(ask, f"query {number}")
            taken.append(time.perf_counter() - asked)
            return end

        started = time.perf_counter()
        ends = Counter(await asyncio.gather(*[client(number) for number in range(n)]))
        return Load.of(taken, ends, time.perf_counter() - started)

    load = asyncio.run(main())
    return Burst(load, _peak_mebibytes() - before)


@dataclass(frozen=True)
class Outcome:
    """A burst, with what the guard counted of it.

    Attributes:
        counted: Requests by outcome, as the metrics have it: received, ok, degraded, failed, shed.
        exact: Whether they add up, and agree with what the clients saw.
    """

    burst: Burst
    counted: dict[str, int]
    exact: bool


BURSTS: dict[str, dict[str, Any]] = {
    "asyncio": {},
    "asyncio, at most 1,000 in flight": {"limits": RequestLimits(max_in_flight=1000)},
    "asyncio, 250 ms to answer": {"limits": RequestLimits(BURST_DEADLINE_SECONDS)},
    "threads": {},
    "threads, at most 1,000 in flight": {"limits": RequestLimits(max_in_flight=1000)},
    "threads, 250 ms to answer": {"limits": RequestLimits(BURST_DEADLINE_SECONDS)},
}


def bursts(n: int) -> dict[str, Outcome]:
    """Every burst, each in a process of its own."""
    fresh = multiprocessing.get_context("spawn")
    found = {}
    for name in BURSTS:
        with fresh.Pool(1) as process:
            found[name] = process.apply(burst, (name, n))
    return found


def burst(name: str, n: int) -> Outcome:
    """One burst in this process."""
    ranking = stub_ranking()

    def engine(query: str, depth: int) -> Ranking:  # noqa: ARG001
        time.sleep(BURST_LATENCY_SECONDS)
        return ranking

    guard, registry = guarded(engine, **BURSTS[name])
    guard.retrieve("the first request")
    if name.startswith("asyncio"):
        result = burst_of_tasks(guard.aretrieve, n)
    else:
        result = burst_of_threads(guard.retrieve, n)
    counted = counted_in(registry)
    ends = result.load.ends
    exact = (
        counted["received"] == n + 1 == sum(counted.values()) - counted["received"]
        and counted["ok"] + counted["degraded"] == ends.get("Context", 0) + 1
        and counted["shed"] == ends.get("OverloadedError", 0)
        and counted["failed"] == ends.get("StageUnavailableError", 0)
    )
    return Outcome(result, counted, exact)


def counted_in(registry: CollectorRegistry) -> dict[str, int]:
    """Requests by outcome, from a guard's metrics."""
    found: Counter[str] = Counter()
    for metric in registry.collect():
        for sample in metric.samples:
            for outcome in ("received", "failed", "shed"):
                if sample.name == f"ctxguard_{outcome}_requests_total":
                    found[outcome] += int(sample.value)
            if sample.name == "ctxguard_requests_total":
                found[sample.labels["outcome"]] += int(sample.value)
    return {name: found[name] for name in ("received", "ok", "degraded", "failed", "shed")}


def _peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MEBIBYTE
