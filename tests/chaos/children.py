"""Forked children of a serving process: each writes its accounts into a pipe, and ends."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from accounting import CallerCounts, ProcessAccounts, compare, read_metrics
from pydantic import TypeAdapter
from serving import ServingProcess, until

_ACCOUNTS = TypeAdapter(ProcessAccounts)


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
            read_metrics(serving.registry) - before,
            samples,
            samples.stored,
            waiting=samples.pending,
        )
        os.write(writing, _ACCOUNTS.dump_json(accounts))
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
    return _ACCOUNTS.validate_json(said) if said else None
