"""Decisions: what was sampled, one request, and a day's requests that lost relevant passages."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from judged_store import PROFILE, REQUEST, SHOWN, filled, hostile, visitor
from live_traffic import profile_of
from starlette.testclient import TestClient

from ctxguard.core.metadata_filter import Where
from ctxguard.core.policies import ExpectedUtilityPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.signals import RANKING, feature_names
from ctxguard.core.types import Mode
from ctxguard.monitor.store import Limits, SampleStore
from ctxguard.server.console import decisions

_N = len(feature_names((RANKING,)))
WITH_P = profile_of(
    ExpectedUtilityPolicy(
        RelevanceModel((RANKING,), (1.0, *[0.0] * (_N - 1)), (0.0,) * _N, (1.0,) * _N, 0.0), k=3
    )
)
"""Gives each passage P(relevant) by its score."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with SampleStore.open(filled(tmp_path_factory.mktemp("store"), 7, ids=hostile)) as store:
        yield visitor(store)


def test_requests_are_paged_newest_first(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "PAGE_ROWS", 3)
    address, seen = "/console/decisions", []
    while address:
        page = client.get(address)
        assert page.status_code == 200
        seen.append([n for n in range(7) if REQUEST(n) in page.text])
        older = page.text.partition('rel="next" href="')[2].partition('"')[0]
        address = older
    assert seen == [[4, 5, 6], [1, 2, 3], [0]]


def test_request_shows_reasons_and_thresholds(client: TestClient) -> None:
    page = client.get("/console/request", params={"id": f" {REQUEST(2)} "}).text
    assert "Served, best first (4)" in page
    assert "Dropped, best first (8)" in page
    assert "Scored too far below the best; kept if <b>min_ratio ≤ 0.818</b>." in page
    assert "which shelf holds tool 2 is d2-1" in page
    assert "judge: 3" in page
    assert "at most 5 passages, each with at least 0.85 of the top score" in page


def test_shadow_shows_would_be_drops(tmp_path: Path) -> None:
    """In shadow it shows what would be dropped and the P of each passage."""
    with SampleStore.open(filled(tmp_path, 1, mode=Mode.SHADOW)) as store:
        pages = [
            visitor(store, profile=profile).get("/console/request", params={"id": REQUEST(0)}).text
            for profile in (PROFILE, WITH_P)
        ]
        listed = visitor(store).get("/console/decisions").text
    n = pages[0].count("would be dropped</span>")
    assert n > 0
    assert f"In shadow: {n} served passages would be dropped under enforce." in pages[0]
    assert "shadow: would keep 4" in listed
    ids = {
        name: re.findall(rf"<dt>{name}</dt><dd[^>]*>([^<]*)</dd>", pages[0])[0].split(", ")
        for name in ("Served", "Would keep")
    }
    assert set(ids["Would keep"]) < set(ids["Served"])
    assert len(ids["Served"]) == len(ids["Would keep"]) + n
    assert pages[1].count("P(relevant)</span>") == 12


@pytest.mark.parametrize("request_id", ["", "never", "\ud800\0", "x" * 2_000])
def test_unknown_request_page_says_why(client: TestClient, request_id: str) -> None:
    query = {"id": request_id.encode("utf-8", "surrogatepass")}
    page = client.get("/console/request", params=query)
    assert page.status_code == 404
    assert "No sample of this request" in page.text


@pytest.mark.parametrize("before", ["-1", "x", "1e9", "9" * 30, "²"])
def test_invalid_place_is_refused(client: TestClient, before: str) -> None:
    page = client.get("/console/decisions", params={"before": before})
    assert page.status_code == 400
    assert "before is not a whole number" in page.text


@pytest.mark.parametrize("before", [0, 1])
def test_before_first_sample_is_nothing(client: TestClient, before: int) -> None:
    page = client.get(f"/console/decisions?before={before}")
    assert "There are no older samples" in page.text


def test_empty_store_is_said(tmp_path: Path) -> None:
    with SampleStore.open(f"sqlite:///{tmp_path / 'samples.db'}") as store:
        page = visitor(store).get("/console/")
    assert page.url.path == "/console/decisions"
    assert "No request has been sampled yet" in page.text


def test_sample_without_text_is_listed(tmp_path: Path) -> None:
    with SampleStore.open(filled(tmp_path, 2), limits=Limits(max_bytes=1)) as store:
        store.clean()
        client = visitor(store)
        assert client.get("/console/decisions").text.count("text deleted, or not readable") == 2
        page = client.get("/console/request", params={"id": REQUEST(0)}).text
    assert "deleted to bound the store" in page


def test_hostile_passage_shows_as_text(client: TestClient) -> None:
    page = client.get("/console/request", params={"id": REQUEST(0)}).text
    assert "<script>document" not in page
    assert "<img" not in page
    assert "{{ 7 * 7 }}" in page
    assert SHOWN in page
    assert not {"\u202e", "\u200b", "\U000e0068"} & set(page)


