"""What people are asked, and what an export says beforehand against what the labels then give."""

import random
from collections.abc import Callable, Mapping

import pytest
from contexts import make_context
from people import grade, label
from stub_judges import ErringJudge
from watching import NOW, Watching

from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.estimation.plan import label_plan, to_label, usable_labels
from ctxguard.monitor.estimation.terms import Metric
from ctxguard.monitor.labels.files import RowToLabel
from ctxguard.monitor.store import PickKind

POOL = [f"p{rank}" for rank in range(20)]


@pytest.fixture
def truth() -> Mapping[str, set[str]]:
    rng = random.Random(3)
    return {
        f"q{number}": {name for rank, name in enumerate(POOL) if rng.random() < 0.7 / (rank + 1)}
        for number in range(500)
    }


@pytest.fixture
def live(truth: Mapping[str, set[str]]) -> Watching:
    made = Watching(ErringJudge(truth), min_n=30)
    made.watch(*[make_context(POOL, 5, query=name, request_id=name) for name in truth])
    return made


@pytest.fixture
def say(truth: Mapping[str, set[str]]) -> Callable[[RowToLabel], int]:
    return lambda row: int(row.passage_id in truth[row.query])


@pytest.mark.parametrize("n", [40, 100, 200])
def test_a_figure_comes_wherever_a_width_is_promised(
    live: Watching, say: Callable[[RowToLabel], int], n: int
) -> None:
    """MRR needs 30 runs from the top and recall 30 dropped passages, not 30 labelled requests."""
    store, series = live.store, live.monitor.series
    samples = to_label(store, series, n)
    promised = label_plan(store, series, samples, NOW).widths
    grade(store, samples, say)
    found = live.monitor.report().estimates[Window.ALL_RETAINED]
    came = {metric for metric in promised if found[metric].value is not None}
    assert {metric for metric, width in promised.items() if width is not None} <= came
    assert (None in promised.values()) == (n < 200)


def test_widths_and_passages_are_about_what_was_said(
    live: Watching, say: Callable[[RowToLabel], int]
) -> None:
    store, series = live.store, live.monitor.series
    for far in (0.6, 0.35):
        samples = to_label(store, series, 300)
        plan = label_plan(store, series, samples, NOW)
        assert grade(store, samples, say) == pytest.approx(plan.expected_passages, rel=0.25)
        found = live.monitor.report().estimates[Window.ALL_RETAINED]
        for metric in (Metric.PRECISION, Metric.MRR, Metric.UDCG):
            width = found[metric].upper - found[metric].lower
            # Before any label nobody knows how much the judge helps.
            assert width == pytest.approx(plan.widths[metric], rel=far), metric
    assert set(plan.widths_now.values()).isdisjoint({None})


def test_people_are_asked_about_as_much_as_the_budget_says(
    live: Watching, say: Callable[[RowToLabel], int]
) -> None:
    samples = label(live.store, live.monitor.series, 200, say)
    graded = len(live.store.labels())
    assert graded == pytest.approx(200, rel=0.15)
    kinds = [one.kind for sample in samples for one in sample.picked]
    assert set(kinds) == set(PickKind)
    assert kinds.count(PickKind.RUN) == pytest.approx(60, abs=8)


def test_what_was_asked_and_not_graded_comes_first(
    live: Watching, say: Callable[[RowToLabel], int]
) -> None:
    store, series = live.store, live.monitor.series
    first = to_label(store, series, 100)
    again = to_label(store, series, 60)
    ids = {sample.sample_id for sample in first}
    assert {sample.sample_id for sample in again} < ids
    grade(store, first, say)
    assert all(one.sample_id not in ids for one in to_label(store, series, 30) if one.is_graded)


def test_a_look_ahead_asks_nobody(live: Watching) -> None:
    assert to_label(live.store, live.monitor.series, 50, dry_run=True)
    assert live.store.picked(live.monitor.series) == {}


def test_whole_requests_are_graded_as_far_as_they_are_judged(live: Watching) -> None:
    for sample in to_label(live.store, live.monitor.series, 100, whole=True):
        judged = {row.passage_id for row in sample.rows()}
        assert judged == set(sample.judge)


def test_grades_that_count_are_told_from_those_that_do_not(
    live: Watching, say: Callable[[RowToLabel], int]
) -> None:
    samples = label(live.store, live.monitor.series, 60, say)
    names = [sample.record.request_id for sample in samples]
    found = usable_labels(live.store, names)
    assert found["passages"] == len(live.store.labels())
    runs = [one for sample in samples for one in sample.picked if one.kind is PickKind.RUN]
    assert found["runs"] == len(runs) > 10
    assert (found["unfinished"], found["unpicked"]) == (0, 0)
    other = next(name for name in ("q1", "q2", "q3", "q4", "q5", "q6") if name not in names)
    assert usable_labels(live.store, [other])["unpicked"] == 1


def test_before_anything_is_judged_nothing_is_promised() -> None:
    live = Watching(ErringJudge({}))
    plan = label_plan(live.store, live.monitor.series, [], NOW)
    assert set(plan.widths.values()) == {None}
    assert plan.expected_passages == 0
    assert to_label(live.store, live.monitor.series, 10) == []
