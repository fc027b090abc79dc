"""False alarms and delays where losses come in sessions, or days differ.

The mean keeps the promise exactly. Delays are in days and compared with those of a detector that
knows the design: how losses scatter within a session, which days are bad, or how much days vary.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks._alarm_judges import quantile
from ctxguard.core.types import FloatArray, Route
from ctxguard.monitor.alarms import AlarmKind
from ctxguard.monitor.alarms.decision import LossMonitor, PromisedLoss
from ctxguard.monitor.alarms.ecusum import Day, ECusum, groups

TARGET, IN_CONTROL, RAISED = 0.12, 0.10, 0.20
QUIET_LOSSES, LOSSES_BEFORE, FEWEST_DAYS_BEFORE, DAYS_AFTER = 10_000, 2_000, 10, 60
LOSSES_PER_DAY = (40, 200, 1_000)
LONGEST_DELAY = 400
"""Losses until the alarm at the median, where days are alike and losses independent; or a day."""
LONGEST_BY_KNOWING = 2.0
"""Times the delay of the detector that knows the design."""
CORRELATION = 0.5
_PROMISE = PromisedLoss(Route.HYBRID, AlarmKind.RECALL_LOSS, TARGET)


@dataclass(frozen=True)
class Design:
    """How losses depend on each other.

    Attributes:
        name: What it shows.
        session: Requests of a session, whose losses correlate with ``CORRELATION``.
        week: The loss of each day of a week over the mean.
        varies: Standard deviation of a day's loss over its mean.
        has_bar: Whether false alarms are held to a bar.
    """

    name: str
    session: int = 1
    week: tuple[float, ...] = (1.0,)
    varies: float = 0.0
    has_bar: bool = True

    @property
    def variance(self) -> float:
        """Of a session's mean loss at the target."""
        return TARGET * (1.0 - TARGET) * (CORRELATION + (1.0 - CORRELATION) / self.session)


DESIGNS = (
    Design("independent"),
    Design("sessions of 3", session=3),
    Design("sessions of 6", session=6),
    Design("weekdays .14, weekends .07", week=(7 / 6,) * 5 + (7 / 12,) * 2),
    Design("days vary by a quarter", varies=0.25, has_bar=False),
)

Level = Callable[[int], float]


def days_of(
    rng: np.random.Generator, design: Design, per_day: int, days: int, level: Level
) -> Iterator[tuple[Day, float]]:
    """Each day's judged losses, and by how much the design says that its mean is off.

    Args:
        rng: Source of the draws.
        design: How losses depend on each other.
        per_day: Judged losses a day, about.
        days: How many.
        level: The mean loss on a day by its number; the first day may be any of a week.
    """
    first, n_sessions = int(rng.integers(7)), -(-per_day // design.session)
    session = np.repeat(np.arange(n_sessions), design.session)
    alone = groups(session + 1, np.arange(len(session)))
    for day in range(days):
        known = design.week[(first + day) % len(design.week)]
        mean = level(day) * known * max(1.0 + design.varies * rng.standard_normal(), 0.0)
        lost = rng.random(len(session)) < mean
        if design.session > 1:
            together = (rng.random(n_sessions) < mean)[session]
            lost = np.where(rng.random(len(session)) < CORRELATION**0.5, together, lost)
        yield Day.of(lost.astype(np.float64), np.ones(len(session)), alone), known


@dataclass(frozen=True)
class Told:
    """What was made of one design.

    Attributes:
        design: Its name.
        per_day: Judged losses a day.
        repeats: Streams at the promise, and as many in which losses double.
        false_alarms: Streams of 10,000 losses at the promise in which the monitor rang.
        early: Streams with a rise in which it rang before; left out of the delay.
        median_days: Days from the rise to the end of the day that rings.
        late_days: The delay that nine in ten stay within.
        knowing_days: The median delay of the detector that knows the design.
    """

    design: str
    per_day: int
    repeats: int
    false_alarms: int
    early: int
    median_days: float | None
    late_days: float | None
    knowing_days: float | None


def tell(design: Design, per_day: int, repeats: int, seed: int) -> Told:
    """How often the monitor rings at the promise, and how soon after losses double."""
    quiet = range(repeats)
    rng = np.random.default_rng(seed)
    days = -(-QUIET_LOSSES // per_day)
    at_promise = [
        _rings(design, days_of(rng, design, per_day, days, lambda _: TARGET)) for _ in quiet
    ]
    before = max(LOSSES_BEFORE // per_day, FEWEST_DAYS_BEFORE)

    def delays(rings: Callable[[Design, Iterator[tuple[Day, float]]], int | None]) -> FloatArray:
        rng = np.random.default_rng(seed + 1)
        found = []
        for _ in range(repeats):
            rang = rings(
                design,
                days_of(
                    rng,
                    design,
                    per_day,
                    before + DAYS_AFTER,
                    lambda day: RAISED if day >= before else IN_CONTROL,
                ),
            )
            if rang is None or rang > before:
                found.append(np.inf if rang is None else rang - before)
        return np.array(found)

    ours = delays(_rings)
    return Told(
        design.name,
        per_day,
        repeats,
        sum(rang is not None for rang in at_promise),
        repeats - len(ours),
        quantile(ours, 0.5),
        quantile(ours, 0.9),
        quantile(delays(_knowing_rings), 0.5),
    )


def _rings(_: Design, days: Iterator[tuple[Day, float]]) -> int | None:
    """The day on which the monitor rings, from 1; None if it never does."""
    monitor = LossMonitor.of_exact_judge(_PROMISE)
    for number, (day, _known) in enumerate(days, start=1):
        monitor = monitor.after(day)
        if monitor.is_alarm:
            return number
    return None


def _knowing_rings(design: Design, days: Iterator[tuple[Day, float]]) -> int | None:
    """The same of the detector that knows the design."""
    evidence = ECusum(TARGET, TARGET)
    for number, (day, known) in enumerate(days, start=1):
        target = known * TARGET
        evidence = replace(evidence, target=target, rise=target)
        evidence = evidence.after(day, known * design.variance, (design.varies * target) ** 2)
        if evidence.alarm():
            return number
    return None


def missed_bars(told: list[Told], most_false: float) -> list[str]:
    """Which bars were missed, in words; empty if all were met."""
    missed = []
    barred: Mapping[str, bool] = {one.name: one.has_bar for one in DESIGNS}
    for found in told:
        name = f"{found.design}, {found.per_day} a day"
        if barred[found.design] and found.false_alarms > most_false * found.repeats:
            missed.append(f"{name}: {found.false_alarms} false alarms")
        longest = LONGEST_BY_KNOWING * (found.knowing_days or np.inf)
        if found.design == DESIGNS[0].name and found.per_day >= LONGEST_DELAY / 2:
            longest = max(LONGEST_DELAY / found.per_day, 1.0)
        if found.median_days is None or found.median_days > longest:
            missed.append(f"{name}: median delay of {found.median_days} days")
    return missed
