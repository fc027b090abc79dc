"""What an export says beforehand, against what the labels then give and cost."""

import random
from collections.abc import Callable, Mapping, Sequence

import pytest
from watching import NOW, Watching

from ctxguard.core.context import Context
from ctxguard.core.types import Passage
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.estimation.plan import label_plan, scaled_width, usable_for
from ctxguard.monitor.estimation.ratio import Estimate
from ctxguard.monitor.estimation.terms import Metric
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.labels.files import IF_NONE_ABOVE
from ctxguard.monitor.labels.samples import GradedSample, graded_samples
from ctxguard.monitor.store import LabelDepth, LabelRow

MakeContext = Callable[..., Context]
POOL = [f"p{rank}" for rank in range(20)]
SERVED_METRICS = (Metric.PRECISION, Metric.MRR, Metric.UDCG, Metric.HARM)


class ErringJudge:
    """Sees relevance with a sensitivity of 0.85 and a specificity of 0.9."""

    name, version, max_grade = "erring", "1", 1

    def __init__(self, truth: Mapping[str, set[str]]) -> None:
        self._truth = truth

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment]:
        return [
            Judgment(
                one.passage_id,
                int(
                    random.Random(f"{query} {one.passage_id}").random()
                    < (0.85 if one.passage_id in self._truth[query] else 0.1)
                ),
            )
            for one in passages
        ]


@pytest.fixture
def truth() -> Mapping[str, set[str]]:
    rng = random.Random(3)
    return {
        f"q{number}": {name for rank, name in enumerate(POOL) if rng.random() < 0.4 / (rank + 1)}
        for number in range(500)
    }


@pytest.fixture
def live(make_context: MakeContext, truth: Mapping[str, set[str]]) -> Watching:
    made = Watching(ErringJudge(truth), min_n=30)
    made.watch(*[make_context(POOL, 5, query=name, request_id=name) for name in truth])
    return made


def samples_of(live: Watching, ids: Sequence[int]) -> list[GradedSample]:
    return list(graded_samples(live.store, live.monitor.series, ids).values())


def grade(live: Watching, truth: Mapping[str, set[str]], ids: Sequence[int]) -> int:
    """Grade the rows of a file as the guide says; how many that took."""
    labels = []
    for sample in samples_of(live, ids):
        found = False
        for row in sample.rows(LabelDepth.SERVED):
            if found and row.when == IF_NONE_ABOVE:
                break
            is_right = row.passage_id in truth[row.query]
            found = found or is_right
            labels.append(LabelRow(row.request_id, row.passage_id, int(is_right), None, "ann", NOW))
    live.store.add_labels(labels)
    return len(labels)


def test_widths_and_passages_are_about_what_was_said(
    live: Watching, truth: Mapping[str, set[str]]
) -> None:
    store, series = live.store, live.monitor.series
    for n, far in ((80, 0.5), (80, 0.25)):
        ids = store.pick_for_labels(series, n)
        plan = label_plan(store, series, samples_of(live, ids), LabelDepth.SERVED, NOW)
        assert grade(live, truth, ids) == pytest.approx(plan.expected_passages, rel=0.25)
        found = live.monitor.report().estimates[Window.ALL_RETAINED]
        for metric in SERVED_METRICS:
            width = found[metric].upper - found[metric].lower
            # Before any label nobody knows how much the judge helps.
            assert width == pytest.approx(plan.widths[metric], rel=far), metric
    assert all(usable_for(one) >= set(SERVED_METRICS) for one in samples_of(live, ids))
    assert set(plan.widths_now.values()).isdisjoint({None})


def test_before_anything_is_judged_nothing_is_promised(make_context: MakeContext) -> None:
    live = Watching(ErringJudge({}))
    plan = label_plan(live.store, live.monitor.series, [], LabelDepth.POOL, NOW)
    assert set(plan.widths.values()) == {None}
    assert (plan.expected_passages, plan.recall_passages) == (0, None)


def test_an_estimate_without_an_interval_has_no_width() -> None:
    assert scaled_width(Estimate(None, None, None, 3, "none"), 3, 10) is None
