"""Runs a bounded number of daemon threads, so that a hanging call cannot keep a process alive.

``concurrent.futures.ThreadPoolExecutor`` queues without a bound and joins its threads at exit.
Starts threads, reads the monotonic clock, and at the end of the process waits a moment for calls.
"""

import atexit
import os
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, Full, SimpleQueue
from threading import Lock, Thread
from time import monotonic, sleep
from typing import Any, TypeVar
from weakref import WeakSet

_T = TypeVar("_T")

_IDLE_SECONDS = 10.0
"""How long a thread without work lives, so that unused threads cost nothing."""

_EXIT_SECONDS = 0.25
"""How long an ending process waits for calls that are still running.

A thread that returns from native code while the interpreter is torn down can abort the process.
Calls past their deadline are not waited for.
"""


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class DaemonThreads:
    """Threads that start when work arrives and end when there is none.

    A thread cannot be killed. When a call is past its deadline, its thread is written off and
    another may replace it, up to ``spare`` in all. So a stage can recover from hung calls, and
    those cost a bounded number of threads.

    Args:
        name: Names the threads.
        workers: Maximum number of concurrent calls, without those written off.
        waiting: Maximum number of calls that wait for a thread.
        spare: Maximum number of threads that replace those of hung calls; None for ``workers``.
    """

    def __init__(self, name: str, *, workers: int, waiting: int, spare: int | None = None) -> None:
        self._name = name
        self._workers = workers
        self._spare = workers if spare is None else spare
        self._waiting_limit = waiting
        self._reset_after_fork()
        _started.add(self)

    def _reset_after_fork(self) -> None:
        self._lock = Lock()
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._threads = 0
        self._idle = 0
        self._waiting = 0
        self._written_off: set[Future[Any]] = set()

    @property
    def running(self) -> int:
        """The number of calls running on threads, except those written off."""
        return self._threads - self._idle - len(self._written_off)

    @property
    def written_off(self) -> int:
        """The number of calls that are past their deadline and have not returned."""
        return len(self._written_off)

    @property
    def load(self) -> str:
        return f"{self.running:,} running, {self._waiting:,} waiting, {self.written_off:,} hung"

    def submit(self, work: Callable[[], _T]) -> "Future[_T]":
        """Call ``work`` on a thread.

        Raises:
            queue.Full: too many calls wait, or too many threads hang.
        """
        future: Future[_T] = Future()
        with self._lock:
            hung = len(self._written_off)
            if self._waiting >= self._waiting_limit or hung >= self._workers + self._spare:
                raise Full
            self._waiting += 1
            if self._waiting > self._idle and self._threads < self._workers + min(
                hung, self._spare
            ):
                self._start_thread()
            self._queue.put((future, work))
        return future

    def write_off(self, future: "Future[Any]") -> None:
        """Abandon a call: cancel it, or replace its thread if it has begun."""
        if future.cancel():
            return
        with self._lock:
            if not future.done():
                self._written_off.add(future)

    def _start_thread(self) -> None:
        thread = Thread(target=self._serve, name=f"ctxguard-{self._name}", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            # The system gives no more threads; the existing ones must suffice.
            if self._threads == 0:
                self._waiting -= 1
                raise Full from None
            return
        self._threads += 1
        self._idle += 1

    def _serve(self) -> None:
        queue = self._queue
        while True:
            try:
                future, work = queue.get(timeout=_IDLE_SECONDS)
            except Empty:
                with self._lock:
                    if self._waiting:
                        continue
                    self._idle -= 1
                    self._threads -= 1
                return
            with self._lock:
                self._idle -= 1
                self._waiting -= 1
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            with self._lock:
                self._written_off.discard(future)
                self._idle += 1
            # Without this the last request stays in memory until the next one comes.
            del future, work


_started: WeakSet[DaemonThreads] = WeakSet()


@atexit.register
def _let_calls_return() -> None:
    until = monotonic() + _EXIT_SECONDS
    while any(threads.running > 0 for threads in list(_started)) and monotonic() < until:
        sleep(0.005)
