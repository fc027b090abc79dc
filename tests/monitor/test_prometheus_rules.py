"""Rules, alerts and dashboard speak of metrics that we export, and say what they are meant to."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from contexts import make_context
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.parser import text_string_to_metric_families
from stub_judges import PaidOpinion
from watching import Watching

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route, ScoreKind
from ctxguard.guard.telemetry import Telemetry
from ctxguard.monitor import export as prometheus
from ctxguard.monitor.alarms import Alarm, AlarmKind, ReferenceKind
from ctxguard.monitor.export.multiprocess import SafeMultiProcessCollector
from ctxguard.monitor.judges import LabelJudge
from ctxguard.profile.schema import Profile, RouteEvidence, RouteProfile
from ctxguard.server.metrics import HttpMetrics
from tests.command import invoke
from tests.profiles import CERTIFICATE, profile_with

RULES_TESTS = [Path(__file__).with_name(f"rules{hours}_test.yml") for hours in ("", "_of_hours")]
FOLDER = Path(prometheus.__file__).parent
RULES = yaml.safe_load(prometheus.rules(all_metrics=True))
ALL_RULES = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in ALL_RULES if "alert" in rule]
DEFAULT_RULES = [
    rule for group in yaml.safe_load(prometheus.rules())["groups"] for rule in group["rules"]
]
PAGES = [
    json.loads(prometheus.dashboard_json(all_metrics=all_metrics)) for all_metrics in (False, True)
]
DEFAULT_PANELS, PANELS = (
    [panel for panel in page["panels"] if panel["type"] != "row"] for page in PAGES
)
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
DEFAULT_QUERIES = [target["expr"] for panel in DEFAULT_PANELS for target in panel["targets"]]
EXPRESSIONS = [rule["expr"] for rule in ALL_RULES] + QUERIES
TYPED = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)
QUOTED = re.compile(r'"[^"]*"')
NAME = re.compile(r"(?<![\w:])(?:job:)?ctxguard_[\w:]+")


def scraped(folder: Path, *, all_metrics: bool, alarms: bool = True) -> list[str]:
    """Scrape a serving process, a monitor whose judge is exact, and one whose judge errs."""
    registries = [CollectorRegistry() for _ in range(3)]
    Telemetry(registries[0], all_metrics=all_metrics)
    HttpMetrics(registries[0], all_metrics=all_metrics)
    SafeMultiProcessCollector(folder, registries[0], all_metrics=all_metrics)
    qrels = {"q": {"p0": 1}}
    for registry, judge in zip(
        registries[1:], (LabelJudge(qrels), PaidOpinion(qrels)), strict=True
    ):
        live = Watching(judge, profile=_profile(), registry=registry, all_metrics=all_metrics)
        state = live.monitor.alarms
        for kind in AlarmKind if alarms else ():
            for route, reference in zip(Route, (None, *ReferenceKind), strict=False):
                state.add(Alarm(kind, "", 0.0, route, reference=reference))
        live.watch(*[make_context(["p0", "p1"], 1) for _ in range(3)])
        live.serve(make_context(["p0"], 1))
        live.now += 1.0
        live.monitor.report()
    return [generate_latest(registry).decode() for registry in registries]


@pytest.fixture
def scrapes(tmp_path: Path) -> list[str]:
    """Every metric that we export, in every state that has one of its own."""
    return scraped(tmp_path, all_metrics=True)


def names_of(scrapes: list[str]) -> set[str]:
    """Return the names that a query can ask for."""
    names: set[str] = set()
    for name, kind in TYPED.findall("".join(scrapes)):
        endings = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {name + ending for ending in endings}
    return names


def _profile() -> Profile:
    calibrated = RouteProfile(
        policy=RatioPolicy(k=3, min_ratio=0.8),
        score_kind=ScoreKind.RATIO,
        certificate=CERTIFICATE,
        evidence=RouteEvidence(queries=100, metrics={}),
    )
    return profile_with({Route.HYBRID: calibrated})


def series_of(scrapes: list[str]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the samples of some scrapes by name and labels, those of the last where alike."""
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for scrape in scrapes
        for family in text_string_to_metric_families(scrape)
        for one in family.samples
    }


