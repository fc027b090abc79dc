"""Wrong drops: the requests of a day whose relevant passages the guard dropped."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from judged_store import REQUEST, SHOWN, filled, hostile, visitor

from ctxguard.core.metadata_filter import Where
from ctxguard.monitor.store import SampleStore
from ctxguard.server.console import decisions


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
