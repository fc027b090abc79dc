"""The guard in a server: many clients, dead and hung stages, and a burst of 10,000 requests.

    python -m benchmarks.load --json load.json --check

``service``: clients on threads, and as tasks of one event loop, each asking again as soon as it
has its answer; sampling off and at 5%. Once over a retriever that answers at once with 100
candidates, so that the figure is the guard's own, and once over the embedded retriever (vectors
of queries looked up, not encoded).

``faults``: one stage raises, or never returns, from the first request on. A search has 100 ms, and
either leg half of that. Compared with the same retriever on the route that is left, healthy, under
the same deadlines and in turns with it. Where a stage hangs at every fourth call only, its circuit
opens only now and then and the other requests that meet such a call wait for its deadline: that is
where the tail past the deadline is seen.

``burst``: 10,000 requests at once, in a process of its own each, against a retriever that takes
2 ms; what the clients saw is compared with what the guard counted.
"""

import argparse
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks._load_bursts import Outcome, bursts
from benchmarks._load_clients import Load, in_a_loop, in_threads, in_turns
from benchmarks._load_system import (
    FAULTS,
    FOURTH,
    HUNG,
    System,
    faulty,
    guarded,
    stub_ranking,
)
from benchmarks._timing import environment
from ctxguard.core.types import Ranking, Route
from ctxguard.monitor.sampling.sampler import Sampler
from ctxguard.resilience import Deadlines, RequestLimits
from ctxguard.retrieval.protocols import AnyRetriever
from tests import doubles

SUMMARY = "The guard in a server: many clients, dead and hung stages, a burst of requests."
PACKAGES = ("ctxguard-rag", "numpy", "faiss-cpu", "prometheus-client")

CLIENTS = (1, 4, 16, 64)
SAMPLING_RATE = 0.05
DEADLINE_SECONDS = 0.1
BURST = 10_000
TURNS = 6


