"""Alarms of judges that err: simulated requests, judged losses, and what references make of them.

A request has one to three relevant passages among the retriever's first ten, or none, and is served
three to six of these. A judge calls a relevant passage relevant with its sensitivity, any other one
with 1 − its specificity, so its loss has a share where nothing was lost, and is undefined for other
requests than the true one. Harm is the share of the worst that passages served can do.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray, Route
from ctxguard.monitor.alarms import AlarmKind
from ctxguard.monitor.alarms.decision import LossMonitor, PromisedLoss
from ctxguard.monitor.alarms.ecusum import DEFAULT_THRESHOLD, Day
from ctxguard.monitor.alarms.reference import corrected

IntArray = NDArray[np.int64]

JUDGES = ((1.0, 1.0), (0.95, 0.98), (0.90, 0.95), (0.85, 0.90))
"""Sensitivity and specificity."""

FIRST = 10
REQUESTS = 300_000
PER_DAY = 200
"""Judged losses a day; alarms are raised at the end of one."""
LABEL_RATES = (0.05, 0.1)
"""Probabilities with which requests are labelled: those of several exports differ."""


class Losses(NamedTuple):
    """Losses in [0, 1] of the same requests, shape (n,); NaN where undefined."""

    true: FloatArray
    judged: FloatArray


@cache
def recall_losses(mean: float, sensitivity: float, specificity: float) -> Losses:
    """Recall losses of many requests; the true ones have the given mean."""
    rng = np.random.default_rng(11)
    relevant = rng.choice([0, 1, 2, 3], REQUESTS, p=[0.1, 0.45, 0.3, 0.15])
    served = rng.integers(3, 7, REQUESTS)
    lost = rng.binomial(relevant, rng.beta(2.0 * mean, 2.0 * (1.0 - mean), REQUESTS))
    kept = relevant - lost

    def called(right: NDArray[np.int64], wrong: NDArray[np.int64]) -> NDArray[np.int64]:
        return rng.binomial(right, sensitivity) + rng.binomial(wrong, 1.0 - specificity)

    judged_kept, judged_lost = called(kept, served - kept), called(lost, FIRST - served - lost)
    return Losses(_share(lost, kept), _share(judged_lost, judged_kept))


def _share(lost: NDArray[np.int64], kept: NDArray[np.int64]) -> FloatArray:
    found = lost + kept
    return np.where(found > 0, lost / np.maximum(found, 1), np.nan)


@cache
def harms(mean: float, sensitivity: float, specificity: float) -> Losses:
    """Harm of many requests, divided by its bound; the true ones have about the given mean."""
    rng = np.random.default_rng(12)
    served = np.arange(6) < rng.integers(3, 7, REQUESTS)[:, None]
    worth = served / np.log2(np.arange(2, 8))
    worth /= worth.sum(axis=1).mean()
    bad = rng.random((REQUESTS, 6)) < rng.beta(3.0 * mean, 3.0 * (1.0 - mean), REQUESTS)[:, None]
    right = np.where(bad, specificity, sensitivity)
    judged_bad = bad ^ (rng.random((REQUESTS, 6)) >= right)
    true, judged = ((worth * each).sum(axis=1) for each in (bad, judged_bad))
    return Losses(np.minimum(true, 1.0), np.minimum(judged, 1.0))


Simulation = Callable[[float, float, float], Losses]
SIMULATIONS: Mapping[AlarmKind, Simulation] = {
    AlarmKind.RECALL_LOSS: recall_losses,
    AlarmKind.HARM: harms,
}


def streams(losses: FloatArray, rng: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
    """Judged losses of requests drawn at random; those undefined are left out, as in a monitor."""
    defined = losses[~np.isnan(losses)]
    return defined[rng.integers(0, len(defined), shape)]


def of_promise(found: FloatArray, monitors: Sequence[LossMonitor | None]) -> IntArray:
    """First alarms of one monitor or none for each stream, in losses seen; 0 for none."""
    return np.array(
        [
            0 if monitor is None else _first_alarm(stream, monitor)
            for stream, monitor in zip(found, monitors, strict=True)
        ]
    )


def of_baseline(found: FloatArray) -> IntArray:
    """First alarms of monitors that learn a baseline first, for many streams."""
    promise = PromisedLoss(Route.HYBRID, AlarmKind.RECALL_LOSS, 0.5)
    return of_promise(found, [LossMonitor.of_baseline(promise)] * len(found))


def _first_alarm(stream: FloatArray, monitor: LossMonitor) -> int:
    for end in range(PER_DAY, len(stream) + 1, PER_DAY):
        day = Day(stream[end - PER_DAY : end], np.ones(PER_DAY), 1.0, PER_DAY)
        monitor = monitor.after(day)
        if monitor.is_alarm:
            return end
    return 0


def corrections(
    losses: Losses, promise: float, n_graded: int, repeats: int, rng: np.random.Generator
) -> list[tuple[float, int] | None]:
    """The correction by ``n_graded`` requests that people graded too, in each of many repeats."""
    found = []
    for _ in range(repeats):
        rates = rng.choice(LABEL_RATES, 20 * n_graded)
        graded = rng.choice(20 * n_graded, n_graded, replace=False, p=rates / rates.sum())
        requests = rng.integers(0, len(losses.true), n_graded)
        found.append(
            corrected(losses.true[requests], losses.judged[requests], 1.0 / rates[graded], promise)
        )
    return found


def least_delay(before: FloatArray, after: FloatArray) -> float:
    """About the least delay of any detector that is given these losses and rings as seldom.

    ln(threshold) / KL(after ‖ before), Lorden, "Procedures for reacting to a change in
    distribution", Annals of Mathematical Statistics 42, 1971; of one that knows both distributions.
    """
    parts = [Counter(np.round(each[~np.isnan(each)], 3).tolist()) for each in (before, after)]
    sizes = [part.total() for part in parts]
    information = sum(
        (n / sizes[1]) * np.log((n / sizes[1]) / (max(parts[0][loss], 1) / sizes[0]))
        for loss, n in parts[1].items()
    )
    return float(np.log(DEFAULT_THRESHOLD) / information)


@dataclass(frozen=True)
class Comparing:
    """What a monitor of one judge's losses made of them, by one reference.

    Attributes:
        quantity: The loss.
        sensitivity, specificity: The judge's.
        reference: What losses are compared with; ``all`` is what a monitor does.
        graded: Requests that people graded too.
        corrected: Streams for which these were enough.
        judge_mean: The judge's mean loss in control.
        false_alarms: Streams in control in which it rang.
        missed: Streams with a change in which it never rang.
        median_delay: Requests from the change to the alarm; a miss counts as later than any.
        late_delay: The delay that nine in ten stay within; None where more are missed.
        known_delay: The median delay if the target were known exactly: the rest of the delay is
            the uncertainty of the target.
        least_delay: The mean delay that no detector can be below, about, if it rings as seldom.
    """

    quantity: str
    sensitivity: float
    specificity: float
    reference: str
    graded: int
    corrected: int
    judge_mean: float
    repeats: int
    false_alarms: int
    missed: int
    median_delay: float | None
    late_delay: float | None
    known_delay: float | None
    least_delay: float


@dataclass(frozen=True)
class Setting:
    """What is simulated: mean losses in control, promised and raised, and how many of each."""

    in_control: float
    promised: float
    raised: float
    quiet: int
    before: int
    after: int
    graded: int


def compare(
    quantity: AlarmKind, judge: tuple[float, float], setting: Setting, repeats: int, seed: int
) -> list[Comparing]:
    """Every reference of one judge, on the same streams."""
    rng = np.random.default_rng(seed)
    quiet, at_promise, raised = (
        SIMULATIONS[quantity](mean, *judge)
        for mean in (setting.in_control, setting.promised, setting.raised)
    )
    promised = PromisedLoss(Route.HYBRID, quantity, float(np.nanmean(at_promise.true)))
    in_control = streams(quiet.judged, rng, (repeats, setting.quiet))
    changing = np.concatenate(
        [
            streams(quiet.judged, rng, (repeats, setting.before)),
            streams(raised.judged, rng, (repeats, setting.after)),
        ],
        axis=1,
    )

    def known(target: float) -> list[LossMonitor]:
        return [LossMonitor.of_corrected(promised, target, 1)] * repeats

    def ringing(alarms: Callable[[FloatArray], IntArray]) -> tuple[IntArray, IntArray]:
        return alarms(in_control), alarms(changing)

    def row(
        reference: str, rang: tuple[IntArray, IntArray], known_target: float, enough: int = 0
    ) -> Comparing:
        delays = delays_after(rang[1], setting.before)
        exact_target = of_promise(changing, known(known_target))
        return Comparing(
            quantity=quantity.value,
            sensitivity=judge[0],
            specificity=judge[1],
            reference=reference,
            graded=setting.graded if reference in ("corrected", "all") else 0,
            corrected=enough,
            judge_mean=float(np.nanmean(quiet.judged)),
            repeats=repeats,
            false_alarms=int((rang[0] > 0).sum()),
            missed=int(np.isinf(delays).sum()),
            median_delay=quantile(delays, 0.5),
            late_delay=quantile(delays, 0.9),
            known_delay=quantile(delays_after(exact_target, setting.before), 0.5),
            least_delay=least_delay(quiet.judged, raised.judged),
        )

    own_mean = float(np.nanmean(quiet.judged))
    translated = float(np.nanmean(at_promise.judged))
    if judge == (1.0, 1.0):
        exact = [LossMonitor.of_exact_judge(promised)] * repeats
        return [row("promise", ringing(lambda found: of_promise(found, exact)), translated)]
    made = corrections(quiet, promised.at_most, setting.graded, repeats, rng)
    monitors = [None if one is None else LossMonitor.of_corrected(promised, *one) for one in made]
    baseline = ringing(of_baseline)
    by_people = ringing(lambda found: of_promise(found, monitors))
    together = (_earliest(baseline[0], by_people[0]), _earliest(baseline[1], by_people[1]))
    enough = sum(one is not None for one in made)
    return [
        row("baseline", baseline, own_mean),
        row("corrected", by_people, translated, enough),
        row("all", together, own_mean, enough),
    ]


def _earliest(one: IntArray, other: IntArray) -> IntArray:
    return np.where((one == 0) | ((other > 0) & (other < one)), other, one)


def delays_after(rang: IntArray, before: int) -> FloatArray:
    """Requests from the change to the alarm of streams that did not ring before it."""
    late = rang[(rang == 0) | (rang > before)]
    return np.where(late == 0, np.inf, late - before)


def quantile(delays: FloatArray, share: float) -> float | None:
    """A quantile of delays; None where that many are missed, or there are none."""
    if not delays.size:
        return None
    found = float(np.quantile(delays, share, method="higher"))
    return found if found < np.inf else None


@dataclass(frozen=True)
class Ending:
    """What became of an alarm after the loss had changed from 0.3 to another mean, exact judge.

    Attributes:
        mean: The mean loss after the alarm; the promise is ``Setting.promised``.
        ended: Streams in which the alarm ended in ``requests`` requests.
        median_requests: Requests until it ended; None where it did not in most.
        again: Streams in which it was raised again after it had ended.
    """

    mean: float
    requests: int
    repeats: int
    ended: int
    median_requests: float | None
    again: int


def ending(mean: float, promised: float, requests: int, repeats: int, seed: int) -> Ending:
    """Alarms of an exact judge: how soon they end, and whether they are raised again."""
    rng = np.random.default_rng(seed)
    high, other = (recall_losses(each, 1.0, 1.0).judged for each in (0.3, mean))
    promise = PromisedLoss(Route.HYBRID, AlarmKind.RECALL_LOSS, promised)
    ended_after, again = [], 0
    for _ in range(repeats):
        monitor = LossMonitor.of_exact_judge(promise)
        while not monitor.is_alarm:
            monitor = monitor.after(one_day(high, rng))
        monitor = monitor.alarmed()
        first_end, raised = np.inf, False
        for end in range(PER_DAY, requests + 1, PER_DAY):
            monitor = monitor.after(one_day(other, rng))
            if monitor.is_alarm:
                raised |= first_end < np.inf
                monitor = monitor.alarmed()
            elif monitor.has_recovered:
                first_end = min(first_end, end)
                monitor = replace(monitor, recovery=None)
        ended_after.append(first_end)
        again += raised
    delays = np.array(ended_after)
    return Ending(
        mean, requests, repeats, int(np.isfinite(delays).sum()), quantile(delays, 0.5), again
    )


def one_day(losses: FloatArray, rng: np.random.Generator) -> Day:
    """A day of requests drawn at random, each of a question of its own."""
    return Day.of(streams(losses, rng, (1, PER_DAY))[0], np.ones(PER_DAY), np.arange(PER_DAY))
