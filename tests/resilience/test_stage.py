"""A stage: where its calls run, what becomes of late and failed ones, and how it recovers."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import pytest

from ctxguard.core.types import FailureKind
from ctxguard.errors import OverloadedError, QueryError, StageError, StageUnavailableError
from ctxguard.resilience.breaker import FAILURES, MAX_RETRY_SECONDS, RETRY_SECONDS
from ctxguard.resilience.stage import Stage, UnansweredError, failure_of
from tests.timing import NEVER, SOON, Clock


def fail() -> None:
    raise OSError("down")


class Unsteady:
    """A call that fails until it is mended."""

    def __init__(self) -> None:
        self.is_down, self.calls = True, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.is_down:
            raise OSError("down")
        return "up"


def opened_stage() -> Stage:
    stage = Stage("dense")
    for _ in range(FAILURES):
        with pytest.raises(OSError, match="down"):
            stage.call(fail)
    return stage


def test_without_limit_callers_thread_calls() -> None:
    assert Stage("dense").call(threading.current_thread) is threading.current_thread()


def test_with_limit_context_crosses_threads() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    variable.set("set")
    thread, value = Stage("dense").call(lambda: (threading.current_thread(), variable.get()), NEVER)
    assert thread is not threading.current_thread()
    assert value == "set"


def test_late_call_is_left_alone(hang: Callable[[], None]) -> None:
    with pytest.raises(UnansweredError, match="no answer within 50 ms") as caught:
        Stage("dense").call(hang, SOON)
    assert failure_of("dense", caught.value).kind is FailureKind.TIMEOUT


def test_no_time_left_is_no_call() -> None:
    with pytest.raises(UnansweredError, match="no time was left"):
        Stage("dense").call(pytest.fail, -0.001)


@pytest.mark.parametrize("seconds", [None, NEVER])
@pytest.mark.parametrize(
    "error", [OSError("down"), TimeoutError("its own"), StopIteration(), MemoryError()]
)
def test_calls_error_is_raised_unchanged(error: Exception, seconds: float | None) -> None:
    def call() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        Stage("dense").call(call, seconds)
    assert caught.value is error

    async def awaited() -> None:
        await Stage("dense").submit(call, seconds).aresult()

    coroutine = awaited()
    with pytest.raises((type(error), RuntimeError)):
        asyncio.run(coroutine)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError("down"), FailureKind.ERROR),
        (TimeoutError("its own client's"), FailureKind.TIMEOUT),
        (StageError("dense", "gave NaN"), FailureKind.GARBAGE),
        (MemoryError(), FailureKind.OUT_OF_MEMORY),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            FailureKind.OUT_OF_MEMORY,
        ),
        (OverloadedError("dense", "later"), FailureKind.SATURATED),
        (StageUnavailableError("dense", "gone"), FailureKind.ERROR),
    ],
)
def test_every_error_has_one_label(error: Exception, kind: FailureKind) -> None:
    assert failure_of("dense", error).kind is kind


def test_refused_query_spares_the_stage() -> None:
    stage = Stage("dense")

    def refuse() -> None:
        raise QueryError("empty")

    for _ in range(2 * FAILURES):
        with pytest.raises(QueryError):
            stage.call(refuse)
    assert not stage.is_open


@pytest.mark.parametrize("seconds", [None, NEVER])
def test_retry_of_open_stage_answers(seconds: float | None, clock: Clock) -> None:
    """One call tries an open stage again and is answered by it."""
    stage = opened_stage()
    with pytest.raises(UnansweredError, match="circuit open") as caught:
        stage.call(pytest.fail, seconds)
    assert caught.value.kind is FailureKind.CIRCUIT_OPEN
    clock.now += RETRY_SECONDS + 0.01
    begun, over = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        probe = threads.submit(stage.call, lambda: (begun.set(), over.wait(NEVER)), seconds)
        assert begun.wait(NEVER)
        with pytest.raises(UnansweredError, match="circuit open"):
            stage.call(pytest.fail, seconds)
        over.set()
        assert probe.result(NEVER)
    assert not stage.is_open
    assert stage.call(lambda: "as usual", seconds) == "as usual"


AWAITED = pytest.mark.parametrize("call", [Stage.await_within, Stage.await_ending])


@AWAITED
@pytest.mark.parametrize("seconds", [None, NEVER])
def test_awaited_stage_retries_alike(
    call: Callable[..., Awaitable[str]], seconds: float | None, clock: Clock
) -> None:
    stage, work = Stage("rerank"), Unsteady()

    async def asked() -> str:
        return work()

    async def main() -> None:
        for _ in range(FAILURES):
            with pytest.raises(OSError, match="down"):
                await call(stage, asked, seconds)
        with pytest.raises(UnansweredError, match="circuit open"):
            await call(stage, asked, seconds)
        work.is_down = False
        clock.now += RETRY_SECONDS + 0.01
        assert await call(stage, asked, seconds) == "up"

    asyncio.run(main())
    assert not stage.is_open


@pytest.mark.parametrize("call", [None, Stage.await_within, Stage.await_ending])
def test_cancelled_probe_leaves_another_try(
    call: Callable[..., Any] | None, clock: Clock, hang: Callable[[], None]
) -> None:
    """A probe that is cancelled leaves the stage open and another may try."""
    stage = opened_stage()
    clock.now += RETRY_SECONDS + 0.01

    async def main() -> None:
        waited = (
            stage.submit(hang, NEVER).aresult()
            if call is None
            else call(stage, asyncio.Event().wait, NEVER)
        )
        probe = asyncio.create_task(waited)
        await asyncio.sleep(0)
        probe.cancel()
        with pytest.raises(asyncio.CancelledError):
            await probe

    asyncio.run(main())
    assert stage.is_open
    clock.now += MAX_RETRY_SECONDS
    assert stage.call(lambda: "back", NEVER) == "back"


def test_hung_probes_leave_threads_for_recovery(clock: Clock) -> None:
    """Hung probes do not use up the threads that a recovery needs."""
    stage, over = Stage("dense", workers=2), threading.Event()
    for _ in range(FAILURES):
        with pytest.raises(OSError, match="down"):
            stage.call(fail, NEVER)
    for _ in range(3):
        clock.now += MAX_RETRY_SECONDS
        with pytest.raises(UnansweredError, match="no answer within 50 ms"):
            stage.call(lambda: over.wait(NEVER), SOON)
        with pytest.raises(UnansweredError, match="circuit open"):
            stage.call(pytest.fail, SOON)
    clock.now += MAX_RETRY_SECONDS
    assert stage.call(lambda: "back", NEVER) == "back"
    assert stage.call(lambda: "as usual", NEVER) == "as usual"
    over.set()


@pytest.fixture
def taken(hang: Callable[[], None]) -> Stage:
    """A stage whose only thread is taken, and for which one call may wait."""
    stage, begun = Stage("dense", workers=1, waiting=1), threading.Event()
    stage.submit(lambda: (begun.set(), hang()))
    assert begun.wait(NEVER)
    return stage


def test_full_queue_opens_no_circuit(taken: Stage, hang: Callable[[], None]) -> None:
    taken.submit(hang)
    for _ in range(2 * FAILURES):
        with pytest.raises(UnansweredError) as caught:
            taken.submit(hang, NEVER)
        assert caught.value.kind is FailureKind.SATURATED
    assert not taken.is_open


def test_untaken_call_is_saturation(taken: Stage) -> None:
    with pytest.raises(UnansweredError, match="no thread was free") as caught:
        taken.call(pytest.fail, SOON)
    assert caught.value.kind is FailureKind.SATURATED


def test_limitless_call_falls_to_caller(taken: Stage) -> None:
    """A call without a limit is made by the caller where no thread took it up."""
    assert taken.submit(threading.current_thread).result() is threading.current_thread()


def test_calls_run_side_by_side() -> None:
    stage = Stage("dense")
    together = threading.Barrier(4)
    pending = [stage.submit(lambda: together.wait(NEVER), NEVER) for _ in range(3)]
    together.wait(NEVER)
    assert {each.result() for each in pending} <= {0, 1, 2, 3}


def test_stage_announces_each_change_once(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    """A stage says once that it fails is left out and has recovered."""
    stage, work = Stage("idle"), Unsteady()
    for _ in range(4 * FAILURES):
        with suppress(OSError, UnansweredError):
            stage.call(work)
        clock.now += RETRY_SECONDS
    work.is_down = False
    clock.now += MAX_RETRY_SECONDS
    assert stage.call(work) == "up"
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == [
        "idle failed",
        "idle is left out until it answers again, after 3 failures in a row",
        "idle has recovered and is in use again",
    ]


def test_flaky_stage_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """A stage that fails now and then stays in use and does not fill the log."""
    stage = Stage("idle")
    for _ in range(10):
        with pytest.raises(OSError, match="down"):
            stage.call(fail)
        stage.call(bool)
    assert (len(caplog.records), stage.is_open) == (1, False)


@AWAITED
def test_late_awaited_call_is_cancelled(call: Callable[..., Awaitable[None]]) -> None:
    """An awaited call that is late is cancelled and its own errors are its own."""
    stage, ended = Stage("rerank"), list[str]()

    async def failing() -> None:
        raise TimeoutError("its own")

    async def late() -> None:
        try:
            await asyncio.sleep(NEVER)
        finally:
            ended.append("cancelled")

    async def main() -> None:
        with pytest.raises(TimeoutError, match="its own"):
            await call(stage, failing, NEVER)
        with pytest.raises(UnansweredError, match="no answer within 50 ms"):
            await call(stage, late, SOON)

    asyncio.run(main())
    assert ended == ["cancelled"]


def test_ending_on_cancel_is_awaited() -> None:
    """A call that ends when cancelled is awaited in the running task."""

    async def main() -> None:
        async def own_task() -> object:
            return asyncio.current_task()

        assert await Stage("rerank").await_ending(own_task, NEVER) is asyncio.current_task()

    asyncio.run(main())
