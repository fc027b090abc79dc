"""What estimates and alarms are worth when few of very many requests are judged.

At a rate of sampling of one in millions the judged requests are as good as drawn independently, so
traffic of twenty times the judged requests stands for all of it. The day, the store, the monitor,
the exporter and the estimators are those of ``benchmarks.live``; detectors those of
``benchmarks.alarms``. The truth is known, so that coverage is checked and not assumed.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from scipy.stats import gamma

from benchmarks._alarm_judges import (
    SIMULATIONS,
    IntArray,
    delays_after,
    of_baseline,
    of_promise,
    quantile,
    streams,
)
from benchmarks._live_runs import SQLITE
from benchmarks._live_scenarios import Scenario
from benchmarks._live_service import Pick, Setting
from benchmarks._live_traffic import DAY_SECONDS, EXACT, JudgeErrors, Shape
from benchmarks.alarms import IN_CONTROL, TARGET
from benchmarks.live import Cell, simulate
from ctxguard.core.types import FloatArray, Route
from ctxguard.monitor.alarms import AlarmKind
from ctxguard.monitor.alarms.loss_monitor import LossMonitor, PromisedLoss
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.estimation.terms import Metric

BUDGETS = (500, 2_000, 20_000, 100_000)
"""Requests judged a day."""
ERRING = JudgeErrors(0.90, 0.95)
"""Sensitivity and specificity of the judge that errs."""
METRICS = (Metric.RECALL, Metric.MRR, Metric.UDCG)
RATE = 0.05
"""Share of the simulated requests that is judged."""
HOURS = 24
"""After each of which the monitor is scraped."""
RAISED = (0.15, 0.20, 0.30)
"""Mean losses after a change; ``benchmarks.alarms`` has those before, and the promise."""
LOSSES_BEFORE, LOSSES_AFTER = 4_000, 20_000
_HOUR_SECONDS = DAY_SECONDS / HOURS
_NAMES = {Window.RECENT: "hour", Window.ALL_RETAINED: "day"}


@dataclass(frozen=True)
class Day:
    """One day of some traffic, simulated several times.

    Attributes:
        judged: Requests judged in it, about.
        traffics: How often the traffic is drawn.
        judge: Its sensitivity and specificity.
        labels: Requests that people grade at its end; 0 for a judge that makes no errors.
        labellings: How often labels are drawn from each traffic.
        traffic: A name.
        shape: Of the traffic.
    """

    judged: int
    traffics: int
    judge: JudgeErrors = EXACT
    labels: int = 0
    labellings: int = 1
    traffic: str = "steady"
    shape: Shape = field(default_factory=Shape)

    def scenario(self) -> Scenario:
        """A look after every hour, or after the last where people must label first."""
        return Scenario(
            f"{self.judged} a day",
            self.judge,
            shape=replace(self.shape, n=round(self.judged / RATE), seconds=DAY_SECONDS),
            setting=Setting(rate=RATE, window_seconds=_HOUR_SECONDS),
            picks=(Pick(HOURS, self.labels),) if self.labels else (),
            looks=() if self.labels else tuple(range(1, HOURS)),
            steps=HOURS,
        )


ERRS = Day(500, 4, ERRING, labels=150, labellings=10)
DAYS = (
    *(Day(judged, runs) for judged, runs in zip(BUDGETS, (20, 20, 4, 1), strict=True)),
    ERRS,
    replace(ERRS, judged=2_000),
    replace(ERRS, judged=20_000, traffics=2),
    replace(ERRS, judged=100_000, traffics=1, labellings=3),
    replace(ERRS, judged=20_000, traffics=1, labels=1_000),
    Day(2_000, 5, traffic="12 popular questions", shape=Shape(popular=12)),
    Day(2_000, 5, traffic="sessions of 5", shape=Shape(session_length=5)),
    Day(2_000, 5, traffic="falling", shape=Shape(precision=(0.8, 0.4))),
)
QUICK_DAYS = (Day(500, 2), replace(ERRS, traffics=1, labellings=2))


@dataclass(frozen=True)
class Estimate:
    """How well one metric of one window is known.

    Attributes:
        window: ``hour`` or ``day``.
        judged: Requests judged a day.
        labels: Graded by people at the end of the day.
        judge: ``exact``, or its sensitivity and specificity.
        looks: How often the window was looked at, over all runs.
        shown: How often an estimate was published.
        half_width: Half the median interval, in units of the metric; None where none was shown.
        coverage: Share of the intervals that hold the truth; None with fewer than 20.
    """

    traffic: str
    judge: str
    labels: int
    judged: int
    window: str
    metric: str
    truth: float
    looks: int
    shown: int
    half_width: float | None
    coverage: float | None

    @property
    def width_text(self) -> str:
        """The half width for a table; a dash where most looks show none."""
        if self.half_width is None or self.shown < 0.5 * self.looks:
            return "–"
        return f"±{self.half_width:.3f}"

    @property
    def coverage_text(self) -> str:
        """The coverage and the number of intervals that it rests on."""
        share = "–" if self.coverage is None else f"{self.coverage:.0%}"
        return f"{share} of {self.shown}"

    def to_dict(self) -> dict[str, Any]:
        """For the report, with the texts that pages quote."""
        coverage = None if self.coverage is None else round(self.coverage, 2)
        found = asdict(self) | {"truth": round(self.truth, 3), "coverage": coverage}
        return {**found, "width_text": self.width_text, "covers": self.coverage_text}


def estimates(days: Iterable[Day]) -> Iterator[Estimate]:
    """Simulate days, and measure the intervals that their monitors publish."""
    for day in days:
        cells = simulate(day.scenario(), SQLITE, range(day.traffics), day.labellings)
        for window, name in _NAMES.items():
            for metric in METRICS:
                chosen = [cell for cell in cells if (cell.window, cell.metric) == (window, metric)]
                if window is Window.ALL_RETAINED:
                    chosen = [cell for cell in chosen if cell.step == HOURS]
                yield _estimate(day, name, together(chosen))


def together(cells: Sequence[Cell]) -> Cell:
    """The cells of several looks as one."""
    first = cells[0]
    return replace(
        first,
        truths=[truth for cell in cells for truth in cell.truths],
        shown=[shown for cell in cells for shown in cell.shown],
    )


def _estimate(day: Day, window: str, cell: Cell) -> Estimate:
    widths = [figure.upper - figure.lower for _, figure, _ in cell.shown]
    return Estimate(
        traffic=day.traffic,
        judge=_name(day.judge),
        labels=day.labels,
        judged=day.judged,
        window=window,
        metric=cell.metric.value,
        truth=sum(cell.truths) / len(cell.truths),
        looks=len(cell.truths),
        shown=len(cell.shown),
        half_width=median(widths) / 2.0 if widths else None,
        coverage=cell.coverage,
    )


def _name(judge: JudgeErrors) -> str:
    return "exact" if judge == EXACT else "{:g} and {:g}".format(*judge[:2])


@dataclass(frozen=True)
class Alarm:
    """What a monitor makes of a judge's losses, counted in judged losses.

    Attributes:
        quantity: The loss.
        judge: ``exact``, or its sensitivity and specificity.
        raised: The true mean loss after the change; 0.10 before.
        repeats: Streams with a change.
        missed: Those in which it never rang.
        median_delay: Judged losses from the change to the alarm; None where most are missed.
        late_delay: What nine in ten stay within.
        quiet_streams: Streams in control.
        quiet_losses: Judged losses in each of them, unless it rang before.
        false_alarms: Those of them in which it rang.
    """

    quantity: str
    judge: str
    raised: float
    repeats: int
    missed: int
    median_delay: float | None
    late_delay: float | None
    quiet_streams: int
    quiet_losses: int
    false_alarms: int

    def hours(self, losses_per_day: float) -> float | None:
        """The median delay in hours, in whole days, where so many losses are judged a day."""
        if self.median_delay is None:
            return None
        return 24.0 * math.ceil(self.median_delay / losses_per_day)

    def most_false_alarms(self, losses: float) -> float:
        """False alarms in so many judged losses: the upper 95% limit of the mean number.

        Of the streams in control, each of which ends with its first false alarm. With x of them
        the limit is the 95% quantile of a gamma distribution with shape x + 1 (Garwood, 1936).
        """
        total = self.quiet_streams * self.quiet_losses
        return float(gamma.ppf(0.95, self.false_alarms + 1)) * losses / total


def alarms(repeats: int, quiet_losses: int) -> Iterator[Alarm]:
    """How soon monitors ring after a rise, and how often without one."""
    for judge in (EXACT, ERRING):
        for quantity in (AlarmKind.RECALL_LOSS, AlarmKind.HARM):
            yield from _of_judge(quantity, judge, repeats, quiet_losses)


def _of_judge(
    quantity: AlarmKind, judge: JudgeErrors, repeats: int, quiet_losses: int
) -> Iterator[Alarm]:
    simulate: Callable[..., Any] = SIMULATIONS[quantity]
    losses = partial(simulate, sensitivity=judge[0], specificity=judge[1])
    in_control, rng = losses(IN_CONTROL).judged, np.random.default_rng(0)
    promise = PromisedLoss(Route.HYBRID, quantity, float(np.nanmean(losses(TARGET).true)))
    detect: Callable[[FloatArray], IntArray] = of_baseline
    if judge == EXACT:
        detect = partial(of_promise, monitors=[LossMonitor.of_exact_judge(promise)] * repeats)
    quiet = detect(streams(in_control, rng, (repeats, quiet_losses)))
    for raised in RAISED:
        parts = ((in_control, LOSSES_BEFORE), (losses(raised).judged, LOSSES_AFTER))
        rang = detect(
            np.concatenate([streams(each, rng, (repeats, n)) for each, n in parts], axis=1)
        )
        delays = delays_after(rang, LOSSES_BEFORE)
        yield Alarm(
            quantity=quantity.value,
            judge=_name(judge),
            raised=raised,
            repeats=len(delays),
            missed=int(np.isinf(delays).sum()),
            median_delay=quantile(delays, 0.5),
            late_delay=quantile(delays, 0.9),
            quiet_streams=repeats,
            quiet_losses=quiet_losses,
            false_alarms=int((quiet > 0).sum()),
        )
