"""The current estimates, from the judgments and labels in the store.

An estimate predicts what labels by people would show for all requests of its window: the judge is
exact, or human labels correct it. The uncorrected figures of a judge that errs are published
separately, under another name.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray, Mode
from ctxguard.monitor.estimation import joint
from ctxguard.monitor.estimation.borrow import borrowed_estimates, error_rates
from ctxguard.monitor.estimation.canaries import Canaries, canaries_key
from ctxguard.monitor.estimation.graded import PASSAGE
from ctxguard.monitor.estimation.joint import Grades, Model, Opened, Population
from ctxguard.monitor.estimation.ratio import (
    Estimate,
    Precision,
    corrected_estimate,
    difference,
    estimate,
    no_estimate,
)
from ctxguard.monitor.estimation.relevance import FOLDS, IntArray
from ctxguard.monitor.estimation.sums import (
    Accumulator,
    ClusterTerms,
    TermSums,
    clusters,
    request_terms,
)
from ctxguard.monitor.estimation.terms import Metric, Table, table_of
from ctxguard.monitor.store import GradedRows, JudgedRows, PickKind, SampleStore, StoredShares
from ctxguard.monitor.store.types import MOST_UNCOVERED

ARMS = (Mode.ENFORCE, Mode.SHADOW)
"""The two modes that a guard with ``enforce_share`` deals requests to."""


class Window(StrEnum):
    """The requests that an estimate covers, narrowest first. A closed set: it labels a metric."""

    RECENT = "recent"
    """Requests answered in the last ``window_seconds``."""
    UP_TO_LABELS = "up_to_labels"
    """Those of all retained that an export of labels could have picked: judged before the last
    export. Only for a judge that errs."""
    ALL_RETAINED = "all_retained"
    """All requests that the store has retained."""


Estimates = Mapping[Metric, Estimate]

REQUESTS_COUNT = 1.5
"""What a request with grades counts towards ``Precision.min_n``, where two grades count 1. So 60
grades of 20 requests suffice for 30; MRR takes 30 runs from the top, recall 30 dropped passages."""


@dataclass(frozen=True, slots=True)
class WindowPopulation:
    """The requests of one window.

    Attributes:
        judged: Number of judged samples in the window.
        labelled: Number of these that people have graded, picked with a known probability.
        since_seconds: Time of the first answer, in seconds since the epoch; None without
            requests.
        until_seconds: Time of the last answer. Samples of later requests may wait for the judge.
    """

    judged: int
    labelled: int
    since_seconds: float | None
    until_seconds: float | None


@dataclass(frozen=True, slots=True)
class LiveEstimates:
    """The estimates from a store's judgments and labels.

    Attributes:
        estimates: By window and metric, from an exact judge or corrected by human labels.
        judge_estimates: The judge's own figures, not corrected; empty for an exact judge.
        populations: The requests that the estimates of each window cover.
        arms: The estimates of each window of the requests dealt to each mode, as if all dealt
            requests had been; empty where none was dealt.
        arm_differences: By window and metric, that of enforced requests less that of shadowed
            ones; empty where none was dealt.
        labelled: Samples that people have graded, including those whose text was deleted since.
        unpicked: Number of these that were not picked at random, and are in no estimate.
        disagreements: Passages on whose relevance annotators disagree.
        age_seconds: Age of the newest judged request's answer; None without judged requests.
        canaries: What judging labelled samples again has shown. Once the judge is found to have
            changed, nothing is borrowed from its errors on earlier ones.
    """

    estimates: Mapping[Window, Estimates]
    judge_estimates: Mapping[Window, Estimates]
    populations: Mapping[Window, WindowPopulation]
    arms: Mapping[tuple[Window, Mode], Estimates]
    arm_differences: Mapping[Window, Estimates]
    labelled: int
    unpicked: int
    disagreements: int
    age_seconds: float | None
    canaries: Canaries

    @property
    def shown(self) -> Mapping[Metric, Window]:
        """The window to show each metric of.

        The narrowest one that has an estimate; without any, the one with most requests behind it.
        """

        def shortcoming(window: Window, metric: Metric) -> float:
            found = self.estimates[window][metric]
            return -math.inf if found.value is not None else -found.n

        windows = [window for window in Window if window in self.estimates]
        return {metric: min(windows, key=partial(shortcoming, metric=metric)) for metric in Metric}


def live_estimates(
    store: SampleStore,
    series: str,
    *,
    exact: bool,
    now_seconds: float,
    window_seconds: float,
    precision: Precision,
) -> LiveEstimates:
    """Estimate every metric over every window, in one pass over the judged requests.

    Memory holds one page of them, their sums, one row for each session, and the labelled ones: it
    does not grow with the number of requests.

    Args:
        exact: Whether the judge's verdicts equal people's and need no correction.
        now_seconds: The present, in seconds since the epoch.
        window_seconds: Length of the recent window.
    """
    graded, stored = store.graded(series), store.stored_shares()
    labels = Labels.of(graded, stored)
    canaries = Canaries.from_json(store.get_state(canaries_key(series)))
    can_borrow = canaries.changed_at is None
    since = {Window.RECENT: now_seconds - window_seconds}
    covered = {Window.UP_TO_LABELS: np.unique(labels.first_pick[labels.opened])}
    windows = {
        (window, arm): _Judged(since.get(window, -np.inf), covered.get(window), arm)
        for window in Window
        if window is not Window.UP_TO_LABELS or not exact
        for arm in (None, *ARMS)
    }
    newest: float | None = None
    for page in store.judged_pages(series):
        table = table_of(page.summaries, len(page)).copy()
        # A stored sample stands for those of its hour that were lost.
        table["probability"] *= stored.at(page.time_seconds)
        own = request_terms(table)
        basis = None
        if not exact:
            columns = joint.basis(Population.of(table), labels.model)
            columns /= table["probability"][:, None]
            basis = ClusterTerms(columns, np.empty((len(table), 0)))
        is_labelled = np.isin(page.sample_ids, labels.sample_ids)
        for judged in windows.values():
            judged.add(page, table, own, basis, is_labelled)
        newest = float(page.time_seconds[-1])
    found, judge, arms = {}, {}, {}
    for (window, arm), judged in windows.items():
        if arm is not None and not judged.n:
            continue
        sums = judged.own.sums()
        shown = by_judge = {each: estimate(each, sums.ratio(each), precision) for each in Metric}
        if not exact:
            of_window = labels if arm is None else labels.dealt()
            shown = _corrected(judged, of_window, precision, can_borrow=can_borrow)
        if arm is not None:
            arms[window, arm] = shown
            continue
        found[window] = shown
        if not exact:
            judge[window] = by_judge
    return LiveEstimates(
        estimates=found,
        judge_estimates=judge,
        populations={
            window: judged.population() for (window, arm), judged in windows.items() if arm is None
        },
        arms=arms,
        arm_differences={
            window: {
                each: difference(arms[window, Mode.ENFORCE][each], arms[window, Mode.SHADOW][each])
                for each in Metric
            }
            for window in found
            if all((window, arm) in arms for arm in ARMS)
        },
        labelled=len(graded.sample_ids),
        unpicked=sum(not passages for passages in graded.passages),
        disagreements=graded.disagreements,
        age_seconds=None if newest is None else max(now_seconds - newest, 0.0),
        canaries=canaries,
    )


@dataclass(frozen=True, slots=True)
class Labels:
    """The l samples with grades of people on passages that were drawn, by ascending id.

    Attributes:
        sample_ids, first_pick: Shape (l,), as of ``JudgedRows``.
        judge: Shape (l,), the requests by the verdicts of the judge.
        passages: Shape (m,), the graded passages, as ``graded.PASSAGE``.
        request: Shape (m,), the sample of each, below l.
        response: Shape (m,), the inverse of the share of what the draw asked about that is
            graded, of opened requests or single passages, apart where an alarm asked for them too.
        model: The fit of people's grades on the judge's verdicts.
    """

    sample_ids: NDArray[np.int64]
    first_pick: NDArray[np.int64]
    judge: Table
    passages: NDArray[np.void]
    request: IntArray
    response: FloatArray
    model: Model

    @classmethod
    def of(cls, graded: GradedRows, stored: StoredShares) -> "Labels":
        """Read the labels that a store holds, and fit the model of relevance to them."""
        passages = [np.frombuffer(rows, PASSAGE) for rows in graded.passages]
        whole = [pick for pick, _, _ in graded.asked]
        passages = [rows[np.isin(rows["pick"], whole)] for rows in passages]
        used = np.array([len(rows) > 0 for rows in passages], np.bool_)
        judge = table_of(graded.judge, len(graded.sample_ids))[used]
        judge["probability"] *= stored.at(graded.time_seconds[used])
        lengths = [len(rows) for rows in passages if len(rows)]
        joined = np.concatenate([np.empty(0, PASSAGE), *passages])
        request = np.repeat(np.arange(len(lengths)), lengths)
        model = joint.fitted_model(
            grades_of(joined, request, np.ones(len(joined))),
            Population.of(judge),
            np.arange(len(judge)) % FOLDS,
        )
        is_targeted = graded.is_targeted[used][request]
        return cls(
            graded.sample_ids[used],
            graded.first_pick[used],
            judge,
            joined,
            request,
            _response(joined, is_targeted, graded.asked),
            model,
        )

    @property
    def is_first(self) -> NDArray[np.bool_]:
        """Shape (m,), whether each is the first passage of a run."""
        return np.asarray((self.passages["frame"] == joint.RUN) & (self.passages["rank"] == 1))

    @property
    def opened(self) -> IntArray:
        """The samples that are graded from the top down, below l."""
        return np.asarray(self.request[self.is_first])

    def take(self, chosen: NDArray[np.bool_]) -> "Labels":
        """Return some of the samples, with the same fit."""
        number = np.cumsum(chosen) - 1
        own = chosen[self.request]
        return Labels(
            self.sample_ids[chosen],
            self.first_pick[chosen],
            self.judge[chosen],
            self.passages[own],
            number[self.request[own]],
            self.response[own],
            self.model,
        )

    def dealt(self) -> "Labels":
        """Return the labels for estimates of an arm."""
        judge = self.judge.copy()
        judge["probability"] *= _dealt(judge)
        return replace(self, judge=judge)

    def grades(self, stands_for: FloatArray) -> Grades:
        """Return the grades, weighted by all that they stand for.

        Args:
            stands_for: Shape (l,), how many judged requests a sample stands for if it was opened.
        """
        rows, request = self.passages, self.request
        is_single = rows["frame"] == joint.SINGLE
        weight = rows["size"] / rows["probability"] / self.judge["probability"][request]
        weight[~is_single] *= stands_for[request[~is_single]]
        # Several draws may have asked about requests of the same time: each counts as many grades
        # as it has there, of those that it asked for.
        keys = np.column_stack([rows["pick"], self.first_pick[request]])[is_single]
        _, cell, in_cell = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
        _, time, in_time = np.unique(keys[:, 1], return_inverse=True, return_counts=True)
        weight[is_single] *= in_cell[cell.ravel()] / in_time[time.ravel()]
        weight[is_single] *= self.response[is_single]
        return grades_of(rows, request, weight)

    def opened_requests(self, stands_for: FloatArray) -> Opened:
        """Return the runs from the top."""
        first, request = self.passages[self.is_first], self.opened
        found = np.zeros(len(self.sample_ids))
        hits = (self.passages["frame"] == joint.RUN) & (self.passages["rank"] > 0)
        hits &= self.passages["relevant"] > 0.0
        np.maximum.at(found, self.request[hits], 1.0 / self.passages["rank"][hits])
        return Opened(
            request,
            stands_for[request] / self.judge["probability"][request],
            first["go_on"],
            first["went_on"] > 0,
            first["relevant"] > 0.0,
            found[request],
        )


def _response(
    rows: NDArray[np.void],
    is_targeted: NDArray[np.bool_],
    asked: Mapping[tuple[int, PickKind, bool], int],
) -> FloatArray:
    kinds = [PickKind.RUN if frame == joint.RUN else PickKind.SINGLE for frame in rows["frame"]]
    keys = list(zip(rows["pick"].tolist(), kinds, is_targeted.tolist(), strict=True))
    # A run is asked about once, at its first passage.
    counts = (rows["frame"] == joint.SINGLE) | (rows["rank"] == 1)
    graded = Counter(key for key, is_one in zip(keys, counts.tolist(), strict=True) if is_one)
    return np.array([asked[key] / graded[key] for key in keys], np.float64)


def grades_of(rows: NDArray[np.void], request: IntArray, weight: FloatArray) -> Grades:
    """Read rows of ``graded.PASSAGE``."""
    kinds = [rows[name].astype(np.intp) for name in ("frame", "rank", "group", "verdict")]
    found = [rows[name] for name in ("relevant", "gain", "harm")]
    return Grades._make([request, *kinds, *found, weight])


def _dealt(table: Table) -> FloatArray:
    """Return the probability with which each request was dealt to its arm; 1 if it was not.

    An arm then stands for all dealt requests, also where the share that is enforced has changed.
    """
    return np.asarray(np.nan_to_num(table["arm_probability"], nan=1.0))


class _Judged:
    """The judged requests of one window, added page by page.

    Args:
        since: Earlier requests are left out, in seconds since the epoch.
        covered: Only requests with one of these as their first pick; None for all.
        arm: Requests that were not dealt to it are left out; None for all requests.
    """

    def __init__(
        self, since: float = -np.inf, covered: IntArray | None = None, arm: Mode | None = None
    ) -> None:
        self._since = since
        self._covered = covered
        self._arm = arm
        self.own, self.basis = Accumulator(), Accumulator()
        self.labelled_ids = [np.empty(0, np.int64)]
        self.served_by_pick: Counter[int] = Counter()
        self.weight_by_pick: Counter[int] = Counter()
        self.n = 0
        self._first: float | None = None
        self._last: float | None = None

    def add(
        self,
        page: JudgedRows,
        table: Table,
        own: ClusterTerms,
        basis: ClusterTerms | None,
        is_labelled: NDArray[np.bool_],
    ) -> None:
        """Add a page of n requests.

        Args:
            page: The page, ordered by time.
            table: Shape (n,), its summaries.
            own: The terms of metrics by the judge's verdicts.
            basis: The columns of ``joint.basis``; None for an exact judge.
            is_labelled: Shape (n,), whether people have graded some of each.
        """
        inside = page.time_seconds >= self._since
        if self._covered is not None:
            inside &= np.isin(page.first_pick, self._covered)
        if self._arm is not None:
            inside &= table["enforced"] == float(self._arm is Mode.ENFORCE)
        if not inside.any():
            return
        session = table["session"][inside]
        share = np.ones(len(session)) if self._arm is None else _dealt(table[inside])
        for sums, terms in ((self.own, own), (self.basis, basis)):
            if terms is not None:
                values = terms.values[inside] / share[:, None]
                sums.add(ClusterTerms(values, terms.inclusion[inside]), session)
        self.labelled_ids.append(page.sample_ids[inside & is_labelled])
        picks, cell = np.unique(page.first_pick[inside], return_inverse=True)
        served = np.bincount(cell, table["n_served"][inside] > 0, len(picks))
        weight = np.bincount(cell, 1.0 / table["probability"][inside] / share, len(picks))
        self.served_by_pick.update(dict(zip(picks.tolist(), served.tolist(), strict=True)))
        self.weight_by_pick.update(dict(zip(picks.tolist(), weight.tolist(), strict=True)))
        self.n += int(np.count_nonzero(inside))
        if self._first is None:
            self._first = float(page.time_seconds[inside][0])
        self._last = float(page.time_seconds[inside][-1])

    def population(self) -> WindowPopulation:
        """Describe the requests that the estimates of this window cover."""
        labelled = sum(len(ids) for ids in self.labelled_ids)
        return WindowPopulation(self.n, labelled, self._first, self._last)


def _corrected(
    judged: _Judged, labels: Labels, precision: Precision, *, can_borrow: bool
) -> dict[Metric, Estimate]:
    """Estimate every metric from the judge's verdicts, corrected by human labels.

    Uses the labels of the window's own requests; if they are too few, or cannot stand for all of
    its requests, the judge's error rates from all labels are used.
    """
    found = _from_own_labels(judged, labels, precision)
    if not can_borrow:
        return found
    borrowed = borrowed_estimates(
        judged.basis.sums(),
        error_rates(labels.grades(np.ones(len(labels.judge))), clusters(labels.judge["session"])),
        labels.model,
        precision,
    )
    return {
        metric: borrowed.get(metric, own) if own.method == "none" else own
        for metric, own in found.items()
    }


def _from_own_labels(
    judged: _Judged, all_labels: Labels, precision: Precision
) -> dict[Metric, Estimate]:
    labels = all_labels.take(np.isin(all_labels.sample_ids, np.concatenate(judged.labelled_ids)))
    nothing = dict.fromkeys(Metric, no_estimate(0, 0.0, precision))
    opened_picks = Counter(labels.first_pick[labels.opened].tolist())
    covered = sum(judged.weight_by_pick[pick] for pick in opened_picks)
    if not len(labels.passages) or covered < (1.0 - MOST_UNCOVERED) * sum(
        judged.weight_by_pick.values()
    ):
        return nothing
    stands_for = np.zeros(len(labels.judge))
    stands_for[labels.opened] = labels.response[labels.is_first]
    for pick in opened_picks:
        own = labels.first_pick == pick
        stands_for[own] *= judged.served_by_pick[pick] / stands_for[own].sum()
    fold = np.flatnonzero(np.isin(all_labels.sample_ids, labels.sample_ids)) % FOLDS
    return joint_estimates(
        judged.basis.sums(),
        (labels.grades(stands_for), labels.opened_requests(stands_for)),
        (Population.of(labels.judge), fold, clusters(labels.judge["session"])),
        labels.model,
        precision,
    )


def joint_estimates(
    sums: TermSums,
    found: tuple[Grades, Opened],
    labelled: tuple[Population, IntArray, IntArray],
    model: Model,
    precision: Precision,
) -> dict[Metric, Estimate]:
    """Estimate every metric from predictions for all judged requests and people's grades.

    Args:
        sums: Sums of the columns of ``joint.basis`` over the judged requests.
        found: The graded passages, at least one; and the requests graded from the top down.
        labelled: The requests of both, l of them, with their folds and clusters, shape (l,) each.
    """
    (grades, opened), (population, fold, cluster) = found, labelled
    correction = joint.corrected(sums.totals, found, population, fold, model)
    residuals = np.zeros((cluster.max() + 1, joint.N_QUANTITIES))
    np.add.at(residuals, cluster, correction.residuals)
    n, n_opened = len(residuals), len(np.unique(cluster[opened.request]))
    n_grades = len(grades.request)
    counts = {
        True: (n_opened, correction.n_seen, min(n_opened, correction.n_opened)),
        False: (n, n_grades / 2.0, min(n * REQUESTS_COUNT, n_grades / 2.0)),
    }
    most = np.array([model.gain, model.harm])
    most *= sums.totals[joint.DISCOUNTED] / sums.totals[joint.ONE]
    bounds = {
        Metric.GAIN: (0.0, float(most[0])),
        Metric.HARM: (0.0, float(most[1])),
        Metric.UDCG: (-float(most[1]), float(most[0])),
    }
    estimates = dict.fromkeys(Metric, no_estimate(0, 0.0, precision))
    for metric, (numerator, denominator) in QUOTIENTS.items():
        a, b = numerator @ correction.coefficients, denominator
        is_ratio = denominator.shape == numerator.shape
        errors = residuals @ numerator, residuals @ denominator if is_ratio else np.zeros(1)
        n, effective, counted = counts[metric is Metric.MRR]
        if metric is Metric.RECALL:
            effective = counted = min(counted, float(np.count_nonzero(grades.rank == 0)))
        estimates[metric] = corrected_estimate(
            metric,
            sums.combined(a, b @ correction.coefficients if is_ratio else b),
            errors,
            n=n,
            effective=min(n, effective),
            counted=counted,
            bounds=bounds.get(metric, (0.0, 1.0)),
            precision=precision,
        )
    return estimates


def _column(place: int) -> FloatArray:
    return np.asarray(np.eye(joint.N_COLUMNS)[place])


_QUANTITY = np.eye(joint.N_QUANTITIES)

QUOTIENTS: Mapping[Metric, tuple[FloatArray, FloatArray]] = {
    Metric.PRECISION: (_QUANTITY[joint.PRECISION], _column(joint.ANY_SERVED)),
    Metric.MRR: (_QUANTITY[joint.RANK], _column(joint.ANY_SERVED)),
    Metric.GAIN: (_QUANTITY[joint.GAIN], _column(joint.ONE)),
    Metric.HARM: (_QUANTITY[joint.HARM], _column(joint.ONE)),
    Metric.UDCG: (_QUANTITY[joint.GAIN] - _QUANTITY[joint.HARM], _column(joint.ONE)),
    Metric.RECALL: (_QUANTITY[joint.KEPT], _QUANTITY[joint.POOL]),
}
"""The metrics that people's labels correct: the numerator, of the quantities of a request; and the
denominator, of these or of the columns of ``joint.basis``."""
