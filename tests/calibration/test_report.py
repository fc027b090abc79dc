"""The report of a calibration: its figures, its statistics, its page, in a browser as well."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_pools import DEPTH, calibrated, indistinct, simulate

from calibration.calibrate import Calibration, calibrate
from calibration.calibrate_route import Settings
from calibration.certify import Promise
from calibration.data.dataset import Dataset
from calibration.report import ReportData, report, summarise, write_html, write_json
from calibration.report.page import page
from calibration.report.reliability import (
    clustered_share,
    expected_calibration_error,
    reliability_bins,
)
from calibration.report.summary import SUMMARY_METRICS, Summary
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Passage, Route
from ctxguard.errors import ConfigurationError, MissingExtraError
from tests.timing import PATIENCE_SECONDS

HOSTILE = '</script><script>fetch("https://example.invalid/")</script><b onclick="x()">&'


def hostile_passage(passage_id: str) -> Passage:
    return Passage(passage_id, f"{HOSTILE} \x1b[31m\u202e text of {passage_id}", f"T {HOSTILE}")


@cache
def reported(n: int = 120, promise: Promise | None = None, **asked: Any) -> ReportData:
    """Of the policy of highest utility, which drops something of every sort, unless asked."""
    asked = {"objective": "utility", **asked}
    found = calibrated(n, noise=0.25, unanswerable=0.1, promise=promise, **asked)
    return report(found, hostile_passage)


@cache
def hostile_calibration() -> Calibration:
    """Queries that try to be markup."""
    retriever, dataset = simulate(80, noise=0.25)
    hostile = tuple(replace(query, text=f"{query.text} {HOSTILE}") for query in dataset.queries)
    rankings = {f"{text} {HOSTILE}": ranking for text, ranking in retriever.rankings.items()}
    dataset = replace(dataset, name=f"set {HOSTILE}", queries=hostile, notes=(HOSTILE,))
    asked = Settings(objective="utility", depth=DEPTH)
    return calibrate(replace(retriever, rankings=rankings), dataset, asked)


class TestFigures:
    def test_no_candidate_beats_the_front_in_both(self) -> None:
        found = reported().routes[0].frontier
        assert found.n_candidates >= len(found.candidates)
        for loss, harm in found.front_line:
            assert not any(
                x <= loss and y <= harm and (x < loss - 1e-4 or y < harm - 1e-4)
                for x, y in found.candidates
            )

    def test_a_promise_that_cannot_be_kept_says_how_many_labels_it_would_take(self) -> None:
        route = reported(60, Promise(0.02, 0.5, 0.1)).routes[0]
        assert route.certificate is None
        assert "The first 5 are kept." in route.certificate_words
        promised = "mean recall loss ≤ 0.02 and mean harm ≤ 0.5 with probability 0.9"
        assert promised in route.certificate_words
        assert re.search(r"About \d+ answerable test queries|No number", route.certificate_words)

    def test_without_queries_held_out_it_says_that_the_figures_are_optimistic(self) -> None:
        data = reported(60, held_out=0.0)
        route = data.routes[0]
        assert not route.summary.held_out
        assert "No query was held out" in route.reliability
        assert "no query was held out" in route.certificate_words
        assert "is optimistic" in page(data)
        assert any("no query was held out" in line for line in route.summary.warnings)

    def test_labels_are_counted(self) -> None:
        labels = reported().labels
        assert labels["queries"] == labels["answerable"] + labels["unanswerable"] == 120
        assert labels["unanswerable"] > 0
        assert labels["chosen_on"][0] + labels["held_out"][0] == 120
        assert labels["grades"] == {"1": 2 * labels["answerable"]}


class TestDropped:
    def test_each_example_has_its_label_and_the_setting_that_would_have_kept_it(self) -> None:
        route = reported().routes[0]
        for found in (route.dropped_irrelevant, route.dropped_relevant):
            assert 0 < found.dropped <= found.total
            assert found.share.value == pytest.approx(found.dropped / found.total, rel=1e-4)
            assert len({example.query_id for example in found.shown}) == len(found.shown)
            for example in found.shown:
                assert example.kept_if
                for setting, value in example.kept_if:
                    if setting == "k":
                        assert value == example.rank > route.policy.k
                    else:
                        assert value <= (example.probability or 0.0) < route.policy.threshold
        assert {e.label for e in route.dropped_relevant.shown} == {"relevant, grade 1 of 1"}
        kept_out = {e.label for e in route.dropped_irrelevant.shown}
        assert kept_out <= {"not judged", "judged irrelevant"}
        assert all(example.retrieved_rank <= 5 for example in route.dropped_irrelevant.shown)

    def test_a_passage_that_is_gone_is_shown_by_its_id(self) -> None:
        def gone(passage_id: str) -> Passage:
            raise KeyError(passage_id)

        found = calibrated(120, noise=0.25, unanswerable=0.1, objective="utility", promise=None)
        example = report(found, gone).routes[0].dropped_irrelevant.shown[0]
        assert example.passage_id
        assert example.snippet is None


class TestReliability:
    def test_the_interval_of_a_share_covers_the_truth_under_clustering(self) -> None:
        random = np.random.default_rng(0)
        covered, runs, truth = 0, 400, 0.3
        for _ in range(runs):
            counts = random.integers(1, 12, size=60)
            # Candidates of one query share its rate: beta-binomial with mean ``truth``.
            rates = random.beta(truth * 2.0, (1.0 - truth) * 2.0, size=60)
            share = clustered_share(random.binomial(counts, rates), counts)
            assert share.lower is not None
            covered += share.lower <= truth <= share.upper
        assert covered / runs >= 0.92

    def test_a_bin_without_a_relevant_candidate_still_has_a_wide_interval(self) -> None:
        share = clustered_share(np.zeros(3, dtype=int), np.array([40, 40, 40]))
        assert share.value == 0.0
        assert share.upper > 0.3

    def test_a_true_probability_lies_in_its_bins(self) -> None:
        random = np.random.default_rng(1)
        probabilities = random.beta(1, 4, size=(400, 20))
        relevant = random.random((400, 20)) < probabilities
        # Positions beyond a query's candidates do not count.
        probabilities = np.pad(probabilities, ((0, 0), (0, 3)), constant_values=np.nan)
        relevant = np.pad(relevant, ((0, 0), (0, 3)), constant_values=True)
        assert expected_calibration_error(probabilities, relevant).value < 0.05
        bins = [b for b in reliability_bins(probabilities, relevant) if b.relevant.n > 50]
        inside = [
            b.relevant.lower <= b.mean_probability <= b.relevant.upper  # type: ignore[operator]
            for b in bins
        ]
        assert sum(inside) >= len(inside) - 1
        assert sum(b.relevant.n for b in reliability_bins(probabilities, relevant)) == 8000

    def test_a_model_that_is_off_by_a_tenth_has_an_error_of_a_tenth(self) -> None:
        random = np.random.default_rng(2)
        truth = random.uniform(0.1, 0.9, size=(500, 20))
        relevant = random.random((500, 20)) < truth
        error = expected_calibration_error(np.clip(truth + 0.1, 0.0, 1.0), relevant)
        assert error.value == pytest.approx(0.1, abs=0.02)
        exact = expected_calibration_error(truth, relevant)
        assert exact.value < 0.03
        assert expected_calibration_error(truth[:1], relevant[:1]).bounds is None
        assert expected_calibration_error(np.full((1, 1), np.nan), relevant[:1, :1]).value is None


class Page(HTMLParser):
    """What a browser would make of a page, as far as it matters here."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.headings: list[int] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        found = dict(attrs)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if found.get("id"):
            self.ids.append(str(found["id"]))


