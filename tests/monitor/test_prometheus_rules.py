"""Rules, alerts and dashboard speak of metrics that we export, and say what they are meant to."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner
from watching import Watching

from ctxguard.cli import metrics as metrics_command
from ctxguard.context import Context
from ctxguard.monitor import prometheus
from ctxguard.monitor.alarms import Alarm, AlarmBoard, AlarmKind, Severity
from ctxguard.monitor.estimates import Metric
from ctxguard.monitor.exporter import MonitorCollector
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.judges.accounts import JudgeAccounts, Ledger
from ctxguard.monitor.multiprocess import SafeMultiProcessCollector
from ctxguard.monitor.store import FeedbackRow
from ctxguard.policy import RatioPolicy
from ctxguard.profile import Evidence, Profile, RouteProfile
from ctxguard.telemetry import Telemetry
from ctxguard.types import Route, ScoreKind
from tests.profiles import CERTIFICATE, profile_with

FOLDER = Path(prometheus.__file__).parent
RULES = yaml.safe_load(prometheus.rules())
ALL_RULES = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in ALL_RULES if "alert" in rule]
DASHBOARD = json.loads(prometheus.dashboard_json())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
EXPRESSIONS = [rule["expr"] for rule in ALL_RULES] + QUERIES
TYPED = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)
QUOTED = re.compile(r'"[^"]*"')
NAME = re.compile(r"(?<![\w:])(?:job:)?ctxguard_[\w:]+")
SELECTOR = re.compile(r"(ctxguard_\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
FROM_THE_SCRAPE = {"job", "instance"}


class Opinion(LabelJudge):
    """A judge that errs, and keeps accounts."""

    exact = False

    def accounts(self) -> JudgeAccounts:
        return Ledger().snapshot((2.0, 8.0))


@pytest.fixture
def scrapes(make_context: Callable[..., Context], tmp_path: Path) -> list[str]:
    """A serving process, a monitor whose judge is exact, and one whose judge errs."""
    registries = [CollectorRegistry() for _ in range(3)]
    Telemetry(registries[0])
    SafeMultiProcessCollector(tmp_path, registries[0])
    board = AlarmBoard(_profile(), drift=False)
    for kind in AlarmKind:
        board.raise_(Alarm(kind, Severity.ALARM, "", 0.0, route=Route.HYBRID, signal="top_score"))
    qrels = {"q": {"p0": 1}}
    for registry, judge in zip(registries[1:], (LabelJudge(qrels), Opinion(qrels)), strict=True):
        live = Watching(judge, alarms=board)
        MonitorCollector(live.monitor, registry)
        live.watch(*[make_context(["p0", "p1"], 1) for _ in range(3)])
        live.serve(make_context(["p0"], 1))
        live.store.add_feedback([FeedbackRow("r", "thumb_up", (), live.now)])
        live.now += 1.0
        live.monitor.report()
    return [generate_latest(registry).decode() for registry in registries]


@pytest.fixture
def scrape(scrapes: list[str]) -> str:
    """Every metric that we export, in every state that has one of its own."""
    return "".join(scrapes)


@pytest.fixture
def exported(scrape: str) -> set[str]:
    """The names that a query can ask for."""
    names: set[str] = set()
    for name, kind in TYPED.findall(scrape):
        endings = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {name + ending for ending in endings}
    return names


def _profile() -> Profile:
    calibrated = RouteProfile(
        policy=RatioPolicy(k=3, min_ratio=0.8),
        score_kind=ScoreKind.RATIO,
        certificate=CERTIFICATE,
        chosen_on=Evidence(queries=100, metrics={}),
    )
    return profile_with({Route.HYBRID: calibrated})


def names_in(expression: str) -> set[str]:
    return set(NAME.findall(QUOTED.sub('""', expression)))


def matchers_in(expression: str) -> Iterator[tuple[str, str, str]]:
    """Every metric, label and value that an expression chooses by."""
    for metric, inside in SELECTOR.findall(expression):
        for label, how, value in MATCHER.findall(inside):
            for one in value.split("|") if "~" in how else [value]:
                yield metric, label, one


def promtool(*arguments: str, given: str | None = None) -> None:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    done = subprocess.run(
        [found, *arguments], input=given, capture_output=True, text=True, cwd=FOLDER, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_of_rules_and_dashboard_is_exported(exported: set[str]) -> None:
    recorded = {rule["record"] for rule in ALL_RULES if "record" in rule}
    used = set().union(*map(names_in, EXPRESSIONS))
    assert used <= exported | recorded


def test_every_label_that_is_chosen_by_has_that_value(scrape: str) -> None:
    known: dict[tuple[str, str], set[str]] = {}
    for family in text_string_to_metric_families(scrape):
        for sample in family.samples:
            for label, value in sample.labels.items():
                known.setdefault((sample.name, label), set()).add(value)
    for expression in EXPRESSIONS:
        for metric, label, value in matchers_in(expression):
            if label not in FROM_THE_SCRAPE:
                values = known.get((metric, label), set())
                if label == "metric":  # Which of them has an estimate depends on the traffic.
                    values = {*Metric}
                assert values, f"{metric} has no label {label}"
                assert value in values or value.startswith("$"), f"{metric}{{{label}={value!r}}}"


def test_every_metric_of_ours_is_named_as_prometheus_wants_it(scrapes: list[str]) -> None:
    for scrape in scrapes:
        promtool("check", "metrics", given=scrape)


def test_the_rules_are_valid() -> None:
    promtool("check", "rules", "rules.yml")


def test_the_rules_do_what_they_say() -> None:
    promtool("test", "rules", "rules_test.yml")


def test_every_rule_is_tested() -> None:
    tests = (FOLDER / "rules_test.yml").read_text(encoding="utf-8")
    names = [rule.get("alert") or rule["record"] for rule in ALL_RULES]
    untested = [name for name in names if not re.search(rf"\b{name}\b", tests)]
    assert untested == []


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_how_bad_it_is_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert alert["annotations"]["summary"]
    assert len(alert["annotations"]["description"].split()) >= 15


def test_the_commands_that_alerts_name_exist() -> None:
    from ctxguard.cli import app

    known = typer.main.get_command(app).commands.keys()
    named = set(re.findall(r"`ctxguard (\w+)", prometheus.rules()))
    assert named <= known


def test_the_dashboard_is_what_its_source_makes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="the dashboard is built with it")
    from ctxguard.monitor.prometheus.dashboard import dashboard

    assert dashboard() == prometheus.dashboard_json(), "make dashboard"


def test_grafanas_own_types_read_the_dashboard() -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    read = models.Dashboard.from_json(DASHBOARD)
    assert [panel.title for panel in read.panels if panel.type_val != "row"] == [
        panel["title"] for panel in PANELS
    ]


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


def test_no_two_panels_lie_over_each_other() -> None:
    cells = [
        (place["x"] + right, place["y"] + down)
        for panel in DASHBOARD["panels"]
        for place in [panel["gridPos"]]
        for right in range(place["w"])
        for down in range(place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize(
    ("what", "file"), [("rules", "rules.yml"), ("dashboard", "dashboard.json")]
)
def test_the_command_prints_the_file(what: str, file: str) -> None:
    app = typer.Typer()
    metrics_command.register(app)
    result = CliRunner().invoke(app, [what])
    assert result.exit_code == 0
    assert result.stdout == (FOLDER / file).read_text(encoding="utf-8")
