"""The threads of daemon threads: how many calls run and wait, and what hung calls cost."""

import itertools
import subprocess
import sys
import threading
from queue import Full

import pytest

from ctxguard.resilience.threads import DaemonThreads
from tests.timing import NEVER, PATIENCE_SECONDS


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


def test_forked_child_has_own_threads() -> None:
    script = """
import os, threading, warnings
warnings.simplefilter("ignore")
from ctxguard.resilience.stage import Stage
stage = Stage("dense")
over = threading.Event()
stage.submit(lambda: over.wait(600))
assert stage.call(lambda: 1, 60.0) == 1
child = os.fork()
if child == 0:
    os._exit(0 if stage.call(lambda: 2, 60.0) == 2 else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", script], timeout=PATIENCE_SECONDS, check=True)
