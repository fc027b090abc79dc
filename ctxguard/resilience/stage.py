"""Runs a stage, work that may fail, hang or return garbage, on its own threads, with a breaker.

Runs threads, reads the monotonic clock, calls watchers, and logs.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from queue import Full
from time import monotonic
from typing import Any, Generic, ParamSpec, TypeVar, cast

from ctxguard._support.error_text import describe_error, drop_tracebacks
from ctxguard._support.fork_safety import reset_in_children
from ctxguard.core.types import FailureKind, StageFailure
from ctxguard.errors import (
    CtxguardError,
    OverloadedError,
    StageError,
    StageRefusedError,
    StageUnavailableError,
)
from ctxguard.resilience.breaker import FAILURES, REFUSED, Breaker, Probe
from ctxguard.resilience.threads import DaemonThreads

_P = ParamSpec("_P")
_T = TypeVar("_T")

WORKERS = 8
WAITING = 1024
"""How many calls of a stage may wait for a thread; each waits no longer than its time limit."""

_LOG_SECONDS = 60.0
"""The shortest time between two log lines that say that a stage fails, as it may do now and
then."""

_log = logging.getLogger(__name__)

_ALLOCATION_FAILURES = ("can't allocate memory", "out of memory", "bad_alloc")


class UnansweredError(StageError):
    """A stage was not called, or did not answer in time; ``cause`` says why, without its name."""

    def __init__(self, stage: str, kind: FailureKind, cause: str) -> None:
        super().__init__(stage, cause)
        self.kind = kind
        self.cause = cause


def kind_of(error: BaseException) -> FailureKind:
    """Return the label of a stage's error; a plain `StageError` means that it refused its result.

    >>> kind_of(MemoryError()), kind_of(ValueError("no")), kind_of(TimeoutError())
    (<FailureKind.OUT_OF_MEMORY: 'out_of_memory'>, <FailureKind.ERROR: 'error'>, <FailureKind.TIMEOUT: 'timeout'>)
    """  # noqa: E501
    if isinstance(error, UnansweredError):
        return error.kind
    if isinstance(error, OverloadedError):
        return FailureKind.SATURATED
    if isinstance(error, MemoryError) or any(
        # torch raises a RuntimeError.
        sign in str(error)
        for sign in _ALLOCATION_FAILURES
    ):
        return FailureKind.OUT_OF_MEMORY
    if isinstance(error, TimeoutError):
        return FailureKind.TIMEOUT
    if isinstance(error, StageError) and not isinstance(error, StageUnavailableError):
        return FailureKind.GARBAGE
    return FailureKind.ERROR


def failure_of(stage: str, error: Exception) -> StageFailure:
    """Build the failure that an answer reports for a stage that raised ``error``."""
    cause = error.cause if isinstance(error, UnansweredError) else describe_error(error)
    return StageFailure(stage, cause, kind_of(error))


def attempt(
    stage: str, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> _T | StageFailure:
    """Return the result of a stage's call, or its failure."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        failure = failure_of(stage, error)
        drop_tracebacks(error)
        return failure


