"""The current estimates, from the judgments and labels in the store.

An estimate predicts what labels by people would show for all requests of its window: the judge is
exact, or human labels correct it. The uncorrected figures of a judge that errs are published
separately, under another name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray, Mode
from ctxguard.monitor.estimation.borrow import borrowed_estimate
from ctxguard.monitor.estimation.ppi import LabelledClusters, ppi_estimate
from ctxguard.monitor.estimation.ratio import Estimate, Precision, difference, estimate
from ctxguard.monitor.estimation.sums import Accumulator, TermSums, sums_of
from ctxguard.monitor.estimation.terms import ROW, Metric, Table, table_of
from ctxguard.monitor.store import GradedRows, JudgedRows, LabelDepth, SampleStore, StoredShares
from ctxguard.monitor.store.types import MOST_UNCOVERED

ARMS = (Mode.ENFORCE, Mode.SHADOW)
"""The two modes that a guard with ``enforce_share`` deals requests to."""

NEEDS_POOL = frozenset({Metric.RECALL, Metric.RECALL_LOSS})
"""The metrics that need labels to ``LabelDepth.POOL``."""


class Window(StrEnum):
    """The requests that an estimate covers. A closed set: it labels a metric."""

    RECENT = "recent"
    """Requests answered in the last ``window_seconds``."""
    ALL_RETAINED = "all_retained"
    """All requests that the store has retained."""
    UP_TO_LABELS = "up_to_labels"
    """Those of all retained that an export of labels could have picked: judged before the last
    export. Only for a judge that errs."""


Estimates = Mapping[Metric, Estimate]


@dataclass(frozen=True, slots=True)
class Population:
    """The requests of one window.

    Attributes:
        judged: Number of judged samples in the window.
        labelled: Number of these that people have graded, with a known probability.
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
    """

    estimates: Mapping[Window, Estimates]
    judge_estimates: Mapping[Window, Estimates]
    populations: Mapping[Window, Population]
    arms: Mapping[tuple[Window, Mode], Estimates]
    arm_differences: Mapping[Window, Estimates]
    labelled: int
    unpicked: int
    disagreements: int
    age_seconds: float | None


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
        store: The store of judgments and graded samples.
        series: The series of judgments.
        exact: Whether the judge's verdicts equal people's and need no correction.
        now_seconds: The present, in seconds since the epoch.
        window_seconds: Length of the recent window.
        precision: The precision that an estimate needs in order to be shown.
    """
    graded, stored = store.graded(series), store.stored_shares()
    labels = Labels.of(graded, stored)
    since = {Window.RECENT: now_seconds - window_seconds}
    windows = {
        (window, arm): _Judged(
            labels.last_pick,
            since=since.get(window, -np.inf),
            covered_only=window is Window.UP_TO_LABELS,
            arm=arm,
        )
        for window in Window
        if window is not Window.UP_TO_LABELS or not exact
        for arm in (None, *ARMS)
    }
    newest: float | None = None
    for page in store.judged_pages(series):
        table = table_of(page.summaries, len(page)).copy()
        # A stored sample stands for those of its hour that were lost.
        table["probability"] *= stored.at(page.time_seconds)
        near_label = np.zeros(len(page), np.bool_) if exact else labels.near(table, page.sample_ids)
        for judged in windows.values():
            judged.add(table, page, near_label)
        newest = float(page.time_seconds[-1])
    found, judge, arms = {}, {}, {}
    for (window, arm), judged in windows.items():
        if arm is not None and not judged.n:
            continue
        sums = judged.sums()
        by_judge = {each: estimate(each, sums.ratio(each), precision) for each in Metric}
        if not exact:
            own = labels if arm is None else labels.dealt()
            corrected = _corrected(judged, sums, own, precision)
        if arm is not None:
            arms[window, arm] = by_judge if exact else corrected
            continue
        found[window] = by_judge if exact else corrected
        if not exact:
            judge[window] = by_judge
    return LiveEstimates(
        estimates=found,
        judge_estimates=judge,
        populations={
            window: judged.population(labels)
            for (window, arm), judged in windows.items()
            if arm is None
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
        unpicked=int(np.count_nonzero(np.isnan(graded.served_probability))),
        disagreements=graded.disagreements,
        age_seconds=None if newest is None else max(now_seconds - newest, 0.0),
    )


@dataclass(frozen=True, slots=True)
class Labels:
    """The n samples that people have graded, by ascending id.

    Attributes:
        sample_ids: Shape (n,).
        human: Shape (n,), the requests by the grades of people.
        judge: Shape (n,), the same by the grades of the judge.
        probability: By depth, shape (n,): the probability with which each was picked and graded;
            NaN if it was not picked at random, or not graded to that depth.
        last_pick: By depth, as ``GradedRows.last_pick``.
    """

    sample_ids: NDArray[np.int64]
    human: Table
    judge: Table
    probability: Mapping[LabelDepth, FloatArray]
    last_pick: Mapping[LabelDepth, int]

    @classmethod
    def of(cls, graded: GradedRows, stored: StoredShares) -> "Labels":
        """Read the labels that a store holds."""
        n = len(graded.sample_ids)
        human, judge = table_of(graded.human, n).copy(), table_of(graded.judge, n).copy()
        for table in (human, judge):
            table["probability"] *= stored.at(graded.time_seconds)
        probability = {
            LabelDepth.SERVED: graded.served_probability,
            LabelDepth.POOL: graded.pool_probability,
        }
        _weigh_searches(human, graded.served_probability)
        return cls(graded.sample_ids, human, judge, probability, graded.last_pick)

    def near(self, table: Table, sample_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell which judged requests are labelled, or share their session with one that is."""
        sessions = self.judge["session"]
        is_labelled: NDArray[np.bool_] = np.isin(sample_ids, self.sample_ids)
        return is_labelled | np.isin(table["session"], sessions[sessions != 0])

    def clusters(self, depth: LabelDepth, chosen: NDArray[np.bool_]) -> LabelledClusters:
        """Pair labelled requests with the judge's verdicts on them."""
        return LabelledClusters.of(
            self.human[chosen], self.judge[chosen], self.probability[depth][chosen]
        )

    def dealt(self) -> "Labels":
        """Return the labels for estimates of an arm."""
        return replace(self, human=_dealt(self.human), judge=_dealt(self.judge))

    def elsewhere(self) -> LabelledClusters:
        """Return all labels with equal weights, to learn the judge's errors from."""
        chosen = ~np.isnan(self.probability[LabelDepth.SERVED])
        human, judge = self.human[chosen], self.judge[chosen].copy()
        human["probability"] = judge["probability"] = 1.0
        return LabelledClusters.of(human, judge, self.probability[LabelDepth.SERVED][chosen])


def _dealt(table: Table) -> Table:
    """Weight the requests of an arm by the probability with which they were dealt to it too.

    An arm then stands for all dealt requests, also where the share that is enforced has changed.
    """
    dealt = table.copy()
    share = dealt["arm_probability"]
    dealt["probability"] *= np.where(np.isnan(share), 1.0, share)
    return dealt


def _weigh_searches(human: Table, probability: FloatArray) -> None:
    """Weight the finished searches for a relevant passage to stand for the open ones.

    A request that was served nothing relevant is graded as far as precision needs it before
    that search ends.
    """
    searched = (human["kept_relevant"] == 0.0) & ~np.isnan(probability)
    weights = np.where(searched, 1.0 / np.where(searched, probability, 1.0), 0.0)
    ended = weights[~np.isnan(human["pool_relevant"])].sum()
    if 0.0 < ended < weights.sum():
        for column in ("full_pool_probability", "full_pool_probability_if_no_hit"):
            human[column][searched] *= ended / weights.sum()


class _Judged:
    """The judged requests of one window, added page by page.

    Keeps requests near a label, that is labelled ones and those in a session with one; keeps only
    sums of the others.

    Args:
        last_pick: By depth, as ``GradedRows.last_pick``.
        since: Earlier requests are left out, in seconds since the epoch.
        covered_only: Whether to leave out requests that no pick could have taken.
        arm: Requests that were not dealt to it are left out; None for all requests.
    """

    def __init__(
        self,
        last_pick: Mapping[LabelDepth, int],
        *,
        since: float = -np.inf,
        covered_only: bool = False,
        arm: Mode | None = None,
    ) -> None:
        self._arm = arm
        self._last_pick = last_pick
        self._since = since
        self._covered_only = covered_only
        self._far = Accumulator()
        self._near = [np.empty(0, ROW)]
        self._near_ids = [np.empty(0, np.int64)]
        self.n = 0
        self._first: float | None = None
        self._last: float | None = None
        self._weight = 0.0
        self._covered = dict.fromkeys(LabelDepth, 0.0)

    def add(
        self,
        table: Table,
        page: JudgedRows,
        near_label: NDArray[np.bool_],
    ) -> None:
        """Add a page of n requests.

        Args:
            table: Shape (n,), the page's summaries.
            page: The page, ordered by time.
            near_label: Shape (n,), whether each is near a label.
        """
        time_seconds, sample_ids = page.time_seconds, page.sample_ids
        is_inside = time_seconds >= self._since
        if self._arm is not None:
            is_inside &= table["enforced"] == float(self._arm is Mode.ENFORCE)
            if not is_inside.any():
                return
            table = _dealt(table)
        is_covered = {
            depth: page.first_pick <= last_pick for depth, last_pick in self._last_pick.items()
        }
        if self._covered_only:
            is_inside &= is_covered[LabelDepth.SERVED]
        if not is_inside.any():
            return
        self._far.add(table[is_inside & ~near_label])
        self._near.append(table[is_inside & near_label])
        self._near_ids.append(sample_ids[is_inside & near_label])
        self.n += int(np.count_nonzero(is_inside))
        if self._first is None:
            self._first = float(time_seconds[is_inside][0])
        self._last = float(time_seconds[is_inside][-1])
        weights = 1.0 / table["probability"]
        self._weight += float(weights[is_inside].sum())
        for depth, within in is_covered.items():
            self._covered[depth] += float(weights[is_inside & within].sum())

    def is_covered(self, depth: LabelDepth) -> bool:
        """Tell whether labels of this depth can stand for all of the window's requests."""
        return self._covered[depth] >= (1.0 - MOST_UNCOVERED) * self._weight

    def near(self) -> tuple[Table, NDArray[np.int64]]:
        """Return the requests near a label, and their sample ids."""
        return np.concatenate(self._near), np.concatenate(self._near_ids)

    def far(self) -> TermSums:
        """Return the sums over the others."""
        return self._far.sums()

    def sums(self) -> TermSums:
        """Return the sums over all of them."""
        return self.far() + sums_of(self.near()[0])

    def population(self, labels: Labels) -> Population:
        """Describe the requests that the estimates of this window cover."""
        picked = labels.sample_ids[~np.isnan(labels.probability[LabelDepth.SERVED])]
        labelled = int(np.count_nonzero(np.isin(self.near()[1], picked)))
        return Population(self.n, labelled, self._first, self._last)


def _corrected(
    judged: _Judged, sums: TermSums, labels: Labels, precision: Precision
) -> dict[Metric, Estimate]:
    """Estimate every metric from the judge's verdicts, corrected by human labels.

    Uses the labels of the window's own requests; if they are too few, or cannot stand for all of
    its requests, the judge's errors from all labels are used.
    """
    far = judged.far()
    near, near_ids = judged.near()
    own, rest = {}, {}
    for depth in LabelDepth:
        chosen = np.isin(labels.sample_ids, near_ids) & ~np.isnan(labels.probability[depth])
        is_labelled = np.isin(near_ids, labels.sample_ids[chosen])
        # A session counts as labelled as a whole: its requests without labels are left out.
        in_labelled_session = np.isin(near["session"], near["session"][is_labelled])
        in_labelled_session &= near["session"] != 0
        own[depth] = labels.clusters(depth, chosen)
        rest[depth] = far + sums_of(near[~is_labelled & ~in_labelled_session])
    elsewhere = labels.elsewhere()
    estimates = {}
    for metric in Metric:
        depth = LabelDepth.POOL if metric in NEEDS_POOL else LabelDepth.SERVED
        found = ppi_estimate(metric, own[depth], rest[depth], precision)
        if not judged.is_covered(depth):
            found = Estimate(None, None, None, found.n, "none", precision.min_n, found.n_effective)
        if found.method == "none":
            instead = borrowed_estimate(metric, elsewhere, sums, precision)
            found = found if instead.method == "none" else instead
        estimates[metric] = found
    return estimates
