"""What people are asked, and what an export says beforehand of what it takes."""

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from contexts import make_context
from people import grade, label
from stub_judges import ErringJudge
from watching import Watching

from ctxguard.monitor.estimation import sampling_design
from ctxguard.monitor.estimation.sampling_design import (
    DROPPED_COINS,
    GO_ON,
    SERVED_COIN,
    to_label,
    usable_labels,
)
from ctxguard.monitor.labels.evidence import asked_probabilities
from ctxguard.monitor.labels.files import RowToLabel
from ctxguard.monitor.labels.samples import graded_samples
from ctxguard.monitor.sampling.sampler import JudgingRates
from ctxguard.monitor.store import OPENED, PickKind

POOL = [f"p{rank}" for rank in range(20)]


@pytest.fixture(scope="module")
def truth() -> Mapping[str, set[str]]:
    rng = random.Random(3)
    return {
        f"q{number}": {name for rank, name in enumerate(POOL) if rng.random() < 0.7 / (rank + 1)}
        for number in range(500)
    }


@pytest.fixture(scope="module")
def judged(truth: Mapping[str, set[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of judged requests."""
    path = tmp_path_factory.mktemp("judged") / "samples.db"
    made = Watching(ErringJudge(truth), url=f"sqlite:///{path}")
    made.watch(*[make_context(POOL, 5, query=name, request_id=name) for name in truth])
    made.writer.stop()
    made.store.close()
    return path


@pytest.fixture
def live(truth: Mapping[str, set[str]], judged: Path, tmp_path: Path) -> Iterator[Watching]:
    path = shutil.copy(judged, tmp_path)
    made = Watching(ErringJudge(truth), min_n=30, url=f"sqlite:///{path}")
    yield made
    made.writer.stop()
    made.store.close()


@pytest.fixture
def say(truth: Mapping[str, set[str]]) -> Callable[[RowToLabel], int]:
    return lambda row: int(row.passage_id in truth[row.query])


@pytest.mark.parametrize("whole", [False, True])
def test_people_grade_about_as_said(
    live: Watching, say: Callable[[RowToLabel], int], whole: bool
) -> None:
    samples = to_label(live.store, live.monitor.series, 300, whole=whole)
    expected = sum(sample.expected_passages for sample in samples)
    assert grade(live.store, samples, say) == pytest.approx(expected, rel=0.25)


def test_people_are_asked_within_budget(live: Watching, say: Callable[[RowToLabel], int]) -> None:
    samples = label(live.store, live.monitor.series, 200, say)
    graded = len(live.store.labels())
    assert graded == pytest.approx(200, rel=0.15)
    for sample in samples:
        kinds = [one.kind for one in sample.picked]
        assert len([one for one in kinds if one in OPENED]) == 1 < len(kinds)


def test_ample_budget_buys_equal_coins(truth: Mapping[str, set[str]]) -> None:
    few = Watching(ErringJudge(truth), min_n=30, rates=JudgingRates(dropped_rate=1.0))
    few.watch(*[make_context(POOL, 5, query=name, request_id=name) for name in list(truth)[:40]])
    samples = to_label(few.store, few.monitor.series, 400)
    assert len(samples) == 40
    assert sum(sample.expected_passages for sample in samples) == pytest.approx(400, rel=0.1)
    coins = Counter(one.probability for sample in samples for one in sample.picked)
    # Those of the first passages and of runs beside the one of all others.
    assert len(coins) == 3
    (whole,) = {len(to_label(few.store, few.monitor.series, 10_000, dry_run=True))}
    assert whole == 40


def test_asked_and_ungraded_comes_first(live: Watching, say: Callable[[RowToLabel], int]) -> None:
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


def test_whole_requests_are_graded_as_judged(live: Watching) -> None:
    for sample in to_label(live.store, live.monitor.series, 100, whole=True):
        judged = {row.passage_id for row in sample.rows()}
        assert judged == set(sample.judge)


def test_counting_grades_are_told_apart(live: Watching, say: Callable[[RowToLabel], int]) -> None:
    samples = label(live.store, live.monitor.series, 60, say)
    names = [sample.record.request_id for sample in samples]
    found = usable_labels(live.store, names)
    assert found["passages"] == len(live.store.labels())
    assert found["requests"] == len(samples) > 10
    assert (found["unfinished"], found["unpicked"]) == (0, 0)
    other = next(name for name in ("q1", "q2", "q3", "q4", "q5", "q6") if name not in names)
    assert usable_labels(live.store, [other])["unpicked"] == 1


def test_nobody_is_asked_before_judging() -> None:
    live = Watching(ErringJudge({}))
    assert to_label(live.store, live.monitor.series, 10) == []


def test_grades_are_asked_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many requests with the same grades, by the grades above and whether it is graded on."""
    truth = {"the first": {"p0", "p3", "p6"}, "the third": {"p2"}, "none": {"p7"}, "nothing": set()}
    coin, no, yes = SERVED_COIN, DROPPED_COINS[False], DROPPED_COINS[True]
    dropped = {"the first": [no, yes, no], "the third": [no] * 3, "none": [no, no, yes]}
    certain = {"the first": 1, "the third": 3, "none": 5}
    expected = {
        (query, goes_on): [*[1.0] * n, *[coin] * (5 - n), *dropped[query]]
        for query in certain
        for goes_on, n in ((True, certain[query]), (False, 1))
    }
    expected |= {("nothing", goes_on): [1.0, *[no] * 7] for goes_on in (True, False)}
    live = Watching(ErringJudge(truth, (1.0, 1.0)), rates=JudgingRates(dropped_rate=1.0))
    for query in truth:
        k = 0 if query == "nothing" else 5
        names = [f"{query} {number}" for number in range(150)]
        live.watch(*[make_context(POOL[:8], k, query=query, request_id=name) for name in names])
    store, series = live.store, live.monitor.series
    # As where other requests are left to open.
    monkeypatch.setattr(sampling_design, "_with_larger_coins", lambda samples, _: samples)
    opened = label(store, series, 10**6, lambda row: int(row.passage_id in truth[row.query]))
    asked, n = {key: np.zeros(8) for key in expected}, Counter[tuple[str, bool]]()
    for sample in graded_samples(store, series, [one.sample_id for one in opened]).values():
        key = str(sample.record.query), sample.picked[0].kind is PickKind.RUN
        n[key] += 1
        for place, chance in asked_probabilities(sample).items():
            assert chance == expected[key][place]
            asked[key][place] += 1.0
    for key, counts in asked.items():
        spread = (0.25 / n[key]) ** 0.5
        assert counts / n[key] == pytest.approx(expected[key], abs=4.5 * spread), key
    goes_on = sum(count for (_, goes_on), count in n.items() if goes_on) / n.total()
    assert goes_on == pytest.approx(GO_ON, abs=4.5 * (0.25 / n.total()) ** 0.5)
