"""How soon are alarms raised, and how often falsely? Simulations with known truth.

    python -m benchmarks.alarms --repeats 1000 --json alarms.json --check

Streams of judged recall losses whose mean is 0.10 and doubles after 2,000 requests; the certificate
promises 0.12, and the e-CUSUM bets as a watch on a target of 0.12 does. Days have 200 requests, and
an alarm is raised at the end of one. A false alarm is an alarm in 10,000 requests in control; the
delay counts from the change. ``_alarm_rhythms`` has traffic with nights, questions that many ask,
and requests that are judged with different probabilities; ``_alarm_designs`` has sessions whose
losses correlate and days that differ, with a mean of exactly the promise.

Judges that err are compared with their own mean over the first requests, and with the promise on
their scale where enough requests were graded by people too (``_alarm_judges``); ``known`` is the
delay if that target were known exactly, ``least`` about what no detector can be quicker than.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks._alarm_designs import DESIGNS, tell
from benchmarks._alarm_designs import LOSSES_PER_DAY as LOSSES_PER_DAY_OF_DESIGNS
from benchmarks._alarm_designs import missed_bars as missed_design_bars
from benchmarks._alarm_judges import (
    JUDGES,
    Comparing,
    IntArray,
    Setting,
    compare,
    ending,
    of_promise,
    quantile,
)
from benchmarks._alarm_rhythms import (
    LOSSES_PER_DAY,
    NEW,
    RHYTHMS,
    ring_in,
)
from benchmarks._alarm_rhythms import missed_bars as missed_rhythm_bars
from benchmarks._command import CONSOLE, command, ended, figures
from benchmarks._timing import environment
from ctxguard.core.types import FloatArray, Route
from ctxguard.monitor.alarms import AlarmKind
from ctxguard.monitor.alarms.decision import LossMonitor, PromisedLoss
from ctxguard.monitor.alarms.reference import ReferenceKind

IN_CONTROL, TARGET, RAISED = 0.10, 0.12, 0.20
QUIET_REQUESTS = 10_000
REQUESTS_BEFORE, REQUESTS_AFTER = 2_000, 3_000

MOST_FALSE_ALARMS = 0.02
LONGEST_MEDIAN_DELAY = 400

PROMISE = PromisedLoss(Route.HYBRID, AlarmKind.RECALL_LOSS, TARGET)
_MONITOR = LossMonitor.of_exact_judge(PROMISE)
GRADED = 400
"""Requests that people graded too, of each judge that errs."""
LONGEST_BY_EXACT = 1.5
"""Times the exact judge's delay; the uncertainty of the target comes on top."""
AFTER_ALARM = (0.05, 0.10, 0.11, 0.13, 0.15, 0.20)
"""Mean losses after an alarm."""
REQUESTS_AFTER_ALARM, ALARMS_FOLLOWED = 20_000, 100
RHYTHM_STREAMS = 500
DESIGN_STREAMS = 200


def whole_losses(rng: np.random.Generator, mean: float, shape: tuple[int, int]) -> FloatArray:
    """One relevant passage a request: found or lost."""
    return (rng.random(shape) < mean).astype(np.float64)


def fractional_losses(rng: np.random.Generator, mean: float, shape: tuple[int, int]) -> FloatArray:
    """One to four relevant passages a request; a hard query loses more than an easy one."""
    relevant = rng.integers(1, 5, shape)
    hardness = rng.beta(2.0 * mean, 2.0 * (1.0 - mean), shape)
    return rng.binomial(relevant, hardness) / relevant


Losses = Callable[[np.random.Generator, float, tuple[int, int]], FloatArray]
LOSSES: Mapping[str, Losses] = {"0 or 1": whole_losses, "fractional": fractional_losses}


def ecusum(streams: FloatArray) -> IntArray:
    """First alarms of ctxguard's monitor of the promise, for many streams at once."""
    return of_promise(streams, [_MONITOR] * len(streams))


@dataclass(frozen=True)
class Ringing:
    """What the alarm made of one kind of losses.

    Attributes:
        false_alarms: Streams in control in which it rang.
        at_target: Streams of a mean of exactly the target in which it rang.
        early: Streams with a change in which it rang before; left out of the delay.
        missed: Streams with a change in which it never rang.
        median_delay: Requests from the change to the alarm; a miss counts as later than any.
        late_delay: The delay that nine in ten stay within; None where more are missed.
    """

    losses: str
    repeats: int
    false_alarms: int
    at_target: int
    early: int
    missed: int
    median_delay: float | None
    late_delay: float | None


def ring(
    name: str, losses: Losses, repeats: int, seed: int, before: int = REQUESTS_BEFORE
) -> Ringing:
    """The alarm on streams of one kind of losses."""
    rng = np.random.default_rng(seed)
    quiet_shape = (repeats, QUIET_REQUESTS)
    quiet, at_target = losses(rng, IN_CONTROL, quiet_shape), losses(rng, TARGET, quiet_shape)
    changing = np.concatenate(
        [
            losses(rng, IN_CONTROL, (repeats, before)),
            losses(rng, RAISED, (repeats, REQUESTS_AFTER)),
        ],
        axis=1,
    )
    rang = ecusum(changing)
    late = rang[(rang == 0) | (rang > before)]
    delays = np.where(late == 0, np.inf, late - before)
    return Ringing(
        losses=name,
        repeats=repeats,
        false_alarms=int((ecusum(quiet) > 0).sum()),
        at_target=int((ecusum(at_target) > 0).sum()),
        early=repeats - len(late),
        missed=int((late == 0).sum()),
        median_delay=quantile(delays, 0.5),
        late_delay=quantile(delays, 0.9),
    )


