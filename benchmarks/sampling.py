"""What being sampled costs a request, by itself and with a judge that takes ten seconds.

    python -m benchmarks.sampling --json sampling.json --check

First the request path alone: the guard over a stub retriever without a sampler, with one that
selects nothing, and with one that selects every request; the queue is drained between turns. Then
a service as it runs: requests come at a steady pace, and beside them, in the same process, a
thread writes every sample to SQLite and another judges, with a judge that sleeps ten seconds over
each passage.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from benchmarks._timing import Call, environment, interleaved
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Hit, Passage, Ranking, ScoreKind
from ctxguard.guard import ContextGuard
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.sampling.sampler import Sampler
from ctxguard.monitor.sampling.writer import SampleWriter
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import SampleStore
from ctxguard.request.telemetry import Telemetry

SUMMARY = "What being sampled costs a request."
CANDIDATES = 100
BAR_MICROSECONDS = 10.0
PACKAGES = ("ctxguard-rag", "numpy", "sqlalchemy", "prometheus-client")


class SlowJudge:
    """Takes ten seconds over every passage."""

    name = "slow"
    version = "1"
    max_grade = 1

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment]:
        """Sleep, and find nothing relevant."""
        del query
        time.sleep(10.0 * len(passages))
        return [Judgment(passage.passage_id, 0) for passage in passages]


class Stub:
    """Retrieves the same every time."""

    def __init__(self, found: Ranking) -> None:
        self._found = found

    def retrieve(self, query: str, *, depth: int) -> Ranking:
        """What it always finds."""
        del query, depth
        return self._found


def ranking() -> Ranking:
    """A hundred candidates with texts of about a hundred words."""
    hits = [
        Hit(f"passage-{rank}", 10.0 - rank / 20, text=f"word{rank} " * 100, title=f"title {rank}")
        for rank in range(CANDIDATES)
    ]
    return Ranking.from_hits(hits, ScoreKind.RATIO)


def guard(sampler: Sampler | None) -> ContextGuard:
    """A guard over a stub, with metrics."""
    return ContextGuard(
        Stub(ranking()),
        policy=RatioPolicy(k=5, min_ratio=0.6),
        sampler=sampler,
        telemetry=Telemetry(CollectorRegistry()),
    )


def on_the_path(rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """Microseconds a request, by how many are sampled; nothing else runs."""
    samplers = {"no sampler": None, "0%": Sampler(0.0), "100%": Sampler(1.0, capacity=100 * calls)}
    cases: dict[str, Call] = {}
    for name, sampler in samplers.items():
        served = guard(sampler)
        cases[name] = lambda served=served: served.retrieve("how do I?")  # type: ignore[misc]

    def drain() -> None:
        for sampler in samplers.values():
            if sampler is not None:
                sampler.drain(10**9)

    timings = interleaved(cases, rounds=rounds, calls=calls, seconds=10.0, between=drain)
    return {name: asdict(timing) for name, timing in timings.items()}


def in_service(rate: float, seconds: float, per_second: int, folder: Path) -> dict[str, Any]:
    """Microseconds a request while samples are written and judged in the same process."""
    store = SampleStore.open(f"sqlite:///{folder / f'{rate}.db'}")
    sampler = Sampler(rate)
    writer = SampleWriter(sampler, store)
    monitor = Monitor(store, SlowJudge())
    served = guard(sampler)
    writer.start()
    monitor.start(interval_seconds=0.05)
    taken = []
    next_at = time.perf_counter()
    until = next_at + seconds
    while next_at < until:
        while (now := time.perf_counter()) < next_at:
            time.sleep(max(next_at - now, 0.0))
        started = time.perf_counter_ns()
        served.retrieve("how do I?")
        taken.append((time.perf_counter_ns() - started) / 1e3)
        next_at += 1.0 / per_second
    monitor.stop(timeout_seconds=0.0)
    writer.stop()
    accounts = writer.accounts()
    return {
        "p50": statistics.median(taken),
        "p99": sorted(taken)[int(0.99 * (len(taken) - 1))],
        "requests": len(taken),
        "sampled": accounts.sampled,
        "stored": accounts.stored,
        "lost": sum(accounts.lost.values()),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both; the exit status is 1 where a bar that was checked is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.sampling", description=SUMMARY)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=2000, help="in each round")
    parser.add_argument("--turns", type=int, default=5, help="of the service at each rate")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    parser.add_argument("--per-second", type=int, default=100, help="requests in service")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    options = parser.parse_args(arguments)
    console = Console(width=100, highlight=False)
    report: dict[str, Any] = {"environment": environment(PACKAGES)}
    console.print_json(data=report["environment"])

    report["path"] = path = on_the_path(options.rounds, options.calls)
    made = Table(title="Request path alone, µs a request", title_justify="left")
    for column in ("sampled", "p50", "p99", "over no sampler"):
        made.add_column(column, justify="left" if column == "sampled" else "right")
    for name, timing in path.items():
        over = timing["p50"] - path["no sampler"]["p50"]
        made.add_row(name, f"{timing['p50']:.1f}", f"{timing['p99']:.1f}", f"{over:+.1f}")
    console.print(made)

    turns: dict[float, list[dict[str, Any]]] = {0.0: [], 1.0: []}
    for _ in range(options.turns):
        for rate, done in turns.items():
            with tempfile.TemporaryDirectory() as folder:
                done.append(in_service(rate, options.seconds, options.per_second, Path(folder)))
    report["service"] = {str(rate): done for rate, done in turns.items()}
    made = Table(
        title=f"In service, {options.per_second} requests a second, a judge that takes 10 s",
        title_justify="left",
    )
    for column in ("sampled", "p50", "p99", "requests", "stored", "lost"):
        made.add_column(column, justify="left" if column == "sampled" else "right")
    p50 = {}
    for rate, done in turns.items():
        p50[rate] = statistics.median([turn["p50"] for turn in done])
        made.add_row(
            f"{rate:.0%}",
            f"{p50[rate]:.1f}",
            f"{statistics.median([turn['p99'] for turn in done]):.1f}",
            *(f"{sum(turn[name] for turn in done):,}" for name in ("requests", "stored", "lost")),
        )
    console.print(made)

    bars = {
        "being sampled, µs at p50": path["100%"]["p50"] - path["no sampler"]["p50"],
        "in service, 100% less 0%, µs at p50": p50[1.0] - p50[0.0],
    }
    for name, measured in bars.items():
        verdict = "met" if measured <= BAR_MICROSECONDS else "MISSED"
        console.print(f"{verdict:<8} {name}: {measured:.1f}, at most {BAR_MICROSECONDS:g}")
    report["bars"] = bars
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(options.check and max(bars.values()) > BAR_MICROSECONDS)


if __name__ == "__main__":
    sys.exit(main())
