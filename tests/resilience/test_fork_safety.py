"""A process owns what it opened: a forked child begins without it, in a fixed order."""

import threading
from collections import Counter
from typing import ClassVar

import pytest

from ctxguard._support import fork_safety
from ctxguard._support.fork_safety import OfProcess


class Thing:
    """Notes what happens to it."""

    def __init__(self, noted: list[str]) -> None:
        self.noted = noted

    def _reset_after_fork(self) -> None:
        self.noted.append("reset")


class Writer(Thing):
    """Starts a thread, which may use any other thing."""

    def _resume_after_fork(self) -> None:
        self.noted.append("resumed")


class Failing(Thing):
    def _reset_after_fork(self) -> None:
        raise OSError("no space")


def test_all_reset_before_any_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that began before its store was reset waited for its parent's transactions.

    One that cannot be reset leaves the others alone.
    """
    noted: list[str] = []
    things = [Writer(noted), Failing(noted), Thing(noted), Thing(noted)]
    monkeypatch.setattr(fork_safety, "_registered", things)
    fork_safety._reset_all()
    assert noted == ["reset", "reset", "reset", "resumed"]


class Owner:
    """Owns a lock, a client that its parent must keep open, and a plain attribute."""

    left: ClassVar[list[str]] = []
    lock = OfProcess(threading.Lock)
    client = OfProcess(lambda: "client", left.append)
    counts = OfProcess[Counter[str]](Counter)

    def __init__(self) -> None:
        self.plain = "kept"


def test_child_makes_anew_sparing_parents() -> None:
    """A child makes anew what its parent used and leaves the parents alone."""
    owner, unused = Owner(), Owner()
    owner.lock.acquire()
    owner.counts["a"] += 1
    owner.client += " of the parent"
    fork_safety._reset_all()
    assert owner.left == ["client of the parent"]
    assert owner.lock.acquire(blocking=False)
    assert (owner.client, owner.counts, owner.plain) == ("client", Counter(), "kept")
    assert unused.lock is not owner.lock


def test_first_threads_share_one() -> None:
    owner, found, barrier = Owner(), [], threading.Barrier(8)

    def use() -> None:
        barrier.wait()
        found.append(owner.lock)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
