"""A time limit on a call that the running task awaits itself."""

import asyncio

import pytest

from ctxguard.resilience.within import LateError, within
from tests.timing import NEVER, SOON


async def answered_at_once() -> int:
    return 1


async def answered_later() -> int:
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.001)
    return 2


async def task_of() -> object:
    async with asyncio.timeout(NEVER):
        await asyncio.sleep(0.0)
        return asyncio.current_task()


async def failing() -> None:
    await asyncio.sleep(0.0)
    raise TimeoutError("its own")


def test_a_call_answers_as_if_it_were_awaited() -> None:
    assert asyncio.run(within(NEVER, answered_at_once())) == 1
    assert asyncio.run(within(NEVER, answered_later())) == 2
    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(within(NEVER, failing()))


def test_a_call_stays_in_the_task_that_awaits_it() -> None:
    async def both() -> bool:
        return await within(NEVER, task_of()) is asyncio.current_task()

    assert asyncio.run(both())


def test_a_late_call_is_cancelled() -> None:
    ended: list[str] = []

    async def late() -> None:
        try:
            await asyncio.sleep(NEVER)
        finally:
            ended.append("cancelled")

    with pytest.raises(LateError):
        asyncio.run(within(SOON, late()))
    assert ended == ["cancelled"]


def test_cancelling_the_caller_cancels_the_call() -> None:
    async def cancelled() -> None:
        task = asyncio.ensure_future(within(NEVER, answered_after(NEVER)))
        await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


async def answered_after(seconds: float) -> None:
    await asyncio.sleep(seconds)
