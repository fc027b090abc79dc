"""The current estimates, from the judgments and labels in the store.

An estimate predicts what labels by people would show for all requests of its window: the judge is
exact, or human labels correct it. The uncorrected figures of a judge that errs are published
separately, under another name.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray
from ctxguard.monitor.estimation import joint
from ctxguard.monitor.estimation.joint import PASSAGE, Grades, Population, joint_estimates
from ctxguard.monitor.estimation.judge_drift import Canaries, canaries_key
from ctxguard.monitor.estimation.ratio import (
    Estimate,
    Precision,
    estimate,
    lacks_grades,
)
from ctxguard.monitor.estimation.relevance import FOLDS, IntArray, Model
from ctxguard.monitor.estimation.sums import Sums
from ctxguard.monitor.estimation.terms import METRICS, Metric, Table, request_terms, table_of
from ctxguard.monitor.store import GradedRows, JudgedRows, PickKind, SampleStore, StoredShares
from ctxguard.monitor.store.types import MOST_UNCOVERED


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
        estimates: By window and metric, from an exact judge or corrected by human labels: of a
            judge that errs without what people's grades do not correct.
        judge_estimates: The judge's own figures, not corrected; empty for an exact judge.
        populations: The requests that the estimates of each window cover.
        labelled: Samples that people have graded, including those whose text was deleted since.
        unpicked: Number of these that were not picked at random, and are in no estimate.
        disagreements: Passages on whose relevance annotators disagree.
        age_seconds: Age of the newest judged request's answer; None without judged requests.
        canaries: What judging labelled samples again has shown.
    """

    estimates: Mapping[Window, Estimates]
    judge_estimates: Mapping[Window, Estimates]
    populations: Mapping[Window, WindowPopulation]
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
        return {
            metric: min(windows, key=partial(shortcoming, metric=metric))
            for metric in self.estimates[Window.ALL_RETAINED]
        }


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
        precision: What an estimate needs in order to be shown.
    """
    graded, stored = store.graded(series), store.stored_shares()
    labels = Labels.of(graded, stored)
    min_n = precision.min_n
    canaries = Canaries.from_json(store.get_state(canaries_key(series)))
    since = {Window.RECENT: now_seconds - window_seconds}
    covered = {Window.UP_TO_LABELS: np.unique(labels.first_pick[labels.opened])}
    windows = {
        window: _Judged(since.get(window, -np.inf), covered.get(window))
        for window in Window
        if window is not Window.UP_TO_LABELS or not exact
    }
    newest: float | None = None
    for page in store.judged_pages(series):
        table = table_of(page.summaries, len(page)).copy()
        # A stored sample stands for those of its hour that were lost.
        table["probability"] *= stored.at(page.time_seconds)
        own, basis = request_terms(table), None
        if not exact:
            columns = joint.basis(Population.of(table), labels.model)
            basis = columns / table["probability"][:, None]
        is_labelled = np.isin(page.sample_ids, labels.sample_ids)
        for judged in windows.values():
            judged.add(page, table, own, basis, is_labelled)
        newest = float(page.time_seconds[-1])
    found: dict[Window, Estimates] = {}
    judge: dict[Window, Estimates] = {}
    for window, judged in windows.items():
        sums = judged.own.ended()
        by_judge = {each: estimate(each, sums.ratio(each), min_n) for each in Metric}
        by_judge = shown = precision.checked(by_judge)
        if not exact:
            corrected = _corrected(judged, labels, min_n)
            shown = precision.checked(corrected)
            judge[window] = by_judge
        found[window] = shown
    return LiveEstimates(
        estimates=found,
        judge_estimates=judge,
        populations={window: judged.population for window, judged in windows.items()},
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
        grades: The grades, each weighted by 1/π.
        response: Shape (m,), the inverse of the share of what the draw asked about that is
            graded, of opened requests or single passages, apart where an alarm asked for them too.
        model: The fit of people's grades on the judge's verdicts.
    """

    sample_ids: NDArray[np.int64]
    first_pick: NDArray[np.int64]
    grades: Grades
    response: FloatArray
    model: Model

    @classmethod
    def of(cls, graded: GradedRows, stored: StoredShares) -> "Labels":
        """Read the labels that a store holds, and fit the model of relevance to them."""
        whole = [pick for pick, _, _ in graded.asked]
        each = [np.frombuffer(rows, PASSAGE) for rows in graded.passages]
        each = [rows[np.isin(rows["pick"], whole)] for rows in each]
        used = np.array([len(rows) > 0 for rows in each], np.bool_)
        judge = table_of(graded.judge, len(graded.sample_ids))[used]
        judge["probability"] *= stored.at(graded.time_seconds[used])
        n, passages = len(judge), np.concatenate([np.empty(0, PASSAGE), *each])
        request = np.repeat(np.arange(n), [len(rows) for rows in each if len(rows)])
        # A session, or a request that belongs to none, is one cluster.
        alone = np.where(judge["session"] == 0, np.arange(n), -1)
        keys = np.column_stack([judge["session"], alone])
        grades = Grades(
            passages,
            request,
            passages["size"] / passages["probability"] / judge["probability"][request],
            Population.of(judge),
            np.arange(n) % FOLDS,
            np.unique(keys, axis=0, return_inverse=True)[1].ravel(),
        )
        return cls(
            graded.sample_ids[used],
            graded.first_pick[used],
            grades,
            _response(passages, graded.is_targeted[used][request], graded.asked),
            grades.fitted_model(),
        )

    @property
    def opened(self) -> IntArray:
        """The samples that are graded from the top down, below l."""
        return self.grades.request[self.grades.is_first]

    def take(self, chosen: NDArray[np.bool_]) -> "Labels":
        """Return some of the samples, with the same fit."""
        return Labels(
            self.sample_ids[chosen],
            self.first_pick[chosen],
            self.grades.take(chosen),
            self.response[chosen[self.grades.request]],
            self.model,
        )

    def weighted(self, stands_for: FloatArray) -> Grades:
        """Return the grades, weighted by all that they stand for.

        Args:
            stands_for: Shape (l,), how many judged requests a sample stands for if it was opened.
        """
        rows, request, weight = self.grades.passages, self.grades.request, self.grades.weight.copy()
        is_single = rows["frame"] == joint.SINGLE
        weight[~is_single] *= stands_for[request[~is_single]]
        # Several draws may have asked about requests of the same time: each counts as many grades
        # as it has there, of those that it asked for.
        keys = np.column_stack([rows["pick"], self.first_pick[request]])[is_single]
        _, cell, in_cell = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
        _, time, in_time = np.unique(keys[:, 1], return_inverse=True, return_counts=True)
        weight[is_single] *= in_cell[cell.ravel()] / in_time[time.ravel()]
        weight[is_single] *= self.response[is_single]
        return self.grades._replace(weight=weight)


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


