"""Live numbers through the store: do the figures that a monitor exports cover the truth?

    export OMP_NUM_THREADS=1
    python -m benchmarks.live --repeats 20 --postgresql 0    # a look
    python -m benchmarks.live --json benchmarks/results/live.json
    python -m benchmarks.live --only refusals --json benchmarks/results/live.json    # one anew

Each run simulates a service over days: requests of known quality are sampled, written to a store,
judged by a judge that errs, labelled by people now and then, and the exporter is scraped. Every run
has traffic of its own. The share of the intervals that hold the truth over all requests, sampled
or not, is then compared with what they claim: no figure may refute 95% (a one-sided binomial test
at 1%, after Holm's correction for all figures), and all figures together cover 94% to 97%.
"""

import argparse
import gc
import json
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table
from scipy.stats import binom

from benchmarks._live_runs import SQLITE, Database, Run, postgresql_database
from benchmarks._live_scenarios import POSTGRESQL, SCENARIOS, Scenario
from benchmarks._live_service import Figure
from ctxguard.measure.metrics import Metric
from ctxguard.monitor.estimation.live import Window

SUMMARY = "Simulate services whose truth is known, and check the intervals that they publish."
CLAIMED = 0.95
LEVEL = 0.01
POOLED_BAR = (0.94, 0.97)
MAIN_METRICS = (Metric.PRECISION, Metric.SERVED_MRR, Metric.UDCG, Metric.GAIN, Metric.HARM)
_NAMES = {Metric.PRECISION: "P@5"}
_WINDOWS = {Window.RECENT: "recent", Window.ALL_RETAINED: "all", Window.UP_TO_LABELS: "labels"}
_RUNS_UNTIL_COLLECTED = 20
_LEAST_SHOWN = 20
"""With fewer intervals nothing is said of their coverage."""


