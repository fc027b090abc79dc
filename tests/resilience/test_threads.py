"""The threads of daemon threads: how many calls run and wait, and what hung calls cost."""

import itertools
import threading
from queue import Full

import pytest

from ctxguard.resilience.threads import DaemonThreads
from tests.timing import NEVER


def test_calls_are_bounded_by_workers() -> None:
    threads = DaemonThreads("test", workers=3, waiting=100)
    running = itertools.count()
    most, lock, now = 0, threading.Lock(), 0

    def call() -> None:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        next(running)
        with lock:
            now -= 1

    for future in [threads.submit(call) for _ in range(100)]:
        future.result(NEVER)
    assert most <= 3
    assert next(running) == 100


def test_hung_threads_are_bounded() -> None:
    threads = DaemonThreads("test", workers=2, waiting=100)
    over = threading.Event()
    for _ in range(4):
        begun = threading.Event()
        hung = threads.submit(lambda begun=begun: (begun.set(), over.wait(NEVER)))
        assert begun.wait(NEVER)
        threads.write_off(hung)
    with pytest.raises(Full):
        threads.submit(int)
    over.set()
    while threads.written_off:
        pass
    assert threads.submit(int).result(NEVER) == 0


def test_threadless_system_refuses_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(Full):
        DaemonThreads("test", workers=2, waiting=2).submit(int)
