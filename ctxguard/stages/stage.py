"""A stage: work that may fail, hang or give garbage, behind a pool and a breaker of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from time import monotonic
from typing import Any, Generic, TypeVar, cast

from ctxguard.errors import CtxguardError, OverloadedError, StageError, StageUnavailableError
from ctxguard.forks import start_afresh_in_children
from ctxguard.hygiene import describe_error
from ctxguard.stages.breaker import Breaker, Probe, Refused
from ctxguard.stages.pool import DaemonPool, PoolFullError
from ctxguard.types import FailureKind, StageFailure

_T = TypeVar("_T")

WORKERS = 8
WAITING = 1024
"""Calls of one stage that may wait for a thread; each waits no longer than its deadline."""

_ALLOCATION_FAILURES = ("can't allocate memory", "out of memory", "bad_alloc")


class UnansweredError(StageError):
    """A stage was not asked, or did not answer in time.

    Attributes:
        kind: Which of the two, and why.
        probe: The call that tries the stage again beside this request, where this is the
            request that began it.
    """

    def __init__(
        self, stage: str, kind: FailureKind, message: str, probe: "Pending[Any] | None" = None
    ) -> None:
        super().__init__(stage, message)
        self.kind = kind
        self.cause = message
        self.probe = probe


def kind_of(error: BaseException) -> FailureKind:
    """The label of what a stage raised.

    A `StageError` that is nothing more particular is the stage's own check of its result.

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
    """What an answer says of a stage that raised ``error``."""
    cause = error.cause if isinstance(error, UnansweredError) else describe_error(error)
    return StageFailure(stage, cause, kind_of(error))


def _is_the_stages_fault(error: BaseException) -> bool:
    """Whether ``error`` counts against the stage: a refused query or setting does not."""
    if isinstance(error, OverloadedError):
        return False
    return isinstance(error, StageError) or not isinstance(error, CtxguardError)


