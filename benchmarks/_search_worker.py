"""One system's process: builds it, asks it, and reports each figure as a line of JSON.

    python -m benchmarks._search_worker TASK REPORT

TASK is a `Task` as JSON; REPORT is the number of an open file descriptor. A figure is reported as
soon as it is known, so that a system that is stopped half-way has told what it did.
"""

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._processes import resident_bytes
from benchmarks._search_data import Corpus
from benchmarks._search_peers import open_peer
from benchmarks._search_peers.base import K, SearchPeer, Surroundings

_FEWEST_QUERIES = 3
_TURNS = 5
_MEBIBYTE = 2**20


@dataclass(frozen=True)
class Task:
    """What one process measures.

    Attributes:
        peer: The system's name.
        corpus: The folder of the data.
        folder: Empty, for the system's own files.
        seconds: How long each measurement lasts at most; a query that was begun is finished.
        clients: Numbers of clients that ask at the same time.
        build_threads: Threads for building.
        threads: Threads for a search.
    """

    peer: str
    corpus: str
    folder: str
    seconds: float
    clients: Sequence[int]
    build_threads: int
    threads: int


Report = Callable[[str, dict[str, Any]], None]


def measure(task: Task, report: Report) -> None:
    """Build a system, compare its answers with exact ones, and time it."""
    peer, corpus = open_peer(task.peer), Corpus(Path(task.corpus))
    versions = {package: version(package) for package in peer.packages}
    report("opened", {"setting": peer.setting, "versions": versions})
    n_queries = len(corpus.queries)
    memory = _Memory(Path(task.folder))
    started = time.perf_counter()
    surroundings = Surroundings(Path(task.folder), task.build_threads, task.threads)
    parts = peer.build(corpus, surroundings)
    try:
        seconds = time.perf_counter() - started
        corpus.release()
        report(
            "built",
            {
                "build_seconds": round(seconds, 2),
                "build_parts_seconds": {name: round(part, 2) for name, part in parts.items()},
                "built_mib": memory.held(),
                "disk_mib": _disk_mib(Path(task.folder)),
            },
        )
        report("agreement", _agreement(peer, corpus, task.seconds))
        corpus.release()
        for figures in _clients(peer, task.clients, n_queries, task.seconds):
            report(f"clients_{figures['clients']}", figures)
        floor = peer.floor_bytes()
        report(
            "served",
            {
                "memory_mib": memory.held(),
                "vectors_and_postings_mib": None if floor is None else round(floor / _MEBIBYTE),
            },
        )
    finally:
        peer.close()


class _Memory:
    """What this system holds beyond its libraries."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = self._resident()

    def _resident(self) -> int:
        gc.collect()
        _give_back()
        return resident_bytes(os.getpid(), self._folder)

    def held(self) -> int:
        return round((self._resident() - self._before) / _MEBIBYTE)


def _give_back() -> None:
    """Have the allocator return what it does not use, where it can (glibc)."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _disk_mib(folder: Path) -> int:
    files = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    return round(sum(files) / _MEBIBYTE)


def _agreement(peer: SearchPeer, corpus: Corpus, seconds: float) -> dict[str, Any]:
    """Share of the exact top 10 that is found, of the whole and of each leg."""
    exact, until = corpus.exact, time.perf_counter() + seconds
    shares: dict[str, list[float]] = {"hybrid": [], "lexical": [], "dense": []}
    for at in range(len(corpus.queries)):
        if peer.reference is not None:
            shares["hybrid"].append(_shared(peer.search(at), getattr(exact, peer.reference)[at]))
        legs = peer.legs(at)
        if legs is not None:
            shares["lexical"].append(_shared(legs[0], exact.lexical[at]))
            shares["dense"].append(_shared(legs[1], exact.dense[at]))
        if at + 1 >= _FEWEST_QUERIES and time.perf_counter() > until:
            break
    means = {leg: round(float(np.mean(each)), 4) if each else None for leg, each in shares.items()}
    return {"top_10": means, "reference": peer.reference, "agreement_queries": at + 1}


def _shared(found: Sequence[int], exact: Sequence[int]) -> float:
    best = {int(row) for row in exact[:K]} - {-1}
    return len(best & set(found[:K])) / len(best)


