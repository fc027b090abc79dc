"""A real Prometheus scrapes a real ``ctxguard monitor``, and both say the same of live traffic."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from ctxguard.core.context import Context
from ctxguard.core.decision import decide
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Hit, Mode, Ranking, Route, ScoreKind
from ctxguard.monitor import export as prometheus
from ctxguard.monitor.sampling.sampler import Sampler
from ctxguard.monitor.sampling.writer import SampleWriter
from ctxguard.monitor.store import SampleStore
from tests.timing import PATIENCE_SECONDS, until

COMMAND = (sys.executable, "-c", "from ctxguard.cli import main; main()", "monitor")
POOL = [f"p{rank}" for rank in range(12)]
RATE = 0.5
CONFIGURATION = """
global:
  scrape_interval: 1s
  evaluation_interval: 1s
rule_files: [rules.yml]
scrape_configs:
  - job_name: ctxguard
    static_configs:
      - targets: ["{target}"]
"""

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not installed: apt-get install --no-install-recommends prometheus",
)


@dataclass(frozen=True)
class Server:
    """The HTTP API of a Prometheus server."""

    url: str

    def get(self, path: str, **arguments: object) -> Any:
        address = f"{self.url}/api/v1/{path}?{urlencode(arguments)}"
        with urlopen(address, timeout=PATIENCE_SECONDS) as reply:  # noqa: S310  it is ours
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return answer["data"]

    def value(self, expression: str, at: float | None = None) -> float | None:
        """Of an expression that gives one series; None where it gives none."""
        when = {} if at is None else {"time": at}
        result = self.get("query", query=expression, **when)["result"]
        assert len(result) <= 1, result
        return float(result[0]["value"][1]) if result else None


@dataclass(frozen=True)
class Live:
    """Everything that runs, and what the monitor said at its end."""

    server: Server
    seen_seconds: float
    sampled: int


@contextmanager
def running(arguments: list[str], log: Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended, if need be by force."""
    with log.open("wb") as written:
        process = subprocess.Popen(arguments, stdout=written, stderr=written, cwd=folder)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert process.returncode == 0, log.read_text(encoding="utf-8")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=PATIENCE_SECONDS) as reply:  # noqa: S310  it is ours
            return bool(reply.status == 200)
    except (URLError, OSError):
        return False


def write_labels(file: Path) -> None:
    """Forty queries; the relevant passages of each lie deeper in the pool than those before."""
    with file.open("w", encoding="utf-8") as lines:
        for number in range(40):
            relevant = {POOL[number % 3]: 1, POOL[(number * 5) % 12]: 1}
            row = {"query_id": f"q{number}", "text": f"question {number}", "relevant": relevant}
            lines.write(json.dumps(row) + "\n")


def answer(number: int) -> Context:
    """To one of forty questions, with one to four passages of twelve."""
    hits = [Hit(name, 100.0 - rank, text=name) for rank, name in enumerate(POOL)]
    decision = decide(Ranking.from_hits(hits, ScoreKind.RATIO), RatioPolicy(k=1 + number % 4))
    kept = decision.order[: 1 + number % 4]
    return Context(
        request_id=f"request-{number}",
        query=f"question {number % 40}",
        route=Route.EXTERNAL,
        mode=Mode.ENFORCE,
        passages=tuple([decision.ranking.passages[position] for position in kept]),
        decision=decision,
    )


def serve_traffic(url: str) -> int:
    """Four hundred requests, of which about half are sampled; returns how many were."""
    writer = SampleWriter(Sampler(RATE, seed="test"), SampleStore.open(url))
    sampled = 0
    for number in range(400):
        context = answer(number)
        probability = writer.sampler.draw(context.request_id)
        if probability:
            sampled += writer.sampler.offer(context, probability, time.time())
    assert writer.flush()
    writer.stop()
    writer.store.close()
    return sampled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    """A monitor and a server that scrapes it, after traffic that came while both were watching."""
    url = f"sqlite:///{folder / 'samples.db'}"
    # The monitor makes no store.
    SampleStore.open(url).close()
    write_labels(folder / "labels.jsonl")
    (folder / "rules.yml").write_text(prometheus.rules(), encoding="utf-8")
    monitor_log = folder / "monitor.log"
    watching = [*COMMAND, "--store", url, "--judge", "labels", "--labels", "labels.jsonl"]
    (folder / "system.toml").write_text(
        "[monitor]\nrefresh-seconds = 0.5\nport = 0", encoding="utf-8"
    )
    watching += ["--system", "system.toml"]
    with running(watching, monitor_log, folder):
        until(lambda: "/metrics" in monitor_log.read_text(), "address of the monitor")
        target = re.search(r"http://([^/\s]+)/metrics", monitor_log.read_text())
        assert target is not None
        configuration = CONFIGURATION.format(target=target[1])
        (folder / "prometheus.yml").write_text(configuration, encoding="utf-8")
        address = f"127.0.0.1:{free_port()}"
        scraping = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        scraping += [f"--web.listen-address={address}"]
        with running(scraping, folder / "prometheus.log", folder):
            until(lambda: answers(f"http://{address}/-/ready"), "server")
            server = Server(f"http://{address}")
            judged = 'sum (ctxguard_judged_samples_total{outcome="judged"})'
            until(lambda: server.value(judged) == 0.0, "scrape before the traffic")
            sampled = serve_traffic(url)
            until(lambda: server.value(judged) == sampled, "scrape after the traffic")
            yield Live(server, time.time(), sampled)


def test_a_second_monitor_says_the_same_of_the_store(live: Live, folder: Path) -> None:
    url = f"sqlite:///{folder / 'samples.db'}"
    arguments = ["--store", url, "--judge", "labels", "--labels", "labels.jsonl"]
    done = subprocess.run(
        [*COMMAND, *arguments, "--once", "--json"], cwd=folder, capture_output=True, check=True
    )
    for metric, said in json.loads(done.stdout)["estimates"]["all_retained"].items():
        chosen = f'{{metric="{metric}",window="all_retained"}}'
        exported = live.server.value(f"ctxguard_estimate{chosen}")
        expected = said["value"] if said["value"] is None else pytest.approx(said["value"])
        assert exported == expected, metric
    assert json.loads(done.stdout)["sampled"] == live.sampled


def test_every_rule_evaluates(live: Live) -> None:
    def rules() -> list[dict[str, Any]]:
        groups = live.server.get("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    until(lambda: all(rule["health"] != "unknown" for rule in rules()), "evaluation of all rules")
    found = rules()
    groups = yaml.safe_load(prometheus.rules())["groups"]
    assert len(found) == sum(len(group["rules"]) for group in groups)
    assert {rule["name"]: rule["lastError"] for rule in found if rule["health"] != "ok"} == {}


def test_alerts_have_a_state_and_say_what_is_wrong(live: Live) -> None:
    def alerts() -> dict[str, dict[str, Any]]:
        found = live.server.get("alerts")["alerts"]
        return {alert["labels"]["alertname"]: alert for alert in found}

    # Nothing serves requests here, which is a matter of ten minutes.
    until(lambda: "CtxguardGuardAbsent" in alerts(), "alert")
    assert alerts()["CtxguardGuardAbsent"]["state"] == "pending"
    assert "No process" in alerts()["CtxguardGuardAbsent"]["annotations"]["summary"]
    firing = {name for name, alert in alerts().items() if alert["state"] == "firing"}
    assert firing == set()
