"""How long requests in flight hold an event loop, and how many are answered a second.

    python -m benchmarks.loop_lag --former FOLDER --check

Coroutines await a guard over an embedded index, each its next question as soon as it is answered,
while a clock of the same loop wakes up every 5 ms: what it is late by is the lag that any other
request of this process would feel. ``text`` encodes the question, ``states`` has its states at
hand. With ``--former`` another checkout answers in turns, from processes of its own.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and "--worker" in sys.argv:
    sys.path.insert(0, str(Path.cwd()))  # another checkout's, where it was started in that

from rich.console import Console
from rich.table import Table

SUMMARY = "Time how long requests in flight hold an event loop."
TICK_SECONDS = 0.005
MOST_LAG_MS = 50.0
LEAST_THROUGHPUT = 0.95
"""Of the former checkout's."""
WAYS = ("states", "text")


async def under_load(guard: Any, questions: Sequence[str], in_flight: int) -> dict[str, float]:
    """Answer the questions, so many at once; lags in milliseconds."""
    lags: list[float] = []
    waiting, running, threads = iter(questions), True, 0

    async def clock() -> None:
        nonlocal threads
        while running:
            began = time.perf_counter()
            await asyncio.sleep(TICK_SECONDS)
            lags.append((time.perf_counter() - began - TICK_SECONDS) * 1e3)
            own = [each for each in threading.enumerate() if each.name.startswith("ctxguard")]
            threads = max(threads, len(own))

    async def ask() -> None:
        for question in waiting:
            await guard.aretrieve(question)

    ticking = asyncio.create_task(clock())
    began = time.perf_counter()
    await asyncio.gather(*[ask() for _ in range(in_flight)])
    seconds = time.perf_counter() - began
    running = False
    await ticking
    lags.sort()
    return {
        "p50": statistics.median(lags),
        "p99": lags[int(0.99 * (len(lags) - 1))],
        "worst": lags[-1],
        "per_second": len(questions) / seconds,
        "threads": threads,
    }


def work(size: int, in_flight: int, n: int) -> dict[str, dict[str, float]]:
    """Measure both ways in this process."""
    from benchmarks._search_data import prepare
    from benchmarks._search_peers.embedded import passages_of
    from benchmarks.question_to_context import RealQuestions
    from ctxguard import ContextGuard
    from ctxguard.retrieval.hybrid.retriever import HybridRetriever
    from ctxguard.retrieval.protocols import Float32Array, QueryStates

    class Remembering(RealQuestions):
        """Encodes a question once, if it is to have states at hand."""

        def __init__(self, vectors: Float32Array) -> None:
            super().__init__(vectors)
            self.known: dict[str, QueryStates] = {}

        def query(self, text: str) -> QueryStates:
            return self.known[text] if text in self.known else super().query(text)

    corpus = prepare(size, Path(tempfile.gettempdir()) / "ctxguard-search-data")
    tokens = Remembering(corpus.vectors)
    retriever = HybridRetriever.build(passages_of(corpus), embedder=tokens)
    guard = ContextGuard(retriever)
    questions = [corpus.queries[number % len(corpus.queries)] for number in range(n)]
    asyncio.run(under_load(guard, questions[:in_flight], in_flight))
    found = {"text": asyncio.run(under_load(guard, questions, in_flight))}
    tokens.known = {text: tokens.query(text) for text in set(questions)}
    found["states"] = asyncio.run(under_load(guard, questions, in_flight))
    return found


def asked(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure a checkout in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    for name in ("size", "in_flight", "requests"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)  # noqa: S603
    found: dict[str, dict[str, float]] = json.loads(ended.stdout.splitlines()[-1])
    return found


def median_of(turns: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the median of each figure over the turns."""
    return {
        way: {
            name: statistics.median([turn[way][name] for turn in turns]) for name in turns[0][way]
        }
        for way in WAYS
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; the exit status is 1 where a bar that was checked is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.loop_lag", description=SUMMARY)
    parser.add_argument("--former", type=Path, metavar="FOLDER", help="another checkout, in turns")
    parser.add_argument("--size", type=int, default=5_000, help="passages (default 5000)")
    parser.add_argument("--in-flight", type=int, default=50)
    parser.add_argument("--requests", type=int, default=400, help="of each way in a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if min(options.size, options.in_flight, options.requests, options.turns) < 1:
        parser.error("--size, --in-flight, --requests and --turns must be positive")
    if options.worker:
        print(json.dumps(work(options.size, options.in_flight, options.requests)))  # noqa: T201
        return 0
    folders = {"here": Path(__file__).resolve().parent.parent}
    if options.former is not None:
        folders["former"] = options.former
    turns: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in folders}
    for number in range(options.turns):
        for name in sorted(folders, reverse=bool(number % 2)):
            turns[name].append(asked(folders[name], options))
    figures = {name: median_of(found) for name, found in turns.items()}
    title = f"{options.in_flight} in flight over {options.size:,} passages, medians of turns"
    table = Table(title=title, title_justify="left")
    for column in ("checkout", "question", "lag p50, ms", "p99", "worst", "a second", "threads"):
        table.add_column(column, justify="left" if column in ("checkout", "question") else "right")
    for name, ways in figures.items():
        for way, row in ways.items():
            cells = [f"{row[each]:.1f}" for each in ("p50", "p99", "worst", "per_second")]
            table.add_row(name, way, *cells, f"{row['threads']:.0f}")
    Console(width=100, highlight=False).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    missed = [f"lag of {way}" for way, row in figures["here"].items() if row["p99"] > MOST_LAG_MS]
    for way, row in figures.get("former", {}).items():
        if figures["here"][way]["per_second"] < LEAST_THROUGHPUT * row["per_second"]:
            missed.append(f"throughput of {way}")
    if options.check and missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)  # noqa: T201
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