class Stage:
    """Calls one stage of a search under a time limit and a circuit breaker.

    Without a time limit a call runs on the caller's own thread. With one it runs on one of the
    stage's threads, and is abandoned when late. Errors of the call are raised unchanged.

    While the circuit is open, calls are refused at once; when a retry is due, one call is made as a
    probe. A stage logs when it begins to fail, is left out, or recovers.

    Args:
        name: The stage's name in answers and metrics.
        workers: Maximum number of concurrent calls.
        waiting: Maximum number of calls that wait for a thread.
        spare: Maximum number of threads that replace those of hung calls; None for ``workers``.
        breaks: Whether repeated failures open the circuit.
    """

    def __init__(
        self,
        name: str,
        *,
        workers: int = WORKERS,
        waiting: int = WAITING,
        spare: int | None = None,
        breaks: bool = True,
    ) -> None:
        self.name = name
        self.breaker = Breaker(name, opens=breaks)
        self._threads = DaemonThreads(name, workers=workers, waiting=waiting, spare=spare)
        self._last_cause = ""
        self._fails_quietly_until = 0.0
        self.watch = self.breaker.watch
        self.watch(self._log_change)
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        self._threads._reset_after_fork()
        self.breaker._reset_after_fork()

    @property
    def is_open(self) -> bool:
        """Whether the circuit breaker is open."""
        return not self.breaker.is_closed

    def call(
        self, work: Callable[[], _T], seconds: float | None = None, *, probe: Probe | None = None
    ) -> _T:
        """Call ``work`` within a time limit, and return its result or raise its error.

        A probe says what it was admitted as; `FORCED` calls even while the circuit is open.

        Raises:
            UnansweredError: the call was refused, or is late.
        """
        if seconds is not None:
            return self.submit(work, seconds, probe=probe).result()
        if probe is None and not self.breaker.is_closed:
            probe = self._admit(None)
        try:
            result = work()
        except Exception as error:
            self._note_error(error, probe)
            raise
        if probe is not None or self.breaker.failures:
            self.breaker.succeeded(probe)
        return result

    def submit(
        self, work: Callable[[], _T], seconds: float | None = None, *, probe: Probe | None = None
    ) -> "StageCall[_T]":
        """Start ``work`` on one of the stage's threads; arguments and errors as for `call`."""
        if seconds is not None and seconds <= 0.0:
            raise UnansweredError(
                self.name, FailureKind.TIMEOUT, "no time was left when its turn came"
            )
        if probe is None and not self.breaker.is_closed:
            probe = self._admit(seconds)
        future: Future[_T] | None = None
        try:
            future = self._threads.submit(partial(copy_context().run, work))
        except Full:
            if seconds is not None:
                self._give_up(probe)
                raise self._full() from None
        until = None if seconds is None else monotonic() + seconds
        return StageCall(self, work, future, seconds, until, probe)

    async def await_within(
        self, start: Callable[[], Awaitable[_T]], seconds: float | None = None
    ) -> _T:
        """Await an asynchronous call without using the stage's threads; otherwise as `call`.

        A late call is cancelled, and abandoned if it does not end then.
        """
        probe = None if self.breaker.is_closed else self._admit(seconds)
        task = asyncio.ensure_future(start())
        try:
            await asyncio.wait({task}, timeout=seconds)
        except asyncio.CancelledError:
            _cancel(task)
            self._give_up(probe)
            raise
        if not task.done():
            _cancel(task)
        return self._settle(task, seconds, probe)

    async def await_ending(self, start: Callable[[], Awaitable[_T]], seconds: float | None) -> _T:
        """Await, like `await_within` but in this task, a call that ends when it is cancelled."""
        probe = None if self.breaker.is_closed else self._admit(seconds)
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                result = await start()
        except asyncio.CancelledError:
            self._give_up(probe)
            raise
        except Exception as error:
            if limit.expired():
                raise self._late(seconds, probe) from None
            self._note_error(error, probe)
            raise
        if probe is not None or self.breaker.failures:
            self.breaker.succeeded(probe)
        return result

    def _late(self, seconds: float | None, probe: Probe | None) -> UnansweredError:
        cause = f"no answer within {cast(float, seconds) * 1e3:.0f} ms"
        self._note_failure(cause, probe)
        return UnansweredError(self.name, FailureKind.TIMEOUT, cause)

    def _settle(
        self, future: "Future[_T] | asyncio.Future[_T]", seconds: float | None, probe: Probe | None
    ) -> _T:
        """Record the outcome of a call that has ended or is late, and return or raise it."""
        if not future.done():
            raise self._late(seconds, probe)
        error = future.exception()
        if error is not None:
            self._note_error(error, probe)
            raise error
        if probe is not None or self.breaker.failures:
            self.breaker.succeeded(probe)
        return future.result()

    def _note_error(self, error: BaseException, probe: Probe | None) -> None:
        if isinstance(error, OverloadedError) and probe is None:
            return
        if isinstance(error, StageRefusedError):
            self._log_failure(describe_error(error))
        # A refused query or setting is the caller's fault: the stage did answer.
        if isinstance(error, OverloadedError | StageRefusedError) or (
            isinstance(error, CtxguardError) and not isinstance(error, StageError)
        ):
            self.breaker.succeeded(probe)
        else:
            self._note_failure(describe_error(error), probe)

    def _note_failure(self, cause: str, probe: Probe | None) -> None:
        """Count a failure; log it if it is the first after a success."""
        if self.breaker.opens and self.breaker.is_closed:
            if not self.breaker.failures:
                self._log_failure(cause)
            self._last_cause = cause
        self.breaker.failed(probe)

    def _log_failure(self, cause: str) -> None:
        now = monotonic()
        if now >= self._fails_quietly_until:
            self._fails_quietly_until = now + _LOG_SECONDS
            _log.warning("%s failed: %s", self.name, cause)

    def _log_change(self, _: str, is_open: bool) -> None:
        if is_open:
            _log.error(
                "%s is left out until it answers again, after %d failures in a row: %s",
                self.name,
                FAILURES,
                self._last_cause,
            )
        else:
            _log.warning("%s has recovered and is in use again", self.name)

    def _give_up(self, probe: Probe | None) -> None:
        """Count an abandoned probe as failed; other abandoned calls do not count."""
        if probe is not None:
            self.breaker.failed(probe)

    def _admit(self, seconds: float | None) -> Probe | None:
        admitted = self.breaker.admit(seconds)
        if admitted is REFUSED:
            raise UnansweredError(
                self.name, FailureKind.CIRCUIT_OPEN, "circuit open after repeated failures"
            )
        return admitted

    def _full(self, message: str = "no thread is free") -> UnansweredError:
        message += f" ({self._threads.load})"
        return UnansweredError(self.name, FailureKind.SATURATED, message)


