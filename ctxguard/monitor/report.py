"""The monitor's figures at one moment, from what the store holds.

What is published as an estimate is what people would say: of an exact judge, or corrected by human
labels. A judge's own mean is kept apart, under a name that says so (DESIGN.md §8).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ctxguard.metrics import Utilities
from ctxguard.monitor.estimates import (
    DEFAULT_CONFIDENCE,
    DEFAULT_MIN_N,
    Estimate,
    JudgedRequest,
    Metric,
    estimate,
)
from ctxguard.monitor.labels import HUMAN, human_request, resolve
from ctxguard.monitor.ppi import LabelledRequest, label_weight, ppi_estimate
from ctxguard.monitor.records import Record
from ctxguard.monitor.sampler import Accounts, accounts
from ctxguard.monitor.store import (
    PICKED,
    RANDOM,
    WEIGHED,
    JudgedRows,
    LabelRow,
    SampleStore,
)
from ctxguard.monitor.table import Table, request_of, sums_of, table_of

MOST_UNLABELLED = 10_000
"""More judged requests beside the labelled ones narrow no interval that anyone would notice."""


class Window(StrEnum):
    """Over which requests an estimate is taken. A closed set: it labels a metric."""

    RECENT = "recent"
    """Those answered in the last ``window_seconds``."""
    KEPT = "kept"
    """All that the store still holds."""


Estimates = Mapping[Metric, Estimate]


@dataclass(frozen=True, slots=True)
class Precision:
    """How sure an estimate has to be.

    Attributes:
        confidence: Of the intervals, in (0, 1).
        min_n: Requests (or sessions) below which there is no estimate.
        max_width: By metric, the interval width above which there is no estimate.
    """

    confidence: float = DEFAULT_CONFIDENCE
    min_n: int = DEFAULT_MIN_N
    max_width: Mapping[Metric, float] | None = None

    def width(self, metric: Metric) -> float | None:
        """The widest interval of a metric that is shown; None for any."""
        return None if self.max_width is None else self.max_width.get(metric)


DEFAULT_PRECISION = Precision()


@dataclass(frozen=True, slots=True)
class LiveEstimates:
    """What a store's judgments and labels say of live traffic.

    Attributes:
        estimates: By window and metric, of what people would say.
        uncorrected: The judge's own means; empty for an exact judge.
        labelled: Judged requests with all the human labels that they need.
        disagreements: Passages on whose relevance annotators disagree.
        age_seconds: Since the newest judged request was answered; None where there is none.
    """

    estimates: Mapping[Window, Estimates]
    uncorrected: Mapping[Window, Estimates]
    labelled: int
    disagreements: int
    age_seconds: float | None


def live_estimates(
    store: SampleStore,
    series: str,
    *,
    exact: bool,
    now_seconds: float,
    window_seconds: float,
    utilities: Utilities,
    max_grade: int,
    precision: Precision,
) -> LiveEstimates:
    """Every metric over every window.

    Args:
        store: Where judgments and labels are.
        series: Of which judge.
        exact: The judge says what people would: it needs no correction.
        now_seconds: The present, in seconds since the epoch.
        window_seconds: Length of the recent window.
        utilities: What a passage is worth.
        max_grade: The judge's highest grade.
        precision: How sure an estimate has to be.
    """
    rows = store.judged(series, with_grades=not exact)
    table = table_of(rows.summaries)
    recent = rows.time_seconds >= now_seconds - window_seconds
    masks = {Window.RECENT: recent, Window.KEPT: np.ones_like(recent)}
    plain = {window: _plain(table[mask], precision) for window, mask in masks.items()}
    people = _People(store, utilities, max_grade)
    corrected: Mapping[Window, Estimates] = plain
    if not exact:
        corrected = {
            window: _corrected(rows, table, mask, people, precision)
            for window, mask in masks.items()
        }
    newest = None if not len(rows) else max(now_seconds - float(rows.time_seconds[-1]), 0.0)
    return LiveEstimates(
        estimates=corrected,
        uncorrected={} if exact else plain,
        labelled=len(people.requests),
        disagreements=people.disagreements,
        age_seconds=newest,
    )


class _People:
    """The samples that people have graded as far as it takes, and how far they agree.

    Labels that were asked for after an alarm tell most and are no random part: they are left out.

    Attributes:
        requests: By sample, as people graded it.
        weighed: Whether they were picked with the chances of ``label_weight``, or all alike.
        disagreements: Passages on whose relevance annotators disagree.
    """

    def __init__(self, store: SampleStore, utilities: Utilities, max_grade: int) -> None:
        reasons = store.label_reasons()
        by_sample: dict[int, list[LabelRow]] = {}
        for sample_id, label in store.labels():
            if label.source == HUMAN:
                by_sample.setdefault(sample_id, []).append(label)
        self.disagreements = sum(resolve(labels).disagreements for labels in by_sample.values())
        self.requests: dict[int, JudgedRequest] = {}
        picked = {sample_id: reasons.get(sample_id, RANDOM) for sample_id in by_sample}
        kinds = Counter(why for why in picked.values() if why in PICKED)
        # Two ways of picking do not mix: each label's chance would be that of neither.
        self.weighed = kinds[WEIGHED] > kinds[RANDOM]
        way = WEIGHED if self.weighed else RANDOM
        used = [sample_id for sample_id, why in picked.items() if why == way]
        for sample_id, payload in store.payloads(used).items():
            found = human_request(
                Record.from_bytes(payload),
                by_sample[sample_id],
                utilities=utilities,
                max_grade=max_grade,
            )
            if found is not None:
                self.requests[sample_id] = found


def _plain(table: Table, precision: Precision) -> dict[Metric, Estimate]:
    return {
        metric: estimate(
            metric,
            sums_of(metric, table),
            confidence=precision.confidence,
            min_n=precision.min_n,
            max_width=precision.width(metric),
        )
        for metric in Metric
    }


def _corrected(
    rows: JudgedRows,
    table: Table,
    mask: NDArray[np.bool_],
    people: _People,
    precision: Precision,
) -> dict[Metric, Estimate]:
    grades = rows.grades or []
    labelled, unlabelled = [], []
    places = mask.nonzero()[0]
    graded = np.fromiter(people.requests, np.int64, len(people.requests))
    known = np.isin(rows.sample_ids[places], graded)
    for place in places[known]:
        judge = request_of(table[place], grades[place])
        human = people.requests[int(rows.sample_ids[place])]
        # The judge's row knows the probability after the budget, and the session's number.
        human = replace(human, probability=judge.probability, session_id=judge.session_id)
        chance = label_weight(judge) if people.weighed else 1.0
        labelled.append(LabelledRequest(human, judge, chance))
    if len(labelled) < precision.min_n:
        return {
            metric: Estimate(None, None, None, len(labelled), "none", precision.min_n)
            for metric in Metric
        }
    others = places[~known][-MOST_UNLABELLED:]
    sessions = {pair.judge.session_id for pair in labelled} - {None}
    for place in others:
        request = request_of(table[place], grades[place])
        # A session is labelled as a whole: what people did not reach of it says nothing.
        if request.session_id not in sessions:
            unlabelled.append(request)
    return {
        metric: ppi_estimate(
            metric,
            labelled,
            unlabelled,
            confidence=precision.confidence,
            min_n=precision.min_n,
            max_width=precision.width(metric),
        )
        for metric in Metric
    }


def fleet_accounts(store: SampleStore) -> Accounts:
    """Where the samples of every serving process are, as far as the store was told."""
    workers = store.workers()
    lost: dict[str, int] = {}
    for worker in workers:
        for reason, count in worker.lost.items():
            lost[reason] = lost.get(reason, 0) + count
    return accounts(
        sum(worker.sampled for worker in workers), sum(worker.stored for worker in workers), lost
    )