class _Judged:
    """The judged requests of one window, added page by page.

    Args:
        since: Earlier requests are left out, in seconds since the epoch.
        covered: Only requests with one of these as their first pick; None for all.
    """

    def __init__(self, since: float = -np.inf, covered: IntArray | None = None) -> None:
        self._since = since
        self._covered = covered
        self.own, self.basis = Sums(2 * len(METRICS)), Sums(joint.N_COLUMNS)
        self.labelled_ids = [np.empty(0, np.int64)]
        self.served_by_pick: Counter[int] = Counter()
        self.weight_by_pick: Counter[int] = Counter()
        self.population = WindowPopulation(0, 0, None, None)

    def add(
        self,
        page: JudgedRows,
        table: Table,
        own: tuple[FloatArray, FloatArray],
        basis: FloatArray | None,
        is_labelled: NDArray[np.bool_],
    ) -> None:
        """Add a page of n requests.

        Args:
            page: The page, ordered by time.
            table: Shape (n,), its summaries.
            own: As of ``request_terms``, by the judge's verdicts.
            basis: The columns of ``joint.basis``, weighted; None for an exact judge.
            is_labelled: Shape (n,), whether people have graded some of each.
        """
        inside = page.time_seconds >= self._since
        if self._covered is not None:
            inside &= np.isin(page.first_pick, self._covered)
        if not inside.any():
            return
        session = table["session"][inside]
        values, inclusion = own
        self.own.add(values[inside], session, inclusion[inside])
        if basis is not None:
            self.basis.add(basis[inside], session)
        self.labelled_ids.append(page.sample_ids[inside & is_labelled])
        picks, cell = np.unique(page.first_pick[inside], return_inverse=True)
        served = np.bincount(cell, table["n_served"][inside] > 0, len(picks))
        weight = np.bincount(cell, 1.0 / table["probability"][inside], len(picks))
        self.served_by_pick.update(dict(zip(picks.tolist(), served.tolist(), strict=True)))
        self.weight_by_pick.update(dict(zip(picks.tolist(), weight.tolist(), strict=True)))
        before, times = self.population, page.time_seconds[inside].tolist()
        self.population = WindowPopulation(
            before.judged + len(times),
            before.labelled + len(self.labelled_ids[-1]),
            times[0] if before.since_seconds is None else before.since_seconds,
            times[-1],
        )


def _corrected(judged: _Judged, labels: Labels, min_n: int) -> Estimates:
    """Estimate every metric from the judge's verdicts, corrected by labels of its requests.

    Labels that cannot stand for nearly all of its requests show nothing.
    """
    labels = labels.take(np.isin(labels.sample_ids, np.concatenate(judged.labelled_ids)))
    opened_picks = Counter(labels.first_pick[labels.opened].tolist())
    covered = sum(judged.weight_by_pick[pick] for pick in opened_picks)
    if not len(labels.grades.passages) or covered < (1.0 - MOST_UNCOVERED) * sum(
        judged.weight_by_pick.values()
    ):
        return dict.fromkeys(joint.QUOTIENTS, lacks_grades(0, 0.0, min_n, 0))
    stands_for = np.zeros(len(labels.sample_ids))
    stands_for[labels.opened] = labels.response[labels.grades.is_first]
    for pick in opened_picks:
        own = labels.first_pick == pick
        stands_for[own] *= judged.served_by_pick[pick] / stands_for[own].sum()
    grades = labels.weighted(stands_for)
    return joint_estimates(judged.basis.ended(), grades, labels.model, min_n)
