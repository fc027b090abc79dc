"""Kills processes that sample, at any moment, and reads what the store was told of them."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from fleet_faults import open_later

from ctxguard.core.context import Context
from ctxguard.monitor.sampling.sampler import Sampler
from ctxguard.monitor.sampling.writer import SampleWriter
from ctxguard.monitor.store import Accounts, SampleStore


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


def kill_one(url: str, context: Context, after_seconds: float, capacity: int) -> Killed:
    """Start a process that samples as fast as it can, and kill it."""
    store = SampleStore.open(url)
    rows_before = sum(store.states().values())
    store.close()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _sample_for_ever(url, context, capacity, lambda text: os.write(writing, text))
    os.close(writing)
    worker_id = os.read(reading, 32).decode()
    told = b""
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
    with open_later(url) as store:
        accounts = store.accounts(worker_id=worker_id)
        rows = sum(store.states().values()) - rows_before
    return Killed(len(told), accounts, rows)


def _available(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65_536)
    except BlockingIOError:
        return b""


def _sample_for_ever(
    url: str, context: Context, capacity: int, tell: Callable[[bytes], object]
) -> None:
    sampler = Sampler(1.0, capacity=capacity)
    tell(sampler.worker_id.encode())
    writer = SampleWriter(sampler, SampleStore.open(url), interval_seconds=0.001)
    writer.start()
    rng = random.Random(os.getpid())
    while True:
        sampler.offer(context, 1.0, time.time())
        tell(b".")
        if rng.random() < 0.02:
            time.sleep(0.002)