def missed_bars(ringings: Sequence[Ringing], repeats: int) -> list[str]:
    """Which bars were missed, in words; empty where all were met."""
    missed = []
    for found in ringings:
        if found.false_alarms > MOST_FALSE_ALARMS * repeats:
            missed.append(f"{found.losses}: {found.false_alarms} false alarms")
        if found.median_delay is None or found.median_delay > LONGEST_MEDIAN_DELAY:
            missed.append(f"{found.losses}: median delay {found.median_delay}")
    return missed


def missed_judge_bars(rows: Sequence[Comparing]) -> list[str]:
    """Which bars were missed with judges that err, in words."""
    exact = {
        row.quantity: row.median_delay for row in rows if row.reference == ReferenceKind.PROMISE
    }
    missed = []
    for row in rows:
        name = f"{row.quantity}, judge {row.sensitivity}/{row.specificity}, {row.reference}"
        if row.false_alarms > MOST_FALSE_ALARMS * row.repeats:
            missed.append(f"{name}: {row.false_alarms} false alarms")
        longest = (exact[row.quantity] or np.inf) * LONGEST_BY_EXACT
        if row.reference == ReferenceKind.BASELINE and (row.known_delay or np.inf) > longest:
            missed.append(f"{name}: delay {row.known_delay} with a known target")
    return missed


TITLES = {
    "ringing": f"in control {IN_CONTROL}, promised {TARGET}, raised to {RAISED}",
    "judges": f"judges, by what their losses are compared with; {GRADED} graded",
    "endings": f"alarms after the mean changed, promised {TARGET}",
    "rhythms": f"rhythms of a day, promised {TARGET}; delay to the end of a day",
    "designs": f"designs, at the promise of {TARGET}; days to the end of the one that rings",
}


_NOT_SHOWN = {"repeats", "graded", "corrected", "judge_mean"}


def show(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of one simulation; a delay that most streams miss is "never"."""
    shown = [column for column in rows[0] if column not in _NOT_SHOWN]
    title = f"{TITLES[name]}, {rows[0]['repeats']} streams"
    table = figures(title, (), [column.replace("_", " ") for column in shown])
    for row in rows:
        table.add_row(*[_cell(row[column]) for column in shown])
    CONSOLE.print(table)


def _cell(value: str | float | None) -> str:
    if value is None:
        return "never"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulations; the exit status is 1 where a bar that was checked is missed."""
    parser = command("Simulate how soon alarms are raised, and how often falsely.", seed=True)
    parser.add_argument("--repeats", type=int, default=1000, help="streams (default 1000)")
    parser.add_argument(
        "--before",
        type=int,
        default=REQUESTS_BEFORE,
        metavar="N",
        help=f"judged requests before losses double (default {REQUESTS_BEFORE})",
    )
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.before < 0:
        parser.error("at least 1 repeat and no fewer than 0 requests before are needed")
    repeats, seed = options.repeats, options.seed
    setting = Setting(
        IN_CONTROL, TARGET, RAISED, QUIET_REQUESTS, options.before, REQUESTS_AFTER, GRADED
    )
    ringings = [
        ring(name, losses, repeats, seed, options.before) for name, losses in LOSSES.items()
    ]
    comparisons = [
        row
        for quantity in (AlarmKind.RECALL_LOSS, AlarmKind.HARM)
        for judge in JUDGES
        for row in compare(quantity, judge, setting, repeats, seed + 2)
    ]
    endings = [
        ending(mean, TARGET, REQUESTS_AFTER_ALARM, min(ALARMS_FOLLOWED, repeats), seed + 3)
        for mean in AFTER_ALARM
    ]
    rungs = [
        ring_in(rhythm, reference, per_day, min(repeats, RHYTHM_STREAMS), seed + 4)
        for rhythm in RHYTHMS
        for reference in NEW
        for per_day in LOSSES_PER_DAY
    ]
    told = [
        tell(design, per_day, min(repeats, DESIGN_STREAMS), seed + 5)
        for design in DESIGNS
        for per_day in LOSSES_PER_DAY_OF_DESIGNS
    ]
    simulated: Sequence[Sequence[Any]] = (ringings, comparisons, endings, rungs, told)
    rows = {name: [asdict(row) for row in own] for name, own in zip(TITLES, simulated, strict=True)}
    for name, own in rows.items():
        show(name, own)
    missed = [
        *missed_bars(ringings, repeats),
        *missed_judge_bars(comparisons),
        *missed_rhythm_bars(rungs, MOST_FALSE_ALARMS),
        *missed_design_bars(told, MOST_FALSE_ALARMS),
    ]
    report = {
        "environment": environment(["numpy"]),
        "repeats": repeats,
        "requests_before": options.before,
        "seed": seed,
        **rows,
        "missed": missed,
    }
    return ended(options, report, missed)


if __name__ == "__main__":
    sys.exit(main())
