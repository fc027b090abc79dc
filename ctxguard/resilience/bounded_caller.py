"""Calls a wrapped retriever under a deadline and a concurrency limit.

Without a deadline a plain call runs on the caller's own thread, and from an event loop on another.
Calls the retriever, and runs threads.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterator
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
    """Calls a retriever that has no deadlines of its own.

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
        self.watch = self._stage.watch
        self._reset_after_fork()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        # Calls in flight belong to the parent.
        self._free = Semaphore(self._limit)

    async def call(
        self,
        function: Callable[..., Any],
        afunction: Callable[..., Awaitable[Any]] | None,
        query: str,
        *,
        blocks: bool,
        **options: Any,
    ) -> Any:
        """Call a retriever and return its result; an iterator becomes a tuple.

        Its asynchronous call is preferred, and what the other one returns awaited, unless the call
        ``blocks``: then it never waits for an event loop, for plain callers.

        Raises:
            OverloadedError: ``max_in_flight`` requests are in flight.
            ConfigurationError: it returned an awaitable, which plain code cannot wait for.
            UnansweredError: it is late, or was not called because its circuit is open.
        """
        # Kept, so that a request that began before a fork is counted where it began.
        free, seconds = self._free, self._seconds
        if not free.acquire(blocking=False):
            raise OverloadedError(
                "guard",
                f"{self._limit:,} requests are in progress, the maximum (max_in_flight); try "
                "again later",
            )
        try:
            if afunction is not None and not blocks:
                return await self._awaited(partial(afunction, query, **options))
            if not blocks:
                work = partial(_call_and_read, function, query, **options)
                returned = await self._stage.submit(work, seconds).aresult()
            elif seconds is not None:
                work = partial(_call_and_read, function, query, **options)
                returned = self._stage.call(work, seconds)
            else:
                returned = function(query, **options)
                if isinstance(returned, Iterator):
                    returned = tuple(returned)
            if isinstance(returned, Ranking) or not inspect.isawaitable(returned):
                return returned
            if not blocks:
                return await self._awaited(lambda: returned)
        finally:
            free.release()
        if inspect.iscoroutine(returned):
            returned.close()  # or Python warns that nobody awaited it
        raise ConfigurationError("the retriever is asynchronous: await aretrieve()")

    async def _awaited(self, start: Callable[[], Awaitable[Any]]) -> Any:
        return await (
            start() if self._seconds is None else self._stage.await_within(start, self._seconds)
        )


def typed(error: Exception) -> CtxguardError:
    """Convert a retriever's error to one of ctxguard's; return ctxguard's own errors unchanged."""
    if isinstance(error, UnansweredError):
        outage = OverloadedError if error.kind is FailureKind.SATURATED else StageUnavailableError
        return outage(error.stage, error.cause)
    if isinstance(error, CtxguardError):
        return error
    return StageUnavailableError(RETRIEVER, describe_error(error))


def cause_of(error: Exception) -> str:
    """Return why a request failed, as a metric label: a `FailureKind` or one of three others."""
    if isinstance(error, StageUnavailableError):
        return "unavailable"
    if isinstance(error, FilterViolationError):
        return "filter_violation"
    if isinstance(error, CtxguardError) and not isinstance(error, StageError):
        return "invalid_request"
    return kind_of(error).value


def _call_and_read(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    returned = function(*args, **options)
    return tuple(returned) if isinstance(returned, Iterator) else returned
