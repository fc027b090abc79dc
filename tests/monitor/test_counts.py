"""Counts that outlive their process: exact under threads, and after a sudden death."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.sampling.counts import Counts, counts_of_dead_processes


def test_every_count_of_every_thread_is_in_the_total() -> None:
    counts = Counts(3)

    def count() -> None:
        for i in range(3_000):
            counts.count(i % 3)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=count) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert counts.totals() == [8_000, 8_000, 8_000]


def test_a_thread_that_ends_leaves_its_counts_and_its_place() -> None:
    counts = Counts(1)
    for _ in range(3_000):
        thread = threading.Thread(target=counts.count, args=(0,))
        thread.start()
        thread.join()
    assert counts.total(0) == 3_000
    assert len(counts._free) >= 1_020


def test_threads_beyond_the_places_share_one() -> None:
    counts = Counts(1)
    counts._free.clear()
    threads = [
        threading.Thread(target=lambda: [counts.count(0) for _ in range(2_000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts.total(0) == 8_000


_COUNTING = """
import sys
from ctxguard.monitor.sampling.counts import Counts
counts = Counts(2, sys.argv[1])
print(counts.worker_id, flush=True)
for i in range(1000):
    counts.count(1)
print("counted", flush=True)
sys.stdin.read()
"""


def test_the_counts_of_a_killed_process_are_read_once(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _COUNTING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        worker_id = child.stdout.readline().strip()
        assert child.stdout.readline() == "counted\n"
        assert list(counts_of_dead_processes(tmp_path)) == []  # it lives
        child.send_signal(signal.SIGKILL)
        child.wait()
    (dead,) = counts_of_dead_processes(tmp_path)
    assert (dead.worker_id, dead.totals) == (worker_id, (0, 1000))
    assert list(counts_of_dead_processes(tmp_path)) == []


def test_a_living_parent_is_not_taken_for_dead_when_its_child_ends(tmp_path: Path) -> None:
    counts = Counts(1, tmp_path)
    child = os.fork()
    if child == 0:
        counts.leave()
        os._exit(0)
    os.waitpid(child, 0)
    assert list(counts_of_dead_processes(tmp_path)) == []
    counts.leave()
    assert len(list(counts_of_dead_processes(tmp_path))) == 1


@pytest.mark.parametrize("content", [b"", b"short", bytes(5_000)])
def test_a_damaged_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.counts").write_bytes(content)
    assert list(counts_of_dead_processes(tmp_path)) == []
    assert (tmp_path / "x.counts").exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="folder that can be written"):
        Counts(1, tmp_path / "file" / "counts")
