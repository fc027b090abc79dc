"""Do the figures of a judge hold the truth after the judge has changed, and is the change seen?

    python -m benchmarks.judge_changes --repeats 100

Services as in ``benchmarks.live``: people grade what the first judge judged, and halfway the judge
is another one, whose verdicts they grade at the end. ``announced`` gives it another version, so
that the first labels are judged again. ``silent`` keeps its name: the canaries should ring.
``unchanged`` keeps the judge: they should not. Precision of the second half is held against the
truth.
"""

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._live_runs import SQLITE
from benchmarks._live_service import Pick, Service, Setting, figures, label_some
from benchmarks._live_traffic import (
    DAY_SECONDS,
    JudgeErrors,
    Shape,
    SimulatedJudge,
    draw_traffic,
)
from ctxguard.monitor.estimation.judge_drift import Canaries, canaries_key
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.estimation.terms import Metric

SUMMARY = "Change the judge of a simulated service, announced or behind its name."
KINDS = ("announced", "silent", "unchanged")
_FIRST, _SECOND = JudgeErrors(0.9, 0.95), JudgeErrors(0.65, 0.85)
_DAYS = 20
_SHAPE = Shape(n=5_000, seconds=_DAYS * DAY_SECONDS)
_SETTING = Setting(rate=0.2, window_seconds=_DAYS / 2 * DAY_SECONDS)
_LABELS = Pick(1, 400)
_SHOWN = Window.RECENT, Metric.PRECISION


class Ended(NamedTuple):
    """How one run ended.

    Attributes:
        holds: Whether the interval of the second half's precision holds the truth; None where none
            is shown.
        width: Of that interval.
        rang_after: Days from the change until the canaries rang; None where they did not.
    """

    holds: bool | None
    width: float
    rang_after: int | None


def run(kind: str, url: str, seed: int) -> Ended:
    """Serve, label, change the judge, serve on."""
    rng = np.random.default_rng(seed)
    traffic = draw_traffic(_SHAPE, rng)
    judge = SimulatedJudge(traffic, _FIRST, rng)
    second = SimulatedJudge(traffic, _SECOND, rng)
    rang: int | None = None
    with closing(Service(url, traffic, judge, _SETTING, f"change {seed}")) as service:
        for day in range(1, _DAYS + 1):
            service.serve(day * DAY_SECONDS)
            service.write()
            service.judge_waiting()
            if day == _DAYS // 2:
                label_some(service, _LABELS)
                service.maintain()
                if kind == "silent":
                    second.version = judge.version
                if kind != "unchanged":
                    service.monitor_with(second)
            saved = service.store.get_state(canaries_key(service.monitors[0].series))
            if rang is None and Canaries.from_json(saved).changed_at is not None:
                rang = day - _DAYS // 2
        service.judge_waiting()
        label_some(service, _LABELS)
        service.maintain()
        shown = figures(service.scrape()).get(_SHOWN)
    truth = traffic.truths(_SHAPE.seconds / 2, _SHAPE.seconds)[Metric.PRECISION]
    if shown is None:
        return Ended(None, 0.0, rang)
    return Ended(shown.holds(truth), shown.upper - shown.lower, rang)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation; the exit status is 1 where a figure misses what it claims."""
    parser = argparse.ArgumentParser(prog="benchmarks.judge_changes", description=SUMMARY)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    table = Table(title=f"{options.repeats} services: precision after the change", box=None)
    for name in ("change", "shown", "covers", "width", "rang", "days, median"):
        table.add_column(name, justify="left" if name == "change" else "right")
    start, missed = time.perf_counter(), False
    for kind in KINDS:
        ends = []
        for seed in range(options.seed, options.seed + options.repeats):
            with SQLITE.stores() as urls:
                ends.append(run(kind, next(urls), seed))
        held = [one.holds for one in ends if one.holds is not None]
        rang = [one.rang_after for one in ends if one.rang_after is not None]
        error = (0.05 * 0.95 / max(len(held), 1)) ** 0.5
        missed |= kind != "silent" and (not held or fmean(held) < 0.95 - 3 * error)
        missed |= (
            (len(rang) < 0.95 * len(ends)) if kind == "silent" else len(rang) > 0.02 * len(ends)
        )
        table.add_row(
            kind,
            f"{len(held) / len(ends):.0%}",
            f"{fmean(held):.1%}" if held else "",
            f"{median(one.width for one in ends if one.holds is not None):.3f}" if held else "",
            f"{len(rang) / len(ends):.0%}",
            f"{median(rang):g}" if rang else "",
        )
    console = Console(width=90, highlight=False)
    console.print(table)
    console.print(f"{time.perf_counter() - start:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    # What fails in an outage, fails on purpose. Set here, because tests call main().
    logging.getLogger("ctxguard").setLevel(logging.ERROR)
    sys.exit(main())
