"""Live numbers through the store: do the figures that a monitor exports cover the truth?

    python -m benchmarks.live --quick    # a few minutes
    python -m benchmarks.live --json benchmarks/results/live.json

Each run simulates a service over days: requests of known quality are sampled, written to a store,
judged by a judge that errs, labelled by people now and then, and the exporter is scraped. The share
of the intervals that hold the truth over all requests is then compared with what they claim.
"""

import argparse
import json
import logging
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from itertools import count, groupby, pairwise
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._live_scenarios import POSTGRESQL, SCENARIOS, Scenario
from benchmarks._live_service import START, Figure, Service, check_together, figures, label_some
from benchmarks._live_traffic import SimulatedJudge, draw_traffic
from benchmarks.store import postgresql
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.estimation.terms import Metric
from ctxguard.monitor.store import Limits

SUMMARY = "Simulate services whose truth is known, and check the intervals that they publish."
COVERAGE_BAR = (0.92, 0.98)
"""Of metrics that labels of what was served tell of."""
LEAST_COVERAGE_BAR = 0.90
"""Of the others."""
MAIN_METRICS = (Metric.PRECISION, Metric.MRR, Metric.UDCG, Metric.GAIN, Metric.HARM)
_NAMES = {
    Metric.PRECISION: "P@5",
    Metric.DISTRACTOR_RATE: "distractors",
    Metric.RECALL_PER_REQUEST: "own recall",
}
_WINDOWS = {Window.RECENT: "recent", Window.ALL_RETAINED: "all", Window.UP_TO_LABELS: "labels"}
_LEAST_SHOWN = 20
"""With fewer intervals nothing is said of their coverage."""
MOST_SECONDS = Limits().max_age_seconds or math.inf
"""How long a store retains samples."""


@dataclass
class Cell:
    """One figure at one look, over all runs.

    Attributes:
        database: Of the stores.
        scenario: By name.
        step: After which.
        labels: Requests that people had labelled by then.
        truths: Of each run.
        shown: The runs that showed a figure: the traffic's seed, the figure, the truth.
    """

    database: str
    scenario: str
    step: int
    labels: int
    window: Window
    metric: Metric
    truths: list[float] = field(default_factory=list)
    shown: list[tuple[int, Figure, float]] = field(default_factory=list)

    def add(self, seed: int, figure: Figure | None, truth: float) -> None:
        self.truths.append(truth)
        if figure is not None:
            self.shown.append((seed, figure, truth))

    @property
    def coverage(self) -> float | None:
        """Share of the shown intervals that hold the truth; None where too few were shown."""
        if len(self.shown) < _LEAST_SHOWN:
            return None
        return fmean(figure.holds(truth) for _, figure, truth in self.shown)

    @property
    def error(self) -> float:
        """Standard error of the coverage.

        That of a coverage of 95%, or what the differences between traffics give where it is
        larger: several labellings of one traffic are not independent.
        """
        if not self.shown:
            return 1.0
        n, coverage = len(self.shown), self.coverage or 0.0
        off = defaultdict[int, float](float)
        for seed, figure, truth in self.shown:
            off[seed] += figure.holds(truth) - coverage
        between = math.sqrt(sum(one**2 for one in off.values())) / n
        return max(math.sqrt(0.05 * 0.95 / n), between)

    @property
    def bar(self) -> tuple[float, float]:
        """The least and the highest coverage that is asked for."""
        is_main = self.metric in MAIN_METRICS and self.window is not Window.RECENT
        return COVERAGE_BAR if is_main else (LEAST_COVERAGE_BAR, 1.0)

    @property
    def is_met(self) -> bool:
        """Whether the coverage is within its bar, but for the simulation's own error."""
        low, high = self.bar
        coverage = self.coverage
        return coverage is None or low - 2 * self.error <= coverage <= high + 2 * self.error

    def to_dict(self) -> dict[str, Any]:
        shown = [figure for _, figure, _ in self.shown]
        return {
            "database": self.database,
            "scenario": self.scenario,
            "step": self.step,
            "labels": self.labels,
            "window": self.window.value,
            "metric": self.metric.value,
            "runs": len(self.truths),
            "truth": fmean(self.truths),
            "shown": len(shown) / len(self.truths),
            "coverage": self.coverage,
            "coverage_error": self.error,
            "bias": fmean(one.value - truth for _, one, truth in self.shown) if shown else None,
            "spread": pstdev(one.value - truth for _, one, truth in self.shown) if shown else None,
            "width": median(one.upper - one.lower for one in shown) if shown else None,
            "effective_labels": fmean(one.effective for one in shown) if shown else None,
            "borrowed": fmean(one.is_borrowed for one in shown) if shown else None,
            "met": self.is_met,
        }


