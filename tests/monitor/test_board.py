"""Every panel and rule has data in a real Prometheus after an hour of traffic."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_server import Server, prometheus_in
from stub_judges import PaidOpinion
from watching import DAY_SECONDS, Watching

from ctxguard import ContextGuard, Hit, Mode, RatioPolicy, Route, ScoreKind
from ctxguard.core.types import FailureKind, Flag, Passage, StageFailure
from ctxguard.core.value_of_information import Assessment
from ctxguard.endpoints.failures import InvalidReason
from ctxguard.errors import CtxguardError, FilterViolationError, OverloadedError
from ctxguard.guard.telemetry import ReloadTarget, Telemetry
from ctxguard.monitor import export
from ctxguard.monitor.alarms import Alarm, AlarmKind, ReferenceKind
from ctxguard.monitor.export.multiprocess import SafeMultiProcessCollector
from ctxguard.monitor.export.prometheus import MonitorCollector
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.sampling.sampler import JudgingRates, LostReason
from ctxguard.profile.schema import RouteEvidence, RouteProfile, RouteVerdict
from ctxguard.server.metrics import Endpoint, HttpMetrics, Outcome
from tests.profiles import CERTIFICATE, profile_with

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus is not installed: apt-get install --no-install-recommends prometheus",
)

MINUTES = (0, 20, 40, 56, 57, 58, 59, 60)
"""When the hour is scraped: rates and present values need its last five minutes alone."""
QUERIES = [f"question {n}" for n in range(400)]
HITS = [Hit(f"p{rank}", 0.9 - rank / 20, f"text of passage {rank}") for rank in range(12)]
QRELS = {query: {f"p{n % 4}": 2, "p7": 1, "deep": 1} for n, query in enumerate(QUERIES)}
VARIABLES = {"monitor": "m", "guard": "g", "__rate_interval": "5m", "__range": "1h"}
RULES = yaml.safe_load(export.rules(all_metrics=True))
ALL_RULES = [rule for group in RULES["groups"] for rule in group["rules"]]
RECORDED = {rule["record"]: rule["expr"] for rule in ALL_RULES if "record" in rule}
PANELS = [
    panel
    for panel in json.loads(export.dashboard_json(all_metrics=True))["panels"]
    if panel["type"] != "row"
]
NAME = re.compile(r"(?<![\w:])(?:job:)?ctxguard_[\w:]+(?:\{[^}]*\})?")
OF_PROMETHEUS = "ALERTS{"
"""A series that Prometheus makes while an alert is pending or fires."""


PROFILE = profile_with(
    {
        Route.EXTERNAL: RouteProfile(
            policy=RatioPolicy(k=4),
            score_kind=ScoreKind.COSINE,
            certificate=CERTIFICATE,
            evidence=RouteEvidence(queries=100, metrics={}),
            safe_policy=RatioPolicy(k=6),
            verdict=RouteVerdict(
                decision="shadow", n=40, serving_k=6, tolerance=0.01, max_loss=0.05
            ),
        )
    }
)


class Service:
    """A process that serves and the monitors of its traffic, on one clock."""

    def __init__(self, folder: Path, start: float) -> None:
        self.registries = {name: CollectorRegistry() for name in ("g", "m exact", "m errs")}
        self.telemetry = Telemetry(self.registries["g"], all_metrics=True)
        self.http = HttpMetrics(self.registries["g"], all_metrics=True)
        SafeMultiProcessCollector(folder, self.registries["g"], all_metrics=True)
        rates = JudgingRates(dropped_rate=1.0, baseline_rate=1.0, baseline_k=5, full_pool_rate=1.0)
        given = {"rates": rates, "lookup": lambda name: Passage(name, "text")}
        self.live = Watching(LabelJudge(QRELS), profile=PROFILE, min_n=60, **given)
        self.errs = Watching(PaidOpinion(QRELS), **given)
        for name, each in (("m exact", self.live), ("m errs", self.errs)):
            MonitorCollector(
                each.monitor, self.registries[name], price_per_million=2.5, all_metrics=True
            )
        self.guard = self._guard(lambda _query, *, depth: HITS[:depth])
        self.enforcing = self._guard(lambda _query, *, depth: HITS[:depth], mode="enforce")
        self.failing = self._guard(self._fail)
        self.answered = 0
        self.set_clock(start - DAY_SECONDS - 5_000.0)
        self.serve(60)
        self.live.end_day()

    def _guard(self, search: Any, **settings: Any) -> ContextGuard:
        return ContextGuard(
            search,
            profile=PROFILE,
            depth=12,
            telemetry=self.telemetry,
            score_kind=ScoreKind.COSINE,
            **settings,
        )

    def _fail(self, _query: str, *, depth: int) -> list[Hit]:
        raise ConnectionError(f"no {depth} passages")

    def set_clock(self, now: float) -> None:
        self.live.now = self.errs.now = now

    def serve(self, n: int) -> None:
        """Answer ``n`` requests, and leave one of them to be judged with those that follow."""
        for _ in range(n):
            query = QUERIES[self.answered % len(QUERIES)]
            self.answered += 1
            guard = self.enforcing if self.answered % 2 else self.guard
            context = guard.retrieve(query, request_id=f"r{self.answered}")
            self.live.serve(context)
            self.errs.serve(context)
        for each in (self.live, self.errs):
            each.monitor.step(n)
            each.serve(context)

    def misbehave(self) -> None:
        """Meet every fault that a metric counts."""
        with suppress(CtxguardError):
            self.failing.retrieve("q")
        context = self.guard.retrieve("q")
        for sufficient in (True, False):
            lacking = replace(
                context,
                sufficient=sufficient,
                flags=(*Flag,),
                assessment=Assessment(
                    {}, np.zeros(0), asked=5, cached=1, cost=0.1, applied=sufficient, changed=True
                ),
                failures=(StageFailure("dense", "slow", FailureKind.TIMEOUT),),
                decision=replace(
                    context.decision,
                    ranking=replace(
                        context.decision.ranking, failures=(StageFailure("dense", "slow"),)
                    ),
                ),
            )
            self.telemetry.answered(lacking, 0.01, 1e-5)
        self.telemetry.received(Mode.SHADOW)
        for error in (OverloadedError("guard", "full"), FilterViolationError("filter", "no")):
            self.telemetry.raised(Mode.SHADOW, error)
        self.telemetry.circuit_changed("dense", is_open=True)
        self.telemetry.observer_failed("sampler")
        for target in get_args(ReloadTarget):
            self.telemetry.reload_attempted(target, "malformed")
            self.telemetry.reload_failing(target, is_failing=True)
        for outcome in Outcome:
            self.http.received(Endpoint.RERANK)
            self.http.ended(Endpoint.RERANK, outcome, 0.01)
        ledger = self.errs.monitor.judge.ledger
        ledger.add(calls=3, retries=1, input_tokens=1_000, output_tokens=10)
        ledger.add_invalid("p", InvalidReason.REFUSED, "no")
        self.live.sampler.lose(1, LostReason.QUEUE_FULL)

    def ring(self) -> None:
        """Raise every alarm."""
        alarms = self.live.monitor.alarms
        assert alarms is not None
        for kind in AlarmKind:
            for route, reference in zip(Route, (None, *ReferenceKind), strict=False):
                alarms.add(Alarm(kind, "", 0.0, route, reference=reference))

    def scrape(self, seconds: float) -> Iterator[str]:
        """What Prometheus would store of this moment, as lines of OpenMetrics."""
        for target, registry in self.registries.items():
            job = target[0]
            for family in text_string_to_metric_families(generate_latest(registry).decode()):
                for sample in family.samples:
                    labels = {**sample.labels, "job": job, "instance": target}
                    chosen = ",".join(f"{name}={json.dumps(one)}" for name, one in labels.items())
                    yield f"{sample.name}{{{chosen}}} {sample.value} {seconds:.3f}"


@dataclass(frozen=True)
class Hour:
    """A Prometheus that holds an hour of scrapes."""

    server: Server
    end_seconds: float

    def ask(self, expression: str) -> list[Any]:
        """Return the series of an expression at the end of the hour."""
        answer = self.server.get("query", query=expression, time=self.end_seconds)
        found: list[Any] = answer["result"]
        return found


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hour]:
    folder = tmp_path_factory.mktemp("hour")
    end = float(int(time.time()))
    begin = end - 3_600.0
    service = Service(folder, begin)
    with (folder / "hour.txt").open("w", encoding="utf-8") as lines:
        for minute in MINUTES:
            now = begin + 60 * minute
            service.set_clock(now)
            service.serve(10)
            service.misbehave()
            service.live.monitor.maintain()
            service.errs.monitor.maintain()
            service.ring()
            with patch.object(service.live.monitor, "store_fault", "StoreFullError"):
                lines.writelines(f"{line}\n" for line in service.scrape(now))
        lines.write("# EOF\n")
    load = ("promtool", "tsdb", "create-blocks-from", "openmetrics", "hour.txt", "data")
    subprocess.run(load, cwd=folder, check=True, capture_output=True)
    (folder / "prometheus.yml").write_text("", encoding="utf-8")
    with prometheus_in(folder) as server:
        yield Hour(server, end)


def without_recorded(expression: str) -> str:
    """Write the expression of a recorded ratio in place of its name."""
    for name, recorded in RECORDED.items():
        expression = re.sub(rf"{name}(\{{[^}}]*\}})?", lambda _, to=recorded: f"({to})", expression)
    return expression


def filled_in(expression: str) -> str:
    return re.sub(r"\$(\w+)", lambda found: VARIABLES[found[1]], without_recorded(expression))


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: f"{panel['id']} {panel['title']}")
def test_a_panel_shows_data(hour: Hour, panel: dict[str, Any]) -> None:
    empty = {
        target["legendFormat"]
        for target in panel["targets"]
        if OF_PROMETHEUS not in target["expr"] and not hour.ask(filled_in(target["expr"]))
    }
    assert empty <= ABSENT.get(panel["title"], set())


ABSENT = {
    "From shadow to enforce": {"{{route}}: days needed"},
    "Requests and grades still needed": {"{{metric}}"},
}
"""Series that this hour has no reason for, by panel: nobody labels, and its requests suffice."""


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_reads_data(hour: Hour, rule: dict[str, Any]) -> None:
    for selector in set(NAME.findall(without_recorded(rule["expr"]))):
        assert hour.ask(f"last_over_time({selector}[1h])"), selector
    if "record" in rule:
        assert hour.ask(rule["expr"])
