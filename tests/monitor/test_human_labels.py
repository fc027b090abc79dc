"""Labels of people: which passages they are asked about, and how they correct a judge."""

import random
from collections.abc import Callable, Mapping, Sequence

import pytest
from watching import Watching

from ctxguard.core.context import Context
from ctxguard.core.types import Passage
from ctxguard.monitor.estimation.live import Window, human_request
from ctxguard.monitor.estimation.terms import Metric
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.labels.human import human_verdicts, positions_to_label
from ctxguard.monitor.sampling.inclusion import JudgingRates
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import LabelRow

MakeContext = Callable[..., Context]
POOL = [f"p{rank}" for rank in range(10)]


def label(
    passage_id: str, grade: int, annotator: str = "ann", at: float = 0.0, request_id: str = "r"
) -> LabelRow:
    return LabelRow(request_id, passage_id, grade, None, annotator, at)


def verdicts_of(labels: Sequence[LabelRow]) -> Mapping[str, Judgment]:
    return human_verdicts((1, label) for label in labels)[1].by_passage


class ErringJudge:
    """Sees relevance with a sensitivity of 0.85 and a specificity of 0.9, the same every time."""

    name = "erring"
    version = "1"
    max_grade = 1

    def __init__(self, truth: dict[str, set[str]]) -> None:
        self._truth = truth

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment]:
        verdicts = []
        for passage in passages:
            name = passage.passage_id
            luck = random.Random(f"{query} {name}").random()
            right = name in self._truth[query]
            verdicts.append(Judgment(name, int(luck < 0.85) if right else int(luck < 0.1)))
        return verdicts


def test_the_last_word_of_each_and_the_lower_median_of_several_count() -> None:
    labels = [
        label("a", 0, "ann", at=1.0),
        label("a", 2, "ann", at=2.0),
        label("a", 1, "bob", at=1.0),
        label("b", 3, "ann"),
        label("b", 0, "bob"),
        label("c", 3, "ann"),
        label("c", 3, "bob"),
        label("c", 0, "eve"),
    ]
    found = human_verdicts((1, label) for label in labels)[1]
    assert {name: verdict.grade for name, verdict in found.by_passage.items()} == {
        "a": 1,
        "b": 0,
        "c": 3,
    }
    assert found.disagreements == 2


def record_of(make_context: MakeContext, rates: JudgingRates) -> SampleRecord:
    live = Watching(ErringJudge({}), rates=rates)
    live.serve(make_context(POOL, 2))
    return SampleRecord.from_bytes(live.store.payloads([1])[1])


def test_people_are_asked_about_what_was_served_first(make_context: MakeContext) -> None:
    record = record_of(
        make_context, JudgingRates(dropped_rate=0.0, full_pool_rate=0.0, baseline_rate=0.0)
    )
    assert positions_to_label(record, {})[:2] == [0, 1]


def test_a_whole_pool_is_asked_for_only_once_nothing_served_was_relevant(
    make_context: MakeContext,
) -> None:
    rates = JudgingRates(
        dropped_rate=0.0, full_pool_rate=0.0, full_pool_rate_if_no_hit=1.0, baseline_rate=0.0
    )
    record = record_of(make_context, rates)
    assert positions_to_label(record, {}) == [0, 1]
    one_right = {"p0": Judgment("p0", 1), "p1": Judgment("p1", 0)}
    assert positions_to_label(record, one_right) == []
    none_right = {"p0": Judgment("p0", 0), "p1": Judgment("p1", 0)}
    assert positions_to_label(record, none_right) == list(range(2, 10))


def test_a_sample_counts_once_people_have_graded_all_that_it_takes(
    make_context: MakeContext,
) -> None:
    live = Watching(ErringJudge({}))
    record = record_of(make_context, JudgingRates(dropped_rate=1.0))
    settings = {"utilities": live.monitor.utilities, "max_grade": 1}
    some = [label(name, 1) for name in POOL[:9]]
    assert human_request(record, verdicts_of(some), **settings) is None
    found = human_request(record, verdicts_of([*some, label("p9", 0)]), **settings)
    assert (found.kept_relevant, found.dropped_relevant) == (2, 7.0)


def live_with_labels(
    make_context: MakeContext, n_labelled: int
) -> tuple[Watching, dict[str, set[str]]]:
    rng = random.Random(1)
    truth = {
        f"q{i}": {name for rank, name in enumerate(POOL) if rng.random() < 0.5 / (rank + 1)}
        for i in range(600)
    }
    live = Watching(ErringJudge(truth), rates=JudgingRates(dropped_rate=1.0), min_n=30)
    live.watch(*[make_context(POOL, 5, query=name, request_id=name) for name in truth])
    for sample_id in live.store.pick_for_labels(live.monitor.series, n_labelled):
        record = SampleRecord.from_bytes(live.store.payloads([sample_id])[sample_id])
        right = truth[record.query]
        live.store.add_labels(
            [
                label(name, int(name in right), request_id=record.request_id)
                for name in record.passage_ids
            ]
        )
    return live, truth


def test_a_judge_that_nobody_corrects_gives_no_estimate_under_that_name(
    make_context: MakeContext,
) -> None:
    live, _ = live_with_labels(make_context, 0)
    report = live.monitor.report()
    assert all(found.value is None for found in report.estimates[Window.ALL_RETAINED].values())
    assert report.estimates[Window.ALL_RETAINED][Metric.UDCG].n_needed == 30
    assert report.live.judge_estimates[Window.ALL_RETAINED][Metric.UDCG].value is not None


def test_human_labels_correct_the_judge(make_context: MakeContext) -> None:
    live, truth = live_with_labels(make_context, 150)
    report = live.monitor.report()
    precision = sum(len(right & set(POOL[:5])) / 5 for right in truth.values()) / len(truth)
    corrected = report.estimates[Window.ALL_RETAINED][Metric.PRECISION]
    alone = report.live.judge_estimates[Window.ALL_RETAINED][Metric.PRECISION]
    assert report.live.labelled == 150
    assert corrected.lower <= precision <= corrected.upper
    assert not alone.lower <= precision <= alone.upper


def test_labels_asked_for_after_an_alarm_correct_nothing(make_context: MakeContext) -> None:
    live, _ = live_with_labels(make_context, 60)
    targeted = live.store.pick_for_labels(live.monitor.series, 40)
    live.store.queue_labels(targeted, reason="recall_loss")
    for sample_id in targeted:
        record = SampleRecord.from_bytes(live.store.payloads([sample_id])[sample_id])
        live.store.add_labels(
            [label(name, 0, request_id=record.request_id) for name in record.passage_ids]
        )
    assert live.monitor.report().live.labelled == 60


def test_disagreements_are_reported(make_context: MakeContext) -> None:
    live, _ = live_with_labels(make_context, 30)
    (sample_id, first), *_ = live.store.labels()
    live.store.add_labels(
        [LabelRow(first.request_id, first.passage_id, 1 - first.grade, None, "another person", 5.0)]
    )
    assert live.monitor.report().live.disagreements == 1
    assert sample_id


@pytest.mark.parametrize("source", ["feedback", "console"])
def test_labels_of_another_source_are_not_mixed_in(make_context: MakeContext, source: str) -> None:
    live, _ = live_with_labels(make_context, 30)
    before = live.monitor.report().live
    other = live.store.pick_for_labels(live.monitor.series, 1)
    (request_id,) = live.store.request_ids(other).values()
    live.store.add_labels(
        [LabelRow(request_id, name, 1, None, "users", 1.0, source) for name in POOL]
    )
    assert live.monitor.report().live.labelled == before.labelled
