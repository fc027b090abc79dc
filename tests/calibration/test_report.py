"""The report of a calibration: its figures, its statistics, its page, in a browser as well."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_pools import DEPTH, calibrated, indistinct, simulate

from calibration.calibrate import Calibration, calibrate
from calibration.report import ReportData, report, summarise, write_html, write_json
from calibration.report.before_after import BeforeAfter
from calibration.report.page import page
from calibration.report.summary import SUMMARY_METRICS, Summary
from calibration.settings import Settings
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Passage, Route
from ctxguard.errors import ConfigurationError, MissingExtraError
from ctxguard.measure.worth import STRICT

HOSTILE = '</script><script>fetch("https://example.invalid/")</script><b onclick="x()">&'


def hostile_passage(passage_id: str) -> Passage:
    return Passage(passage_id, f"{HOSTILE} \x1b[31m\u202e text of {passage_id}", f"T {HOSTILE}")


@cache
def reported(n: int = 120, alpha: float | None = None, **asked: Any) -> ReportData:
    """Of the policy of highest utility where wrong passages harm: it drops some of every sort."""
    asked = {"context": "utility", "utilities": STRICT, **asked}
    found = calibrated(n, noise=0.25, unanswerable=0.1, alpha=alpha, **asked)
    return report(found, hostile_passage)


@cache
def hostile_calibration() -> Calibration:
    """Queries that try to be markup, each in many words of its own: none repeats another."""
    retriever, dataset = simulate(80, noise=0.25)
    texts = {
        query.text: " ".join([query.text, *(f"{query.query_id}x{i}" for i in range(30)), HOSTILE])
        for query in dataset.queries
    }
    hostile = tuple(replace(query, text=texts[query.text]) for query in dataset.queries)
    rankings = {texts[text]: ranking for text, ranking in retriever.rankings.items()}
    dataset = replace(dataset, name=f"set {HOSTILE}", queries=hostile, notes=(HOSTILE,))
    asked = Settings(context="utility", depth=DEPTH)
    return calibrate(replace(retriever, rankings=rankings), dataset, asked)


class TestFigures:
    def test_unkeepable_promise_names_labels_needed(self) -> None:
        found = reported(60, 0.02)
        words = found.routes[0].certificate
        assert found.profile.routes[Route.HYBRID].certificate is None
        assert "The first 5 are kept." in words
        assert "mean recall loss ≤ 0.02 with probability 0.9" in words
        assert re.search(r"About \d+ test queries|No number", words)

    def test_evidence_says_folds_or_held_out(self) -> None:
        folded, by_hand = reported(60), reported(60, held_out=0.5)
        assert folded.routes[0].summary.shown_by == "folds"
        assert "queries left out of the choice in turn" in folded.routes[0].certificate
        assert "each of which was left out of the choice" in page(folded)
        assert by_hand.routes[0].summary.shown_by == "held_out"
        assert by_hand.routes[0].summary.queries == 30
        assert "that were held out" in page(by_hand)
        assert "left out of the choice" not in page(by_hand)

    def test_labels_are_counted(self) -> None:
        labels = reported().labels
        assert labels["queries"] == labels["answerable"] + labels["unanswerable"] == 120
        assert labels["unanswerable"] > 0
        assert (labels["chosen_on"][0], labels["held_out"][0]) == (120, 0)
        assert reported(held_out=0.25).labels["held_out"][0] == 30
        assert labels["grades"] == {"1": 2 * labels["answerable"]}


class TestDropped:
    def test_examples_have_label_rank_probability(self) -> None:
        found = reported().routes[0].dropped
        assert 0 < found.dropped <= found.total
        assert found.share.value == pytest.approx(found.dropped / found.total, rel=1e-4)
        assert len({example.query_id for example in found.shown}) == len(found.shown)
        for example in found.shown:
            assert example.rank >= 1
            assert 1 <= example.retrieved_rank <= 5
            assert 0.0 <= example.probability <= 1.0
        assert {e.label for e in found.shown} == {"grade 1 of 1"}

    def test_missing_passage_shows_its_id(self) -> None:
        asked = {"utilities": STRICT, "context": "utility", "alpha": None}
        found = calibrated(120, noise=0.25, unanswerable=0.1, **asked)
        example = report(found, {}.__getitem__).routes[0].dropped.shown[0]
        assert example.passage_id
        assert example.snippet is None

    def test_expected_stands_beside_labelled(self) -> None:
        route = reported().routes[0]
        assert route.found.lower - 0.05 <= route.expected <= route.found.upper + 0.05
        assert route.found.value == pytest.approx(
            route.summary.results.of("chosen", "precision").mean.value, abs=0.1
        )


def parsed(text: str) -> Any:
    """What a browser would make of a page."""
    return pytest.importorskip("bs4").BeautifulSoup(text, "html.parser")


class TestSummary:
    """What a person sees first, and what they are warned of."""

    @staticmethod
    def of(found: Calibration) -> Summary:
        return summarise(found.outcomes[Route.HYBRID])

    def test_today_and_choice_share_queries(self) -> None:
        found = calibrated(200)
        outcome, summary = found.outcomes[Route.HYBRID], self.of(found)
        assert summary.results.metrics == SUMMARY_METRICS
        assert summary.results.policies[:2] == ("first 5, as today", "chosen")
        assert summary.queries == 200
        evidence = outcome.profile.evidence
        for metric in SUMMARY_METRICS:
            today = summary.results.of("first 5, as today", metric)
            chosen = summary.results.of("chosen", metric)
            if metric in ("tokens", "misleading"):  # no texts, and no labels of misleading ones
                assert chosen.mean.value is None
                continue
            assert chosen.mean.value == pytest.approx(evidence.metrics[metric].value)
            if today.mean.n == chosen.mean.n == chosen.difference.n:
                assert chosen.difference.value == pytest.approx(
                    (chosen.mean.value or 0.0) - (today.mean.value or 0.0)
                )

    def test_kept_today_warns_of_nothing(self) -> None:
        found = calibrate(*indistinct(100), Settings(depth=DEPTH))
        assert found.outcomes[Route.HYBRID].profile.policy == RatioPolicy(k=5)
        summary = self.of(found)
        changes = [row.difference for row in summary.results.only(["chosen"]).rows]
        assert all(each is not None and each.value in (0.0, None) for each in changes)
        assert summary.judged.value == 1.0
        assert summary.warnings == ()
        assert summary.missing == ("leaner", "balanced", "richer")
        assert list(summary.by_size) == ["today"]
        assert "Leaner and balanced and richer: no policy is shown to keep" in page(report(found))

    def test_few_labels_make_a_guess(self) -> None:
        retriever, dataset = simulate(100, relevant=1)
        sparse = self.of(calibrate(retriever, dataset, Settings(depth=DEPTH)))
        assert sparse.judged.value == pytest.approx(0.2, abs=0.05)
        assert any("of the first 5 passages were ever labelled" in w for w in sparse.warnings)
        negatives = {
            query: {f"{query}-{position}": 0 for position in range(DEPTH)} | dict(grades)
            for query, grades in dataset.qrels.items()
        }
        dataset = replace(dataset, qrels=negatives)
        labelled = self.of(calibrate(retriever, dataset, Settings(depth=DEPTH)))
        assert not any("ever labelled" in line for line in labelled.warnings)

    def test_recall_fall_is_quantified(self) -> None:
        summary = self.of(calibrated(120, noise=0.25, utilities=STRICT, context="utility"))
        recall = summary.results.of("chosen", "recall").difference
        assert recall.value < -0.05
        (line,) = [w for w in summary.warnings if w.startswith("mean recall is")]
        assert f"{-recall.value:.3f} lower than that of the first 5" in line
        assert ("may be noise" in line) == (recall.upper is None or recall.upper >= 0.0)

    def test_half_bound_promises_nothing(self) -> None:
        few = calibrated(46, noise=0.4, utilities=STRICT, context="utility", held_out=0.1)
        certificate = few.outcomes[Route.HYBRID].profile.certificate
        assert certificate.promises_nothing
        assert any("the certificate promises nothing" in w for w in self.of(few).warnings)
        many = self.of(calibrated(200, context="utility", held_out=0.5))
        assert not any("promises nothing" in line for line in many.warnings)

    def test_other_policy_is_named_chosen(self) -> None:
        summary = self.of(calibrated(120, noise=0.25, context="utility"))
        assert list(summary.by_size)[:2] == ["today", "chosen"]
        assert summary.missing == ()

    @pytest.mark.parametrize(
        "asked",
        [
            {},
            {"context": "utility"},
            {"alpha": 0.2},
            {"alpha": 0.02, "noise": 0.25},  # cannot be kept
            {"held_out": 0.5},
            {"context": "leaner"},
            {"context": "richer"},
            {"serving_k": 1},
            {"serving_k": DEPTH},  # all candidates
        ],
        ids=str,
    )
    def test_page_begins_with_today_and_choice(self, asked: dict[str, Any]) -> None:
        found = calibrated(60, **asked)
        written = page(report(found))
        start = written.index("<h1")
        table = written[start : written.index("<details")]
        assert html.escape(self.of(found).in_short) in table[: table.index("<figure")]
        assert table.index("<figure") < table.index("<h2") < table.index("<table")
        assert f"first {found.settings.serving_k}, as today" in table
        for words in ("chosen", "difference", "recall", "udcg", "passages", "have a label"):
            assert words in table
        for line in self.of(found).warnings:
            assert html.escape(line[1:]) in table


@pytest.fixture(scope="module")
def text() -> str:
    """A page with a promise that is kept."""
    return page(reported(240, 0.2))


class TestPage:
    def test_same_calibration_same_bytes(self, tmp_path: Path) -> None:
        found = [calibrated(60, noise=0.25, context="utility", alpha=None) for _ in range(2)]
        for name, each in zip("ab", found, strict=True):
            write_json(report(each), tmp_path / f"{name}.json")
        assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
        assert page(report(found[0])) == page(report(found[1]))

    def test_json_is_six_digit_data(self, tmp_path: Path) -> None:
        write_json(reported(), tmp_path / "deep" / "report.json")
        read = json.loads((tmp_path / "deep" / "report.json").read_text())
        route, own = read["routes"][0], reported().routes[0]
        assert route["recall_of_first"] == pytest.approx(own.recall_of_first, rel=1e-5)
        assert len(route["summary"]["results"]["rows"]) == len(own.summary.results.rows)
        digest = reported().profile.provenance.dataset_digest
        assert read["profile"]["provenance"]["dataset_digest"] == digest

    def test_headings_nest_routes_collapse(self, text: str) -> None:
        found = parsed(text)
        headings = [int(each.name[1]) for each in found(["h1", "h2", "h3", "h4", "h5", "h6"])]
        assert headings.count(1) == 1
        assert headings[0] == 1
        assert all(after <= before + 1 for before, after in pairwise(headings))
        ids = [each["id"] for each in found(id=True)]
        assert len(ids) == len(set(ids))
        assert len(found("details")) == 1 + 3
        assert not found(open=True)
        assert len(found("caption")) == len(found("table")) >= len(found("figure")) == 1
        assert len(text.encode()) < 250_000
        for words in ("n = 120", "(n = ", "120 held-out queries"):
            assert words in text

    def test_loads_nothing_but_the_dial(self, text: str) -> None:
        found = parsed(text)
        assert not found(["img", "iframe", "object", "embed", "base"])
        sources = [
            each[name] for name in ("src", "href", "action") for each in found(**{name: True})
        ]
        assert all(str(source).startswith(("#", "data:")) for source in sources)
        assert "default-src 'none'" in text
        (script,) = re.findall("<script>(.*?)</script>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'; style-src" in text

    def test_hostile_text_never_runs(self) -> None:
        text = page(report(hostile_calibration(), hostile_passage))
        hostile = parsed(text)
        assert len(hostile("figure")) == len(hostile("script")) == 1
        assert not hostile(["b"])
        assert not hostile(onclick=True)
        assert HOSTILE not in text
        assert "&lt;/script&gt;&lt;script&gt;fetch(" in text
        assert "\x1b" not in text
        assert "\u202e" not in text

    def test_unwritable_path_names_the_mend(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for path in (tmp_path / "file" / "report.json", tmp_path):
            with pytest.raises(
                ConfigurationError, match="name a file in a folder that you may write to"
            ):
                write_json(reported(), path)
        assert sorted(tmp_path.iterdir()) == [tmp_path / "file"]

    def test_without_the_extra_it_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
        with pytest.raises(MissingExtraError, match=r"\[report\]"):
            write_html(reported(), tmp_path / "report.html")
        assert not (tmp_path / "report.html").exists()


_LOOK = """() => {
  const root = document.documentElement, height = root.scrollHeight;
  for (const each of document.querySelectorAll("details")) each.open = true;
  const boxes = (what) => [...document.querySelectorAll(what)]
    .map((each) => each.getBoundingClientRect());
  return {
    height,
    charts: document.querySelectorAll(".chart .mark").length,
    text: Math.min(...boxes(".chart text").map((box) => Math.max(box.height, box.width))),
    wide: root.scrollWidth - root.clientWidth,
    scrolled: [...document.querySelectorAll(".scroll")]
      .filter((each) => each.scrollWidth > each.clientWidth).length,
    names: [boxes(".stops span"), boxes(".chart text")].map((found) => found.filter((one, at) =>
      found.slice(at + 1).some((other) => one.left < other.right && other.left < one.right
        && one.top < other.bottom && other.top < one.bottom)).length),
    difference: Math.max(...boxes(".beside td:last-child").map((box) => box.right)) - innerWidth,
    fetched: performance.getEntriesByType("resource").length,
  };
}"""


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("hostile") / "report.html"
    write_html(report(hostile_calibration(), hostile_passage), file)
    assert file.stat().st_size < 250_000
    return file


@pytest.fixture(params=[1280, 390, 364])
def opened(request: pytest.FixtureRequest, browser: Any, hostile_page: Path) -> Iterator[Any]:
    """A report on which nothing may fail: no script, and nothing that the policy forbids."""
    context = browser.new_context(viewport={"width": request.param, "height": 900})
    found, problems = context.new_page(), list[str]()
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("console", lambda said: problems.append(said.text))
    found.on("dialog", lambda dialog: problems.append(dialog.message))
    found.goto(hostile_page.as_uri())
    yield found
    context.close()
    assert problems == []


@pytest.mark.slow
def test_browser_shows_desktop_and_phone(opened: Any) -> None:
    seen = opened.evaluate(_LOOK)
    assert seen["charts"] > 0
    assert seen["fetched"] == 0
    assert seen["wide"] <= 0
    assert seen["scrolled"] == 0, "a column to scroll for"
    assert seen["names"] == [0, 0], "names that overlap"
    assert seen["difference"] <= 0
    assert seen["text"] >= 11
    if opened.viewport_size["width"] > 1000:
        assert seen["height"] <= 6000


@pytest.mark.slow
class TestDial:
    """The control below the first screen, by keyboard, on a desktop and on a phone."""

    def test_begins_at_choice_arrows_turn(self, opened: Any) -> None:
        dial = report(hostile_calibration(), hostile_passage).dial
        slider = opened.get_by_role("slider")
        slider.focus()
        assert slider.input_value() == str(dial.start)
        for key, place in (("Home", 0), ("ArrowRight", 1), ("End", len(dial.stops) - 1)):
            opened.keyboard.press(key)
            stop = dial.stops[place]
            assert slider.input_value() == str(place)
            assert slider.get_attribute("aria-valuetext").startswith(f"{stop.kept:.1f} passages")
            assert opened.locator(".tile strong").first.inner_text() == f"{100 * stop.recall:.0f}%"
            lists = opened.locator("#dial article .side:last-child ol")
            for number, places in enumerate(stop.contexts):
                assert lists.nth(number).locator(".name").count() == len(places)

        assert opened.locator("#dial article").count() == 3
        box = slider.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= opened.viewport_size["width"]

    def test_todays_end_drops_nothing(self, opened: Any) -> None:
        """At today's place nothing is dropped and at the leanest most is; hostile text stays."""
        dial, slider = (
            report(hostile_calibration(), hostile_passage).dial,
            opened.get_by_role("slider"),
        )
        slider.focus()
        opened.keyboard.press("Home")
        assert opened.locator("#dial s").count() > 0
        assert "<script>" in opened.locator("#dial").inner_text()
        assert opened.locator("#dial b").count() == 0
        for _ in range(dial.today):
            opened.keyboard.press("ArrowRight")
        assert opened.locator("#dial s").count() == 0
        assert "today" in slider.get_attribute("aria-valuetext")

    def test_without_script_the_table_stands(self, browser: Any, hostile_page: Path) -> None:
        context = browser.new_context(java_script_enabled=False)
        found = context.new_page()
        found.goto(hostile_page.as_uri())
        assert not found.get_by_role("slider").is_visible()
        assert found.locator("#dial .chart").is_visible()
        assert found.get_by_role("heading", name="Leaner or richer").is_visible()
        assert found.locator("tr.chosen").first.is_visible()
        context.close()


