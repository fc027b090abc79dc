"""Counts that outlive their process: exact under threads, and after a sudden death."""

import os
import signal
import stat
import struct
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


def dead_file(folder: Path) -> Path:
    """The file of two counters, (0, 1000), of a process that has ended."""
    counts = Counts(2, folder)
    for _ in range(1_000):
        counts.count(1)
    counts.leave()
    return folder / f"{counts.worker_id}.counts"


def overwrite(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(data)


@pytest.mark.parametrize(
    ("offset", "data"),
    [
        (64, struct.pack("<q", -1)),
        (64, struct.pack("<q", 2**63 - 1)),
        (8, struct.pack("<I", 0)),
        (8, struct.pack("<I", 3)),
        (8, struct.pack("<II", 2**31, 2**31)),
        (12, struct.pack("<I", 1)),
        (16, b"f" * 32),
        (2**40, b"0"),
    ],
)
def test_a_forged_file_is_left_alone(tmp_path: Path, offset: int, data: bytes) -> None:
    file = dead_file(tmp_path)
    overwrite(file, offset, data)
    assert list(counts_of_dead_processes(tmp_path)) == []
    assert file.exists()


def test_a_pipe_or_a_link_is_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    file = dead_file(elsewhere)
    folder = tmp_path / "counts"
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / "pipe.counts")
    (folder / file.name).symlink_to(file)
    assert list(counts_of_dead_processes(folder)) == []


def test_a_file_of_another_user_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead_file(tmp_path)
    me = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: me + 1)
        assert list(counts_of_dead_processes(tmp_path)) == []
    assert len(list(counts_of_dead_processes(tmp_path))) == 1


def test_the_folder_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "counts"
    Counts(1, folder).leave(remove=True)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o770)
    with pytest.raises(ConfigurationError, match="chmod 700"):
        Counts(1, folder)
    folder.chmod(0o700)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(ConfigurationError, match="must belong to user"):
        Counts(1, folder)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="folder that can be written"):
        Counts(1, tmp_path / "file" / "counts")