def test_unreadable_store_is_a_page(tmp_path: Path) -> None:
    file = tmp_path / "samples.db"
    with SampleStore.open(f"sqlite:///{file}") as store:
        client = visitor(store)
        client.get("/console/decisions")
        store.close()
        for one in tmp_path.iterdir():
            if one.is_file():
                one.unlink()
        file.mkdir()
        page = client.get("/console/decisions")
    assert page.status_code == 503
    assert "The store cannot be used" in page.text
    assert "Traceback" not in page.text


def test_there_are_no_other_pages(client: TestClient) -> None:
    page = client.get("/console/nowhere/else")
    assert page.status_code == 404
    assert "No such page" in page.text


def day_of(store: SampleStore) -> str:
    """When the traffic was served."""
    return str(datetime.fromtimestamp(store.newest_samples(1)[0].time_seconds, UTC).date())


def test_page_shows_drops_and_reasons(tmp_path: Path) -> None:
    """The guard keeps four passages; the fifth is the relevant one."""
    with SampleStore.open(filled(tmp_path, 3, relevant=4, ids=hostile)) as store:
        client, day = visitor(store), day_of(store)
        page = client.get("/console/mistakes", params={"day": day}).text
        assert all(f"request?id={REQUEST(number)}" in page for number in range(3))
        assert "which shelf holds tool 2" in page
        assert "Scored too far below the best; kept if <b>min_ratio ≤ 0.818</b>." in page
        assert '<span class="hint">rank</span> 5' in page
        assert "<span>judge: 3</span>" in page
        assert '<span class="hint">UDCG lost</span> 0.39' in page  # 1 / log2(6)
        assert '<span class="hint">recall lost</span> 1.00' in page
        assert SHOWN in page
        assert "<img" not in page
        latest = client.get("/console/mistakes").text
        assert f'value="{day}"' in latest
        assert f"request?id={REQUEST(0)}" in latest
        before = datetime.now(UTC).date() - timedelta(days=3)
        named = client.get("/console/mistakes", params={"day": str(before)}).text
        assert "No request of this day is judged" in named


def test_without_any_it_opens_on_yesterday(tmp_path: Path) -> None:
    with SampleStore.open(filled(tmp_path, 2, relevant=0)) as store:
        page = visitor(store).get("/console/mistakes").text
    assert f'value="{datetime.now(UTC).date() - timedelta(days=1)}"' in page


def test_absent_from_first_k_is_unlost(tmp_path: Path) -> None:
    """Without the policy ten are served, and the twelfth is the relevant one."""
    with SampleStore.open(filled(tmp_path, 2, relevant=11)) as store:
        page = visitor(store).get("/console/mistakes", params={"day": day_of(store)}).text
    assert "None of the 2 judged requests is known to have lost one" in page


def test_tenants_see_only_their_own(tmp_path: Path) -> None:
    filters = (Where(tenant="a"), Where(tenant="b"))
    with SampleStore.open(filled(tmp_path, 4, relevant=4, filters=filters)) as store:
        client, day = visitor(store), day_of(store)
        asked = {"day": day, "tenant": "b"}
        page = client.get("/console/mistakes", params=asked).text
        assert [n for n in range(4) if REQUEST(n) in page] == [1, 3]
        assert "&amp;tenant=b" in page or "&tenant=b" in page
        none = client.get("/console/mistakes", params={"day": day, "tenant": "acme"}).text
        assert "None is known of this tenant" in none


def test_worst_come_first_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "MISTAKES_SHOWN", 2)
    with SampleStore.open(filled(tmp_path, 5, relevant=4)) as store:
        client = visitor(store)
        address, seen = f"/console/mistakes?day={day_of(store)}", []
        while address:
            page = client.get(address).text
            seen.append([n for n in range(5) if REQUEST(n) in page])
            address = page.partition('rel="next" href="')[2].partition('"')[0]
            address = address if "first=" in address else ""
    assert list(map(len, seen)) == [2, 2, 1]
    assert sorted(n for page in seen for n in page) == list(range(5))


@pytest.mark.parametrize(
    ("day", "status", "said"),
    [
        *[(day, 400, "Enter a date") for day in ("never", "2026-13-01", "²", "x" * 2_000)],
        # The first and the last day of the calendar have one neighbour each.
        *[(day, 200, 'class="button"') for day in ("0001-01-01", "9999-12-31")],
    ],
)
def test_invalid_day_is_refused(tmp_path: Path, day: str, status: int, said: str) -> None:
    with SampleStore.open(f"sqlite:///{tmp_path / 'samples.db'}") as store:
        page = visitor(store).get("/console/mistakes", params={"day": day})
    assert (page.status_code, page.text.count(said)) == (status, 1)
