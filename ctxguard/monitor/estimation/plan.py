"""What labels will give, before people grade them, and what those that came back are good for."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctxguard.core.types import FloatArray
from ctxguard.monitor.estimation.graded import depth_graded
from ctxguard.monitor.estimation.live import NEEDS_POOL, Window, live_estimates
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
    """What labels of some samples will give and cost.

    Attributes:
        widths_now: The width of each metric's interval over all that is retained; None where
            there is no estimate yet.
        widths: About the width with the labels; None where it cannot be told.
        expected_passages: About how many passages people grade.
        recall_passages: How many more they would grade for recall; None where that is included.
    """

    widths_now: Mapping[Metric, float | None]
    widths: Mapping[Metric, float | None]
    expected_passages: int
    recall_passages: int | None


def label_plan(
    store: SampleStore,
    series: str,
    samples: Sequence[GradedSample],
    depth: LabelDepth,
    now_seconds: float,
) -> LabelPlan:
    """What grading these samples will give and cost.

    Widths shrink with the square root of the number of labels. Where there are labels already, the
    present interval tells how far people and judge agree. Where there are none, the spread of the
    judge's own verdicts stands for that of people's.

    Args:
        store: Where judgments and graded samples are.
        series: The series of judgments.
        samples: Those to be graded.
        depth: How far.
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
    """About how wide the interval of an estimate from ``n`` clusters would be from ``n_new``.

    >>> scaled_width(Estimate(0.5, 0.4, 0.6, 100, "normal"), 100, 400)
    0.1
    """
    if found.lower is None or found.upper is None or not n_new > 0.0:
        return None
    return round((found.upper - found.lower) * math.sqrt(n / n_new), 6)


def usable_for(sample: GradedSample) -> frozenset[Metric]:
    """The metrics for which a sample counts by what people have graded of it so far."""
    depth = depth_graded(sample.record, sample.people)
    if depth is None:
        return frozenset()
    served = {Metric.PRECISION, Metric.UDCG, Metric.GAIN, Metric.HARM}
    pool = {Metric.RECALL} if depth is LabelDepth.POOL else set()
    rank = {Metric.MRR} if sample.is_graded(depth) else set()
    return frozenset(served | pool | rank)


def usable_requests(store: SampleStore, request_ids: Sequence[str]) -> dict[str, int]:
    """How many of these requests count for each metric, lack grades, or were not picked.

    Returns:
        By the name of each of ``PLANNED``, ``UNFINISHED`` and ``UNPICKED``.
    """
    ids = [sample_id for request_id in request_ids for sample_id in store.find(request_id)]
    counts: Counter[str] = Counter()
    for series in store.series():
        picked = {depth: store.picked(series, depth) for depth in LabelDepth}
        # Of a request that was sampled twice, the sample that was picked.
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
    """Weights for a pick: twice as much where the judge calls the first passage wrong.

    Args:
        summaries: Those of n judged samples, one after the other.

    Returns:
        Shape (n,), > 0.
    """
    return label_weights(table_of(summaries))