def _clients(
    peer: SearchPeer, clients: Sequence[int], n_queries: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Clients that each ask one query after the other, all at once, until the time is up.

    The numbers of clients take turns, so that a busy spell of the machine falls on all of them.
    """
    turns: dict[int, list[tuple[list[float], float]]] = {n: [] for n in clients}
    spent: dict[int, list[float]] = {n: [] for n in clients}
    for _ in range(_TURNS):
        for n, taken_turns in turns.items():
            ask = _in_processes if peer.clients == "processes" and n > 1 else _in_threads
            before = time.process_time()
            taken_turns.append(ask(peer, n, n_queries, seconds / _TURNS))
            # The first query of each client is not timed.
            spent[n].append((time.process_time() - before) / (len(taken_turns[-1][0]) + n))
    for n, taken_turns in turns.items():
        taken = [each for turn, _ in taken_turns for each in turn]
        p50, p99 = np.quantile(taken, (0.5, 0.99)) * 1e3
        rates = [len(turn) / wall for turn, wall in taken_turns]
        yield {
            "clients": n,
            "as": "one thread" if n == 1 else peer.clients,
            "p50_ms": round(float(p50), 4),
            "p99_ms": round(float(p99), 4),
            "processor_ms": round(float(np.median(spent[n])) * 1e3, 4),
            "queries_per_second": round(float(np.median(rates)), 2),
            "queries": len(taken),
        }


def _in_threads(
    peer: SearchPeer, clients: int, n_queries: int, seconds: float
) -> tuple[list[float], float]:
    taken: list[list[float]] = [[] for _ in range(clients)]
    failures: list[BaseException] = []
    start = threading.Barrier(clients + 1)

    def client(number: int) -> None:
        try:
            peer.search(number % n_queries)
        except BaseException as error:
            failures.append(error)
            start.abort()
            return
        start.wait()
        try:
            taken[number] = _asked(peer, number, clients, n_queries, seconds)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        start.wait()
    except threading.BrokenBarrierError:
        raise failures[0] from None
    begun = time.perf_counter()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - begun
    if failures:
        raise failures[0]
    return list(chain.from_iterable(taken)), wall


def _in_processes(
    peer: SearchPeer, clients: int, n_queries: int, seconds: float
) -> tuple[list[float], float]:
    context = get_context("fork")
    start, results = context.Barrier(clients + 1), context.SimpleQueue()

    def client(number: int) -> None:
        try:
            peer.reopen()
            peer.search(number % n_queries)
        except BaseException:
            start.abort()
            raise
        start.wait()
        results.put(_asked(peer, number, clients, n_queries, seconds))

    processes = [context.Process(target=client, args=(number,)) for number in range(clients)]
    for process in processes:
        process.start()
    start.wait()
    begun = time.perf_counter()
    taken: list[list[float]] = [results.get() for _ in range(clients)]
    wall = time.perf_counter() - begun
    for process in processes:
        process.join()
    return list(chain.from_iterable(taken)), wall


def _asked(
    peer: SearchPeer, number: int, clients: int, n_queries: int, seconds: float
) -> list[float]:
    """Seconds of each query of one client; each client starts elsewhere in the queries."""
    clock = time.perf_counter
    taken: list[float] = []
    at, until = number * n_queries // clients, clock() + seconds
    while clock() < until or not taken:
        started = clock()
        peer.search(at % n_queries)
        taken.append(clock() - started)
        at += 1
    return taken


def main() -> None:
    """Measure the task that the command line tells."""
    task, descriptor = Task(**json.loads(sys.argv[1])), int(sys.argv[2])
    with os.fdopen(descriptor, "w", buffering=1) as stream:

        def report(stage: str, figures: dict[str, Any]) -> None:
            stream.write(json.dumps({"stage": stage, **figures}) + "\n")

        try:
            measure(task, report)
        except ImportError as error:
            report("absent", {"why": str(error)})
        except BaseException as error:
            report("failed", {"why": f"{type(error).__name__}: {error}"[:300]})
            raise


if __name__ == "__main__":
    main()
