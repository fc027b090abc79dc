"""Processes that serve and write samples, killed at any moment, and what they leave behind."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from accounting import ENDS, ProcessAccounts, read_metrics
from fleet_faults import open_later
from prometheus_client import REGISTRY, CollectorRegistry
from serving import Result, ServingProcess, Size

from ctxguard.core.types import DEFAULT_DEPTH
from ctxguard.monitor.export.multiprocess import SafeMultiProcessCollector


def writer_killed(folder: Path, size: Size) -> Result:
    """SIGKILL of a process that serves and writes, at any moment."""
    rng = random.Random(5)
    rounds = 2 if size is Size.SMALL else 12
    processes = [_killed(folder / f"round{n}", size, rng.uniform(0.3, 0.9)) for n in range(rounds)]
    held = sum(one.samples.unaccounted for one in processes)
    return Result(
        f"{rounds} killed; {held} samples are unaccounted for, which they had reported as pending",
        {"every process had served": all(one.metrics["received"] > 0 for one in processes)},
        tuple(processes),
    )


_THREADS = 3


def _killed(folder: Path, size: Size, after_seconds: float) -> ProcessAccounts:
    """Serve in a process, kill it, and compare the accounts.

    Its metrics lie in files that stay after it (``PROMETHEUS_MULTIPROC_DIR``); each of its threads
    tells through a pipe when a request has ended.
    """
    metrics = folder / "metrics"
    metrics.mkdir(parents=True)
    serving = subprocess.Popen(
        [sys.executable, __file__, str(folder), size.value],
        stdout=subprocess.PIPE,
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(metrics)},
    )
    assert serving.stdout is not None
    descriptor = serving.stdout.fileno()
    answered = len(os.read(descriptor, 1))
    os.set_blocking(descriptor, False)
    deadline = time.monotonic() + after_seconds
    while time.monotonic() < deadline:
        with suppress(BlockingIOError):
            answered += len(os.read(descriptor, 65_536))
        time.sleep(0.001)
    serving.send_signal(signal.SIGKILL)
    serving.wait()
    os.set_blocking(descriptor, True)
    while more := os.read(descriptor, 65_536):
        answered += len(more)
    registry = CollectorRegistry()
    SafeMultiProcessCollector(metrics, registry)
    found = read_metrics(registry)
    url = f"sqlite:///{folder / 'samples.db'}"
    with open_later(url) as store:
        rows = sum(store.states().values())
        known = store.accounts()
    ended = sum(found[end] for end in ENDS)
    under_way = found["received"] - ended
    wrong = []
    if not 0 <= under_way <= _THREADS:
        wrong.append(f"{under_way} requests were under way in {_THREADS} threads")
    # A request is sampled before it is counted as ended. What it sampled since its last report
    # nobody knows of.
    if not rows <= known.sampled <= ended + _THREADS:
        wrong.append(f"{known.sampled} samples of {ended} requests that ended")
    if not answered <= ended <= answered + _THREADS:
        wrong.append(f"{ended} requests ended, callers knew of {answered}")
    if known.stored != rows or known.pending != 0 or known.unaccounted < 0:
        wrong.append(
            f"{known.stored} stored, {known.pending} pending and {known.unaccounted} unaccounted "
            f"for, {rows} rows"
        )
    # Every answer has a hundred. Those of requests that were under way may be half counted.
    candidates = found["kept"] + found["dropped"]
    if not 0 <= DEFAULT_DEPTH * ended - candidates <= DEFAULT_DEPTH * _THREADS:
        wrong.append(f"{candidates} candidates of {ended} answers")
    return ProcessAccounts(found, candidates, known, rows, under_way, tuple(wrong))


def serve_for_ever(folder: str, size: str) -> None:
    """Serve from some threads, and tell of every request that ended."""
    serving = ServingProcess(
        Path(folder), Size(size), capacity=200, interval_seconds=0.005, registry=REGISTRY
    )

    def client(first: int) -> None:
        number, rng = first, random.Random(first)
        while True:
            serving.request(number)
            os.write(1, b".")
            number += 1
            # So that the writer keeps up: what it has stored is to be found.
            time.sleep(rng.uniform(0.0, 0.02))

    for first in range(_THREADS):
        threading.Thread(target=client, args=(first,)).start()


if __name__ == "__main__":
    serve_for_ever(sys.argv[1], sys.argv[2])
