"""Live numbers through the store: do the figures that a monitor exports cover the truth?

    python -m benchmarks.live --quick    # a few minutes
    python -m benchmarks.live --json benchmarks/results/live.json

Each run simulates a service over days: requests of known quality are sampled, written to a store,
judged by a judge that errs, labelled by people now and then, and the exporter is scraped. The share
of the intervals that hold the truth over all requests is then compared with what they claim.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, groupby, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._live_service import START, Figure, Service, Setting, figures, label_some
from benchmarks._live_traffic import DAY_SECONDS, Shape, SimulatedJudge, draw_traffic
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.estimation.terms import Metric
from ctxguard.monitor.judging.budget import BudgetLimits
from ctxguard.monitor.store import LabelDepth, Limits

SUMMARY = "Simulate services whose truth is known, and check the intervals that they publish."
COVERAGE_BAR = (0.92, 0.98)
"""Of metrics that labels of what was served tell of."""
LEAST_COVERAGE_BAR = 0.90
"""Of the others."""
MAIN_METRICS = (Metric.PRECISION, Metric.MRR, Metric.UDCG, Metric.GAIN, Metric.HARM)
_STEPS = 10
_LEAST_SHOWN = 20
"""With fewer intervals nothing is said of their coverage."""
MOST_SECONDS = Limits().max_age_seconds or math.inf
"""How long a store retains samples."""


@dataclass(frozen=True)
class Pick:
    """Some requests that people label after a step.

    Attributes:
        step: From 1.
        n: Requests.
        weighted: Whether they are picked by weight.
        depth: How much of each is graded.
    """

    step: int
    n: int
    weighted: bool = False
    depth: LabelDepth = LabelDepth.POOL


@dataclass(frozen=True)
class Scenario:
    """Some traffic, how it is monitored, and when people label and look.

    Attributes:
        name: In the tables.
        judge: Its sensitivity and specificity.
        shape: Of the traffic.
        setting: How it is monitored.
        picks: What people label, by step.
        looks: After which steps the figures are scraped; the last one always.
        look_after_each_pick: Whether they are scraped after each pick as well.
        down: Steps in which the judge is down.
        locked: Steps at whose end another process holds the store's lock.
        steps: In how many parts the traffic is served, judged and cleaned.
    """

    name: str
    judge: tuple[float, float] = (0.85, 0.90)
    shape: Shape = field(default_factory=Shape)
    setting: Setting = field(default_factory=Setting)
    picks: tuple[Pick, ...] = ()
    looks: tuple[int, ...] = ()
    look_after_each_pick: bool = False
    down: tuple[int, ...] = ()
    locked: tuple[int, ...] = ()
    steps: int = _STEPS

    @property
    def can_label_anew(self) -> bool:
        """Whether labels change nothing but the estimates, and nothing else is looked at."""
        return bool(self.picks) and not self.down and not self.locked and self.setting.monitors == 1


EXACT = (1.0, 1.0)
GOOD = (0.95, 0.98)
FALLING = Shape(precision=(0.8, 0.4))
UNEQUAL = Shape(n=20_000, seconds=2_000.0, precision=(0.75, 0.75), busy=6.0, busy_precision=0.4)
CAPPED = Setting(rate=0.5, max_per_second=1.2, window_seconds=400.0)
TWO_DAYS = ((1, 100), (10, 100))
MONTHS = replace(FALLING, seconds=60 * DAY_SECONDS, n=32_000)
WEEKLY = Setting(window_seconds=6 * DAY_SECONDS)

SCENARIOS = (
    Scenario("steady, exact judge", EXACT, looks=(3,)),
    Scenario("steady, good judge", GOOD, picks=(Pick(10, 150),)),
    Scenario("steady", picks=(Pick(10, 150),)),
    Scenario("steady, served only", picks=(Pick(10, 150, depth=LabelDepth.SERVED),)),
    Scenario("drift", shape=FALLING, picks=(Pick(4, 100), Pick(7, 100), Pick(10, 100)), looks=(9,)),
    Scenario("drift, exact judge", EXACT, shape=FALLING),
    Scenario("popular repeats", shape=Shape(popular=12), picks=(Pick(10, 150),)),
    Scenario("sessions", shape=Shape(session_length=5), picks=(Pick(10, 150),)),
    Scenario(
        "rate limit, few labels",
        shape=UNEQUAL,
        setting=CAPPED,
        picks=tuple(Pick(10, n) for n in (50, 50, 100, 200)),
        look_after_each_pick=True,
    ),
    Scenario(
        "rate limit and budget",
        GOOD,
        shape=UNEQUAL,
        setting=replace(CAPPED, budget=BudgetLimits(calls_per_hour=6_000)),
        picks=(Pick(10, 150),),
    ),
    Scenario("two days", shape=FALLING, picks=tuple(Pick(*day) for day in TWO_DAYS)),
    Scenario(
        "two days, weighted",
        shape=FALLING,
        picks=tuple(Pick(*day, weighted=True) for day in TWO_DAYS),
    ),
    Scenario(
        "two days, both ways",
        shape=FALLING,
        picks=(Pick(1, 100), Pick(10, 100, weighted=True)),
    ),
    Scenario(
        "retention",
        shape=MONTHS,
        setting=WEEKLY,
        picks=(Pick(3, 150), Pick(20, 150)),
        looks=(8, 15, 19),
        steps=20,
    ),
    Scenario("retention, exact judge", EXACT, MONTHS, WEEKLY, steps=20),
    Scenario(
        "outage",
        shape=FALLING,
        picks=(Pick(5, 100), Pick(10, 100)),
        looks=(7,),
        down=(7, 8),
        locked=(3, 9),
    ),
    Scenario(
        "audits",
        EXACT,
        shape=Shape(missed=1.0 / 6.0),
        setting=Setting(audit_probability=0.08),
        looks=(3,),
    ),
    Scenario("two monitors", setting=Setting(monitors=2), picks=(Pick(10, 150),)),
)


@dataclass
class Cell:
    """One figure at one look, over all runs.

    Attributes:
        labels: Requests that people had labelled by then.
        truths: Of each run.
        shown: The runs that showed a figure: the traffic's seed, the figure, the truth.
    """

    scenario: str
    step: int
    labels: int
    window: Window
    metric: Metric
    truths: list[float] = field(default_factory=list)
    shown: list[tuple[int, Figure, float]] = field(default_factory=list)

    def add(self, seed: int, figure: Figure, truth: float) -> None:
        self.truths.append(truth)
        if figure.value is not None:
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
        is_main = self.metric in MAIN_METRICS and self.window is Window.ALL_RETAINED
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
            "width": median(one.upper - one.lower for one in shown) if shown else None,
            "effective_labels": fmean(one.n for one in shown) if shown else None,
            "met": self.is_met,
        }


Look = tuple[int, int, dict[tuple[Window, Metric], tuple[Figure, float]]]
"""(step, labels so far, the figures with their truth)."""


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
            labellings: How often the labels are drawn from what one service judged.
        """
        with closing(self._service()) as service:
            if not self.scenario.can_label_anew:
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
                label_some(service, pick.n, weighted=pick.weighted, depth=pick.depth)
                if scenario.look_after_each_pick:
                    yield self._look(service, step)
        is_last = step == scenario.steps and not scenario.look_after_each_pick
        if is_last or step in scenario.looks:
            yield self._look(service, step)

    def _look(self, service: Service, step: int) -> Look:
        service.maintain()
        scraped = figures(service.scrape())
        until = service.now - START
        lengths = {
            Window.RECENT: self.scenario.setting.window_seconds,
            Window.ALL_RETAINED: MOST_SECONDS,
        }
        found = {
            (window, metric): (scraped[window, metric], truth)
            for window, length in lengths.items()
            for metric, truth in self.traffic.truths(until - length, until).items()
        }
        return step, service.labelled, found