class Stage:
    """Calls one stage of a search, within its limits.

    Without a limit of time the call is made on the caller's own thread and costs nothing more.
    With one it is made on a thread of the stage's pool; a call that is late is left to itself.
    Errors that a call raises are raised here too.

    Where the circuit is open a call is refused at once. When it is time to try again, one
    request's call is made as a probe beside that request, which goes on without the stage.

    Args:
        name: As it is called in answers and metrics.
        workers: The most calls at once in the pool.
        waiting: The most calls that wait for a thread.
        breaks: Whether it has a circuit breaker.
    """

    def __init__(
        self, name: str, *, workers: int = WORKERS, waiting: int = WAITING, breaks: bool = True
    ) -> None:
        self.name = name
        self._pool = DaemonPool(name, workers=workers, waiting=waiting)
        self._breaker = Breaker(name) if breaks else None
        self._last_probe: Future[Any] | None = None
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Forget threads, work, failures and held locks, as a forked child must."""
        self._pool.start_afresh()
        self._last_probe = None
        if self._breaker is not None:
            self._breaker.start_afresh()

    @property
    def is_open(self) -> bool:
        """Whether calls are refused because of what earlier ones came to."""
        return self._breaker is not None and not self._breaker.is_closed()

    def watch(self, watcher: Callable[[str, bool], None]) -> None:
        """Have ``watcher`` told the stage's name, and whether its circuit is open, on change."""
        if self._breaker is not None:
            self._breaker.watch(watcher)

    def call(
        self, work: Callable[[], _T], seconds: float | None = None, *, sole: bool = False
    ) -> _T:
        """What ``work`` returns.

        Args:
            work: The call.
            seconds: Its limit; None for none.
            sole: Whether nothing else could answer: the request then waits for its probe.

        Raises:
            UnansweredError: it was refused, or late.
            Exception: what ``work`` raises.
        """
        if seconds is not None:
            return self.begin(work, seconds, sole=sole).result()
        probing = self._probing(work, None, sole)
        return self.call_directly(work) if probing is None else probing.result()

    def begin(
        self, work: Callable[[], _T], seconds: float | None = None, *, sole: bool = False
    ) -> "Pending[_T]":
        """Start ``work`` on a thread of the pool; arguments and errors as ``call``."""
        if seconds is not None and seconds <= 0.0:
            raise self._too_late()
        probing = self._probing(work, seconds, sole)
        return self._submitted(work, seconds, None) if probing is None else probing

    def insist(self, work: Callable[[], _T], seconds: float | None = None) -> _T:
        """``call`` whatever the circuit says, where otherwise there would be no answer at all.

        A stage that answers is closed again at once: load may have opened it.
        """
        if seconds is None:
            result = self.call_directly(work)
        elif seconds <= 0.0:
            raise self._too_late()
        else:
            result = self._submitted(work, seconds, None).result()
        if self._breaker is not None:
            self._breaker.recovered()
        return result

    async def attend(self, start: Callable[[], Awaitable[_T]], seconds: float) -> _T:
        """What an asynchronous call gives; as ``call`` of a sole stage, without a pool.

        A call that is late is cancelled, and not waited for if it will not end.
        """
        probe = self._permit(seconds)
        task = asyncio.ensure_future(start())
        try:
            await asyncio.wait({task}, timeout=seconds)
        except asyncio.CancelledError:
            _cancel(task)
            if probe is not None:
                self.failed(probe)
            raise
        if not task.done():
            _cancel(task)
            self.failed(probe)
            raise self.late(seconds)
        return self.settled(task, probe)

    def call_directly(self, work: Callable[[], _T]) -> _T:
        """What ``work`` returns on the caller's thread, noted for the breaker."""
        try:
            result = work()
        except Exception as error:
            self.raised(error, None)
            raise
        self.succeeded(None)
        return result

    def settled(self, future: "Future[_T] | asyncio.Future[_T]", probe: Probe | None) -> _T:
        """What a finished call came to, noted for the breaker."""
        error = future.exception()
        if error is not None:
            self.raised(error, probe)
            raise error
        self.succeeded(probe)
        return future.result()

    def raised(self, error: BaseException, probe: Probe | None) -> None:
        """Note what a call raised."""
        if isinstance(error, OverloadedError) and probe is None:
            return
        if _is_the_stages_fault(error):
            self.failed(probe)
        else:
            self.succeeded(probe)

    def succeeded(self, probe: Probe | None) -> None:
        """Note that a call answered."""
        if self._breaker is not None:
            self._breaker.succeeded(probe)

    def failed(self, probe: Probe | None) -> None:
        """Note that a call did not."""
        if self._breaker is not None:
            self._breaker.failed(probe)

    def late(self, seconds: float) -> UnansweredError:
        """The error of a call that took longer than it may."""
        return UnansweredError(
            self.name, FailureKind.TIMEOUT, f"no answer within {seconds * 1e3:.0f} ms"
        )

    def _too_late(self) -> UnansweredError:
        return UnansweredError(
            self.name, FailureKind.TIMEOUT, "no time was left when its turn came"
        )

    def full(self, message: str) -> UnansweredError:
        """The error of a call that no thread took up."""
        return UnansweredError(self.name, FailureKind.SATURATED, message)

    def write_off(self, future: "Future[Any]") -> bool:
        """Give up a call; whether a thread had begun with it."""
        return self._pool.write_off(future)

    def _permit(self, seconds: float | None) -> Probe | None:
        """None while the circuit is closed, or leave to try the stage again.

        Raises:
            UnansweredError: neither.
        """
        admitted = None if self._breaker is None else self._breaker.admit(seconds)
        if isinstance(admitted, Refused):
            raise UnansweredError(
                self.name, FailureKind.CIRCUIT_OPEN, "circuit open after repeated failures"
            )
        return admitted

    def _probing(
        self, work: Callable[[], _T], seconds: float | None, sole: bool
    ) -> "Pending[_T] | None":
        """None where the call is to be made as usual; a sole stage's probe."""
        probe = self._permit(seconds)
        if probe is None:
            return None
        if self._last_probe is not None:
            # Hung, or it would have been settled; its thread may be replaced.
            self._pool.write_off(self._last_probe)
        pending = self._submitted(work, seconds, probe)
        self._last_probe = pending.settle_when_done()
        if sole:
            return pending
        raise UnansweredError(
            self.name, FailureKind.CIRCUIT_OPEN, "circuit open; being tried again", pending
        )

    def _submitted(
        self, work: Callable[[], _T], seconds: float | None, probe: Probe | None
    ) -> "Pending[_T]":
        future: Future[_T] | None
        try:
            future = self._pool.submit(partial(copy_context().run, work))
        except PoolFullError:
            if probe is not None:
                self.failed(probe)
            if probe is not None or seconds is not None:
                raise self.full("no thread is free, and as many calls wait as may") from None
            future = None
        return Pending(self, work, future, seconds, probe)