class Draining:
    """Empties a sampler's queue beside the requests, as a writer to a store would."""

    def __init__(self, sampler: Sampler | None) -> None:
        self._sampler = sampler
        self._ended = threading.Event()

    def __enter__(self) -> None:
        if self._sampler is not None:
            threading.Thread(target=self._drain, args=(self._sampler,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _drain(self, sampler: Sampler) -> None:
        while not self._ended.wait(0.05):
            sampler.drain(sampler.capacity)


def service(system: System, clients: Sequence[int], seconds: float) -> dict[str, Load]:
    """Every number of clients, both ways of serving, sampling off and on."""
    ranking, queries = stub_ranking(), system.queries
    retrievers: dict[str, AnyRetriever] = {
        "stub": lambda query, depth: ranking,  # noqa: ARG005
        "embedded": system.retriever(),
    }
    loads: dict[str, Load] = {}
    for name, retriever in retrievers.items():
        for n in clients:
            for sampled in (False, True):
                sampler = Sampler(SAMPLING_RATE) if sampled else None
                guard, _ = guarded(retriever, sampler=sampler)
                case = f"{name}, {n} clients, sampling {'5%' if sampled else 'off'}"
                with Draining(sampler):
                    loads[f"{case}, threads"] = in_threads(guard.retrieve, queries, n, seconds)
                    loads[f"{case}, asyncio"] = in_a_loop(guard.aretrieve, queries, n, seconds)
    return loads


@dataclass(frozen=True)
class Fault:
    """A stage that is lost, beside the route that is left.

    Attributes:
        faulty: With the fault.
        healthy_rate: Answers a second of the route that is left; None for a wrapped retriever,
            beside which nothing is left.
        past_deadline: Milliseconds by which the 99th percentile passes the deadline; negative
            where hardly a request waits for it.
    """

    faulty: Load
    healthy_rate: float | None
    past_deadline: float

    @property
    def share(self) -> float | None:
        """The faulty one's answers a second, errors left out, as a share of the healthy route's."""
        healthy = self.healthy_rate
        return None if healthy is None else self.faulty.answered_rate / healthy


ROUTE_LEFT = {"dense": Route.LEXICAL, "lexical": Route.DENSE, "rerank": Route.HYBRID}


def faults(system: System, clients: Sequence[int], seconds: float) -> dict[str, Fault]:
    """Every stage dead, hung, and hanging at every fourth call."""
    limits = Deadlines(
        total_seconds=DEADLINE_SECONDS,
        lexical_seconds=DEADLINE_SECONDS / 2.0,
        dense_seconds=DEADLINE_SECONDS / 2.0,
    )
    found: dict[str, Fault] = {}
    for stage, route in ROUTE_LEFT.items():
        for n in clients:
            for fault in FAULTS:
                healthy, _ = guarded(system.retriever(deadlines=limits).on_route(route))
                whole, _ = guarded(system.retriever(rerank=stage == "rerank", deadlines=limits))
                both = [whole.retrieve, healthy.retrieve]
                with faulty(system.faults[stage], fault):
                    lost, left = in_turns(both, system.queries, n, seconds, turns=TURNS)
                found[f"{stage} {fault}, {n} clients"] = Fault(
                    lost, left.answered_rate, past_deadline(lost)
                )
    for n in clients:
        for fault in (HUNG, FOURTH):
            found[f"wrapped retriever {fault}, {n} clients"] = wrapped_fault(fault, n, seconds)
    return found


def wrapped_fault(fault: str, clients: int, seconds: float) -> Fault:
    """A retriever of which the guard knows nothing, under the guard's own deadline."""
    ranking, part = stub_ranking(), doubles.Fault()

    def engine(query: str, depth: int) -> Ranking:  # noqa: ARG001
        answer: Ranking = part.run(lambda: ranking)
        return answer

    guard, _ = guarded(engine, limits=RequestLimits(DEADLINE_SECONDS))
    with faulty(part, fault):
        load = in_threads(guard.retrieve, ["a query"], clients, seconds)
    return Fault(load, None, past_deadline(load))


def past_deadline(load: Load) -> float:
    """Milliseconds by which the 99th percentile passes the deadline."""
    return load.p99 - 1e3 * DEADLINE_SECONDS


@dataclass(frozen=True)
class Bar:
    """A promise, what was measured, and the limit."""

    promise: str
    measured: float
    limit: float
    at_most: bool = True

    @property
    def missed(self) -> bool:
        """Whether it is on the wrong side of its limit."""
        return self.measured > self.limit if self.at_most else self.measured < self.limit


BARS = ("deadline", "throughput", "burst")


def bars(found: dict[str, Fault], outcomes: dict[str, Outcome]) -> dict[str, Bar]:
    """Every bar by its name; the worst case counts."""
    shares = [fault.share for name, fault in found.items() if FOURTH not in name]
    return {
        "deadline": Bar(
            "ms past the deadline at p99, a stage dead or hung, always or at every fourth call",
            max(fault.past_deadline for fault in found.values()),
            20.0,
        ),
        "throughput": Bar(
            "throughput with a stage dead or hung, to that of the route that is left",
            min(share for share in shares if share is not None),
            0.8,
            at_most=False,
        ),
        "burst": Bar(
            "bursts whose requests were not all answered or refused and counted exactly",
            float(sum(not outcome.exact for outcome in outcomes.values())),
            0.0,
        ),
    }


def load_table(title: str, loads: dict[str, Load]) -> Table:
    """What clients saw, for people."""
    table = Table(title=title, title_justify="left")
    table.add_column("case", no_wrap=True)
    for column in ("requests/s", "p50 ms", "p99 ms", "slowest ms"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("ended with")
    for name, load in loads.items():
        table.add_row(name, *_figures(load), _in_words(load.ends))
    return table


def fault_table(found: dict[str, Fault]) -> Table:
    """What a lost stage does, for people."""
    table = Table(title="faults", title_justify="left")
    table.add_column("case", no_wrap=True)
    for column in ("requests/s", "p50 ms", "p99 ms", "slowest ms", "of healthy", "p99 - deadline"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, fault in found.items():
        past = f"{fault.past_deadline:+.1f}"
        share = "" if fault.share is None else f"{fault.share:.2f}"
        table.add_row(name, *_figures(fault.faulty), share, past)
    return table


def burst_table(n: int, outcomes: dict[str, Outcome]) -> Table:
    """What bursts came to, for people."""
    table = Table(title=f"burst of {n:,}", title_justify="left")
    table.add_column("case", no_wrap=True)
    for column in ("requests/s", "p50 ms", "p99 ms", "slowest ms", "grown MiB", "exact"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("ended with")
    for name, outcome in outcomes.items():
        load = outcome.burst.load
        table.add_row(
            name,
            *_figures(load),
            f"{outcome.burst.grown_mebibytes:.0f}",
            "yes" if outcome.exact else "NO",
            _in_words(load.ends),
        )
    return table


def _figures(load: Load) -> tuple[str, ...]:
    return f"{load.rate:,.0f}", f"{load.p50:.2f}", f"{load.p99:.2f}", f"{load.slowest:.1f}"


def _in_words(ends: Mapping[str, int]) -> str:
    return ", ".join([f"{name} {n:,}" for name, n in sorted(ends.items())])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status is 1 where a bar that was checked is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.load", description=SUMMARY)
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS), metavar="N")
    parser.add_argument(
        "--fault-clients", type=int, nargs="+", default=[4, 16], metavar="N", help="(4 16)"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="of a case (default 3)")
    parser.add_argument("--burst", type=int, default=BURST, help="requests (default 10,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument(
        "--check",
        nargs="*",
        choices=BARS,
        metavar="BAR",
        help=f"exit with 1 where a bar is missed: all, or some of {', '.join(BARS)}",
    )
    options = parser.parse_args(arguments)
    if min(*options.clients, *options.fault_clients, options.burst) < 1 or options.seconds <= 0.0:
        parser.error("--clients, --fault-clients, --burst and --seconds must be positive")
    console = Console(width=144, highlight=False)
    about = environment(PACKAGES, threads=max(options.clients))
    console.print_json(data=about)
    outcomes = bursts(options.burst)
    console.print(burst_table(options.burst, outcomes))
    system = System(options.seed)
    found = faults(system, options.fault_clients, options.seconds)
    console.print(fault_table(found))
    loads = service(system, options.clients, options.seconds)
    console.print(load_table("service", loads))
    measured = bars(found, outcomes)
    for name, bar in measured.items():
        verdict = "MISSED" if bar.missed else "met"
        bound = "at most" if bar.at_most else "at least"
        console.print(
            f"{verdict:<7}{name}: {bar.promise}: {bar.measured:.3g}, {bound} {bar.limit:g}"
        )
    if options.json is not None:
        report = {
            "environment": about,
            "seconds": options.seconds,
            "deadline_seconds": DEADLINE_SECONDS,
            "burst": {name: asdict(outcome) for name, outcome in outcomes.items()},
            "faults": {
                name: asdict(fault) | {"share": fault.share} for name, fault in found.items()
            },
            "service": {name: asdict(load) for name, load in loads.items()},
            "bars": {name: asdict(bar) | {"missed": bar.missed} for name, bar in measured.items()},
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    checked = () if options.check is None else options.check or BARS
    return 1 if any(measured[name].missed for name in checked) else 0


if __name__ == "__main__":
    sys.exit(main())