def names_in(expression: str) -> set[str]:
    return set(NAME.findall(QUOTED.sub('""', expression)))


def promtool(*arguments: str, given: str | None = None) -> None:
    run_tool("promtool", "prometheus", *arguments, given=given)


def amtool(*arguments: str) -> str:
    return run_tool("amtool", "prometheus-alertmanager", *arguments)


def run_tool(name: str, package: str, *arguments: str, given: str | None = None) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install {package}")
    done = subprocess.run(
        [found, *arguments], input=given, capture_output=True, text=True, cwd=FOLDER, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("all_metrics", "rules", "queries"),
    [(True, ALL_RULES, QUERIES), (False, DEFAULT_RULES, DEFAULT_QUERIES)],
    ids=["all", "default"],
)
def test_all_that_is_exported_is_read(
    tmp_path: Path, all_metrics: bool, rules: list[dict[str, Any]], queries: list[str]
) -> None:
    """What panels and rules read is exported, and what is exported is read by one of them."""
    exported = names_of(scraped(tmp_path, all_metrics=all_metrics))
    recorded = {rule["record"] for rule in rules if "record" in rule}
    read = [rule["expr"] for rule in rules if "alert" in rule] + queries
    assert recorded <= set().union(*map(names_in, read))
    used = set().union(*map(names_in, [*[rule["expr"] for rule in rules], *queries]))
    assert used <= exported | recorded
    histograms = {name.removesuffix("_bucket") for name in used if name.endswith("_bucket")}
    # prometheus-client adds the time of its creation to each counter.
    unread = {name for name in exported - used if not name.endswith("_created")}
    assert {name for name in unread if re.sub("_(sum|count)$", "", name) not in histograms} == set()


class TestStart:
    """What one begins with: few alerts, panels and lines; ``all-metrics`` gives the rest."""

    def test_twelve_alerts_and_panels(self) -> None:
        """And they are a part of all."""
        alerts = [rule["alert"] for rule in DEFAULT_RULES if "alert" in rule]
        assert max(len(alerts), len(DEFAULT_PANELS)) <= 12
        assert [rule for rule in ALL_RULES if rule in DEFAULT_RULES] == DEFAULT_RULES
        titles = {panel["title"] for panel in PANELS}
        assert {panel["title"] for panel in DEFAULT_PANELS} <= titles

    def test_lines_of_a_scrape(self, tmp_path: Path) -> None:
        """At most 120 lines each, with HELP, TYPE and what prometheus-client says of a process."""
        process = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=process)
        about_process = len(generate_latest(process).decode().splitlines())
        for scrape in scraped(tmp_path, all_metrics=False, alarms=False):
            assert len(scrape.splitlines()) + about_process <= 120

    def test_sums_over_other_labels(self, tmp_path: Path) -> None:
        """A count by fewer labels is the sum over the others, so rates and ratios are the same."""
        few, everything = (
            series_of(scraped(tmp_path, all_metrics=all_metrics)) for all_metrics in (False, True)
        )
        for (name, labels), value in few.items():
            found = everything.items()
            whole = [each for (other, of), each in found if other == name and labels <= of]
            assert value == sum(whole), (name, labels)


def test_metric_names_suit_prometheus(scrapes: list[str]) -> None:
    for scrape in scrapes:
        promtool("check", "metrics", given=scrape)


def test_the_rules_are_valid() -> None:
    promtool("check", "rules", "rules.yml", "more_rules.yml")
    assert len(ALL_RULES) == len({json.dumps(rule) for rule in ALL_RULES})


def test_the_rules_do_what_they_say() -> None:
    promtool("test", "rules", *map(str, RULES_TESTS))


