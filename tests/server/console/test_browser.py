"""The console in a browser: grading by keyboard, accessibility, and what a hostile passage does."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from judged_store import HOSTILE, SHOWN, WordJudge, console_at, filled, hostile

from ctxguard.measure.metrics import Metric
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import SampleStore

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

N = 4
BEGUN = "?annotator=ann"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SampleStore]:
    """Requests of which the judge reads a part wrongly; the passages' ids and texts are hostile."""
    folder = tmp_path_factory.mktemp("store")
    url = filled(folder, N, misleading=0.3, ids=lambda *place: hostile(*place) + HOSTILE)
    with SampleStore.open(url) as opened:
        yield opened


@pytest.fixture(scope="module")
def address(store: SampleStore) -> Iterator[str]:
    with console_at(store) as found:
        yield found


@pytest.fixture
def page(browser: "Browser") -> "Iterator[Page]":
    """A page on which nothing may fail: no script, and nothing that the policy forbids."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    opened.on("dialog", lambda dialog: problems.append(dialog.message))
    yield opened
    opened.close()
    assert [one for one in problems if "favicon" not in one] == []


def begin(page: "Page", address: str, n: int = N * 12, *, whole: bool = True) -> None:
    """From the front page to the first passage, by keyboard where there are fields."""
    page.goto(f"{address}/label")
    page.fill("#annotator", "ann")
    page.keyboard.press("Enter")
    page.wait_for_selector("#n")
    if whole:
        page.check("input[name='whole']")
    page.fill("#n", str(n))
    page.keyboard.press("Enter")
    page.wait_for_selector("#task")


def key(page: "Page", pressed: str) -> None:
    """Press a key, and wait until the page has answered."""
    page.evaluate("document.getElementById('announce').textContent = ''")
    page.keyboard.press(pressed)
    page.wait_for_selector("#announce:not(:empty)", state="attached")


def focused(page: "Page") -> str:
    return str(page.evaluate("document.activeElement.dataset.passage ?? ''"))


def is_relevant(passage_id: str) -> bool:
    """What the person thinks: the second passage, and in every other request also the first."""
    number, rank = passage_id.removeprefix("d").partition(" ")[0].split("-")
    return rank == "1" or (rank == "0" and int(number) % 2 == 0)


def test_keyboard_labels_reach_live_report(page: "Page", address: str, store: SampleStore) -> None:
    """Of the four passages that are served one or two are relevant; the judge errs on some."""
    begin(page, address)
    page.focus("[data-current]")
    first = focused(page)
    key(page, "3")
    second = focused(page)
    assert second not in ("", first)
    key(page, "d")
    key(page, "u")
    assert focused(page) == second
    key(page, "Control+z")
    assert focused(page) == first
    page.keyboard.press("ArrowDown")
    assert focused(page) == second
    page.keyboard.press("ArrowUp")
    for _ in range(N):
        while passage := focused(page):
            key(page, "2" if is_relevant(passage) else "0")
        assert page.inner_text(".done") == "This query is graded."
        page.keyboard.press("n")
        page.wait_for_selector("[data-current], h1:not(.query)")
    assert page.inner_text("h1") == "All that was picked is graded"
    judge = WordJudge()
    report = Monitor(store, judge, min_n=N).report()
    assert (report.labelled, report.unpicked) == (N, 0)
    by_people = report.estimates[Window.ALL_RETAINED][Metric.PRECISION]
    by_judge = report.judge_estimates[Window.ALL_RETAINED][Metric.PRECISION]
    assert by_people.value == pytest.approx((1 + 2) / 2 / 4, abs=0.01)
    assert by_judge.value != pytest.approx(by_people.value, abs=0.01)


IN_SIGHT = """() => {
  const question = document.querySelector('h1.query').getBoundingClientRect();
  const passage = document.activeElement.getBoundingClientRect();
  const x = question.left + 5, y = question.top + question.height / 2;
  return document.elementFromPoint(x, y)?.matches('h1.query')
    && passage.top >= question.bottom && passage.bottom <= window.innerHeight;
}"""


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_question_stays_in_sight(page: "Page", tmp_path: Path, width: int, height: int) -> None:
    """By keyboard alone; each passage that has the focus is in sight as well."""
    page.set_viewport_size({"width": width, "height": height})
    with SampleStore.open(filled(tmp_path, 10)) as store, console_at(store) as address:
        begin(page, address, n=20, whole=False)
        n_requests = 0
        while page.query_selector("h1.query"):
            n_requests += 1
            while focused(page):
                assert page.evaluate(IN_SIGHT)
                key(page, "0")
            assert page.is_visible("h1.query")
            page.keyboard.press("n")
            page.wait_for_selector("[data-current], h1:not(.query)")
        assert page.inner_text("h1") == "All that was picked is graded"
        assert n_requests >= 4
        assert len(store.labels()) >= n_requests


def test_keys_during_loading_are_kept(page: "Page", tmp_path: Path) -> None:
    with SampleStore.open(filled(tmp_path, 2)) as store, console_at(store) as address:
        begin(page, address, n=24)
        for pressed in f"{'2' * 12}n{'2' * 12}":
            page.keyboard.press(pressed)
        page.wait_for_selector("#next:has-text('Go on')")
        assert len(store.labels()) == 24


def test_axe_finds_no_fault(browser: "Browser", address: str, store: SampleStore) -> None:
    """On a phone, which is dark, and on a desktop, which is light; with every detail open."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe").Axe()
    opened = browser.new_page(bypass_csp=True)  # so that axe itself may run
    sample = next(iter(store.picked_samples(store.series()[0])), None)
    day = datetime.fromtimestamp(store.newest_samples(1)[0].time_seconds, UTC).date()
    pages = [
        "/decisions",
        "/request?id=which-shelf-holds-tool-1",
        f"/mistakes?day={day}",
        "/mistakes?day=2020-01-01&tenant=a",
        "/mistakes?day=never",
        "/label",
        f"/label{BEGUN}",
        *([] if sample is None else [f"/label{BEGUN}&sample={sample.sample_id}"]),
        "/label/guide",
    ]
    with console_at(store, token="a token") as closed:  # noqa: S106
        for one in (closed + "/decisions", *(address + page for page in pages)):
            opened.emulate_media(color_scheme="light")
            opened.goto(one)
            for summary in opened.query_selector_all("summary"):
                summary.click()
            for scheme, width in (("light", 1280), ("dark", 390)):
                opened.emulate_media(color_scheme=scheme)
                opened.set_viewport_size({"width": width, "height": 844})
                found = axe.run(opened).response["violations"]
                named = [(each["id"], each["nodes"][0]["html"]) for each in found]
                assert named == [], (one, scheme, width)
                assert opened.evaluate("document.documentElement.scrollWidth") <= width, one
    opened.close()


def test_hostile_passage_does_nothing(page: "Page", address: str) -> None:
    page.goto(f"{address}/request?id=which-shelf-holds-tool-1")
    for summary in page.query_selector_all("summary"):
        summary.click()
    assert "owned" not in page.title()
    assert page.query_selector("main script, main img") is None
    text = page.inner_text("main")
    assert '<script>document.title = "owned"</script>' in text
    assert SHOWN in text


def test_pages_work_without_a_script(browser: "Browser", tmp_path: Path) -> None:
    with SampleStore.open(filled(tmp_path, 1)) as store, console_at(store) as address:
        context = browser.new_context(java_script_enabled=False)
        page = context.new_page()
        begin(page, address)
        page.click("#task .card button[value='2']")
        page.wait_for_selector("button[aria-pressed='true']")
        page.click("#task .card button.quiet")
        page.wait_for_selector("#task")
        context.close()
        assert [row.grade for _, row in store.labels()] == [2, None]