class Look(NamedTuple):
    """What is scraped at one moment.

    Attributes:
        step: After which.
        labels: Requests that people were asked to label by then.
        figures: What is shown, by window and metric.
        truths: Every metric over all traffic of each window.
    """

    step: int
    labels: int
    figures: Mapping[tuple[Window, Metric], Figure]
    truths: Mapping[tuple[Window, Metric], float]


class Run:
    """Services of one scenario that answer the same traffic.

    Args:
        scenario: What is simulated.
        urls: Of empty stores.
        seed: Of all random choices.
    """

    def __init__(self, scenario: Scenario, urls: Iterator[str], seed: int) -> None:
        self.scenario = scenario
        rng = np.random.default_rng([seed, 1])
        self.traffic = draw_traffic(scenario.shape, rng)
        self._judge = SimulatedJudge(self.traffic, *scenario.judge, rng)
        self._urls = urls
        self._seed = f"run {seed}"
        parts = np.linspace(0.0, scenario.shape.seconds, scenario.steps + 1).tolist()
        self._parts = list(enumerate(pairwise(parts), start=1))

    def looks(self, labellings: int) -> Iterator[Look]:
        """What is seen, in the order of time.

        Args:
            labellings: How often the labels are drawn from what one service judged; with 1 the
                service goes through all of it itself.
        """
        with closing(self._service()) as service:
            if labellings == 1:
                for step, (_, until) in self._parts:
                    self._answer(service, step, until)
                    yield from self._after(service, step)
                return
            for step, (_, until) in self._parts:
                self._answer(service, step, until)
            for labelling in range(labellings):
                with closing(self._service()) as other:
                    for step, (since, until) in self._parts:
                        other.take_over(service, since, until, f"{self._seed}, {labelling}")
                        yield from self._after(other, step)

    def _service(self) -> Service:
        url = next(self._urls)
        return Service(url, self.traffic, self._judge, self.scenario.setting, self._seed)

    def _answer(self, service: Service, step: int, until: float) -> None:
        """Answer, store and judge the requests of a step, as far as nothing is down."""
        service.serve(until)
        if step in self.scenario.locked:
            service.write_while_locked()
        service.write()
        self._judge.down = step in self.scenario.down
        service.judge_waiting()

    def _after(self, service: Service, step: int) -> Iterator[Look]:
        """What monitors and people do after a step."""
        scenario = self.scenario
        if scenario.shape.seconds > MOST_SECONDS:
            service.maintain()
        for pick in scenario.picks:
            if pick.step == step:
                label_some(service, pick)
                if scenario.look_after_each_pick:
                    yield self._look(service, step)
        is_last = step == scenario.steps and not scenario.look_after_each_pick
        if is_last or step in scenario.looks:
            yield self._look(service, step)

    def _look(self, service: Service, step: int) -> Look:
        service.maintain()
        if len(service.monitors) > 1:
            check_together(service)
        scraped = figures(service.scrape())
        until = service.now - START
        spans = {
            Window.RECENT: (until - self.scenario.setting.window_seconds, until),
            Window.ALL_RETAINED: (until - MOST_SECONDS, until),
        }
        if service.picked_until is not None and service.picked_until > until - MOST_SECONDS:
            spans[Window.UP_TO_LABELS] = until - MOST_SECONDS, service.picked_until
        truths = {
            (window, metric): truth
            for window, span in spans.items()
            for metric, truth in self.traffic.truths(*span).items()
        }
        return Look(step, service.labelled, scraped, truths)


class Database(NamedTuple):
    """Where stores are kept.

    Attributes:
        name: In the tables.
        stores: Opens the URLs of empty stores, which are deleted in the end.
    """

    name: str
    stores: Callable[[], AbstractContextManager[Iterator[str]]]


def simulate(
    scenario: Scenario, database: Database, seeds: Iterable[int], labellings: int
) -> list[Cell]:
    """Run a scenario, once for each seed, with labels drawn several times from each."""
    cells: dict[tuple[int, int, Window, Metric], Cell] = {}
    for seed in seeds:
        with database.stores() as urls:
            for look in Run(scenario, urls, seed).looks(labellings):
                for key, truth in look.truths.items():
                    place = look.step, look.labels, *key
                    if place not in cells:
                        cells[place] = Cell(database.name, scenario.name, *place)
                    cells[place].add(seed, look.figures.get(key), truth)
    return list(cells.values())


@contextmanager
def sqlite_stores() -> Iterator[Iterator[str]]:
    """Empty SQLite files, in memory where this machine has a folder for that."""
    memory = Path("/dev/shm")  # noqa: S108 - a new folder in it
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield (f"sqlite:///{Path(folder) / f'{number}.db'}" for number in count())


SQLITE = Database("sqlite", sqlite_stores)


