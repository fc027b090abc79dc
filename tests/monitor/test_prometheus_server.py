"""A real Prometheus scrapes a real ``ctxguard monitor``, and both say the same of live traffic."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import pytest
from live_traffic import serve
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_server import Server, prometheus_in, running

from ctxguard import ContextGuard, Hit
from ctxguard.guard.telemetry import Telemetry
from ctxguard.monitor import export as prometheus
from ctxguard.monitor.export.prometheus import DEFAULT_ESTIMATES
from ctxguard.monitor.store import SampleStore
from tests.timing import until

COMMAND = (sys.executable, "-c", "from ctxguard.cli import main; main()", "monitor")
REQUESTS = 200
CONFIGURATION = """
global:
  scrape_interval: 1s
  evaluation_interval: 1s
rule_files: [rules.yml]
scrape_configs:
  - job_name: ctxguard
    static_configs:
      - targets: {targets}
"""

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not installed: apt-get install --no-install-recommends prometheus",
)


@dataclass(frozen=True)
class Live:
    """Everything that runs, in a folder."""

    server: Server
    folder: Path


@contextmanager
def watched(folder: Path, serving: str) -> Iterator[Live]:
    """A monitor and a server that scrapes it, after traffic that came while both were watching.

    Args:
        folder: Holds everything.
        serving: The host and port of a serving process, which the server scrapes too.
    """
    url = f"sqlite:///{folder / 'samples.db'}"
    # The monitor makes no store.
    SampleStore.open(url).close()
    (elsewhere := folder / "elsewhere").mkdir()
    serve(elsewhere, REQUESTS).write_labels(folder / "labels.jsonl")
    (folder / "rules.yml").write_text(prometheus.rules(), encoding="utf-8")
    monitor_log = folder / "monitor.log"
    watching = [*COMMAND, "--store", url, "--judge", "labels", "--labels", "labels.jsonl"]
    (folder / "system.toml").write_text(
        "[monitor]\nrefresh-seconds = 0.5\nport = 0", encoding="utf-8"
    )
    watching += ["--system", "system.toml"]
    with running(watching, monitor_log):
        until(lambda: "/metrics" in monitor_log.read_text(), "address of the monitor")
        target = re.search(r"http://([^/\s]+)/metrics", monitor_log.read_text())
        assert target is not None
        targets = json.dumps([target[1], serving])
        configuration = CONFIGURATION.format(targets=targets)
        (folder / "prometheus.yml").write_text(configuration, encoding="utf-8")
        with prometheus_in(folder) as server:
            judged = 'sum (ctxguard_judged_samples_total{outcome="judged"})'
            until(lambda: server.value(judged) == 0.0, "scrape before the traffic")
            serve(folder, REQUESTS)
            until(lambda: server.value(judged) == REQUESTS, "scrape after the traffic")
            yield Live(server, folder)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """With the default metrics and rules, and a guard that serves beside the monitor."""
    registry = CollectorRegistry()
    guard = ContextGuard(
        lambda query, *, depth: [Hit(f"p{rank}", 1.0, "text") for rank in range(12)],
        score_kind="ratio",
        telemetry=Telemetry(registry),
    )
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    stopped = Event()

    def ask() -> None:
        while not stopped.wait(0.05):
            guard.retrieve("question 1")

    requests = Thread(target=ask)
    requests.start()
    try:
        address = f"127.0.0.1:{server.server_port}"
        with watched(tmp_path_factory.mktemp("watched"), address) as found:
            yield found
    finally:
        stopped.set()
        requests.join()
        server.shutdown()
        server.server_close()
        thread.join()


def test_second_monitor_agrees(live: Live) -> None:
    url = f"sqlite:///{live.folder / 'samples.db'}"
    arguments = ["--store", url, "--judge", "labels", "--labels", "labels.jsonl"]
    done = subprocess.run(
        [*COMMAND, *arguments, "--once", "--json"], cwd=live.folder, capture_output=True, check=True
    )
    said = json.loads(done.stdout)
    exported = live.server.get("query", query="ctxguard_estimate")["result"]
    assert {one["metric"]["metric"] for one in exported} == {*DEFAULT_ESTIMATES}
    for one in exported:
        own = said["estimates"][one["metric"]["window"]][one["metric"]["metric"]]
        assert float(one["value"][1]) == pytest.approx(own["value"])
    assert said["sampled"] == REQUESTS


def test_no_alert_without_cause(live: Live) -> None:
    server = live.server
    until(lambda: server.value("count (ALERTS)") is None, "end of alerts about the beginning")
    rules = [rule for group in server.get("rules")["groups"] for rule in group["rules"]]
    assert sum(rule["type"] == "alerting" for rule in rules) == 12
    assert {rule["name"]: rule["lastError"] for rule in rules if rule["health"] == "err"} == {}


def test_panels_have_data(live: Live) -> None:
    """Each of the twelve, but those about what has not happened here."""
    page = json.loads(prometheus.dashboard_json())
    panels = [panel for panel in page["panels"] if panel["type"] != "row"]
    assert len(panels) == 12

    def empty() -> set[str]:
        return {
            panel["title"]
            for panel in panels
            if not any(
                live.server.get("query", query=asked(target["expr"]))["result"]
                for target in panel["targets"]
            )
        }

    nothing = {"Alerts that fire", "Stages left out", "Requests and grades still needed"}
    until(lambda: empty() <= nothing, "data of every panel")


def asked(expression: str) -> str:
    """A panel's query, as Grafana fills it in."""
    for variable in ("$monitor", "$guard"):
        expression = expression.replace(variable, "ctxguard")
    return expression.replace("$__rate_interval", "1m").replace("$__range", "5m")
