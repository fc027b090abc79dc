"""Predicts the effect of labels before people grade them, and counts the uses of those graded."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctxguard.core.types import FloatArray
from ctxguard.monitor.estimation.graded import depth_graded
from ctxguard.monitor.estimation.live import ARMS, NEEDS_POOL, Estimates, Window, live_estimates
from ctxguard.monitor.estimation.ppi import label_weights
from ctxguard.monitor.estimation.ratio import DEFAULT_PRECISION, Estimate
from ctxguard.monitor.estimation.terms import Metric, table_of
from ctxguard.monitor.labels.samples import GradedSample, confirmed_share, graded_samples
from ctxguard.monitor.store import LabelDepth, SampleStore

PLANNED = (Metric.PRECISION, Metric.MRR, Metric.UDCG, Metric.GAIN, Metric.HARM, Metric.RECALL)
"""The metrics that labels are graded for."""

UNFINISHED, UNPICKED = "unfinished", "unpicked"


@dataclass(frozen=True, slots=True)
class LabelPlan:
    """The predicted effect and cost of labelling some samples.

    Attributes:
        widths_now: The width of each metric's interval over all that is retained; None without
            an estimate so far.
        widths: Approximate width with the labels; None if it cannot be predicted.
        expected_passages: Approximate number of passages that people grade.
        recall_passages: Number of further passages for recall; None if that is included.
        arms: Estimates over all that is retained of the requests that were dealt to each mode,
            and their difference, by name; empty where none was dealt.
    """

    widths_now: Mapping[Metric, float | None]
    widths: Mapping[Metric, float | None]
    expected_passages: int
    recall_passages: int | None
    arms: Mapping[str, Estimates]


def label_plan(
    store: SampleStore,
    series: str,
    samples: Sequence[GradedSample],
    depth: LabelDepth,
    now_seconds: float,
) -> LabelPlan:
    """Predict the effect and cost of grading these samples.

    Widths shrink with the square root of the number of labels. If there are labels already, the
    present interval shows how far people and judge agree. If there are none, the spread of the
    judge's own verdicts stands in for that of people's.

    Args:
        store: The store of judgments and graded samples.
        series: The series of judgments.
        samples: The samples to be graded.
        depth: How far to grade them.
        now_seconds: The present, in seconds since the epoch.
    """
    live = live_estimates(
        store,
        series,
        exact=False,
        now_seconds=now_seconds,
        window_seconds=1.0,
        precision=DEFAULT_PRECISION,
    )
    corrected = live.estimates[Window.ALL_RETAINED]
    judge = live.judge_estimates[Window.ALL_RETAINED]
    metrics = [one for one in PLANNED if depth is LabelDepth.POOL or one not in NEEDS_POOL]
    confirmed = confirmed_share(store, series, list(store.picked(series, LabelDepth.SERVED)))
    expected, with_recall = (
        round(sum(sample.expected_passages(each, confirmed) for sample in samples))
        for each in (depth, LabelDepth.POOL)
    )
    return LabelPlan(
        {one: scaled_width(corrected[one], 1.0, 1.0) for one in metrics},
        {
            one: _expected_width(
                len(samples), corrected[one], judge[one], judge[Metric.PRECISION].n
            )
            for one in metrics
        },
        expected,
        None if depth is LabelDepth.POOL else with_recall - expected,
        {}
        if Window.ALL_RETAINED not in live.arm_differences
        else {
            **{arm.value: live.arms[Window.ALL_RETAINED, arm] for arm in ARMS},
            "difference": live.arm_differences[Window.ALL_RETAINED],
        },
    )


def _expected_width(n: int, corrected: Estimate, judge: Estimate, n_judged: int) -> float | None:
    if not judge.n:
        return None
    # Not every request has a reciprocal rank, or a recall.
    n_more = n * judge.n / n_judged
    if corrected.lower is not None and not corrected.is_borrowed:
        n_now = corrected.n_effective or corrected.n
        return scaled_width(corrected, n_now, n_now + n_more)
    return scaled_width(judge, judge.n_effective or judge.n, n_more)


def scaled_width(found: Estimate, n: float, n_new: float) -> float | None:
    """Predict an interval's width with ``n_new`` clusters, from an estimate with ``n``.

    >>> scaled_width(Estimate(0.5, 0.4, 0.6, 100, "normal"), 100, 400)
    0.1
    """
    if found.lower is None or found.upper is None or not n_new > 0.0:
        return None
    return round((found.upper - found.lower) * math.sqrt(n / n_new), 6)


def usable_for(sample: GradedSample) -> frozenset[Metric]:
    """Return the metrics for which people have graded a sample far enough."""
    depth = depth_graded(sample.record, sample.people)
    if depth is None:
        return frozenset()
    served = {Metric.PRECISION, Metric.UDCG, Metric.GAIN, Metric.HARM}
    pool = {Metric.RECALL} if depth is LabelDepth.POOL else set()
    rank = {Metric.MRR} if sample.is_graded(depth) else set()
    return frozenset(served | pool | rank)


def usable_requests(store: SampleStore, request_ids: Sequence[str]) -> dict[str, int]:
    """Count how many of these requests are usable for each metric, lack grades, or were not picked.

    Returns:
        Counts by the name of each of ``PLANNED``, ``UNFINISHED`` and ``UNPICKED``.
    """
    ids = [sample_id for request_id in request_ids for sample_id in store.find(request_id)]
    counts: Counter[str] = Counter()
    for series in store.series():
        picked = {depth: store.picked(series, depth) for depth in LabelDepth}
        # If a request was sampled twice, take the sample that was picked.
        ids.sort(key=picked[LabelDepth.SERVED].__contains__)
        samples = graded_samples(store, series, ids).items()
        for sample_id, sample in {
            one.record.request_id: (key, one) for key, one in samples
        }.values():
            depth = LabelDepth.POOL if sample_id in picked[LabelDepth.POOL] else LabelDepth.SERVED
            counts[UNFINISHED] += not sample.is_graded(depth)
            counts[UNPICKED] += sample_id not in picked[LabelDepth.SERVED]
            counts.update(metric.value for metric in usable_for(sample))
    return {name: counts[name] for name in (*(one.value for one in PLANNED), UNFINISHED, UNPICKED)}


def weigh_by_first(summaries: bytes) -> FloatArray:
    """Weight a pick: twice as much if the judge calls the first passage wrong.

    Args:
        summaries: The summaries of n judged samples, concatenated.

    Returns:
        Weights of shape (n,), > 0.
    """
    return label_weights(table_of(summaries))
