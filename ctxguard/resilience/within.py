"""A time limit that costs nothing where nothing is waited for."""

import asyncio
from collections.abc import Awaitable, Coroutine, Generator
from functools import partial
from typing import Any, TypeVar

_T = TypeVar("_T")


class LateError(Exception):
    """A call did not end in time."""


async def within(seconds: float, call: Coroutine[Any, Any, _T]) -> _T:
    """Await a call that ends when it is cancelled, as part of the running task.

    Its first step runs before a timer is set, which takes longer than many a call that is done by
    then, such as reading a body that has arrived.

    Raises:
        LateError: it did not end in time, and was cancelled.
        Exception: whatever the call raises.
    """
    try:
        waits_for = call.send(None)
    except StopIteration as done:
        result: _T = done.value
        return result
    limit = asyncio.timeout(seconds)
    begun: Awaitable[_T] = _Begun(call, waits_for)
    try:
        async with limit:
            return await begun
    except TimeoutError:
        if limit.expired():
            raise LateError from None
        raise


class _Begun:
    """A coroutine that has begun, to be awaited by the task that began it.

    Args:
        call: The coroutine.
        waits_for: What it yielded last.
    """

    def __init__(self, call: Coroutine[Any, Any, Any], waits_for: object) -> None:
        self._call = call
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        while True:
            try:
                step = partial(self._call.send, (yield self._waits_for))
            except BaseException as error:
                step = partial(self._call.throw, error)
            try:
                self._waits_for = step()
            except StopIteration as done:
                return done.value
