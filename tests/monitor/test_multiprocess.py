"""One scrape over many worker processes, some of them dead, some of their files broken."""

import contextlib
import json
import logging
import math
import os
import random
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.multiprocess import SafeMultiProcessCollector, registry_for_scrape
from ctxguard.monitor.multiprocess import files as worker_files
from ctxguard.monitor.multiprocess.entries import exact_parts, exact_sum

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

# The guard and its metrics are made before the fork, as a preloading server does.
SERVER = """
import os, signal, sys, time
from ctxguard.guard import ContextGuard
from ctxguard.types import Hit, Mode, ScoreKind

guard = ContextGuard(score_kind=ScoreKind.RATIO, k=2)
hits = [Hit("a", 3.0, "a"), Hit("b", 2.0, "b"), Hit("c", 1.0, "c")]
for _ in range(10):
    guard.filter("q", hits)
workers = []
for worker in range(4):
    ready, say = os.pipe()
    child = os.fork()
    if child == 0:
        for _ in range(1000):
            guard.filter("q", hits)
        os.write(say, b"!")
        if worker == 0:
            time.sleep(60)
        os._exit(0)
    workers.append((child, ready))
for worker, (child, ready) in enumerate(workers):
    os.read(ready, 1)
    if worker == 0:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""

METRICS = """
import sys
from prometheus_client import Counter, Gauge, Histogram, Summary
n = int(sys.argv[1])
c = Counter("jobs", "Jobs.", ["kind"])
c.labels("a").inc(n); c.labels("b").inc(0.1)
h = Histogram("took_seconds", "Time.", ["kind"], buckets=(1, 2, 5))
for value in (0.5, 1.5, n, 0.1): h.labels("a").observe(value)
Summary("size", "Size.").observe(n)
for mode in ("all", "liveall", "min", "max", "sum", "mostrecent", "livesum"):
    Gauge("level_" + mode, "Level.", multiprocess_mode=mode).set(n)