class Pending(Generic[_T]):
    """A call that a thread of a stage's pool works on."""

    __slots__ = ("_future", "_probe", "_seconds", "_stage", "_until", "_work")

    def __init__(
        self,
        stage: Stage,
        work: Callable[[], _T],
        future: "Future[_T] | None",
        seconds: float | None,
        probe: Probe | None,
    ) -> None:
        self._stage = stage
        self._work = work
        self._future = future
        self._seconds = seconds
        self._until = None if seconds is None else monotonic() + seconds
        self._probe = probe

    def result(self) -> _T:
        """What the call returns; it is made here where it has no limit and no thread took it up.

        Raises:
            UnansweredError: it is late, or waited for a thread until then.
            Exception: what the call raises.
        """
        future = self._future
        if future is None or (self._seconds is None and self._probe is None and future.cancel()):
            return self._stage.call_directly(self._work)
        with suppress(TimeoutError, CancelledError):
            future.exception(self._left())
        return self._settled(future)

    async def aresult(self) -> _T:
        """``result`` without blocking the event loop; cancelling it gives the call up."""
        future = self._future
        if future is None:
            raise self._stage.full("no thread is free, and as many calls wait as may")
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def wake(_: "Future[_T]") -> None:
            # The loop may have ended without waiting for this call.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_set, done)

        future.add_done_callback(wake)
        try:
            if self._seconds is None:
                await done
            else:
                await asyncio.wait({done}, timeout=self._left())
        except asyncio.CancelledError:
            self._stage.write_off(future)
            raise
        return self._settled(future)

    def settle_when_done(self) -> "Future[_T] | None":
        """Note the outcome for the breaker although nobody may wait for it; the call."""
        if self._future is not None:
            self._future.add_done_callback(self._note)
        return self._future

    def _left(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - monotonic())

    def _note(self, future: "Future[_T]") -> None:
        late = self._until is not None and monotonic() > self._until
        if late or future.cancelled():
            self._stage.failed(self._probe)
        elif (error := future.exception()) is not None:
            self._stage.raised(error, self._probe)
        else:
            self._stage.succeeded(self._probe)

    def _settled(self, future: "Future[_T]") -> _T:
        if not future.done():
            begun = self._stage.write_off(future)
            if not future.done():
                self._stage.failed(self._probe)
                raise self._stage.late(cast(float, self._seconds))
            if not begun:
                raise self._stage.full("no thread was free in time")
        if future.cancelled():
            raise self._stage.full("given up before a thread took it up")
        return self._stage.settled(future, self._probe)


def _set(done: "asyncio.Future[None]") -> None:
    if not done.done():
        done.set_result(None)


def _cancel(task: "asyncio.Future[Any]") -> None:
    """Cancel without waiting, and read what it ends with, so that asyncio does not complain."""
    task.cancel()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