@contextmanager
def postgresql_database() -> Iterator[Database]:
    """A PostgreSQL server that ends with the block."""
    import psycopg

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # A server that runs as another user must reach its folder.
        folder.chmod(0o755)
        with postgresql(folder) as url, psycopg.connect(url, autocommit=True) as connection:
            # It need not outlive a crash of this machine.
            connection.execute("ALTER SYSTEM SET fsync = off")
            connection.execute("SELECT pg_reload_conf()")

            @contextmanager
            def stores() -> Iterator[Iterator[str]]:
                connection.execute("DROP SCHEMA IF EXISTS live CASCADE")
                connection.execute("CREATE SCHEMA live")
                yield iter([f"{url}&options=-csearch_path%3Dlive"])

            yield Database("postgresql", stores)


def cell_table(cells: Sequence[Cell], *, title: str) -> Table:
    """The cells of one look as a person reads them; a star where an estimate is borrowed."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1))
    for name in ("window", "metric"):
        table.add_column(name, no_wrap=True)
    for name in ("truth", "shown", "covers, %", "bias", "width", "labels", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        one = cell.to_dict()
        covers, borrowed = one["coverage"], "*" if one["borrowed"] else ""
        table.add_row(
            _WINDOWS[cell.window],
            _NAMES.get(cell.metric, cell.metric.value),
            f"{one['truth']:.3f}",
            f"{one['shown']:.0%}",
            "" if covers is None else f"{100 * covers:.1f} ± {100 * cell.error:.1f}",
            "" if one["bias"] is None else f"{one['bias']:+.3f}",
            "" if one["width"] is None else f"{one['width']:.3f}",
            "" if one["effective_labels"] is None else f"{one['effective_labels']:.0f}{borrowed}",
            "" if cell.is_met else "MISSED",
        )
    return table


def run_and_show(
    console: Console, scenario: Scenario, database: Database, seeds: Sequence[int], labellings: int
) -> list[Cell]:
    """Run one scenario, and print every look."""
    start = time.perf_counter()
    cells = simulate(scenario, database, seeds, labellings)
    sensitivity, specificity = scenario.judge
    console.print(
        f"{scenario.name}, judge {sensitivity:g}/{specificity:g}, {database.name}: "
        f"{len(seeds) * labellings} runs in {time.perf_counter() - start:.0f} s"
    )
    for (step, labels), of_look in groupby(cells, lambda cell: (cell.step, cell.labels)):
        title = f"{labels} labels, after step {step} of {scenario.steps}"
        console.print(cell_table(list(of_look), title=title))
    console.print()
    return cells


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation; the exit status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.live", description=SUMMARY)
    parser.add_argument("--repeats", type=int, default=200, help="runs of each scenario")
    parser.add_argument(
        "--labellings",
        type=int,
        default=4,
        metavar="N",
        help="how many of them draw other labels from the same traffic, where that is all the same",
    )
    parser.add_argument(
        "--postgresql", type=int, default=24, metavar="N", help="runs on PostgreSQL; 0 for none"
    )
    parser.add_argument("--quick", action="store_true", help="24 runs, none on PostgreSQL")
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", default=[""], help="scenarios whose name has a TEXT"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    repeats, on_server = (24, 0) if options.quick else (options.repeats, options.postgresql)
    if min(repeats, options.labellings) < 1:
        parser.error("at least 1 repeat and 1 labelling are needed")
    chosen = [one for one in SCENARIOS if any(text in one.name for text in options.only)]
    if not chosen:
        parser.error(f"no scenario's name has {' or '.join(map(repr, options.only))}")
    console = Console(width=80, highlight=False)
    # What fails in an outage, fails on purpose.
    logging.getLogger("ctxguard").setLevel(logging.ERROR)
    cells = []
    start = time.perf_counter()
    for scenario in chosen:
        labellings = options.labellings if scenario.can_label_anew else 1
        seeds = range(options.seed, options.seed + math.ceil(repeats / labellings))
        cells += run_and_show(console, scenario, SQLITE, seeds, labellings)
    if on_server:
        with postgresql_database() as database:
            seeds = range(options.seed, options.seed + on_server)
            for scenario in chosen:
                if scenario.name in POSTGRESQL:
                    cells += run_and_show(console, scenario, database, seeds, 1)
    seconds = time.perf_counter() - start
    missed = [cell for cell in cells if not cell.is_met]
    for cell in missed:
        console.print(
            f"missed: {cell.scenario}, {cell.labels} labels, step {cell.step}, {cell.window.value} "
            f"{cell.metric.value}: {cell.coverage:.1%} of {len(cell.shown)}"
        )
    console.print(f"{len(cells) - len(missed)} of {len(cells)} figures keep their bar")
    console.print(f"{seconds:.0f} s")
    if options.json is not None:
        results = {
            "repeats": repeats,
            "postgresql": on_server,
            "seed": options.seed,
            "seconds": round(seconds, 1),
            "figures": len(cells),
            "kept": len(cells) - len(missed),
            "cells": [cell.to_dict() for cell in cells],
        }
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
