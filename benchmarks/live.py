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
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks._live_runs import SQLITE, Database, Run, postgresql_database
from benchmarks._live_scenarios import POSTGRESQL, SCENARIOS, Scenario
from benchmarks._live_service import Figure
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.estimation.terms import Metric

SUMMARY = "Simulate services whose truth is known, and check the intervals that they publish."
COVERAGE_BAR = (0.92, 0.98)
"""Of metrics that labels of what was served tell of."""
LEAST_COVERAGE_BAR = 0.90
"""Of the others."""
MAIN_METRICS = (Metric.PRECISION, Metric.MRR, Metric.UDCG, Metric.GAIN, Metric.HARM)
_NAMES = {Metric.PRECISION: "P@5"}
_WINDOWS = {Window.RECENT: "recent", Window.ALL_RETAINED: "all", Window.UP_TO_LABELS: "labels"}
_LEAST_SHOWN = 20
"""With fewer intervals nothing is said of their coverage."""


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


def summary(scenario: Scenario, database: Database, cells: Sequence[Cell]) -> dict[str, Any]:
    """The coverage of a scenario's figures as ranges in words, for the page that quotes them."""
    parts: dict[str, Callable[[Cell], bool]] = {
        "main": lambda cell: cell.window is not Window.RECENT and cell.metric in MAIN_METRICS,
        "recent": lambda cell: cell.window is Window.RECENT and cell.metric in MAIN_METRICS,
        "others": lambda cell: cell.metric not in MAIN_METRICS,
    }
    return {
        "database": database.name,
        "scenario": scenario.name,
        "judge": "{:g} / {:g}".format(*scenario.judge),
        **{
            name: _range([cell.coverage for cell in cells if belongs(cell)])
            for name, belongs in parts.items()
        },
        "missed": sum(not cell.is_met for cell in cells),
    }


def _range(shares: Iterable[float | None]) -> str:
    """
    >>> _range([0.931, None, 0.95]), _range([None])
    ('93% to 95%', '–')
    """
    shown = [share for share in shares if share is not None]
    return f"{min(shown):.0%} to {max(shown):.0%}" if shown else "–"


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
    parser.add_argument(
        "--quick", action="store_true", help="20 runs of 2 traffics, none on PostgreSQL"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", default=[""], help="scenarios whose name has a TEXT"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    repeats, most_labellings, on_server = (
        (20, 10, 0) if options.quick else (options.repeats, options.labellings, options.postgresql)
    )
    if min(repeats, most_labellings) < 1:
        parser.error("at least 1 repeat and 1 labelling are needed")
    chosen = [one for one in SCENARIOS if any(text in one.name for text in options.only)]
    if not chosen:
        parser.error(f"no scenario's name has {' or '.join(map(repr, options.only))}")
    console = Console(width=80, highlight=False)
    cells, summaries = list[Cell](), list[dict[str, Any]]()

    def run(scenario: Scenario, database: Database, seeds: Sequence[int], labellings: int) -> None:
        own = run_and_show(console, scenario, database, seeds, labellings)
        cells.extend(own)
        summaries.append(summary(scenario, database, own))

    start = time.perf_counter()
    for scenario in chosen:
        labellings = most_labellings if scenario.can_label_anew else 1
        seeds = range(options.seed, options.seed + math.ceil(repeats / labellings))
        run(scenario, SQLITE, seeds, labellings)
    if on_server:
        with postgresql_database() as database:
            seeds = range(options.seed, options.seed + on_server)
            for scenario in chosen:
                if scenario.name in POSTGRESQL:
                    run(scenario, database, seeds, 1)
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
            "scenarios": summaries,
            "cells": [
                {
                    key: round(value, 4) if isinstance(value, float) else value
                    for key, value in cell.to_dict().items()
                }
                for cell in cells
            ],
        }
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    # What fails in an outage, fails on purpose. Set here, because tests call main().
    logging.getLogger("ctxguard").setLevel(logging.ERROR)
    sys.exit(main())
