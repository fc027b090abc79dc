"""A stage: where its calls run, what becomes of late and failed ones, and how it recovers."""

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar

import pytest

from ctxguard.core.types import FailureKind
from ctxguard.errors import OverloadedError, QueryError, StageError, StageUnavailableError
from ctxguard.resilience import Stage, UnansweredError, failure_of
from ctxguard.resilience import breaker as breaker_module
from ctxguard.resilience.breaker import FAILURES, MAX_RETRY_SECONDS, RETRY_SECONDS
from tests.timing import NEVER, PATIENCE_SECONDS, SOON, Clock, until


def fail() -> None:
    raise OSError("down")


def opened_stage() -> Stage:
    stage = Stage("dense")
    for _ in range(FAILURES):
        with pytest.raises(OSError, match="down"):
            stage.call(fail)
    return stage


def test_without_a_limit_the_call_is_made_on_the_callers_thread() -> None:
    assert Stage("dense").call(threading.current_thread) is threading.current_thread()


def test_with_a_limit_on_another_that_sees_the_callers_context() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    variable.set("set")
    thread, value = Stage("dense").call(lambda: (threading.current_thread(), variable.get()), NEVER)
    assert thread is not threading.current_thread()
    assert value == "set"


def test_a_late_call_is_left_to_itself(hang: Callable[[], None]) -> None:
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
def test_what_a_call_raises_is_raised_as_it_is(error: Exception, seconds: float | None) -> None:
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


def test_a_refused_query_says_nothing_against_the_stage() -> None:
    stage = Stage("dense")

    def refuse() -> None:
        raise QueryError("empty")

    for _ in range(2 * FAILURES):
        with pytest.raises(QueryError):
            stage.call(refuse)
    assert not stage.is_open


@pytest.mark.parametrize("seconds", [None, NEVER])
def test_a_stage_that_recovers_is_found_out_beside_a_request_that_goes_on_without_it(
    seconds: float | None, clock: Clock
) -> None:
    stage = opened_stage()
    clock.now += RETRY_SECONDS + 0.01
    begin = threading.Event()
    with pytest.raises(UnansweredError, match="being tried again") as caught:
        stage.call(lambda: begin.wait(NEVER), seconds)
    assert stage.is_open
    begin.set()
    assert caught.value.probe is not None
    assert caught.value.probe.result()
    assert not stage.is_open
    assert stage.call(lambda: "as usual", seconds) == "as usual"


@pytest.mark.parametrize("seconds", [None, NEVER])
def test_where_nothing_else_could_answer_the_request_waits_for_its_probe(
    seconds: float | None, clock: Clock
) -> None:
    stage = opened_stage()
    clock.now += RETRY_SECONDS + 0.01
    assert stage.call(lambda: "back", seconds, is_only_stage=True) == "back"
    assert not stage.is_open


def test_hung_probes_do_not_use_up_the_threads_that_a_recovery_needs(clock: Clock) -> None:
    stage, over = Stage("dense", workers=2), threading.Event()
    for _ in range(FAILURES):
        with pytest.raises(OSError, match="down"):
            stage.call(fail, NEVER)
    for _ in range(3):
        clock.now += MAX_RETRY_SECONDS
        with pytest.raises(UnansweredError):
            stage.call(lambda: over.wait(NEVER), SOON)
        clock.now += SOON
        with pytest.raises(UnansweredError):
            stage.call(pytest.fail, SOON)
    clock.now += MAX_RETRY_SECONDS
    assert stage.call(lambda: "back", NEVER, is_only_stage=True) == "back"
    assert stage.call(lambda: "as usual", NEVER) == "as usual"
    over.set()


def test_a_full_pool_refuses_and_that_opens_no_circuit(hang: Callable[[], None]) -> None:
    stage = Stage("dense", workers=1, waiting=1)
    begun = threading.Event()
    stage.submit(lambda: (begun.set(), hang()))
    assert begun.wait(NEVER)
    stage.submit(hang)
    for _ in range(2 * FAILURES):
        with pytest.raises(UnansweredError) as caught:
            stage.submit(hang, NEVER)
        assert caught.value.kind is FailureKind.SATURATED
    assert not stage.is_open


def test_a_call_that_no_thread_took_up_in_time_is_saturation(hang: Callable[[], None]) -> None:
    stage, begun = Stage("dense", workers=1), threading.Event()
    stage.submit(lambda: (begun.set(), hang()))
    assert begun.wait(NEVER)
    with pytest.raises(UnansweredError, match="no thread was free") as caught:
        stage.call(pytest.fail, SOON)
    assert caught.value.kind is FailureKind.SATURATED


