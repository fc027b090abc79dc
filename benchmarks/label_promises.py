"""Does labelling give what was promised for n labels: a figure, and an interval as narrow?

    python -m benchmarks.label_promises --json benchmarks/results/label_promises.json

Simulated requests are sampled into a store and judged. Before people grade, ``label_plan`` says how
wide each interval will be, as the console and ``ctxguard label export`` do; then people grade what
was asked, and the monitor reports. Each case grades twice: first without any label in the store,
then with those. Every labelling draws other requests; every tenth has other traffic.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, cast

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._live_service import Service, Setting, graded_by_people
from benchmarks._live_traffic import DAY_SECONDS, JudgeErrors, Shape, SimulatedJudge, draw_traffic
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.estimation.plan import PLANNED, label_plan, to_label
from ctxguard.monitor.judges import PeopleAlone

SUMMARY = "Simulate labellings through the store, and check what was promised for them."
_DAYS = 2.0
_REQUESTS = 1_200
_LABELLINGS_OF_A_TRAFFIC = 10
_BAR = 0.9
"""Of the promised widths that are to be reached."""


@dataclass(frozen=True)
class Case:
    """One kind of traffic, judge and labelling.

    Attributes:
        name: In the table.
        grades: How many passages people are asked to grade, first and then.
        precision: Mean precision of what is served.
        sensitivity, specificity: The judge's.
        whole: Whether whole requests are graded.
        alone: Whether people grade without a judge.
    """

    name: str
    grades: tuple[int, int]
    precision: float = 0.6
    sensitivity: float = 0.85
    specificity: float = 0.9
    whole: bool = False
    alone: bool = False


CASES = (
    Case("400 grades, then 200", (400, 200)),
    Case("100 grades, then 100", (100, 100)),
    Case("poor judge", (400, 200), sensitivity=0.7, specificity=0.75),
    Case("precision .9", (300, 200), precision=0.9),
    Case("whole requests", (400, 400), whole=True),
    Case("people alone", (400, 200), alone=True),
)


class Promise(NamedTuple):
    """What was promised of one metric, and what came.

    Attributes:
        promised: Width; None where nothing was.
        came: Width of the interval; None without a figure.
    """

    case: str
    turn: int
    metric: str
    promised: float | None
    came: float | None


def labelling(case: Case, service: Service) -> Iterator[Promise]:
    """Label twice, and compare what was promised with what came."""
    store, series = service.store, service.monitors[0].series
    for turn, n in enumerate(case.grades, start=1):
        samples = to_label(store, series, n, whole=case.whole)
        plan = label_plan(store, series, samples, service.now)
        rows = [row for sample in samples for row in graded_by_people(service, sample.rows())]
        store.add_labels(rows, service.traffic.shape.top_grade)
        found = service.monitors[0].report().estimates[Window.ALL_RETAINED]
        for metric in PLANNED:
            one = found[metric]
            came = None if one.lower is None or one.upper is None else one.upper - one.lower
            yield Promise(case.name, turn, metric.value, plan.widths[metric], came)


def labellings(case: Case, n: int, seed: int, folder: Path) -> Iterator[Promise]:
    """Label n times, every tenth time on other traffic."""
    for number in range(n):
        if number % _LABELLINGS_OF_A_TRAFFIC == 0:
            rng = np.random.default_rng((seed, number))
            shape = Shape(
                n=_REQUESTS,
                seconds=_DAYS * DAY_SECONDS,
                precision=(case.precision, case.precision),
            )
            traffic = draw_traffic(shape, rng)
            errors = JudgeErrors(case.sensitivity, case.specificity)
            judge = SimulatedJudge(traffic, errors, rng)
            if case.alone:
                judge = cast("SimulatedJudge", PeopleAlone())

            def opened(name: str) -> Service:
                url = f"sqlite:///{folder / name}.db"
                return Service(url, traffic, judge, Setting(rate=1.0), name)  # noqa: B023

            first = opened(f"{case.name} {number}")
            first.serve(_DAYS * DAY_SECONDS)
            first.write()
            first.judge_waiting()
        one = opened(f"{case.name} {number} labelled")
        one.take_over(first, -1.0, _DAYS * DAY_SECONDS, f"{seed} {number}")
        yield from labelling(case, one)
        one.close()
        one.file.unlink()
        if number % _LABELLINGS_OF_A_TRAFFIC == _LABELLINGS_OF_A_TRAFFIC - 1 or number == n - 1:
            first.close()


@dataclass(frozen=True)
class Outcome:
    """One metric of one turn of a case.

    Attributes:
        promised: Share of the labellings for which a width was promised.
        came: Share of these in which a figure came.
        reached: Share of these in which it was as narrow as promised.
        width: Median width that was promised; None without any.
        ratio: Median of the width that came, divided by that promised; None without any.
    """

    promised: float
    came: float
    reached: float
    width: float | None
    ratio: float | None

    @property
    def in_words(self) -> str:
        """For a cell of the table."""
        if self.width is None:
            return "nothing promised"
        return f"{self.width:.2f} ×{self.ratio or np.nan:.2f} {self.reached:.0%}"


def _rounded(one: Outcome) -> dict[str, float | str]:
    found = {name: value for name, value in asdict(one).items() if value is not None}
    return {"in_words": one.in_words} | {name: round(value, 4) for name, value in found.items()}


def outcome(promises: Sequence[Promise]) -> Outcome:
    """Summarise promises of one kind."""
    kept = [one for one in promises if one.promised is not None]
    ratios = [
        one.came / one.promised for one in kept if one.came is not None and one.promised is not None
    ]
    n = max(len(kept), 1)
    return Outcome(
        promised=len(kept) / len(promises),
        came=len(ratios) / n if kept else 1.0,
        reached=sum(ratio <= 1.0 + 1e-9 for ratio in ratios) / n if kept else 1.0,
        width=float(np.median([one.promised for one in kept if one.promised])) if kept else None,
        ratio=float(np.median(ratios)) if ratios else None,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation; the exit status is 1 where promises are not kept."""
    parser = argparse.ArgumentParser(prog="benchmarks.label_promises", description=SUMMARY)
    parser.add_argument("--labellings", type=int, default=40, help="of each case")
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=[""], help="cases by name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    console = Console(width=110, highlight=False)
    table = Table(title="width promised, ratio that came, and share reached", title_justify="left")
    for name in ("case", "turn", *(metric.value for metric in PLANNED)):
        table.add_column(name, justify="left" if name == "case" else "right")
    start, cases = time.perf_counter(), {}
    every: list[Promise] = []
    with TemporaryDirectory() as folder:
        for case in CASES:
            if not any(text in case.name for text in options.only):
                continue
            made = list(labellings(case, options.labellings, options.seed, Path(folder)))
            every += made
            turns = {}
            for turn, named in enumerate(("first", "then"), start=1):
                own = {
                    metric.value: outcome(
                        [one for one in made if (one.turn, one.metric) == (turn, metric.value)]
                    )
                    for metric in PLANNED
                }
                cells = [one.in_words for one in own.values()]
                table.add_row(case.name if turn == 1 else "", named, *cells)
                turns[named] = {name: _rounded(one) for name, one in own.items()}
            cases[case.name] = {**asdict(case), "turns": turns}
    total = outcome(every)
    console.print(table)
    seconds = time.perf_counter() - start
    console.print(
        f"{len(every):,} promises of {options.labellings * len(cases)} labellings: a figure came "
        f"in {total.came:.1%}, as narrow in {total.reached:.1%}; {seconds:.0f} s"
    )
    if options.json is not None:
        document = {
            "labellings": options.labellings * len(cases),
            "requests": _REQUESTS,
            "seed": options.seed,
            "seconds": round(seconds, 1),
            "came": round(total.came, 4),
            "reached": round(total.reached, 4),
            "cases": cases,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if total.came == 1.0 and total.reached >= _BAR else 1


if __name__ == "__main__":
    sys.exit(main())