def test_every_rule_is_tested() -> None:
    tests = "".join([each.read_text(encoding="utf-8") for each in RULES_TESTS])
    names = [rule.get("alert") or rule["record"] for rule in ALL_RULES]
    untested = [name for name in names if not re.search(rf"\b{name}\b", tests)]
    assert untested == []


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alert_says_severity_and_action(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert alert["annotations"]["summary"]
    assert len(alert["annotations"]["description"].split()) >= 15


def test_the_commands_that_alerts_name_exist() -> None:
    from ctxguard.cli import COMMANDS

    known = {name.split()[0] for name in COMMANDS}
    named = set(re.findall(r"`ctxguard (\w+)", prometheus.rules(all_metrics=True)))
    assert named <= known


class TestAlertmanagerExample:
    FILE = Path(__file__).parents[2] / "docs" / "alertmanager.yml"
    CONFIGURATION = yaml.safe_load(FILE.read_text(encoding="utf-8"))

    def test_alertmanager_accepts_it(self) -> None:
        amtool("check-config", str(self.FILE))

    @pytest.mark.parametrize(
        ("severity", "receiver"), [("critical", "on-call"), ("warning", "team"), ("info", "team")]
    )
    def test_every_severity_reaches_its_receiver(self, severity: str, receiver: str) -> None:
        routing = ("config", "routes", "test", f"--config.file={self.FILE}")
        assert amtool(*routing, f"severity={severity}").split() == [receiver]

    def test_example_groups_and_posts(self) -> None:
        route = self.CONFIGURATION["route"]
        assert route["group_by"] == ["alertname", "job"]
        assert {route["repeat_interval"], *[one["repeat_interval"] for one in route["routes"]]} == {
            *("1h", "12h", "7d")
        }
        used = {route["receiver"], *[one["receiver"] for one in route["routes"]]}
        posting = {one["name"] for one in self.CONFIGURATION["receivers"] if one["webhook_configs"]}
        assert used == posting

    def test_the_alerts_that_it_names_exist(self) -> None:
        named = set(re.findall(r"Ctxguard\w+", self.FILE.read_text(encoding="utf-8")))
        assert named <= {alert["alert"] for alert in ALERTS}


@pytest.mark.parametrize("all_metrics", [False, True])
def test_dashboards_equal_their_source(all_metrics: bool) -> None:
    from tools.dashboard.dashboard import dashboard

    made = dashboard(all_metrics=all_metrics)
    assert made == prometheus.dashboard_json(all_metrics=all_metrics), "make dashboard"


@pytest.mark.parametrize("page", PAGES, ids=["default", "all"])
def test_grafana_types_know_everything(page: dict[str, Any]) -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    # Without these, the options of a panel would be read as they are.
    pytest.importorskip("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    read = models.Dashboard.from_json(page)
    # What Grafana's types do not know is lost on the way.
    again = json.loads(json.dumps(read, cls=encoder.JSONEncoder))
    assert set(paths_in(page)) <= set(paths_in(again))


def paths_in(value: object, place: str = "") -> Iterator[tuple[str, object]]:
    """Every leaf of a JSON document with its place."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths_in(inner, f"{place}/{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from paths_in(inner, f"{place}/{number}")
    else:
        yield place, value


def test_no_data_looks_like_no_data() -> None:
    for panel in PANELS:
        assert panel["fieldConfig"]["defaults"]["noValue"] == "no data"
        if panel["type"] == "timeseries":
            assert panel["fieldConfig"]["defaults"]["custom"]["spanNulls"] is False
        else:
            assert all(target["instant"] for target in panel["targets"])
    for expression in EXPRESSIONS:
        assert "vector(" not in expression
        assert not re.search(r"\bor\b", expression)


@pytest.mark.parametrize("page", PAGES, ids=["default", "all"])
def test_panels_never_overlap(page: dict[str, Any]) -> None:
    cells = [
        (place["x"] + right, place["y"] + down)
        for panel in page["panels"]
        for place in [panel["gridPos"]]
        for right in range(place["w"])
        for down in range(place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize("all_metrics", [False, True])
def test_the_command_prints_the_files(tmp_path: Path, all_metrics: bool) -> None:
    file = tmp_path / "system.toml"
    file.write_text(f"all-metrics = {str(all_metrics).lower()}", encoding="utf-8")
    for what, printed in (
        ("rules", prometheus.rules(all_metrics=all_metrics)),
        ("dashboard", prometheus.dashboard_json(all_metrics=all_metrics)),
    ):
        assert invoke(["metrics", what, "--system", str(file)]).stdout == printed