"""


def run(folder: Path, script: str, *arguments: str) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, check=True, timeout=120
    )


def scrape(collector: object) -> Samples:
    registry = CollectorRegistry()
    registry.register(collector)  # type: ignore[arg-type]
    text = generate_latest(registry).decode("utf-8")
    found = [s for family in text_string_to_metric_families(text) for s in family.samples]
    samples = {(s.name, frozenset(s.labels.items())): s.value for s in found}
    assert len(samples) == len(found), "a series was exported twice"
    return samples


def one(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


def counter_file(folder: Path, pid: int, values: dict[str, float], metric: str = "jobs") -> Path:
    """A counter file as a worker would leave it, one entry per label value."""
    body = b""
    for label, value in values.items():
        key = json.dumps([metric, f"{metric}_total", {"kind": label}, "Jobs."]).encode()
        padded = key + b" " * (8 - (len(key) + 4) % 8)
        body += struct.pack(f"i{len(padded)}sdd", len(key), padded, value, 0.0)
    file = folder / f"counter_{pid}.db"
    file.write_bytes((struct.pack("ii", len(body) + 8, 0) + body).ljust(1 << 12, b"\0"))
    return file


@pytest.fixture
def dead() -> Callable[[], int]:
    """Ids of processes that have ended."""

    def new() -> int:
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            process.wait()
        return process.pid

    return new


def test_four_forked_workers_add_up_though_one_was_killed_and_a_file_is_empty(
    tmp_path: Path,
) -> None:
    run(tmp_path, SERVER)
    (tmp_path / "counter_999999.db").touch()
    samples = scrape(SafeMultiProcessCollector(tmp_path))
    answered = {"mode": "enforce", "route": "external", "outcome": "ok"}
    assert one(samples, "ctxguard_requests_total", **answered) == 4010
    assert sum(v for (name, _), v in samples.items() if name == "ctxguard_requests_total") == 4010
    assert one(samples, "ctxguard_kept_candidates_total") == 8020
    assert one(samples, "ctxguard_dropped_candidates_total", reason="beyond_k") == 4010
    assert one(samples, "ctxguard_flags_total", flag="uncalibrated") == 4010
    assert one(samples, "ctxguard_guard_seconds_count") == 4010
    assert one(samples, "ctxguard_guard_seconds_bucket", le="+Inf") == 4010
    assert one(samples, "ctxguard_context_passages_sum") == 8020
    assert one(samples, "ctxguard_multiprocess_bad_files") == 1


def test_sound_files_give_what_the_client_library_gives(tmp_path: Path) -> None:
    for n in ("1", "3", "10"):
        run(tmp_path, METRICS, n)
    ours = scrape(SafeMultiProcessCollector(tmp_path))
    theirs = scrape(MultiProcessCollector(None, str(tmp_path)))
    assert ours.pop(("ctxguard_multiprocess_bad_files", frozenset())) == 0
    assert ours.keys() == theirs.keys()
    assert all(math.isclose(ours[key], theirs[key], rel_tol=1e-15) for key in ours)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1",
        struct.pack("ii", 5000, 0),
        struct.pack("ii", -8, 0),
        struct.pack("iii", 64, 0, -40).ljust(64, b"\0"),
        struct.pack("iii", 64, 0, 4000).ljust(64, b"\0"),
        struct.pack("iii4sdd", 40, 0, 4, b"abcd", 1.0, 0.0).ljust(64, b"\0"),
        struct.pack("iii12sdd", 40, 0, 8, b"[1,2,3] ", 1.0, 0.0).ljust(64, b"\0"),
        random.Random(1).randbytes(3000),
    ],
)
def test_a_broken_file_is_left_out_whole_counted_and_logged_once(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    counter_file(tmp_path, 1, {"a": 5})
    (tmp_path / "counter_2.db").write_bytes(content)
    collector = SafeMultiProcessCollector(tmp_path)
    for _ in range(2):
        samples = scrape(collector)
        assert one(samples, "jobs_total", kind="a") == 5
        assert one(samples, "ctxguard_multiprocess_bad_files") == 1
    assert len([r for r in caplog.records if "counter_2.db" in r.getMessage()]) == 1


@given(st.integers(0, 400))
def test_a_file_cut_short_anywhere_never_stops_the_scrape(
    tmp_path_factory: pytest.TempPathFactory, length: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    counter_file(folder, 1, {"a": 5})
    cut = counter_file(folder, 2, {"a": 7, "b": 1, "c": 2})
    cut.write_bytes(cut.read_bytes()[:length])
    samples = scrape(SafeMultiProcessCollector(folder))
    bad = one(samples, "ctxguard_multiprocess_bad_files")
    assert (one(samples, "jobs_total", kind="a"), bad) in {(5, 1), (12, 0)}


def test_a_file_of_anything_else_is_counted_as_bad(tmp_path: Path) -> None:
    (tmp_path / "users.db").write_bytes(b"SQLite format 3")
    samples = scrape(SafeMultiProcessCollector(tmp_path))
    assert samples == {("ctxguard_multiprocess_bad_files", frozenset()): 1}


def test_a_lone_surrogate_in_a_label_is_spelled_out(tmp_path: Path) -> None:
    counter_file(tmp_path, 1, {"\udc80": 5, "é": 1})
    samples = scrape(SafeMultiProcessCollector(tmp_path))
    assert one(samples, "jobs_total", kind="\\udc80") == 5
    assert one(samples, "jobs_total", kind="é") == 1


def test_a_metric_of_two_types_is_served_as_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counter_file(tmp_path, 1, {"a": 5})
    counter_file(tmp_path, 2, {"a": 7}).rename(tmp_path / "summary_2.db")
    assert one(scrape(SafeMultiProcessCollector(tmp_path)), "jobs_total", kind="a") == 5
    assert "counter in some workers and a summary in others" in caplog.text


def test_a_folder_that_vanished_gives_no_series_at_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    collector = SafeMultiProcessCollector(folder)
    folder.rmdir()
    assert scrape(collector) == {}
    collector.tidy()
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize("settle_seconds", [-1.0, float("nan")])
def test_settings_that_cannot_work_are_refused(tmp_path: Path, settle_seconds: float) -> None:
    with pytest.raises(ConfigurationError, match="is not a folder"):
        SafeMultiProcessCollector(tmp_path / "none")
    with pytest.raises(ConfigurationError, match="must not be negative"):
        SafeMultiProcessCollector(tmp_path, settle_seconds=settle_seconds)


def test_tidying_folds_dead_workers_and_changes_no_total(tmp_path: Path) -> None:
    for n in ("1", "3", "10"):
        run(tmp_path, METRICS, n)
    counter_file(tmp_path, os.getpid(), {"a": 0.3})
    collector = SafeMultiProcessCollector(tmp_path, settle_seconds=0)
    before = scrape(collector)
    collector.tidy()
    after = scrape(collector)
    assert {key for key in before if key not in after} == {
        key for key in before if key[0] in ("level_all", "level_liveall", "level_livesum")
    }
    assert all(after[key] == before[key] for key in after)
    assert {file.name.rpartition("_")[0] for file in tmp_path.glob("*.db")} == {
        *("counter", "gauge_min", "gauge_max", "gauge_sum", "gauge_mostrecent")
    }
    assert [file.name for file in tmp_path.glob("counter_*")] == [f"counter_{os.getpid()}.db"]


@given(st.lists(st.lists(st.floats(0, 1e9), min_size=1, max_size=6), min_size=1, max_size=6))
def test_folding_early_never_changes_a_sum_by_a_single_bit(rounds: list[list[float]]) -> None:
    parts: list[float] = []
    for values in rounds:
        parts = exact_parts([*parts, *values])
    assert exact_sum(parts) == exact_sum(value for values in rounds for value in values)


def test_totals_grow_over_many_generations_of_workers(
    tmp_path: Path, dead: Callable[[], int]
) -> None:
    collector = SafeMultiProcessCollector(tmp_path, settle_seconds=0)
    for generation in range(1, 6):
        counter_file(tmp_path, dead(), {"a": 0.1, str(generation): 1})
        collector.tidy()
        samples = scrape(collector)
        assert one(samples, "jobs_total", kind="a") == math.fsum([0.1] * generation)
    assert list(tmp_path.glob("*.db")) == []


def test_a_dead_worker_is_left_until_it_has_settled(
    tmp_path: Path, dead: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(worker_files.time, "monotonic", lambda: now[0])
    file = counter_file(tmp_path, dead(), {"a": 5})
    collector = SafeMultiProcessCollector(tmp_path, settle_seconds=600)
    collector.tidy()
    now[0] = 599.0
    collector.tidy()
    assert file.exists()
    now[0] = 600.0
    collector.tidy()
    assert not file.exists()


def test_nothing_is_tidied_where_the_workers_cannot_be_seen(
    tmp_path: Path,
    dead: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    monkeypatch.setattr(worker_files.time, "monotonic", lambda: now[0])
    idle, busy = dead(), dead()
    counter_file(tmp_path, idle, {"a": 5})
    collector = SafeMultiProcessCollector(tmp_path, settle_seconds=600)
    for minute in range(100):
        now[0] = 60.0 * minute
        if minute % 5 == 0:
            counter_file(tmp_path, busy, {"a": minute})
        collector.tidy()
    assert len(list(tmp_path.glob("counter_*.db"))) == 2
    assert "tidy where the workers' processes can be seen" in caplog.text


def test_a_new_process_with_a_dead_ones_id_loses_nothing(
    tmp_path: Path, dead: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opened the file between the look at its id and the renaming."""
    pid = dead()
    file = counter_file(tmp_path, pid, {"a": 5})
    collector = SafeMultiProcessCollector(tmp_path, settle_seconds=0)
    answers = iter([True, False, False])
    with monkeypatch.context() as patch, file.open("r+b") as opened:
        patch.setattr(worker_files, "_is_gone", lambda name: next(answers))
        collector.tidy()
        (moved,) = tmp_path.glob("counter_*.db")
        assert not file.exists()
        whole = counter_file(tmp_path, pid, {"a": 9}).read_bytes()
        file.unlink()
        opened.write(whole)
    assert one(scrape(collector), "jobs_total", kind="a") == 9
    collector.tidy()
    assert not moved.exists()
    assert one(scrape(collector), "jobs_total", kind="a") == 9