def test_dial_runs_leanest_to_richest() -> None:
    found = calibrated(150, relevant=3)
    data = report(found, hostile_passage)
    dial, outcome = data.dial, found.outcomes[Route.HYBRID]
    assert 12 <= len(dial.stops) <= 20
    kept = [stop.kept for stop in dial.stops]
    assert kept == sorted(kept)
    for place, option in ((dial.today, outcome.today), (dial.start, outcome.chosen)):
        assert dial.stops[place].kept == pytest.approx(option.metrics["kept"].mean())
        recall = np.nanmean(option.metrics["recall"])
        assert dial.stops[place].recall == pytest.approx(recall)
    assert "balanced" in dial.stops[dial.start].names
    assert [question.which for question in dial.questions] == ["gains", "typical", "loses"]
    marks = {mark for question in dial.questions for _, _, mark in question.passages}
    assert "relevant" in marks
    assert marks <= {"relevant", "misleading", "other"}


def test_same_titles_show_their_ids() -> None:
    def titled(passage_id: str) -> Passage:
        return Passage(passage_id, "text", title="Repair")

    found = report(calibrated(80, noise=0.25, context="utility"), titled)
    names = [title for title, _, _ in found.dial.questions[0].passages]
    assert len(set(names)) == len(names) > 1


@pytest.mark.parametrize(
    ("before", "after", "gain", "shown"),
    [
        # The gain is the median of those that gain an answer, or the highest without any.
        ([0, 0, 0, 1], [1, 1, 1, 1], [0.9, 0.5, 0.2, 2.0], {"gains": 1, "typical": 0, "loses": 2}),
        ([1, 1, 0], [1, 1, 0], [0.1, 0.4, 0.2], {"gains": 1, "loses": 0}),
        # Gains of those with an answer: -3, 0.1, 0.2, 0.3; the third gains its answer.
        ([1, 1, 0, 0, 1], [1, 1, 1, 0, 0], [0.3, 0.1, 0.2, 9.0, -3.0], {"gains": 2, "loses": 4}),
        ([1], [1], [0.5], {"gains": 0}),
    ],
)
def test_median_questions_are_shown_once(
    before: list[int], after: list[int], gain: list[float], shown: dict[str, int]
) -> None:
    answered = np.array(before) > 0, np.array(after) > 0
    assert BeforeAfter(answered, (0, 0), (0, 0), np.array(gain)).shown() == shown


def test_answers_are_kept_gained_and_lost() -> None:
    answered = np.array([True, True, False, False]), np.array([True, False, True, False])
    found = BeforeAfter(answered, (0, 0), (0, 0), np.zeros(4))
    assert found.answers == {"kept": 1, "gained": 1, "lost": 1}


def test_counts_are_of_contexts() -> None:
    outcome = next(iter(calibrated(120, noise=0.25, unanswerable=0.1).outcomes.values()))
    found = BeforeAfter.of(outcome)
    assert found.irrelevant[0] < 5 * 120
    recall = outcome.today.metrics["recall"]
    assert int((np.nan_to_num(recall) > 0).sum()) == int(found.answered[0].sum())
    assert found.answers["kept"] + found.answers["lost"] == int(found.answered[0].sum())
