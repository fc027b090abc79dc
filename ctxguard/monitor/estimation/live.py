"""The estimates of one moment, from the judgments and labels in the store.

An estimate says what the labels of people would say of all requests: it is of an exact judge, or
corrected by human labels. The own figures of a judge that errs are published apart, under another
name.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.metrics import Utilities
from ctxguard.monitor.estimation.ppi import LabelledClusters, label_weights, ppi_estimate
from ctxguard.monitor.estimation.ratio import Estimate, Precision, estimate
from ctxguard.monitor.estimation.reduce import judged_request
from ctxguard.monitor.estimation.sums import Accumulator, TermSums, sums_of
from ctxguard.monitor.estimation.terms import ROW, JudgedRequest, Metric, Table, table_of
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.labels.human import human_verdicts, positions_to_label
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import RANDOM, WEIGHTED, SampleStore


class Window(StrEnum):
    """The requests that an estimate is about. A closed set: it labels a metric."""

    RECENT = "recent"
    """Those answered in the last ``window_seconds``."""
    ALL_RETAINED = "all_retained"
    """All that the store has retained."""


Estimates = Mapping[Metric, Estimate]


@dataclass(frozen=True, slots=True)
class LiveEstimates:
    """The estimates that a store's judgments and labels give.

    Attributes:
        estimates: By window and metric, of an exact judge or corrected by human labels.
        judge_estimates: The judge's own figures, not corrected; empty for an exact judge.
        labelled: Sampled requests with complete human labels.
        disagreements: Passages on whose relevance annotators disagree.
        age_seconds: Since the newest judged request was answered; None where there is none.
    """

    estimates: Mapping[Window, Estimates]
    judge_estimates: Mapping[Window, Estimates]
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
    """Estimate every metric over every window, in one pass over the judged requests.

    Memory holds one page of them, their sums, one row for each session, and what is labelled: it
    does not grow with the number of requests.

    Args:
        store: Where judgments and labels are.
        series: The series of judgments.
        exact: Whether the judge's verdicts are those of people, and need no correction.
        now_seconds: The present, in seconds since the epoch.
        window_seconds: Length of the recent window.
        utilities: What a passage is worth.
        max_grade: The judge's highest grade.
        precision: What an estimate needs in order to be shown.
    """
    human = human_labels(store, utilities=utilities, max_grade=max_grade)
    windows = {
        Window.RECENT: _Population(now_seconds - window_seconds),
        Window.ALL_RETAINED: _Population(-np.inf),
    }
    newest: float | None = None
    for page in store.judged_pages(series):
        table, ids, times = table_of(page.summaries), page.sample_ids, page.time_seconds
        near_label = np.zeros(len(page), np.bool_) if exact else human.near_label(table, ids)
        for population in windows.values():
            population.add(table, ids, times, near_label)
        newest = float(times[-1])
    judged, corrected = {}, {}
    for window, population in windows.items():
        far, near, near_ids = population.parts()
        sums = far + sums_of(near)
        judged[window] = {each: estimate(each, sums.ratio(each), precision) for each in Metric}
        if not exact:
            corrected[window] = _corrected(far, near, near_ids, human, precision)
    return LiveEstimates(
        estimates=judged if exact else corrected,
        judge_estimates={} if exact else judged,
        labelled=len(human.sample_ids),
        disagreements=human.disagreements,
        age_seconds=None if newest is None else max(now_seconds - newest, 0.0),
    )


@dataclass(frozen=True, slots=True)
class HumanLabels:
    """The samples that people have graded completely, and how far they agree.

    Attributes:
        sample_ids: Shape (n,), ascending.
        table: Shape (n,), the requests by the grades of people.
        are_weighted: Whether they were picked with probabilities in proportion to
            ``label_weights``, or all with the same.
        disagreements: Passages on whose relevance annotators disagree.
    """

    sample_ids: NDArray[np.int64]
    table: Table
    are_weighted: bool
    disagreements: int

    def near_label(self, table: Table, sample_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which judged requests are labelled, or share their session with one that is."""
        sessions = self.table["session"]
        is_labelled: NDArray[np.bool_] = np.isin(sample_ids, self.sample_ids)
        return is_labelled | np.isin(table["session"], sessions[sessions != 0])


