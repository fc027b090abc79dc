"""Reports on a series: estimates from the judgments and labels in the store, and counts.

An estimate predicts the result of labelling all requests of its window by people: the judge is
exact, or human labels correct it. The uncorrected figures of a judge that errs are published
separately, under another name. Reads the store.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray
from ctxguard.measure import corrected
from ctxguard.measure.corrected import FOLDS, Model
from ctxguard.measure.estimate import Estimate, Sums, estimate, lacks_grades
from ctxguard.measure.metrics import METRICS, N_TERMS, Metric, shown_metrics, weighted_terms
from ctxguard.measure.rows import BoolArray, IntArray, Rows
from ctxguard.monitor.judges import PEOPLE_ALONE
from ctxguard.monitor.judging.counts import JUDGE_CHANGED, NOTHING_COUNTED, JudgingOutcome
from ctxguard.monitor.sampling.sampler import Accounts
from ctxguard.monitor.store import Counts, SampleStore, State
from ctxguard.monitor.store.types import MOST_UNCOVERED


class Window(StrEnum):
    """The requests that an estimate covers, narrowest first. A closed set: it labels a metric."""

    RECENT = "recent"
    """Requests answered in the last ``window_seconds``."""
    UP_TO_LABELS = "up_to_labels"
    """The retained requests that an export of labels could have picked, because they were judged
    before the last export. Only for a judge that errs."""
    ALL_RETAINED = "all_retained"
    """All requests that the store has retained."""


Estimates = Mapping[Metric, Estimate]


@dataclass(frozen=True, slots=True)
class WindowPopulation:
    """The requests of one window.

    Attributes:
        judged: Number of judged samples in the window.
        failed: Number of these with a passage that has no grade yet, because a call of the judge
            failed. Figures that need that grade leave them out, unless people's grades correct the
            judge; above a share of ``MOST_FAILED``, these figures have no value.
        labelled: Number of these that people have graded, picked with a known probability.
        since_seconds: Time of the first answer, in seconds since the epoch; None without
            requests.
        until_seconds: Time of the last answer. Samples of later requests may wait for the judge.
    """

    judged: int
    failed: int
    labelled: int
    since_seconds: float | None
    until_seconds: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """The estimates and counts at one moment, from everything the store held then.

    Attributes:
        judge: The series of judgments that the report is about.
        time_seconds: When the report was made, in seconds since the epoch.
        estimates: By window, narrowest first, and metric, from an exact judge or corrected by human
            labels: of a judge that errs without what people's grades do not correct.
        judge_estimates: The judge's own figures, not corrected; empty for an exact judge.
        populations: The requests that the estimates of each window cover.
        age_seconds: Age of the newest judged request's answer; None without judged requests.
        labelled: Samples that people have graded, including those whose text was deleted since.
        unpicked: Number of these that were not picked at random, and are in no estimate.
        disagreements: Passages on whose relevance annotators disagree.
        labelled_waiting: Labelled samples of another judge that this one has yet to judge.
        judge_changed: Whether labelled samples, judged again, show that the judge has changed.
        counts: Counts of this judge by every process since its series began.
        outcomes: Samples that this process took up, by outcome.
        failed_requests, failed_passages: Judged requests with passages that have no grade, because
            a call of the judge failed, and these passages; the next run asks about them again.
        waiting: Samples in the store that are not judged yet.
        oldest_waiting_seconds: Age of the oldest waiting sample; None where none waits.
        judging_sampling_probability: The probability with which a waiting sample is judged, to keep
            the budget.
        accounts: Samples of all serving processes, as last reported to the store.
    """

    judge: str
    time_seconds: float
    estimates: Mapping[Window, Estimates]
    judge_estimates: Mapping[Window, Estimates]
    populations: Mapping[Window, WindowPopulation]
    age_seconds: float | None
    labelled: int
    unpicked: int
    disagreements: int
    labelled_waiting: int
    judge_changed: bool
    counts: Counts
    outcomes: Mapping[JudgingOutcome, int]
    failed_requests: int
    failed_passages: int
    waiting: int
    oldest_waiting_seconds: float | None
    judging_sampling_probability: float
    accounts: Accounts

    @property
    def shown(self) -> Mapping[Metric, Window]:
        """The window in which to show each metric.

        The narrowest window with an estimate; without one, the window with the most requests.
        """
        chosen: dict[Metric, Window] = {}
        for metric in self.estimates[Window.ALL_RETAINED]:
            best = None
            for window, estimates in self.estimates.items():
                found = estimates[metric]
                if best is None or (
                    best.value is None and (found.value is not None or found.n > best.n)
                ):
                    best, chosen[metric] = found, window
        return chosen


def live_report(
    store: SampleStore,
    series: str,
    *,
    exact: bool,
    now_seconds: float,
    window_seconds: float,
    min_n: int,
    outcomes: Mapping[JudgingOutcome, int] | None = None,
    judging_sampling_probability: float = 1.0,
) -> Report:
    """Report on a series in one transaction, so that all of it describes one moment.

    Memory holds one page of judged requests, their sums, one row for each session, and the labelled
    ones: it does not grow with the number of requests.

    Args:
        exact: Whether the judge's grades equal people's and need no correction.
        now_seconds: The present, in seconds since the epoch.
        window_seconds: Length of the recent window.
        min_n: Effective number of clusters below which there is no estimate, ≥ 2.
        outcomes, judging_sampling_probability: As in ``Report``, which the store does not hold.
    """
    is_corrected, known = not (exact or series == PEOPLE_ALONE), outcomes or {}
    with store.snapshot():
        graded, draws = store.graded(series), list(store.draws(series))
        drawn = graded.take(np.isin(graded.requests["draw"], draws))
        labels = None if exact or not len(drawn.requests) else Labels.of(drawn)
        windows = {
            Window.RECENT: _Judged(since=now_seconds - window_seconds),
            Window.UP_TO_LABELS: _Judged(covered=np.unique(drawn.requests["first_pick"])),
            Window.ALL_RETAINED: _Judged(),
        }
        if exact:
            del windows[Window.UP_TO_LABELS]
        for rows in store.judged_pages(series):
            is_labelled = np.isin(rows.requests["draw"], draws)
            terms = weighted_terms(rows)
            predicted = None if labels is None else labels.predict(rows)
            for judged in windows.values():
                judged.add(rows.requests, *terms, predicted, is_labelled=is_labelled)
        by_judge = {window: judged.estimates(min_n) for window, judged in windows.items()}
        estimates = by_judge
        if not exact:
            estimates = {each: _corrected(one, labels, min_n) for each, one in windows.items()}
        newest = windows[Window.ALL_RETAINED].population.until_seconds
        is_judged = store.labelled(series).values() if is_corrected else ()
        oldest, counts = store.oldest_waiting(), store.counts(series)
        failed_requests, failed_passages = store.n_failed(series)
        return Report(
            judge=series,
            time_seconds=now_seconds,
            estimates=estimates,
            judge_estimates=by_judge if is_corrected else {},
            populations={window: judged.population for window, judged in windows.items()},
            age_seconds=None if newest is None else max(now_seconds - newest, 0.0),
            labelled=len(graded.requests),
            unpicked=int(np.count_nonzero(graded.requests["draw"] == 0)),
            disagreements=int(graded.requests["disagreements"].sum()),
            labelled_waiting=sum(not each for each in is_judged),
            judge_changed=is_corrected and counts.get((JUDGE_CHANGED,), 0.0) > 0.0,
            counts={**NOTHING_COUNTED, **counts},
            outcomes={outcome: known.get(outcome, 0) for outcome in JudgingOutcome},
            failed_requests=failed_requests,
            failed_passages=failed_passages,
            waiting=store.states()[State.PENDING],
            oldest_waiting_seconds=None if oldest is None else max(now_seconds - oldest, 0.0),
            judging_sampling_probability=judging_sampling_probability,
            accounts=store.accounts(),
        )


@dataclass(frozen=True, slots=True)
class Labels:
    """The l samples for which people graded everything that a draw asked for, by ascending id.

    Attributes:
        rows: Their rows.
        questions: What they ask, ascending; those of one fold are ``FOLDS`` places apart.
        model: The fit of people's grades on the judge's.
        p: P(relevant) of each passage in ``rows``, by the grades of other questions.
    """

    rows: Rows
    questions: NDArray[np.int64]
    model: Model
    p: FloatArray

    @classmethod
    def of(cls, rows: Rows) -> "Labels":
        """Fit the model of relevance to labels."""
        questions, place = np.unique(rows.requests["question"], return_inverse=True)
        model = Model.fitted(rows, place % FOLDS)
        return cls(rows, questions, model, model.of(rows, place % FOLDS))

    def folds_of(self, questions: NDArray[np.int64]) -> IntArray:
        """Return the fold of each question, shape (n,); −1 for unknown questions."""
        place = np.searchsorted(self.questions, questions)
        return np.where(np.isin(questions, self.questions), place % FOLDS, -1)

    def predict(self, rows: Rows) -> FloatArray:
        """Compute the columns of ``corrected.predicted``, weighted by 1/π."""
        p = self.model.of(rows, self.folds_of(rows.requests["question"]))
        columns = corrected.predicted(rows, p, self.model)
        return np.asarray(columns / rows.requests["probability"][:, None])


class _Judged:
    """The judged requests of one window, added page by page.

    Args:
        since: Earlier requests are left out, in seconds since the epoch.
        covered: Only requests with one of these as their first pick; None for all.
    """

    def __init__(self, since: float = -np.inf, covered: IntArray | None = None) -> None:
        self._since = since
        self._covered = covered
        self.own, self.predicted = Sums.of(N_TERMS), Sums.of(corrected.N_COLUMNS)
        self.labelled_ids = [np.empty(0, np.int64)]
        self.requests_by_pick: Counter[int] = Counter()
        self.weight_by_pick: Counter[int] = Counter()
        self.population = WindowPopulation(0, 0, 0, None, None)

    def estimates(self, min_n: int) -> Estimates:
        """Estimate every metric from the judge's grades, if few enough requests lack a grade."""
        own = self.own.ended()
        found, shown = dict[Metric, Estimate](), shown_metrics(own.totals)
        for metric in METRICS:
            ratio = own.ratio(metric)
            is_shown = metric in shown
            found[metric] = (
                estimate(metric, ratio, min_n) if is_shown else Estimate.undefined(ratio.n)
            )
        return found

    def add(
        self,
        requests: NDArray[np.void],
        values: FloatArray,
        inclusion: FloatArray,
        predicted: FloatArray | None,
        *,
        is_labelled: BoolArray,
    ) -> None:
        """Add a page of n requests, ordered by time.

        Args:
            requests: Shape (n,), of ``REQUEST``.
            values, inclusion: From ``weighted_terms``.
            predicted: From ``Labels.predict``; None without labels that correct the judge.
            is_labelled: Shape (n,), whether people have graded each.
        """
        inside = requests["time_seconds"] >= self._since
        if self._covered is not None:
            inside &= np.isin(requests["first_pick"], self._covered)
        if not inside.any():
            return
        requests, is_labelled = requests[inside], is_labelled[inside]
        session = requests["session"]
        self.own.add(values[inside], session, inclusion[inside])
        if predicted is not None:
            self.predicted.add(predicted[inside], session)
        self.labelled_ids.append(requests["sample_id"][is_labelled])
        picks, cell = np.unique(requests["first_pick"], return_inverse=True)
        asked_of = np.bincount(cell, requests["n_passages"] > 0, len(picks))
        weight = np.bincount(cell, 1.0 / requests["probability"], len(picks))
        self.requests_by_pick.update(dict(zip(picks.tolist(), asked_of.tolist(), strict=True)))
        self.weight_by_pick.update(dict(zip(picks.tolist(), weight.tolist(), strict=True)))
        before, times = self.population, requests["time_seconds"].tolist()
        self.population = WindowPopulation(
            before.judged + len(times),
            before.failed + int(np.count_nonzero(values[inside, -1])),
            before.labelled + len(self.labelled_ids[-1]),
            times[0] if before.since_seconds is None else before.since_seconds,
            times[-1],
        )


def _corrected(judged: _Judged, labels: Labels | None, min_n: int) -> Estimates:
    """Estimate every metric from the judge's grades, corrected by people's labels.

    There is no estimate if the labels cannot stand for nearly all of its requests.
    """
    none = dict.fromkeys(corrected.QUOTIENTS, lacks_grades(min_n))
    if labels is None:
        return none
    requests = labels.rows.requests
    first_pick, sample_ids = requests["first_pick"], requests["sample_id"]
    chosen = np.isin(sample_ids, np.concatenate(judged.labelled_ids))
    own_picks = set(first_pick[chosen].tolist())
    covered = sum(map(judged.weight_by_pick.__getitem__, own_picks))
    if not own_picks or covered < (1.0 - MOST_UNCOVERED) * sum(judged.weight_by_pick.values()):
        return none
    stands_for = corrected.stands_for(first_pick, chosen, judged.requests_by_pick)
    graded = corrected.Graded.of(labels.rows, labels.p, stands_for)
    return corrected.corrected_estimates(judged.predicted.ended(), graded, labels.model, min_n)
