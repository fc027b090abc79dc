"""Kills processes that sample, at any moment, and settles their accounts against what they did."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ctxguard.core.context import Context
from ctxguard.monitor.sampling.sampler import Accounts, LostReason, Sampler
from ctxguard.monitor.sampling.writer import SampleWriter, settle_dead_processes
from ctxguard.monitor.store import SampleStore


@dataclass(frozen=True)
class Killed:
    """What became of the samples of one killed process.

    Attributes:
        offered: Offers that had returned when it died, as it told through a pipe.
        accounts: What the store was told afterwards.
        rows: Samples of its that are in the store.
    """

    offered: int
    accounts: Accounts
    rows: int


def kill_one(
    url: str, counts: Path, context: Context, after_seconds: float, capacity: int
) -> Killed:
    """Start a process that samples as fast as it can, kill it, and settle its accounts."""
    store = SampleStore.open(url)
    before = {worker.worker_id for worker in store.workers()}
    rows_before = sum(store.states().values())
    store.close()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _sample_for_ever(url, counts, context, capacity, lambda: os.write(writing, b"."))
    os.close(writing)
    told = os.read(reading, 1)  # it has begun
    # Read on while it lives: a full pipe would hold it up.
    os.set_blocking(reading, False)
    deadline = time.monotonic() + after_seconds
    while time.monotonic() < deadline:
        told += _available(reading)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.set_blocking(reading, True)
    while more := os.read(reading, 65_536):
        told += more
    os.close(reading)
    store = SampleStore.open(url)
    settle_dead_processes(store, counts)
    (worker,) = [row for row in store.workers() if row.worker_id not in before]
    lost = {reason: worker.lost.get(reason.value, 0) for reason in LostReason}
    rows = sum(store.states().values()) - rows_before
    store.close()
    return Killed(len(told), Accounts(worker.sampled, worker.stored, worker.pending, lost), rows)


def _available(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65_536)
    except BlockingIOError:
        return b""


def _sample_for_ever(
    url: str, counts: Path, context: Context, capacity: int, tell: Callable[[], object]
) -> None:
    sampler = Sampler(1.0, capacity=capacity, counts_folder=counts)
    writer = SampleWriter(sampler, SampleStore.open(url), interval_seconds=0.001)
    writer.start()
    rng = random.Random(os.getpid())
    while True:
        sampler.offer(context, 1.0, time.time())
        tell()
        if rng.random() < 0.02:
            time.sleep(0.002)
