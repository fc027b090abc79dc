"""Forked children of a serving process: each writes its accounts into a pipe, and ends."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accounting import CallerCounts, MetricCounts, ProcessAccounts, compare, read_metrics
from serving import ServingProcess, until

from ctxguard.monitor.store import Accounts, LostReason


@dataclass(frozen=True)
class Child:
    """A forked child: its process id, and the pipe that its accounts come from."""

    pid: int
    reading: int


def fork_child(serving: ServingProcess, work: Callable[[], object]) -> Child:
    """Fork; the child works, stops its writer and writes its accounts."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Child(pid, reading)
    status = 1
    try:
        os.close(reading)
        before = read_metrics(serving.registry)
        serving.callers = CallerCounts()
        work()
        serving.writer.stop()
        samples = serving.writer.accounts()
        accounts = compare(
            serving.callers,
            read_metrics(serving.registry).less(before),
            samples,
            samples.stored,
            waiting=samples.pending,
            worker_id=serving.sampler.worker_id,
        )
        os.write(writing, json.dumps(accounts.to_dict()).encode())
        status = 0
    finally:
        os._exit(status)


def accounts_of_child(child: Child) -> ProcessAccounts | None:
    """Wait for a child and read its accounts; None where it failed, or hung and was killed."""
    if not until(lambda: os.waitpid(child.pid, os.WNOHANG)[0] != 0):
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
    with os.fdopen(child.reading, "rb") as pipe:
        said = pipe.read()
    return _accounts_from(json.loads(said)) if said else None


def _accounts_from(data: dict[str, Any]) -> ProcessAccounts:
    """What ``ProcessAccounts.to_dict`` gave."""
    lost = {LostReason(why): n for why, n in data["samples"].pop("lost").items()}
    return ProcessAccounts(
        metrics=MetricCounts(**data["metrics"]),
        candidates=data["candidates"],
        samples=Accounts(**data["samples"], lost=lost),
        stored_rows=data["stored_rows"],
        under_way=data["under_way"],
        wrong=tuple(data["wrong"]),
        worker_id=data["worker_id"],
    )