@dataclass
class Cell:
    """One figure at one look, over all runs.

    Attributes:
        database: Of the stores.
        scenario: By name.
        step: After which.
        labels: Passages that people were asked to grade by then.
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
    def covered(self) -> int:
        """How many of the shown intervals hold the truth."""
        return sum(figure.holds(truth) for _, figure, truth in self.shown)

    @property
    def coverage(self) -> float | None:
        """The share of these; None where too few were shown."""
        return self.covered / len(self.shown) if len(self.shown) >= _LEAST_SHOWN else None

    def to_dict(self) -> dict[str, Any]:
        shown = [figure for _, figure, _ in self.shown]
        return {
            "step": self.step,
            "labels": self.labels,
            "window": self.window.value,
            "metric": self.metric.value,
            "runs": len(self.truths),
            "truth": _rounded(fmean(self.truths)),
            "shown": len(shown),
            "covered": self.covered,
            "p": float(f"{binom.cdf(self.covered, len(shown), CLAIMED):.2g}") if shown else 1.0,
            "bias": _rounded(fmean(one.value - truth for _, one, truth in self.shown))
            if shown
            else None,
            "width": _rounded(median(one.upper - one.lower for one in shown)) if shown else None,
            "effective_labels": _rounded(fmean(one.effective for one in shown)) if shown else None,
        }


def _rounded(value: float) -> float:
    return round(value, 4)


def simulate(
    scenario: Scenario, database: Database, seeds: Iterable[int], labellings: int = 1
) -> list[Cell]:
    """Run a scenario, once for each seed, with labels drawn as often from each."""
    cells: dict[tuple[int, int, Window, Metric], Cell] = {}
    for number, seed in enumerate(seeds):
        if number % _RUNS_UNTIL_COLLECTED == 0:
            gc.collect()
        with database.stores() as urls:
            for look in Run(scenario, urls, seed).looks(labellings):
                for key, truth in look.truths.items():
                    place = look.step, look.labels, *key
                    if place not in cells:
                        cells[place] = Cell(database.name, scenario.name, *place)
                    cells[place].add(seed, look.figures.get(key), truth)
    return list(cells.values())


def cell_table(cells: Sequence[Cell], *, title: str) -> Table:
    """The cells of one look as a person reads them."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1))
    for name in ("window", "metric"):
        table.add_column(name, no_wrap=True)
    for name in ("truth", "shown", "covers, %", "p", "bias", "width", "labels"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        one = cell.to_dict()
        n = one["shown"]
        table.add_row(
            _WINDOWS[cell.window],
            _NAMES.get(cell.metric, cell.metric.value),
            f"{one['truth']:.3f}",
            f"{n / one['runs']:.0%}",
            f"{100 * one['covered'] / n:.1f}" if n else "",
            f"{one['p']:.0e}" if one["p"] < LEVEL else "",
            f"{one['bias']:+.3f}" if n else "",
            f"{one['width']:.3f}" if n else "",
            f"{one['effective_labels']:.0f}" if n else "",
        )
    return table


def summary(scenario: Scenario, database: Database, cells: Sequence[Cell]) -> dict[str, Any]:
    """One scenario's results."""
    sensitivity, specificity, *_ = scenario.judge
    return {
        "database": database.name,
        "scenario": scenario.name,
        "judge": f"{sensitivity:g} / {specificity:g}",
        "runs": max(len(cell.truths) for cell in cells),
        "figures": [cell.to_dict() for cell in cells],
    }


_Figures = list[dict[str, Any]]

_PARTS: tuple[Callable[[dict[str, Any]], bool], ...] = (
    lambda one: one["metric"] in MAIN_METRICS and one["window"] != Window.RECENT,
    lambda one: one["metric"] in MAIN_METRICS and one["window"] == Window.RECENT,
    lambda one: one["metric"] not in MAIN_METRICS,
)
"""The columns of the page: figures of labelled and of all retained requests, of recent ones, and
other metrics."""


def _row(one: dict[str, Any]) -> str:
    """One scenario as a row of the page."""
    name = one["scenario"] + (", PostgreSQL" if one["database"] == "postgresql" else "")
    parts = [
        _pooled([figure for figure in one["figures"] if belongs(figure)]) for belongs in _PARTS
    ]
    return f"| {' | '.join([name, one['judge'], str(one['runs']), *parts])} |"


def _pooled(figures: _Figures) -> str:
    """The coverage of some figures together, and the lowest of one.

    >>> _pooled([{"covered": 19, "shown": 20}, {"covered": 20, "shown": 20}])
    '97.5% (95.0%)'
    """
    shown = [one for one in figures if one["shown"] >= _LEAST_SHOWN]
    if not shown:
        return "–"
    pooled = sum(one["covered"] for one in shown) / sum(one["shown"] for one in shown)
    return f"{pooled:.1%} ({min(one['covered'] / one['shown'] for one in shown):.1%})"


def refuted(scenarios: Iterable[dict[str, Any]]) -> list[str]:
    """The figures that refute what they claim, after Holm's correction for all of them."""
    found = [
        (figure["p"], f"{one['scenario']} ({one['database']})", figure)
        for one in scenarios
        for figure in one["figures"]
        if figure["shown"]
    ]
    names = []
    for place, (p, name, figure) in enumerate(sorted(found, key=lambda one: one[0])):
        if p * (len(found) - place) > LEVEL:
            break
        names.append(
            f"{name}: {figure['window']} {figure['metric']}, step {figure['step']}, "
            f"{figure['covered']} of {figure['shown']}"
        )
    return names


def totals(scenarios: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all figures of all scenarios say together."""
    figures = [figure for one in scenarios for figure in one["figures"] if figure["shown"]]
    pooled = defaultdict[str, list[int]](lambda: [0, 0])
    for figure in figures:
        for key in ("all", figure["metric"]):
            pooled[key][0] += figure["covered"]
            pooled[key][1] += figure["shown"]
    names = refuted(scenarios)
    return {
        "scenarios_run": len({one["scenario"] for one in scenarios}),
        "scenarios_known": len(SCENARIOS),
        "figures": len(figures),
        "refuted": len(names),
        "refuted_figures": names,
        "pooled": {key: round(covered / n, 4) for key, (covered, n) in sorted(pooled.items())},
        "rows": "\n".join(map(_row, scenarios)),
    }


def run_and_show(
    console: Console,
    scenario: Scenario,
    database: Database,
    seeds: Sequence[int],
) -> dict[str, Any]:
    """Run one scenario, and print every look."""
    start = time.process_time()
    cells = simulate(scenario, database, seeds)
    sensitivity, specificity, *_ = scenario.judge
    console.print(
        f"{scenario.name}, judge {sensitivity:g}/{specificity:g}, {database.name}: "
        f"{len(seeds)} runs in {time.process_time() - start:.0f} s"
    )
    for (step, labels), of_look in groupby(cells, lambda cell: (cell.step, cell.labels)):
        title = f"{labels} grades, after step {step} of {scenario.steps}"
        console.print(cell_table(list(of_look), title=title))
    console.print()
    return summary(scenario, database, cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation; the exit status is 1 where a figure refutes what it claims."""
    parser = argparse.ArgumentParser(prog="benchmarks.live", description=SUMMARY)
    parser.add_argument("--repeats", type=int, default=200, help="runs of each scenario")
    parser.add_argument(
        "--postgresql", type=int, default=50, metavar="N", help="runs on PostgreSQL; 0 for none"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", default=[""], help="scenarios whose name has a TEXT"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results here too, beside its others"
    )
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error("at least 1 repeat is needed")
    chosen = [one for one in SCENARIOS if any(text in one.name for text in options.only)]
    if not chosen:
        parser.error(f"no scenario's name has {' or '.join(map(repr, options.only))}")
    console = Console(width=80, highlight=False)
    results = _earlier(options.json)

    def run(scenario: Scenario, database: Database, n: int) -> None:
        own = run_and_show(console, scenario, database, range(options.seed, options.seed + n))
        results[database.name, scenario.name] = own
        if options.json is not None:
            _write(options.json, options, results)

    for scenario in chosen:
        run(scenario, SQLITE, options.repeats)
    on_server = [one for one in chosen if options.postgresql and one.name in POSTGRESQL]
    if on_server:
        with postgresql_database() as database:
            for scenario in on_server:
                run(scenario, database, options.postgresql)
    total = totals(list(results.values()))
    for name in total["refuted_figures"]:
        console.print(f"refuted: {name}")
    pooled, (low, high) = total["pooled"].get("all", CLAIMED), POOLED_BAR
    console.print(
        f"{total['refuted']} of {total['figures']} figures refute {CLAIMED:.0%}; together they "
        f"cover {pooled:.1%}"
    )
    return 1 if total["refuted"] or not low <= pooled <= high else 0


_Results = dict[tuple[str, str], dict[str, Any]]


def _earlier(file: Path | None) -> _Results:
    """The results of scenarios that are not run now, by database and name."""
    if file is None or not file.is_file():
        return {}
    known = {one.name for one in SCENARIOS}
    scenarios = json.loads(file.read_text(encoding="utf-8")).get("scenarios", [])
    return {
        (one["database"], one["scenario"]): one
        for one in scenarios
        if one["scenario"] in known and "figures" in one
    }


def _write(file: Path, options: argparse.Namespace, results: _Results) -> None:
    order = [(database, one.name) for database in ("sqlite", "postgresql") for one in SCENARIOS]
    scenarios = [results[key] for key in order if key in results]
    document = {
        "repeats": options.repeats,
        "postgresql": options.postgresql,
        "seed": options.seed,
        **totals(scenarios),
        "scenarios": scenarios,
    }
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    # What fails in an outage, fails on purpose. Set here, because tests call main().
    logging.getLogger("ctxguard").setLevel(logging.ERROR)
    # A tenth of the time otherwise.
    gc.disable()
    sys.exit(main())
