"""Asking a retriever that knows nothing of deadlines: in time, so many requests at once.

Without a deadline a plain call is made on the caller's own thread, and from an event loop on a
thread of the pool. What a retriever raises becomes one of the package's own errors.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from threading import Lock
from typing import Any

from ctxguard.errors import (
    ConfigurationError,
    CtxguardError,
    FilterViolationError,
    OverloadedError,
    StageError,
    StageUnavailableError,
)
from ctxguard.forks import start_afresh_in_children
from ctxguard.hygiene import describe_error
from ctxguard.stages.breaker import Watcher
from ctxguard.stages.deadlines import check_seconds
from ctxguard.stages.stage import Stage, UnansweredError, kind_of
from ctxguard.types import FailureKind

DEFAULT_MAX_IN_FLIGHT = 10_000
RETRIEVER = "retriever"

_WORKERS = 32


class Asking:
    """How a guard asks its retriever.

    Args:
        deadline_seconds: How long an answer may take; None for as long as it takes.
        max_in_flight: The most requests under way at once.

    Raises:
        ConfigurationError: one of them is out of range.
    """

    def __init__(self, deadline_seconds: float | None, max_in_flight: int) -> None:
        check_seconds("deadline_seconds", deadline_seconds)
        if max_in_flight < 1:
            raise ConfigurationError(f"max_in_flight {max_in_flight!r} must be at least 1")
        self._seconds = deadline_seconds
        self._limit = max_in_flight
        # Without a deadline a retriever that fails is asked again, as it would be by itself.
        self._stage = Stage(
            RETRIEVER,
            workers=_WORKERS,
            waiting=max_in_flight,
            breaks=deadline_seconds is not None,
        )
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Forget the requests under way, as a forked child must: they are its parent's."""
        self._lock = Lock()
        self._in_flight = 0

    def enter(self) -> None:
        """Begin a request, to be ended with `leave`.

        Raises:
            OverloadedError: as many are under way as may.
        """
        with self._lock:
            if self._in_flight < self._limit:
                self._in_flight += 1
                return
        raise OverloadedError(
            "guard",
            f"{self._limit:,} requests are under way, the most that may be (max_in_flight); ask "
            "again later",
        )

    def leave(self) -> None:
        """End a request that began."""
        with self._lock:
            self._in_flight -= 1

    def watch(self, watcher: Watcher) -> None:
        """Have ``watcher`` told when the retriever's circuit opens or closes."""
        self._stage.watch(watcher)

    def ask(self, call: Callable[[], Any]) -> Any:
        """What ``call`` returns.

        Raises:
            ConfigurationError: an awaitable, which plain code cannot wait for.
            UnansweredError: it is late, or was not asked.
            Exception: what ``call`` raises.
        """
        seconds = self._seconds
        if seconds is None:
            returned = call()
        else:
            returned = self._stage.call(partial(_read, call), seconds, sole=True)
        if inspect.isawaitable(returned):
            if inspect.iscoroutine(returned):
                returned.close()  # or Python warns that nobody awaited it
            raise ConfigurationError("the retriever is asynchronous: await aretrieve()")
        return returned

    async def ask_natively(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """What an asynchronous ``call`` gives; errors as ``ask``."""
        return await (call() if self._seconds is None else self._stage.attend(call, self._seconds))

    async def ask_aside(self, call: Callable[[], Any]) -> Any:
        """What a plain ``call`` returns, made on another thread; errors as ``ask``.

        Where it returns an awaitable, what that gives.
        """
        pending = self._stage.begin(partial(_read, call), self._seconds, sole=True)
        returned = await pending.aresult()
        if not inspect.isawaitable(returned):
            return returned
        return await self.ask_natively(lambda: returned)


def typed(error: Exception) -> CtxguardError:
    """The package's error for what a retriever raised; its own stay as they are."""
    if isinstance(error, UnansweredError):
        outage = OverloadedError if error.kind is FailureKind.SATURATED else StageUnavailableError
        return outage(error.stage, error.cause)
    if isinstance(error, CtxguardError):
        return error
    return StageUnavailableError(RETRIEVER, describe_error(error))


def cause_of(error: Exception) -> str:
    """Why a request failed, as a label: a `FailureKind`, or one of three more.

    >>> cause_of(ConfigurationError("no such thing")), cause_of(TimeoutError())
    ('refused', 'timeout')
    """
    if isinstance(error, StageUnavailableError):
        return "unavailable"
    if isinstance(error, FilterViolationError):
        return "filter_violation"
    if isinstance(error, CtxguardError) and not isinstance(error, StageError):
        return "refused"
    return kind_of(error).value


def _read(call: Callable[[], Any]) -> Any:
    """What ``call`` returns, with what it would give one by one read to the end."""
    returned = call()
    return tuple(returned) if isinstance(returned, Iterator) else returned
