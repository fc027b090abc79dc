"""Forked children of a process that serves: each tells its accounts through a pipe, and ends."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bookkeeping import Books, Counted, Tally, balance, counted
from scene import Scene, until

from ctxguard.monitor.sampler import Accounts, LostReason

_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Child:
    """A child that was begun: its process, and where it tells."""

    pid: int
    reading: int


def begin_child(scene: Scene, work: Callable[[], object]) -> Child:
    """Fork, and have the child work, stop its writer and tell."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Child(pid, reading)
    status = 1
    try:
        os.close(reading)
        before = counted(scene.registry)
        scene.tally = Tally()
        work()
        scene.writer.stop()
        samples = scene.writer.accounts()
        books = balance(
            scene.tally,
            counted(scene.registry).less(before),
            samples,
            samples.stored,
            waiting=samples.pending,
            worker_id=scene.sampler.worker_id,
        )
        os.write(writing, json.dumps(books.to_dict()).encode())
        status = 0
    finally:
        os._exit(status)


def told_by_child(child: Child) -> Books | None:
    """The accounts of a child; None where it failed, or hangs and so was killed."""
    if not until(lambda: os.waitpid(child.pid, os.WNOHANG)[0] != 0, _PATIENCE_SECONDS):
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
    with os.fdopen(child.reading, "rb") as pipe:
        said = pipe.read()
    return _books_from(json.loads(said)) if said else None


def _books_from(data: dict[str, Any]) -> Books:
    """What ``Books.to_dict`` gave."""
    lost = {LostReason(why): n for why, n in data["samples"].pop("lost").items()}
    return Books(
        counted=Counted(**data["counted"]),
        candidates=data["candidates"],
        samples=Accounts(**data["samples"], lost=lost),
        stored_rows=data["stored_rows"],
        under_way=data["under_way"],
        wrong=tuple(data["wrong"]),
        worker_id=data["worker_id"],
    )