@pytest.mark.parametrize("step", ["unlink", "rename", "replace", "fsync"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_kill_while_tidying_neither_loses_nor_repeats_a_count(
    tmp_path: Path, dead: Callable[[], int], step: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    for _ in range(3):
        counter_file(tmp_path, dead(), {"a": 5})
    collector = SafeMultiProcessCollector(tmp_path, settle_seconds=0)
    calls = [0]
    owner = os if step == "fsync" else Path
    real = getattr(owner, step)

    def killed_at_nth(*arguments: object, **named: object) -> object:
        calls[0] += 1
        if calls[0] == nth:
            raise Killed
        return real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, killed_at_nth)
        with contextlib.suppress(Killed):
            collector.tidy()
    again = SafeMultiProcessCollector(tmp_path, settle_seconds=0)
    assert one(scrape(again), "jobs_total", kind="a") == 15
    again.tidy()
    assert one(scrape(again), "jobs_total", kind="a") == 15
    assert list(tmp_path.glob("*.db")) == []


def test_a_dead_workers_broken_file_is_set_aside_so_that_a_new_one_can_start(
    tmp_path: Path, dead: Callable[[], int]
) -> None:
    file = tmp_path / f"counter_{dead()}.db"
    file.write_bytes(struct.pack("ii", 5000, 0))
    collector = SafeMultiProcessCollector(tmp_path, settle_seconds=0)
    collector.tidy()
    assert list(tmp_path.glob("*.db")) == []
    (aside,) = tmp_path.glob("*.bad")
    assert one(scrape(collector), "ctxguard_multiprocess_bad_files") == 1
    aside.unlink()
    assert one(scrape(collector), "ctxguard_multiprocess_bad_files") == 0


@pytest.mark.parametrize("content", ["{", "{}", '{"format": 9}', '{"format": 1, "entries": [1]}'])
def test_a_damaged_archive_is_never_written_over(
    tmp_path: Path, dead: Callable[[], int], content: str
) -> None:
    archive = tmp_path / "ctxguard-retired.json"
    archive.write_text(content)
    counter_file(tmp_path, dead(), {"a": 5})
    collector = SafeMultiProcessCollector(tmp_path, settle_seconds=0)
    collector.tidy()
    assert archive.read_text() == content
    samples = scrape(collector)
    assert one(samples, "jobs_total", kind="a") == 5
    assert one(samples, "ctxguard_multiprocess_bad_files") == 1


def test_files_of_workers_not_known_by_process_id_are_read_and_left(tmp_path: Path) -> None:
    counter_file(tmp_path, 1, {"a": 5}).rename(tmp_path / "counter_worker-3.db")
    collector = SafeMultiProcessCollector(tmp_path, settle_seconds=0)
    collector.tidy()
    assert (tmp_path / "counter_worker-3.db").exists()
    assert one(scrape(collector), "jobs_total", kind="a") == 5


def test_a_server_of_one_process_scrapes_its_own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    assert registry_for_scrape() is REGISTRY


def test_a_server_of_many_processes_scrapes_their_totals_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter_file(tmp_path, 1, {"a": 5})
    counter_file(tmp_path, 2, {"a": 6})
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    server, thread = start_http_server(0, "127.0.0.1", registry=registry_for_scrape())
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert 'jobs_total{kind="a"} 11.0' in answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_variable_that_names_no_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="must exist beforehand"):
        registry_for_scrape()


def test_a_collector_that_the_caller_tidies_is_served(tmp_path: Path) -> None:
    counter_file(tmp_path, 1, {"a": 5})
    collector = SafeMultiProcessCollector(tmp_path)
    with_workers = registry_for_scrape(collector)
    assert b'jobs_total{kind="a"} 5.0' in generate_latest(with_workers)


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_only_be_read_is_scraped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counter_file(tmp_path, 1, {"a": 5})
    tmp_path.chmod(0o555)
    collector = SafeMultiProcessCollector(tmp_path, settle_seconds=0)
    with caplog.at_level(logging.ERROR):
        collector.tidy()
    assert one(scrape(collector), "jobs_total", kind="a") == 5
    tmp_path.chmod(0o755)