Stores = Callable[[], AbstractContextManager[Iterator[str]]]
"""Opens the URLs of empty stores, which are deleted in the end."""


def simulate(
    scenario: Scenario, stores: Stores, seeds: Iterable[int], labellings: int
) -> list[Cell]:
    """Run a scenario, once for each seed, with labels drawn several times from each."""
    cells: dict[tuple[int, int, Window, Metric], Cell] = {}
    for seed in seeds:
        with stores() as urls:
            for step, labels, found in Run(scenario, urls, seed).looks(labellings):
                for (window, metric), (figure, truth) in found.items():
                    key = step, labels, window, metric
                    cell = cells.setdefault(key, Cell(scenario.name, step, labels, window, metric))
                    cell.add(seed, figure, truth)
    return list(cells.values())


@contextmanager
def sqlite_stores() -> Iterator[Iterator[str]]:
    """Empty SQLite files, in memory where this machine has a folder for that."""
    memory = Path("/dev/shm")  # noqa: S108 - a new folder in it
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield (f"sqlite:///{Path(folder) / f'{number}.db'}" for number in count())


def cell_table(cells: Sequence[Cell], *, title: str) -> Table:
    """The cells of one look as a person reads them."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("window", "metric"):
        table.add_column(name, no_wrap=True)
    for name in ("truth", "shown", "covers, %", "bias", "width", "n", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        one = cell.to_dict()
        covers = one["coverage"]
        table.add_row(
            "all" if cell.window is Window.ALL_RETAINED else cell.window.value,
            "P@5" if cell.metric is Metric.PRECISION else cell.metric.value,
            f"{one['truth']:.3f}",
            f"{one['shown']:.0%}",
            "" if covers is None else f"{100 * covers:.1f} ± {100 * cell.error:.1f}",
            "" if one["bias"] is None else f"{one['bias']:+.3f}",
            "" if one["width"] is None else f"{one['width']:.3f}",
            "" if one["effective_labels"] is None else f"{one['effective_labels']:.0f}",
            "" if cell.is_met else "MISSED",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation; the exit status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.live", description=SUMMARY)
    parser.add_argument("--repeats", type=int, default=200, help="runs of each scenario")
    parser.add_argument(
        "--labellings",
        type=int,
        default=8,
        metavar="N",
        help="how many of them draw other labels from the same traffic, where that is all the same",
    )
    parser.add_argument("--quick", action="store_true", help="24 runs of each scenario")
    parser.add_argument("--only", metavar="TEXT", default="", help="scenarios whose name has TEXT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    repeats = 24 if options.quick else options.repeats
    if repeats < 1 or options.labellings < 1:
        parser.error("at least 1 repeat and 1 labelling are needed")
    chosen = [scenario for scenario in SCENARIOS if options.only in scenario.name]
    if not chosen:
        parser.error(f"no scenario's name has {options.only!r}")
    console = Console(width=80)
    cells = []
    start = time.perf_counter()
    for number, scenario in enumerate(chosen, 1):
        began = time.perf_counter()
        labellings = options.labellings if scenario.can_label_anew else 1
        seeds = range(options.seed, options.seed + math.ceil(repeats / labellings))
        own = simulate(scenario, sqlite_stores, seeds, labellings)
        cells += own
        sensitivity, specificity = scenario.judge
        seconds = time.perf_counter() - began
        console.print(
            f"{number} of {len(chosen)}: {scenario.name}, judge {sensitivity:g}/{specificity:g}, "
            f"{repeats} runs in {seconds:.0f} s"
        )
        for (step, labels), of_look in groupby(own, lambda cell: (cell.step, cell.labels)):
            title = f"{labels} labels, after step {step} of {scenario.steps}"
            console.print(cell_table(list(of_look), title=title))
        console.print()
    missed = [cell for cell in cells if not cell.is_met]
    for cell in missed:
        console.print(
            f"missed: {cell.scenario}, {cell.labels} labels, step {cell.step}, {cell.window.value} "
            f"{cell.metric.value}: {cell.coverage:.1%} of {len(cell.shown)}"
        )
    console.print(f"{len(cells) - len(missed)} of {len(cells)} figures keep their bar")
    seconds = time.perf_counter() - start
    if options.json is not None:
        results = {
            "repeats": repeats,
            "seed": options.seed,
            "seconds": round(seconds, 1),
            "cells": [cell.to_dict() for cell in cells],
        }
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
