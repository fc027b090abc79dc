"""False alarms and delays where traffic has rhythms, and where not all of it is judged alike.

Every stream is days of requests whose mean loss is known, judged with known probabilities, and
handed to ``LossMonitor`` a day at a time as a monitor does. The mean loss over a day's traffic is
below the promise in each of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks._alarm_judges import quantile
from ctxguard.core.types import Route
from ctxguard.monitor.alarms import AlarmKind
from ctxguard.monitor.alarms.decision import LossMonitor, PromisedLoss
from ctxguard.monitor.alarms.ecusum import Day
from ctxguard.monitor.alarms.reference import ReferenceKind

PROMISE = PromisedLoss(Route.HYBRID, AlarmKind.RECALL_LOSS, 0.12)
QUIET_LOSSES = 10_000
LOSSES_BEFORE, FEWEST_DAYS_BEFORE, DAYS_AFTER = 4_000, 10, 30
LONGEST_DELAY = 400
"""Judged losses at the median, and those of a day on top: a day must be over."""
NEW = {
    ReferenceKind.PROMISE: LossMonitor.of_exact_judge,
    ReferenceKind.BASELINE: LossMonitor.of_baseline,
}


@dataclass(frozen=True)
class Part:
    """A part of each day.

    Attributes:
        requests: Its share of the day's requests.
        loss: Their mean loss.
        judged: Probability with which each is judged, relative to the other parts.
    """

    requests: float
    loss: float
    judged: float = 1.0


@dataclass(frozen=True)
class Rhythm:
    """Traffic that repeats every day.

    Attributes:
        name: What it shows.
        parts: The parts of a day, in their order.
        viral_days: Days on which a tenth of the requests ask one question, which fails.
    """

    name: str
    parts: tuple[Part, ...]
    viral_days: range = range(0)


RHYTHMS = (
    Rhythm("steady", (Part(1.0, 0.10),)),
    Rhythm("nights .04, days .16", (Part(0.5, 0.04), Part(0.5, 0.16))),
    Rhythm("a failed question", (Part(1.0, 0.10),), range(2, 3)),
    Rhythm("max_per_second", (Part(0.2, 0.22, 0.5), Part(0.8, 0.08, 0.1))),
    Rhythm("a judging budget", (Part(0.25, 0.20, 1.0), Part(0.75, 0.075, 0.25))),
)
LOSSES_PER_DAY = (200, 400, 1_000)


def days_of(
    rng: np.random.Generator, rhythm: Rhythm, per_day: int, days: int, raised_at: float = np.inf
) -> Iterator[tuple[Day, int]]:
    """Each day's judged losses, and how many of these came after all losses had doubled.

    Args:
        rng: Source of the draws.
        rhythm: The traffic.
        per_day: Judged losses a day, about.
        days: How many.
        raised_at: When losses double, in days.
    """
    shares = np.array([part.requests for part in rhythm.parts])
    judged = np.array([part.judged for part in rhythm.parts])
    probability = judged / judged.max()
    requests = round(per_day / float(shares @ probability))
    losses = np.array([part.loss for part in rhythm.parts])
    for day in range(days):
        time = rng.random(requests)
        part = np.minimum(np.searchsorted(np.cumsum(shares), time), len(shares) - 1)
        is_after = day + time >= raised_at
        lost = (rng.random(requests) < losses[part] * (1.0 + is_after)).astype(np.float64)
        question = np.arange(requests)
        if day in rhythm.viral_days:
            asked = rng.random(requests) < 0.1
            lost[asked], question[asked] = 1.0, -1
        taken = rng.random(requests) < probability[part]
        yield (
            Day.of(lost[taken], probability[part][taken], question[taken]),
            int(np.count_nonzero(is_after & taken)),
        )


@dataclass(frozen=True)
class Rung:
    """What one monitor made of one rhythm.

    Attributes:
        rhythm: Its name.
        reference: What losses are compared with.
        per_day: Judged losses a day.
        repeats: Streams without a rise, and as many in which losses double.
        false_alarms: Streams of 10,000 losses without a rise in which it rang.
        early: Streams with a rise in which it rang before; left out of the delay.
        median_delay: Losses from the rise to the alarm, at the end of a day; None if most are
            missed.
        late_delay: The delay that nine in ten stay within.
    """

    rhythm: str
    reference: str
    per_day: int
    repeats: int
    false_alarms: int
    early: int
    median_delay: float | None
    late_delay: float | None


def ring_in(
    rhythm: Rhythm, reference: ReferenceKind, per_day: int, repeats: int, seed: int
) -> Rung:
    """How often a monitor rings falsely, and how soon after losses double at any time of day."""
    rng = np.random.default_rng(seed)
    false_alarms = sum(
        _rings(reference, (day for day, _ in days_of(rng, rhythm, per_day, _days(per_day))))
        for _ in range(repeats)
    )
    delays = [_delay(rng, rhythm, reference, per_day) for _ in range(repeats)]
    late = np.array([delay for delay in delays if delay is not None])
    return Rung(
        rhythm.name,
        reference.value,
        per_day,
        repeats,
        false_alarms,
        repeats - len(late),
        quantile(late, 0.5),
        quantile(late, 0.9),
    )


def _days(per_day: int) -> int:
    return -(-QUIET_LOSSES // per_day)


def _rings(reference: ReferenceKind, days: Iterator[Day]) -> bool:
    monitor = NEW[reference](PROMISE)
    for day in days:
        monitor = monitor.after(day)
        if monitor.is_alarm:
            return True
    return False


def _delay(
    rng: np.random.Generator, rhythm: Rhythm, reference: ReferenceKind, per_day: int
) -> float | None:
    """Losses from the rise to the alarm; None if it rang before, infinite if it never did."""
    before = max(-(-LOSSES_BEFORE // per_day), FEWEST_DAYS_BEFORE)
    monitor, seen = NEW[reference](PROMISE), 0
    days = days_of(rng, rhythm, per_day, before + DAYS_AFTER, before + rng.random())
    for day, n_after in days:
        monitor, seen = monitor.after(day), seen + n_after
        if monitor.is_alarm:
            return float(seen) if seen else None
    return np.inf


def missed_bars(rungs: list[Rung], most_false: float) -> list[str]:
    """Which bars were missed, in words; empty if all were met."""
    missed = []
    for rung in rungs:
        name = f"{rung.rhythm}, {rung.reference}, {rung.per_day} a day"
        if rung.false_alarms > most_false * rung.repeats:
            missed.append(f"{name}: {rung.false_alarms} false alarms")
        longest = LONGEST_DELAY + rung.per_day
        if rung.median_delay is None or rung.median_delay > longest:
            missed.append(f"{name}: median delay {rung.median_delay}")
    return missed