class TestSummary:
    """What a person sees first, and what they are warned of."""

    @staticmethod
    def of(found: Calibration) -> Summary:
        held_out = found.held_out is not None
        return summarise(found.outcomes[Route.HYBRID], found.settings, held_out=held_out)

    def test_today_and_the_choice_are_measured_on_the_same_queries(self) -> None:
        found = calibrated(200)
        outcome, summary = found.outcomes[Route.HYBRID], self.of(found)
        assert summary.results.metrics == SUMMARY_METRICS
        assert summary.results.policies[:2] == ("first 5, as today", "chosen")
        assert summary.queries == 100
        evidence = outcome.profile.held_out
        for metric in SUMMARY_METRICS:
            today = summary.results.of("first 5, as today", metric)
            chosen = summary.results.of("chosen", metric)
            if metric == "tokens":  # the simulated passages have no text
                assert chosen.mean.value is None
                continue
            assert chosen.mean.value == pytest.approx(evidence.metrics[metric].value)
            if today.mean.n == chosen.mean.n == chosen.difference.n:
                assert chosen.difference.value == pytest.approx(
                    (chosen.mean.value or 0.0) - (today.mean.value or 0.0)
                )

    def test_where_today_is_kept_nothing_differs_and_nothing_is_warned_of(self) -> None:
        found = calibrate(*indistinct(100), Settings(depth=DEPTH))
        assert found.outcomes[Route.HYBRID].profile.policy == RatioPolicy(k=5)
        summary = self.of(found)
        changes = [row.difference for row in summary.results.only(["chosen"]).rows]
        assert all(each is not None and each.value in (0.0, None) for each in changes)
        assert summary.judged.value == 1.0
        assert summary.warnings == ()

    def test_few_labels_among_what_is_served_make_the_figures_a_guess(self) -> None:
        retriever, dataset = simulate(100, relevant=1)
        sparse = self.of(calibrate(retriever, dataset, Settings(depth=DEPTH)))
        assert sparse.judged.value == pytest.approx(0.2, abs=0.05)
        assert any("of the first 5 passages were ever labelled" in w for w in sparse.warnings)
        labelled = self.of(calibrate(retriever, negatives_labelled(dataset), Settings(depth=DEPTH)))
        assert not any("ever labelled" in line for line in labelled.warnings)

    def test_a_fall_of_recall_is_said_with_how_much(self) -> None:
        summary = self.of(calibrated(120, noise=0.25, objective="utility"))
        recall = summary.results.of("chosen", "recall").difference
        assert recall.value < -0.05
        (line,) = [w for w in summary.warnings if w.startswith("mean recall is")]
        assert f"{-recall.value:.3f} lower than that of the first 5" in line
        assert ("may be noise" in line) == (recall.upper is None or recall.upper >= 0.0)

    def test_a_bound_of_more_than_half_promises_nothing(self) -> None:
        few = calibrated(46, noise=0.4, objective="utility", held_out=0.1)
        certificate = few.outcomes[Route.HYBRID].profile.certificate
        assert certificate.promises_nothing
        assert any("the certificate promises nothing" in w for w in self.of(few).warnings)
        many = self.of(calibrated(200, objective="utility"))
        assert not any("promises nothing" in line for line in many.warnings)

    def test_it_says_how_many_labels_would_make_a_loose_bound_tight(self) -> None:
        found = calibrated(60, noise=0.1, objective="utility")
        needed = found.outcomes[Route.HYBRID].labels_needed
        assert needed > 30
        assert any(
            line.startswith(f"about {needed} held-out queries like these would show")
            and line.endswith("30 were at hand")
            for line in self.of(found).warnings
        )

    def test_where_nothing_is_held_out_the_mend_fits_the_cause(self) -> None:
        asked = {"objective": "utility", "policy": "ratio"}
        few = self.of(calibrated(20, **asked)).warnings
        assert any("label 50 answerable queries or more" in line for line in few)
        by_hand = self.of(calibrated(60, held_out=0.0, **asked)).warnings
        assert any("hold out a share of them" in line for line in by_hand)

    @pytest.mark.parametrize(
        "asked",
        [
            {},
            {"objective": "utility"},
            {"promise": Promise(0.2, None, 0.1)},
            {"promise": Promise(0.02, 0.5, 0.1), "noise": 0.25},  # cannot be kept
            {"held_out": 0.0},
            {"serving_k": 1},
            {"serving_k": DEPTH},  # all candidates
        ],
        ids=str,
    )
    def test_the_page_begins_with_today_beside_the_choice(self, asked: dict[str, Any]) -> None:
        found = calibrated(60, **asked)
        written = page(report(found))
        start = written.index("<h1")
        table = written[start : written.index("<details")]
        assert html.escape(self.of(found).verdict) in table[: table.index("<table")]
        assert table.index("<figure") < table.index("<h2")
        assert f"first {found.settings.serving_k}, as today" in table
        for words in ("chosen", "difference", "recall", "harm", "kept", "judged", "highest"):
            assert words in table
        for line in self.of(found).warnings:
            assert html.escape(line[1:]) in table

    def test_figures_of_the_queries_that_chose_are_never_shown_as_gains(self) -> None:
        chosen_only = report(calibrated(60, objective="utility", held_out=0.0))
        held_out = report(calibrated(200, objective="utility"))
        for data, shown in ((chosen_only, False), (held_out, True)):
            for route in data.routes:
                found = [row.difference for row in route.summary.results.rows if row.difference]
                assert any(each.n for each in found)
                assert all((each.value is not None) == shown for each in found if each.n)
            assert ('class="better"' in page(data)) == shown


