"""A bounded pool of daemon threads, which a call that never returns cannot keep from ending.

``concurrent.futures.ThreadPoolExecutor`` queues without a bound, and joins its threads when the
process ends: one hung call keeps the process alive.
"""

import atexit
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic, sleep
from typing import Any, TypeVar
from weakref import WeakSet

_T = TypeVar("_T")

_IDLE_SECONDS = 10.0
"""After which a thread without work ends: a pool that is not used any more costs nothing."""

_EXIT_SECONDS = 0.25
"""How long a process that ends waits for calls which are still under way.

A thread that comes back from native code while the interpreter is torn down can abort the
process; calls that are past their deadline are not waited for.
"""


class PoolFullError(Exception):
    """No thread is free and as much work waits as may."""


class DaemonPool:
    """Threads that are started as they are needed and end when they are not.

    A thread cannot be killed. One whose call is past its deadline is written off, and another
    may take its place, up to as many again as ``workers``: so that a stage which recovers is not
    lost to the calls that hung before, and hung calls cost a bounded number of threads.

    Args:
        name: Of the threads.
        workers: The most calls at once, without those written off.
        waiting: The most calls that wait for a thread.
    """

    def __init__(self, name: str, *, workers: int, waiting: int) -> None:
        self._name = name
        self._workers = workers
        self._waiting_limit = waiting
        self.start_afresh()
        _pools.add(self)

    def start_afresh(self) -> None:
        """Forget every thread and all work, as a forked child must: it has neither."""
        self._lock = Lock()
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._threads = 0
        self._idle = 0
        self._waiting = 0
        self._written_off: set[Future[Any]] = set()

    @property
    def under_way(self) -> int:
        """Calls that a thread works on and that are not written off."""
        return self._threads - self._idle - len(self._written_off)

    @property
    def written_off(self) -> int:
        """Calls past their deadline that have not returned."""
        return len(self._written_off)

    def submit(self, work: Callable[[], _T]) -> "Future[_T]":
        """Have a thread call ``work``.

        Raises:
            PoolFullError: as many calls wait as may, or every thread there may be is hung.
        """
        future: Future[_T] = Future()
        with self._lock:
            hung = len(self._written_off)
            if self._waiting >= self._waiting_limit or hung >= 2 * self._workers:
                raise PoolFullError
            self._waiting += 1
            if self._waiting > self._idle and self._threads < self._workers + min(
                hung, self._workers
            ):
                self._start_thread()
            self._queue.put((future, work))
        return future

    def write_off(self, future: "Future[Any]") -> bool:
        """Give up a call; whether a thread had begun with it."""
        if future.cancel():
            return False
        with self._lock:
            if not future.done():
                self._written_off.add(future)
        return True

    def _start_thread(self) -> None:
        thread = Thread(target=self._serve, name=f"ctxguard-{self._name}", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            # The system gives no more threads; those that there are will have to do.
            if self._threads == 0:
                self._waiting -= 1
                raise PoolFullError from None
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
            # Or the last request would be kept alive until the next one comes.
            del future, work


_pools: WeakSet[DaemonPool] = WeakSet()


@atexit.register
def _let_calls_return() -> None:
    until = monotonic() + _EXIT_SECONDS
    while any(pool.under_way > 0 for pool in list(_pools)) and monotonic() < until:
        sleep(0.005)
