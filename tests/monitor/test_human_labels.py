"""Labels of people: which passages they are asked about, and how they correct a judge."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace

import numpy as np
import pytest
import sqlalchemy as sa
from judged_rows import table
from numpy.typing import NDArray
from watching import Watching

from ctxguard.core.context import Context
from ctxguard.core.metrics import DEFAULT_UTILITIES
from ctxguard.core.types import Passage
from ctxguard.monitor.estimation.borrow import borrowed_estimate
from ctxguard.monitor.estimation.graded import depth_graded, graded_request
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.estimation.ppi import LabelledClusters
from ctxguard.monitor.estimation.ratio import Precision
from ctxguard.monitor.estimation.sums import sums_of
from ctxguard.monitor.estimation.terms import JudgedRequest, Metric, table_of
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.labels.human import (
    WHOLE_POOL_RATE,
    human_verdicts,
    positions_to_label,
    searches_whole_pool,
)
from ctxguard.monitor.sampling.inclusion import JudgingRates
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import LabelDepth, LabelRow, schema

MakeContext = Callable[..., Context]
POOL = [f"p{rank}" for rank in range(10)]


def label(
    passage_id: str, grade: int, annotator: str = "ann", at: float = 0.0, request_id: str = "r"
) -> LabelRow:
    return LabelRow(request_id, passage_id, grade, None, annotator, at)


def verdicts_of(labels: Sequence[LabelRow]) -> Mapping[str, Judgment]:
    return human_verdicts((1, label) for label in labels)[1].by_passage


def test_what_an_annotator_took_back_does_not_count() -> None:
    labels = [label("a", 3), label("a", 0, "bob"), label("b", 2)]
    withdrawn = [replace(label("a", 3, at=1.0), grade=None), replace(label("b", 2), grade=None)]
    found = verdicts_of([*labels, *withdrawn])
    assert {name: one.grade for name, one in found.items()} == {"a": 0}
    assert verdicts_of([*labels, *withdrawn, label("a", 1, at=2.0)])["a"].grade == 0
    assert verdicts_of([*labels, *withdrawn, label("b", 1, at=2.0)])["b"].grade == 1


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


ONLY_SERVED = JudgingRates(
    dropped_rate=0.0, full_pool_rate=0.0, full_pool_rate_if_no_hit=1.0, baseline_rate=0.0
)


def searched(record: SampleRecord, *, whole_pool: bool) -> SampleRecord:
    """The record with a request id whose whole pool people search, or do not."""
    return next(
        named
        for number in range(1_000)
        if searches_whole_pool(named := replace(record, request_id=f"r{number}")) is whole_pool
    )


def to_label(record: SampleRecord, grades: Mapping[str, int], *judged: str) -> list[str]:
    verdicts = {name: Judgment(name, grade) for name, grade in grades.items()}
    positions = positions_to_label(record, verdicts, LabelDepth.SERVED, judged)
    return [record.passage_ids[position] for position in positions]


def test_where_a_served_passage_is_relevant_nothing_else_needs_a_grade(
    make_context: MakeContext,
) -> None:
    record = record_of(make_context, ONLY_SERVED)
    assert to_label(record, {})[:2] == ["p0", "p1"]
    assert to_label(record, {"p0": 1}, "p5") == ["p1"]
    assert to_label(record, {"p0": 1, "p1": 0}, "p5") == []


def test_where_nothing_served_is_relevant_people_look_where_the_judge_saw_something(
    make_context: MakeContext,
) -> None:
    record = searched(record_of(make_context, ONLY_SERVED), whole_pool=False)
    nothing = {"p0": 0, "p1": 0}
    assert to_label(record, nothing) == []
    assert to_label(record, nothing, "p7", "p4") == ["p4", "p7"]
    assert to_label(record, {**nothing, "p4": 1}, "p7", "p4") == []
    assert to_label(record, {**nothing, "p4": 0, "p7": 0}, "p7", "p4") == []


def test_for_some_requests_the_rest_of_the_pool_is_searched_until_one_is_found(
    make_context: MakeContext,
) -> None:
    record = searched(record_of(make_context, ONLY_SERVED), whole_pool=True)
    nothing = {"p0": 0, "p1": 0, "p4": 0}
    rest = ["p2", "p3", *POOL[5:]]
    assert to_label(record, {"p0": 0, "p1": 0}, "p4") == ["p4", *rest]
    assert to_label(record, nothing, "p4") == rest
    assert to_label(record, {**nothing, "p2": 0, "p3": 1}, "p4") == []
    # Before the likely one is graded, it is not known what a find among the others stands for.
    assert to_label(record, {"p0": 0, "p1": 0, "p3": 1}, "p4")[0] == "p4"


def test_what_recall_needs_is_asked_for_to_that_depth(make_context: MakeContext) -> None:
    record = record_of(make_context, JudgingRates(dropped_rate=1.0))
    right = {"p0": Judgment("p0", 1), "p1": Judgment("p1", 0)}
    assert positions_to_label(record, right, LabelDepth.SERVED, ()) == []
    assert positions_to_label(record, right, LabelDepth.POOL, ()) == list(range(2, 10))


def graded(record: SampleRecord, grades: Mapping[str, int], *judged: str) -> JudgedRequest:
    verdicts = {name: Judgment(name, grade) for name, grade in grades.items()}
    depth = depth_graded(record, verdicts)
    assert depth is not None
    return graded_request(
        record,
        verdicts,
        depth,
        judged,
        utilities=DEFAULT_UTILITIES,
        max_grade=1,
        probability=0.5,
    )


def test_a_sample_counts_once_people_have_graded_what_was_served(
    make_context: MakeContext,
) -> None:
    record = record_of(make_context, JudgingRates(dropped_rate=1.0))
    assert depth_graded(record, {"p0": Judgment("p0", 1)}) is None
    of_served = graded(record, {"p0": 1, "p1": 1})
    assert (of_served.kept_relevant, of_served.dropped_relevant) == (2, None)
    of_all = graded(record, {**dict.fromkeys(POOL[:9], 1), "p9": 0})
    assert (of_all.kept_relevant, of_all.dropped_relevant) == (2, 7.0)


def test_a_search_stands_for_those_that_were_not_made(make_context: MakeContext) -> None:
    record = record_of(make_context, ONLY_SERVED)
    nothing = {"p0": 0, "p1": 0}
    whole, not_whole = (searched(record, whole_pool=each) for each in (True, False))

    def found(record: SampleRecord, grades: Mapping[str, int]) -> tuple[int | None, float]:
        request = graded(record, {**nothing, **grades}, "p4")
        return request.pool_relevant, request.full_pool_probability

    for one in (whole, not_whole):
        assert found(one, {}) == (None, WHOLE_POOL_RATE)  # the likely one has no grade yet
        assert found(one, {"p4": 1}) == (1, 1.0)
    assert found(not_whole, {"p4": 0}) == (0, WHOLE_POOL_RATE)
    assert found(not_whole, {"p4": 0, "p5": 1}) == (0, WHOLE_POOL_RATE)
    assert found(whole, {"p4": 0}) == (None, WHOLE_POOL_RATE)
    assert found(whole, {"p4": 0, "p5": 1}) == (1, WHOLE_POOL_RATE)
    everything = dict.fromkeys(POOL, 0)
    assert found(whole, everything) == (0, WHOLE_POOL_RATE)


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
    picked = live.store.pick_for_labels(live.monitor.series, n_labelled) if n_labelled else []
    for sample_id in picked:
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


def test_labels_that_nobody_picked_at_random_correct_nothing(make_context: MakeContext) -> None:
    """Such as those asked for after an alarm."""
    live, _ = live_with_labels(make_context, 60)
    before = live.monitor.estimates(Window.ALL_RETAINED)
    labelled = {sample_id for sample_id, _ in live.store.labels()}
    targeted = [number for number in range(1, 601) if number not in labelled][:40]
    for sample_id in targeted:
        record = SampleRecord.from_bytes(live.store.payloads([sample_id])[sample_id])
        live.store.add_labels(
            [label(name, 0, request_id=record.request_id) for name in record.passage_ids]
        )
    report = live.monitor.report()
    assert (report.live.labelled, report.live.unpicked) == (100, 40)
    assert report.live.populations[Window.ALL_RETAINED].labelled == 60
    for metric, estimate in report.estimates[Window.ALL_RETAINED].items():
        assert astuple(estimate) == pytest.approx(astuple(before[metric]))


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


def test_a_labelled_sample_that_is_damaged_fails_no_report(make_context: MakeContext) -> None:
    live, _ = live_with_labels(make_context, 40)
    damaged = live.store.labels()[0][0]

    def damage(connection: sa.Connection) -> None:
        payloads = schema.payloads
        connection.execute(
            sa.update(payloads).where(payloads.c.sample_id == damaged).values(payload=b"no record")
        )

    live.store._database.write(damage)
    assert live.monitor.report().live.labelled == 39


def test_two_labels_are_too_few_to_borrow_from() -> None:
    """Whatever precision is asked for: the error of a map through two points is not known."""
    rows = table(
        JudgedRequest(1.0, grades, tuple(map(float, grades)), None, 0.0, None, 0.0, 0.0)
        for grades in ((1, 1), (0, 1))
    )
    labelled = LabelledClusters.of(rows, rows)
    found = borrowed_estimate(Metric.PRECISION, labelled, sums_of(rows), Precision(min_n=2))
    assert (found.value, found.n) == (None, 2)


def test_a_borrowed_precision_is_a_mean_over_requests_that_were_served_anything() -> None:
    """Three requests in ten are served nothing; of twenty windows, three may miss the truth."""
    rng, n, held = np.random.default_rng(8), 600, 0
    for _ in range(20):
        truth = rng.random((n, 5)) < rng.beta(1.2, 0.8, n)[:, None]
        verdicts = np.where(truth, rng.random(truth.shape) < 0.85, rng.random(truth.shape) < 0.1)
        is_empty = rng.random(n) < 0.3
        human, judge = (
            table_of([_served(row, empty) for row, empty in zip(grades, is_empty, strict=True)])
            for grades in (truth, verdicts)
        )
        labelled = LabelledClusters.of(human[:150], judge[:150])
        found = borrowed_estimate(
            Metric.PRECISION, labelled, sums_of(judge[150:]), Precision(min_n=2)
        )
        held += found.lower <= truth[150:][~is_empty[150:]].mean() <= found.upper
    assert held >= 17


def _served(grades: NDArray[np.bool_], is_empty: bool) -> bytes:
    given = () if is_empty else tuple(grades.astype(int).tolist())
    utilities = tuple(1.0 if grade else -0.5 for grade in given)
    return JudgedRequest(1.0, given, utilities, None, 0.0, None, 0.0, 0.0).to_row()