def negatives_labelled(dataset: Dataset) -> Dataset:
    """The same labels, and 0 for every other candidate of a simulated query."""
    qrels = {
        query: {f"{query}-{position}": 0 for position in range(DEPTH)} | dict(grades)
        for query, grades in dataset.qrels.items()
    }
    return replace(dataset, qrels=qrels)


@pytest.fixture(scope="module")
def text() -> str:
    """A page with a promise that is kept."""
    return page(reported(240, Promise(0.2, None, 0.1)))


class TestPage:
    def test_the_same_calibration_gives_the_same_bytes(self, tmp_path: Path) -> None:
        found = [calibrated(60, noise=0.25, objective="utility", promise=None) for _ in range(2)]
        for name, each in zip("ab", found, strict=True):
            write_json(report(each), tmp_path / f"{name}.json")
        assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
        assert page(report(found[0])) == page(report(found[1]))

    def test_the_json_is_the_data_to_six_digits(self, tmp_path: Path) -> None:
        write_json(reported(), tmp_path / "deep" / "report.json")
        read = json.loads((tmp_path / "deep" / "report.json").read_text())
        route, own = read["routes"][0], reported().routes[0]
        assert route["policy"]["threshold"] == pytest.approx(own.policy.threshold, rel=1e-5)
        assert len(route["summary"]["results"]["rows"]) == len(own.summary.results.rows)
        assert read["provenance"]["dataset_digest"] == reported().provenance.dataset_digest

    def test_headings_go_down_one_level_and_routes_are_collapsed(self, text: str) -> None:
        found = Page(text)
        headings = found.headings
        assert headings.count(1) == 1
        assert headings[0] == 1
        assert all(after <= before + 1 for before, after in pairwise(headings))

        assert len(found.ids) == len(set(found.ids))
        assert found.tags.count("details") == 1 + 3
        assert "open" not in {name for name, _ in found.attributes}

    def test_it_is_small_and_each_part_has_its_n(self, text: str) -> None:
        assert len(text.encode()) < 2**20 / 3, "of three routes a mebibyte"
        for words in ("n = 120", "(n = ", "120 held-out queries", "policies were compared"):
            assert words in text

    def test_it_runs_nothing_and_loads_nothing(self, text: str) -> None:
        found = Page(text)
        assert not {"script", "img", "iframe", "object", "embed", "base"} & set(found.tags)
        sources = [value for name, value in found.attributes if name in ("src", "href", "action")]
        assert all(str(source).startswith(("#", "data:")) for source in sources)
        assert "default-src 'none'" in text

    def test_every_chart_stands_beside_a_table(self, text: str) -> None:
        tags = Page(text).tags
        assert tags.count("figure") == 4
        assert tags.count("table") >= tags.count("figure")
        assert tags.count("caption") == tags.count("table")

    def test_hostile_text_is_shown_and_never_run(self) -> None:
        plain, hostile = (
            Page(page(report(found, hostile_passage)))
            for found in (calibrated(80, noise=0.25, objective="utility"), hostile_calibration())
        )
        assert hostile.tags.count("figure") == plain.tags.count("figure")
        assert "script" not in hostile.tags
        assert "onclick" not in {name for name, _ in hostile.attributes}
        assert "b" not in hostile.tags
        text = page(report(hostile_calibration(), hostile_passage))
        assert HOSTILE not in text
        assert "&lt;/script&gt;&lt;script&gt;fetch(" in text
        assert "\x1b" not in text
        assert "\u202e" not in text

    def test_a_path_that_cannot_be_written_is_refused_with_the_mend(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for path in (tmp_path / "file" / "report.json", tmp_path):
            with pytest.raises(ConfigurationError, match="name a file in a folder that can be"):
                write_json(reported(), path)
        assert sorted(tmp_path.iterdir()) == [tmp_path / "file"]

    def test_without_the_extra_it_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
        with pytest.raises(MissingExtraError, match=r"\[report\]"):
            write_html(reported(), tmp_path / "report.html")
        assert not (tmp_path / "report.html").exists()


def _browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (found := shutil.which(name)) is not None:
            return found
    pytest.skip("no chromium is installed, so the page cannot be looked at in a browser")


_LOOK = """
<script>
addEventListener("load", () => setTimeout(() => {
  const look = document.body.dataset, root = document.documentElement;
  look.height = root.scrollHeight;
  for (const each of document.querySelectorAll("details")) each.open = true;
  const texts = [...document.querySelectorAll(".chart text")]
    .map((text) => text.getBoundingClientRect());
  look.charts = document.querySelectorAll(".chart .mark").length;
  look.text = Math.min(...texts.map((box) => Math.max(box.height, box.width)));
  look.wide = root.scrollWidth - root.clientWidth;
  look.difference = Math.max(...[...document.querySelectorAll(".beside td:last-child")]
    .map((cell) => cell.getBoundingClientRect().right)) - innerWidth;
  look.fetched = performance.getEntriesByType("resource").length;
  parent.postMessage({...look}, "*");
}, 500));
</script>
"""

_FRAME = """
<body><iframe src="watched.html" width="{width}" height="900"></iframe><script>
addEventListener("message", (e) => Object.assign(document.body.dataset, e.data));
</script></body>
"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_page_on_a_desktop_and_on_a_phone(width: int, tmp_path: Path) -> None:
    browser, file = _browser(), tmp_path / "report.html"
    write_html(report(hostile_calibration(), hostile_passage), file)
    assert file.stat().st_size < 2**20
    # The page itself has nothing that tells; a copy of it does.
    written = file.read_text("utf-8").replace("style-src", "script-src 'unsafe-inline'; style-src")
    watched = written.replace("<title>", f"{_LOOK}<title>", 1)
    (tmp_path / "watched.html").write_text(watched, "utf-8")
    # A headless window is never narrower than 500.
    frame = tmp_path / "frame.html"
    frame.write_text(_FRAME.replace("{width}", str(width)))
    done = subprocess.run(
        [
            browser,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1400,1000",
            *("--virtual-time-budget=8000", "--dump-dom", frame.as_uri()),
        ],
        capture_output=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    body = re.search(r"<body[^>]*>", done.stdout.decode())
    seen = {key: float(value) for key, value in re.findall(r'data-(\w+)="([^"]*)"', body[0])}
    assert seen["charts"] > 0
    assert seen["fetched"] == 0
    assert seen["wide"] <= 0
    assert seen["difference"] <= 0
    assert seen["text"] >= 11
    if width > 1000:
        assert seen["height"] <= 6000