@dataclass(slots=True, eq=False)
class StageCall(Generic[_T]):
    """A call of a stage that runs on its own thread; ``_future`` is None if no thread took it."""

    _stage: Stage
    _work: Callable[[], _T]
    _future: "Future[_T] | None"
    _seconds: float | None
    _until: float | None
    _probe: Probe | None

    def result(self) -> _T:
        """Wait for the call and return its result.

        A call without a time limit runs here instead if no thread has started it yet.

        Raises:
            UnansweredError: the call is late, or no thread was free within its time limit.
        """
        future = self._future
        if future is None or (self._seconds is None and future.cancel()):
            return self._stage.call(self._work, probe=self._probe)
        with suppress(TimeoutError, CancelledError):
            future.exception(self._seconds_left())
        return self._settle(future)

    async def aresult(self) -> _T:
        """Await the `result` without blocking the event loop; to cancel this abandons the call."""
        future = self._future
        if future is None:
            self._stage._give_up(self._probe)
            raise self._stage._full()
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def wake(_: "Future[_T]") -> None:
            # The loop may have ended without waiting for this call.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_set, done)

        future.add_done_callback(wake)
        try:
            await asyncio.wait({done}, timeout=self._seconds_left())
        except asyncio.CancelledError:
            self._stage._threads.write_off(future)
            self._stage._give_up(self._probe)
            raise
        return self._settle(future)

    def _seconds_left(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - monotonic())

    def _settle(self, future: "Future[_T]") -> _T:
        stage = self._stage
        if not future.done():
            stage._threads.write_off(future)
        if future.cancelled():
            stage._give_up(self._probe)
            raise stage._full("no thread was free in time")
        return stage._settle(future, self._seconds, self._probe)


def _set(done: "asyncio.Future[None]") -> None:
    if not done.done():
        done.set_result(None)


def _cancel(task: "asyncio.Future[Any]") -> None:
    """Cancel a task without waiting, and read its outcome, so that asyncio does not warn."""
    task.cancel()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
