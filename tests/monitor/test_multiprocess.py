"""One scrape over many worker processes, some of them dead, some of their files broken."""

import json
import math
import os
import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from scraping import one, scrape

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.export.multiprocess import SafeMultiProcessCollector, registry_for_scrape

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


# The guard and its metrics are made before the fork, as a preloading server does.
SERVER = """
import os, signal, sys, time
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.core.types import Hit, Mode, ScoreKind

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


def test_four_workers_add_up_despite_death(tmp_path: Path) -> None:
    """Four forked workers add up though one was killed and a file is empty."""
    run(tmp_path, SERVER)
    (tmp_path / "counter_999999.db").touch()
    samples = scrape(SafeMultiProcessCollector(tmp_path, all_metrics=True))
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


def test_sound_files_equal_the_client(tmp_path: Path) -> None:
    for n in ("1", "3", "10"):
        run(tmp_path, METRICS, n)
    ours = scrape(SafeMultiProcessCollector(tmp_path, all_metrics=True))
    theirs = scrape(MultiProcessCollector(None, str(tmp_path)))
    assert ours.pop(("ctxguard_multiprocess_bad_files", frozenset())) == 0
    assert ours.keys() == theirs.keys()
    # The order of the files may round a sum otherwise.
    assert all(math.isclose(ours[key], theirs[key], rel_tol=1e-15) for key in ours)


BROKEN: dict[str, bytes | Callable[[Path], object]] = {
    "empty": b"",
    "a byte": b"\1",
    "longer than it is": struct.pack("ii", 5000, 0),
    "far longer": struct.pack("i", 2**30).ljust(512, b"\0"),
    "a key of negative length": struct.pack("iii", 64, 0, -40).ljust(64, b"\0"),
    "a key beyond the end": struct.pack("iii", 64, 0, 4000).ljust(64, b"\0"),
    "no JSON": struct.pack("iii4sdd", 40, 0, 4, b"abcd", 1.0, 0.0).ljust(64, b"\0"),
    "other JSON": struct.pack("iii12sdd", 40, 0, 8, b"[1,2,3] ", 1.0, 0.0).ljust(64, b"\0"),
    "noise": random.Random(1).randbytes(3000),
    "a database": b"SQLite format 3",
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a dangling link": lambda file: file.symlink_to(file.with_name("nothing")),
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "sparse": lambda file: sparse(file, 2**32),
}


def sparse(file: Path, size: int) -> None:
    with file.open("wb") as opened:
        opened.write(struct.pack("ii", 2**31 - 1, 0))
        opened.truncate(size)


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_broken_file_is_left_out_once(
    tmp_path: Path, broken: bytes | Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    """And takes no memory, whatever it says of its length."""
    counter_file(tmp_path, 1, {"a": 5})
    other = tmp_path / "counter_2.db"
    other.write_bytes(broken) if isinstance(broken, bytes) else broken(other)
    collector = SafeMultiProcessCollector(tmp_path, all_metrics=True)
    tracemalloc.start()
    try:
        for _ in range(2):
            samples = scrape(collector)
            assert one(samples, "jobs_total", kind="a") == 5
            assert one(samples, "ctxguard_multiprocess_bad_files") == 1
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert len([r for r in caplog.records if "counter_2.db" in r.getMessage()]) == 1


def test_lone_surrogate_is_spelled_out(tmp_path: Path) -> None:
    counter_file(tmp_path, 1, {"\udc80": 5, "é": 1})
    samples = scrape(SafeMultiProcessCollector(tmp_path, all_metrics=True))
    assert one(samples, "jobs_total", kind="\\udc80") == 5
    assert one(samples, "jobs_total", kind="é") == 1


def test_vanishing_gauge_is_not_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A live gauge that is removed while it is read is not a bad file."""
    run(tmp_path, METRICS, "1")
    collector = SafeMultiProcessCollector(tmp_path, all_metrics=True)
    merge = MultiProcessCollector.merge

    def merge_after_removal(files: Iterable[str]) -> object:
        for file in tmp_path.glob("gauge_live*.db"):
            file.unlink()
        return merge(files)

    monkeypatch.setattr(MultiProcessCollector, "merge", staticmethod(merge_after_removal))
    samples = scrape(collector)
    assert one(samples, "jobs_total", kind="a") == 1
    assert one(samples, "ctxguard_multiprocess_bad_files") == 0


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=8), st.data())
def test_sum_never_falls(
    tmp_path_factory: pytest.TempPathFactory, values: list[float], data: st.DataObject
) -> None:
    """Prometheus would take a fall by one bit for a restart."""
    folder = tmp_path_factory.mktemp("sums")
    collector = SafeMultiProcessCollector(folder, all_metrics=True)
    before = 0.0
    for value in values:
        pid = data.draw(st.integers(1, 4))
        file = folder / f"counter_{pid}.db"
        counted = _value_of(file) if file.exists() else 0.0
        counter_file(folder, pid, {"a": counted + value})
        after = one(scrape(collector), "jobs_total", kind="a")
        assert after is not None
        assert after >= before
        before = after


def _value_of(file: Path) -> float:
    (found,) = MmapedDict.read_all_values_from_file(str(file))
    return float(found[1])


def test_vanished_folder_gives_no_series(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    collector = SafeMultiProcessCollector(folder, all_metrics=True)
    folder.rmdir()
    assert scrape(collector) == {}
    assert "cannot be read" in caplog.text


def test_endpoint_serves_its_own_or_totals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one process, of many, and of a folder that is not there."""
    variable = "PROMETHEUS_MULTIPROC_DIR"
    monkeypatch.delenv(variable, raising=False)
    assert registry_for_scrape() is REGISTRY
    for pid in (1, 2):
        counter_file(tmp_path, pid, {"a": 5})
    monkeypatch.setenv(variable, str(tmp_path))
    assert 'jobs_total{kind="a"} 10.0' in generate_latest(registry_for_scrape()).decode()
    monkeypatch.setenv(variable, str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="is not a folder"):
        registry_for_scrape()
