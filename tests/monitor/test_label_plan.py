"""What people are asked, and what an export says beforehand of what it takes."""

import random
from collections.abc import Callable, Mapping

import pytest
from contexts import make_context
from people import grade, label
from stub_judges import ErringJudge
from watching import Watching

from ctxguard.monitor.estimation.plan import to_label, usable_labels
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


@pytest.mark.parametrize("whole", [False, True])
def test_people_grade_about_as_many_passages_as_was_said(
    live: Watching, say: Callable[[RowToLabel], int], whole: bool
) -> None:
    samples = to_label(live.store, live.monitor.series, 300, whole=whole)
    expected = sum(sample.expected_passages for sample in samples)
    assert grade(live.store, samples, say) == pytest.approx(expected, rel=0.25)


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


def test_before_anything_is_judged_nobody_is_asked() -> None:
    live = Watching(ErringJudge({}))
    assert to_label(live.store, live.monitor.series, 10) == []
