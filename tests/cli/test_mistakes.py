"""What the guard did wrong on a day: from served traffic to the requests that lost passages."""

import time
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from live_traffic import EVERYTHING, Traffic, judge, profile_of, serve
from running import Run

from ctxguard.core.metadata_filter import Where
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Mode
from ctxguard.monitor import mistakes
from ctxguard.monitor.mistakes import DayOfMistakes, mistakes_of
from ctxguard.monitor.store import LabelRow, SampleStore

PROFILE = profile_of(RatioPolicy(k=5, min_ratio=0.85))
"""Keeps the first four of the traffic's passages."""
SETTINGS = {"profile": PROFILE, "rates": EVERYTHING, "days_ago": 1.0}
YESTERDAY = datetime.now(UTC).date() - timedelta(days=1)
REQUEST = "which-shelf-holds-tool-{}".format


@pytest.fixture(scope="module")
def judged(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    """Yesterday's requests: of the first three the ranks 2, 5 and 7 are relevant, of others 2.

    The guard serves the first four.
    """
    folder = tmp_path_factory.mktemp("judged")
    lost = serve(folder, 3, relevant_ranks=[1, 4, 6], **SETTINGS)
    kept = serve(folder, 4, first=3, relevant_ranks=[1], **SETTINGS)
    made = Traffic(lost.file, {**lost.relevant, **kept.relevant})
    assert judge(run, made).exit_code == 0
    return made


@pytest.fixture
def traffic(judged: Traffic, tmp_path: Path) -> Traffic:
    return judged.copied(tmp_path)


def of_day(traffic: Traffic, day: date = YESTERDAY, **options: object) -> DayOfMistakes:
    with SampleStore.open(traffic.url) as store:
        return mistakes_of(store, day, options.pop("profile", PROFILE), **options)  # type: ignore[arg-type]


def test_losing_requests_show_reasons(traffic: Traffic) -> None:
    found = of_day(traffic)
    assert (found.judged, found.unread) == (7, 0)
    assert {one.request_id for one in found.mistakes} == {REQUEST(n) for n in range(3)}
    one = found.mistakes[0]
    assert [each.rank for each in one.dropped] == [5, 7]
    assert one.dropped[0].reason == "scored too far below the best"
    assert one.dropped[0].kept_if == ("min_ratio ≤ 0.818",)
    assert one.dropped[1].reason == "beyond k"
    assert one.dropped[0].judge.grade == 1
    assert one.dropped[0].labels == ()
    # Four were kept: these two would have stood at ranks 5 and 6.
    assert one.udcg_loss == pytest.approx(1 / 2.585 + 1 / 2.807, abs=1e-3)
    assert (one.n_relevant, one.recall_loss) == (3, pytest.approx(2 / 3))
    assert of_day(traffic, YESTERDAY - timedelta(days=1)).mistakes == ()


def test_persons_grade_beats_the_judges(traffic: Traffic) -> None:
    with SampleStore.open(traffic.url) as store:
        for name in ("d0-4", "d0-6"):
            store.add_labels([LabelRow(REQUEST(0), name, 0, None, "ann", time.time())], 1)
        store.add_labels([LabelRow(REQUEST(1), "d1-4", 0, None, "ann", time.time())], 1)
    found = of_day(traffic).mistakes
    assert [one.request_id for one in found] == [REQUEST(2), REQUEST(1)]
    assert [each.passage_id for each in found[1].dropped] == ["d1-6"]


def test_peoples_find_is_a_mistake(run: Run, traffic: Traffic, tmp_path: Path) -> None:
    out = tmp_path / "todo.jsonl"
    run.ok("label", "export", "--store", traffic.url, "--out", out, "-n", "200", "--whole")
    with SampleStore.open(traffic.url) as store:
        store.add_labels([LabelRow(REQUEST(5), "d5-9", 1, None, "ann", time.time())], 1)
    found = next(one for one in of_day(traffic).mistakes if one.request_id == REQUEST(5))
    [passage] = found.dropped
    assert (passage.rank, passage.labels[0].annotator, passage.labels[0].grade) == (10, "ann", 1)


def test_shadow_tells_would_be_drops(run: Run, tmp_path: Path) -> None:
    made = serve(tmp_path, 3, relevant_ranks=[4], mode=Mode.SHADOW, **SETTINGS)
    assert judge(run, made).exit_code == 0
    found = [(one.mode, one.dropped[0].rank, one.recall_loss) for one in of_day(made).mistakes]
    assert found == [(Mode.SHADOW, 5, 1.0)] * 3
    assert of_day(made, profile=None).mistakes == ()


def test_tenant_reads_own_requests(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filters = (Where(tenant="a"), Where(tenant="b"), None)
    made = serve(tmp_path, 6, relevant_ranks=[1, 4], filters=filters, **SETTINGS)
    assert judge(run, made).exit_code == 0
    monkeypatch.setattr(mistakes, "MOST_READ", 1)
    [own] = of_day(made, tenant="b").mistakes
    assert own.request_id in {REQUEST(1), REQUEST(4)}
    monkeypatch.setattr(mistakes, "MOST_READ", 5)
    assert {one.request_id for one in of_day(made, tenant="b").mistakes} == {REQUEST(1), REQUEST(4)}
    assert (len(of_day(made).mistakes), of_day(made).unread) == (5, 1)
