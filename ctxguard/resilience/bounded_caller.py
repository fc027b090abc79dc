"""Calls a wrapped retriever under a deadline and a concurrency limit.

Without a deadline a plain call runs on the caller's own thread, and from an event loop on one
of its own. ``typed`` turns the retriever's errors into the package's own.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Semaphore
from typing import Any

from ctxguard._support.checks import check_at_least, check_positive
from ctxguard._support.error_text import describe_error
from ctxguard._support.fork_safety import reset_in_children
from ctxguard.core.types import FailureKind, Ranking
from ctxguard.errors import (
    ConfigurationError,
    CtxguardError,
    FilterViolationError,
    OverloadedError,
    StageError,
    StageUnavailableError,
)
from ctxguard.resilience.breaker import Watcher
from ctxguard.resilience.stage import Stage, UnansweredError, kind_of

RETRIEVER = "retriever"

_WORKERS = 32


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of a guard's requests.

    Attributes:
        deadline_seconds: The longest that the retriever may take; None for no limit. With one, a
            plain retriever runs on a thread of the guard's own (32, or as many as its
            ``concurrency`` says), which costs 20 to 40 µs, and is not called for a while after it
            failed repeatedly. The embedded retriever has deadlines for each stage instead
            (``Deadlines``), and answers without a late one.
        max_in_flight: The most requests that may wait for the retriever at once; others are
            refused with an ``OverloadedError``.
        max_query_chars: Longer queries are refused before they are searched or sampled. It
            overrides a retriever's own limit; None leaves that one, and means 10,000 for the guard.

    Raises:
        ConfigurationError: a limit is out of range.
    """

    deadline_seconds: float | None = None
    max_in_flight: int = 10_000
    max_query_chars: int | None = None

    def __post_init__(self) -> None:
        check_positive(deadline_seconds=self.deadline_seconds)
        check_at_least(1, max_in_flight=self.max_in_flight, max_query_chars=self.max_query_chars)


DEFAULT_REQUEST_LIMITS = RequestLimits()


class BoundedCaller:
    """Calls a retriever that does not support deadlines.

    Args:
        limits: The longest call, and the most at once.
        concurrency: The most calls that are worth a thread at once. None for a retriever that
            waits for another machine; one that computes here holds up every thread beyond the
            processors, the event loop's too.
    """

    def __init__(self, limits: RequestLimits, concurrency: int | None = None) -> None:
        self._seconds = limits.deadline_seconds
        self._limit = limits.max_in_flight
        # Without a deadline, a failing retriever is called again, as without this wrapper.
        self._stage = Stage(
            RETRIEVER,
            workers=_WORKERS if concurrency is None else min(max(concurrency, 1), _WORKERS),
            spare=_WORKERS,
            waiting=self._limit,
            breaks=self._seconds is not None,
        )
        self._reset_after_fork()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        """Reset the count in a forked child: calls in flight belong to the parent."""
        self._free = Semaphore(self._limit)

    def watch(self, watcher: Watcher) -> None:
        """Call ``watcher`` when the retriever's circuit opens or closes."""
        self._stage.watch(watcher)

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a plain function and return its result, an iterator as a tuple.

        Raises:
            OverloadedError: ``max_in_flight`` requests are in flight.
            ConfigurationError: it returned an awaitable, which plain code cannot wait for.
            UnansweredError: it is late, or was not called because its circuit is open.
            Exception: any error of the function.
        """
        # As by `_in_flight`, with fewer calls on the way of every request.
        free = self._free
        if not free.acquire(blocking=False):
            raise self._overloaded()
        try:
            if self._seconds is None:
                returned = function(*args, **options)
                if isinstance(returned, Iterator):
                    returned = tuple(returned)
            else:
                work = partial(_call_and_read, function, *args, **options)
                returned = self._stage.call(work, self._seconds)
        finally:
            free.release()
        if not isinstance(returned, Ranking) and inspect.isawaitable(returned):
            if inspect.iscoroutine(returned):
                returned.close()  # or Python warns that nobody awaited it
            raise ConfigurationError("the retriever is asynchronous: await aretrieve()")
        return returned

    async def await_call(
        self, function: Callable[..., Awaitable[Any]], *args: Any, **options: Any
    ) -> Any:
        """Call an asynchronous function and return its result; errors as for `call`."""
        with self._in_flight():
            return await self._await_call(partial(function, *args, **options))

    async def call_in_thread(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a plain function on another thread and return its result; errors as for `call`.

        Awaits the result if it is an awaitable.
        """
        with self._in_flight():
            work = partial(_call_and_read, function, *args, **options)
            returned = await self._stage.submit(work, self._seconds).aresult()
            if not inspect.isawaitable(returned):
                return returned
            return await self._await_call(lambda: returned)

    async def _await_call(self, start: Callable[[], Awaitable[Any]]) -> Any:
        return await (
            start() if self._seconds is None else self._stage.await_within(start, self._seconds)
        )

    @contextmanager
    def _in_flight(self) -> Iterator[None]:
        """Count a request as in flight; errors as for `call`."""
        # Kept, so that a request that began before a fork is counted where it began.
        free = self._free
        if not free.acquire(blocking=False):
            raise self._overloaded()
        try:
            yield
        finally:
            free.release()

    def _overloaded(self) -> OverloadedError:
        return OverloadedError(
            "guard",
            f"{self._limit:,} requests are under way, the maximum (max_in_flight); try again later",
        )


def typed(error: Exception) -> CtxguardError:
    """Return the package's error for a retriever's error; its own errors stay as they are."""
    if isinstance(error, UnansweredError):
        outage = OverloadedError if error.kind is FailureKind.SATURATED else StageUnavailableError
        return outage(error.stage, error.cause)
    if isinstance(error, CtxguardError):
        return error
    return StageUnavailableError(RETRIEVER, describe_error(error))


def cause_of(error: Exception) -> str:
    """Return why a request failed, as a metric label: a `FailureKind`, or one of three more.

    >>> cause_of(ConfigurationError("no such thing")), cause_of(TimeoutError())
    ('invalid_request', 'timeout')
    """
    if isinstance(error, StageUnavailableError):
        return "unavailable"
    if isinstance(error, FilterViolationError):
        return "filter_violation"
    if isinstance(error, CtxguardError) and not isinstance(error, StageError):
        return "invalid_request"
    return kind_of(error).value


def _call_and_read(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call ``function`` and return its result, with an iterator read to its end."""
    returned = function(*args, **options)
    return tuple(returned) if isinstance(returned, Iterator) else returned
