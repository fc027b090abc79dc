"""One system in a process of its own, within limits of time and memory."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._processes import end_all, resident_bytes
from benchmarks._search_data import Corpus

_WORKER = "benchmarks._search_worker"
_GIBIBYTE = 2**30
_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 20.0
_SILENT = {
    "ANONYMIZED_TELEMETRY": "False",
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_THREADS = (
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


@dataclass(frozen=True)
class Limits:
    """What a system may take.

    Attributes:
        seconds: For one measurement; a query that was begun is finished.
        total_seconds: From the start of its process to its end; it is stopped then.
        gibibytes: Of memory, its servers' included; it is stopped above.
        build_threads: Threads for building.
        threads: Threads for a search.
    """

    seconds: float
    total_seconds: float
    gibibytes: float
    build_threads: int
    threads: int


def run(peer: str, corpus: Corpus, clients: Sequence[int], limits: Limits) -> dict[str, Any]:
    """All the figures of one system over one corpus.

    Returns:
        What its process reported, by stage, and ``ended``: ``done``, or why not.
    """
    with tempfile.TemporaryDirectory(prefix=f"search-{peer}-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        task = {
            "peer": peer,
            "corpus": str(corpus.folder),
            "folder": name,
            "seconds": limits.seconds,
            "clients": list(clients),
            "build_threads": limits.build_threads,
            "threads": limits.threads,
        }
        reading, writing = os.pipe()
        with (folder.parent / f"{folder.name}.log").open("wb+") as log:
            # Its own module, with arguments made here.
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", _WORKER, json.dumps(task), str(writing)],
                pass_fds=(writing,),
                stdout=log,
                stderr=log,
                env={**os.environ, **_SILENT, **_threads(limits)},
                start_new_session=True,
            )
            os.close(writing)
            try:
                figures = _watched(process, reading, folder, limits)
            finally:
                os.close(reading)
                _end(process, folder)
        Path(log.name).unlink()
    return figures


def _threads(limits: Limits) -> dict[str, str]:
    # LanceDB has one number for both; with one thread it would build for an hour.
    told = dict.fromkeys(_THREADS, str(limits.threads))
    return told | {"LANCE_CPU_THREADS": str(limits.build_threads)}


def _watched(
    process: subprocess.Popen[bytes], reading: int, folder: Path, limits: Limits
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    most, until = 0, time.monotonic() + limits.total_seconds
    waiting = b""
    for arrived in _pieces(reading):
        waiting += arrived
        *lines, waiting = waiting.split(b"\n")
        for line in lines:
            told = json.loads(line)
            figures[told.pop("stage")] = told
        most = max(most, _resident(process.pid, folder))
        if most > limits.gibibytes * _GIBIBYTE:
            figures["ended"] = f"stopped above {limits.gibibytes:g} GiB"
            break
        if time.monotonic() > until:
            figures["ended"] = f"stopped after {limits.total_seconds:g} s"
            break
    else:
        for stage in ("absent", "failed"):
            if stage in figures:
                figures["ended"] = f"{stage}: {figures[stage]['why']}"
                break
        else:
            status = None if "served" in figures else process.wait()
            figures["ended"] = "done" if status is None else f"ended with status {status}"
    figures["peak_mib"] = round(most / 2**20)
    return figures


def _pieces(reading: int) -> Iterator[bytes]:
    """What arrives, and nothing at all now and then, until the other side closes."""
    while True:
        ready, _, _ = select.select([reading], [], [], _LOOK_SECONDS)
        if not ready:
            yield b""
            continue
        piece = os.read(reading, 65_536)
        if not piece:
            return
        yield piece


def _resident(pid: int, folder: Path) -> int:
    try:
        return resident_bytes(pid, folder)
    except OSError:
        return 0


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Let it stop by itself where it is done, and end what is left."""
    if process.poll() is None:
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    end_all(folder)