def human_labels(store: SampleStore, *, utilities: Utilities, max_grade: int) -> HumanLabels:
    """Read the samples that people have graded.

    Samples that an alarm targeted for labelling are no random part of the traffic, and are left
    out.
    """
    reasons = store.label_reasons()
    labelled = human_verdicts(store.labels())
    reason_of = {sample_id: reasons.get(sample_id, RANDOM) for sample_id in labelled}
    kinds = Counter(reason_of.values())
    # Two ways of picking do not mix: each label's probability would be that of neither.
    are_weighted = kinds[WEIGHTED] > kinds[RANDOM]
    used_reason = WEIGHTED if are_weighted else RANDOM
    used = [sample_id for sample_id, reason in reason_of.items() if reason == used_reason]
    complete: dict[int, bytes] = {}
    for sample_id, payload in sorted(store.payloads(used).items()):
        request = human_request(
            SampleRecord.from_bytes(payload),
            labelled[sample_id].by_passage,
            utilities=utilities,
            max_grade=max_grade,
        )
        if request is not None:
            complete[sample_id] = request.to_row()
    return HumanLabels(
        np.array(list(complete), np.int64),
        table_of(list(complete.values())),
        are_weighted,
        sum(verdicts.disagreements for verdicts in labelled.values()),
    )


def human_request(
    record: SampleRecord, verdicts: Mapping[str, Judgment], *, utilities: Utilities, max_grade: int
) -> JudgedRequest | None:
    """A sample by the grades of people; None until they have graded all that it needs."""
    if positions_to_label(record, verdicts):
        return None
    highest = max([max_grade, *(verdict.grade for verdict in verdicts.values())])
    return judged_request(record, verdicts, utilities=utilities, max_grade=highest)


class _Population:
    """The judged requests of one window, added page by page.

    Requests near a label, that is labelled ones and those in a session with one, are kept; of all
    others only the sums are.

    Args:
        since: Requests answered before this are not in it, in seconds since the epoch.
    """

    def __init__(self, since: float) -> None:
        self._since = since
        self._far = Accumulator()
        self._near = [np.empty(0, ROW)]
        self._near_ids = [np.empty(0, np.int64)]

    def add(
        self,
        table: Table,
        sample_ids: NDArray[np.int64],
        time_seconds: NDArray[np.float64],
        near_label: NDArray[np.bool_],
    ) -> None:
        """Add a page of requests; all arguments have shape (n,)."""
        is_inside = time_seconds >= self._since
        self._far.add(table[is_inside & ~near_label])
        self._near.append(table[is_inside & near_label])
        self._near_ids.append(sample_ids[is_inside & near_label])

    def parts(self) -> tuple[TermSums, Table, NDArray[np.int64]]:
        """The sums over the requests far from a label, those near one, and their sample ids."""
        return self._far.sums(), np.concatenate(self._near), np.concatenate(self._near_ids)


def _corrected(
    far: TermSums,
    near: Table,
    near_ids: NDArray[np.int64],
    human: HumanLabels,
    precision: Precision,
) -> dict[Metric, Estimate]:
    """Every metric as the judge's verdicts give it, corrected by human labels.

    Args:
        far: Over the requests that are neither labelled nor in a session with one that is.
        near: Shape (n,), the requests that are.
        near_ids: Shape (n,), their samples.
        human: The labels.
        precision: What an estimate needs in order to be shown.
    """
    is_labelled = np.isin(near_ids, human.sample_ids)
    judge, rest = near[is_labelled], near[~is_labelled]
    graded = human.table[np.searchsorted(human.sample_ids, near_ids[is_labelled])]
    # Only the judge's row knows the probability after the judging budget.
    graded["probability"] = judge["probability"]
    labelled = LabelledClusters.of(
        graded, judge, label_weights(judge) if human.are_weighted else None
    )
    # A session counts as labelled as a whole: its requests without labels are left out.
    unlabelled = far + sums_of(rest[~np.isin(rest["session"], judge["session"])])
    return {each: ppi_estimate(each, labelled, unlabelled, precision) for each in Metric}
