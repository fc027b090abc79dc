"""`ctxguard monitor` as a process: what it serves, and how it ends."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from chat_endpoint import ChatEndpoint
from live_traffic import BROKEN, EVERYTHING, ONLY_SERVED, Traffic, profile_of, serve, states

from ctxguard.monitor.store import State
from tests.timing import PATIENCE_SECONDS, until

START = "from ctxguard.cli import main; main()"
"""For what takes well under a second on a machine that has nothing else to do."""


@contextmanager
def monitor(traffic: Traffic, *options: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*(sys.executable, "-c", START, "monitor", "--store", traffic.url), *map(str, options)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def url_of(process: subprocess.Popen[str]) -> str:
    line = process.stderr.readline()
    found = re.match(r"(http://127\.0\.0\.1:\d+/metrics), judged by ", line)
    assert found is not None, line
    return found[1]


def wait_for(url: str, line: str) -> None:
    """Wait until a line of what is served matches."""

    def is_served() -> bool:
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:  # noqa: S310
            return re.search(line, answer.read().decode(), re.MULTILINE) is not None

    until(is_served, line)


def test_serves_figures_until_told_otherwise(tmp_path: Path) -> None:
    profile = profile_of(BROKEN)
    profile.save(tmp_path / "p.json")
    traffic = serve(
        tmp_path, 40, profile=profile, relevant_ranks=[4], rates=EVERYTHING, days_ago=2.0
    )
    labels = traffic.write_labels(tmp_path / "labels.jsonl")
    system = tmp_path / "system.toml"
    system.write_text("[monitor]\nport = 0\nrefresh-seconds = 0.1", encoding="utf-8")
    options = ("--judge", "labels", "--labels", labels, "--profile", tmp_path / "p.json")
    with monitor(traffic, *options, "--system", system) as process:
        url = url_of(process)
        wait_for(url, r'^ctxguard_alarm_active\{kind="recall_loss",.*\} 1\.0$')
        wait_for(url, r'^ctxguard_judged_samples_total\{.*outcome="judged"\} 40\.0$')
        wait_for(url, r'^ctxguard_estimate\{.*metric="pooled_recall",window="all_retained"\} 0\.0$')
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0
    assert states(traffic) == {State.JUDGED: 40}


def test_hanging_judge_delays_no_end(tmp_path: Path) -> None:
    pytest.importorskip("truststore")
    traffic = serve(tmp_path, 3, rates=ONLY_SERVED)
    with closing(ChatEndpoint()) as endpoint:
        endpoint.hanging_on = "tool"
        system = tmp_path / "system.toml"
        system.write_text(f'[monitor]\nport = 0\nbase-url = "{endpoint.url}"', encoding="utf-8")
        options = ("--judge", "llm", "--model", "m", "--system", system)
        with monitor(traffic, *options) as process:
            url_of(process)
            until(lambda: endpoint.requests, "a request to the judge")
            process.send_signal(signal.SIGINT)
            # Less than the judge's own patience, which with its retries is two minutes.
            process.communicate(timeout=60.0)
            assert process.returncode == 0
    assert sum(states(traffic).values()) == 3