def test_a_call_without_a_limit_is_made_by_the_caller_where_no_thread_took_it_up(
    hang: Callable[[], None],
) -> None:
    stage, begun = Stage("dense", workers=1), threading.Event()
    stage.submit(lambda: (begun.set(), hang()))
    assert begun.wait(NEVER)
    assert stage.submit(threading.current_thread).result() is threading.current_thread()


def test_calls_are_not_made_one_at_a_time() -> None:
    stage = Stage("dense")
    together = threading.Barrier(4)
    pending = [stage.submit(lambda: together.wait(NEVER), NEVER) for _ in range(3)]
    together.wait(NEVER)
    assert {each.result() for each in pending} <= {0, 1, 2, 3}


def test_giving_up_an_awaited_call_leaves_the_event_loop_free(hang: Callable[[], None]) -> None:
    async def main() -> None:
        waiting = asyncio.create_task(Stage("dense").submit(hang).aresult())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())


def idle_threads(stage: Stage) -> list[threading.Thread]:
    name = f"ctxguard-{stage.name}-probes"
    return [thread for thread in threading.enumerate() if thread.name == name]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make breakers try again soon."""
    monkeypatch.setattr(breaker_module, "RETRY_SECONDS", SOON)
    monkeypatch.setattr(breaker_module, "MAX_RETRY_SECONDS", SOON)


class Unsteady:
    """A call that fails until it is mended."""

    def __init__(self) -> None:
        self.is_down, self.calls = True, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.is_down:
            raise OSError("down")
        return "up"


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("seconds", [None, NEVER])
def test_a_stage_recovers_while_nobody_asks(seconds: float | None) -> None:
    stage, work = Stage("idle"), Unsteady()
    for _ in range(FAILURES):
        with pytest.raises(OSError, match="down"):
            stage.call(work, seconds)
    until(lambda: work.calls > FAILURES + 2, "a probe of no request")
    assert stage.is_open
    work.is_down = False
    until(lambda: not stage.is_open, "the recovery")
    until(lambda: not idle_threads(stage), "the end of the thread")


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("call", [Stage.await_within, Stage.await_ending])
def test_an_awaited_stage_recovers_on_its_own_loop_while_nobody_asks(
    call: Callable[..., Awaitable[str]],
) -> None:
    stage, work, loops = Stage("idle"), Unsteady(), set()

    async def on_loop() -> str:
        loops.add(asyncio.get_running_loop())
        return work()

    async def serve() -> None:
        for _ in range(FAILURES):
            with pytest.raises(OSError, match="down"):
                await call(stage, on_loop, NEVER)
        work.is_down = False
        await asyncio.to_thread(until, lambda: not stage.is_open, "the recovery")

    asyncio.run(serve())
    assert len(loops) == 1


@pytest.mark.usefixtures("hasty")
def test_the_probes_of_a_stage_end_with_it() -> None:
    stage, work = Stage("idle"), Unsteady()
    for _ in range(FAILURES):
        with pytest.raises(OSError, match="down"):
            stage.call(work)
    threads = idle_threads(stage)
    assert threads
    del stage
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def test_a_requests_own_probe_comes_before_one_of_no_request(clock: Clock) -> None:
    stage = opened_stage()
    assert stage.breaker.seconds_to_idle_probe > RETRY_SECONDS


@pytest.mark.usefixtures("hasty")
def test_a_stage_says_once_that_it_fails_is_left_out_and_has_recovered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage, work = Stage("idle"), Unsteady()
    for _ in range(4 * FAILURES):
        with suppress(OSError, UnansweredError):
            stage.call(work)
    until(lambda: work.calls > FAILURES + 2, "a probe of no request")
    work.is_down = False
    until(lambda: not stage.is_open, "the recovery")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0].split(",")[0] for line in lines] == [
        "idle failed",
        "idle is left out after 3 failures in a row",
        "idle has recovered and is in use again",
    ]


def test_a_stage_that_fails_now_and_then_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage("idle")
    for _ in range(10):
        with pytest.raises(OSError, match="down"):
            stage.call(fail)
        stage.call(bool)
    assert len(caplog.records) == 1


def test_a_call_that_ends_when_cancelled_is_awaited_in_the_running_task() -> None:
    stage, ended = Stage("rerank"), list[str]()

    async def own_task() -> bool:
        await asyncio.sleep(0.0)
        return asyncio.current_task() is task

    async def failing() -> None:
        raise TimeoutError("its own")

    async def late() -> None:
        try:
            await asyncio.sleep(NEVER)
        finally:
            ended.append("cancelled")

    async def main() -> None:
        nonlocal task
        task = asyncio.current_task()
        assert await stage.await_ending(own_task, NEVER)
        with pytest.raises(TimeoutError, match="its own"):
            await stage.await_ending(failing, NEVER)
        with pytest.raises(UnansweredError, match="no answer within 50 ms"):
            await stage.await_ending(late, SOON)

    task: object = None
    asyncio.run(main())
    assert ended == ["cancelled"]
