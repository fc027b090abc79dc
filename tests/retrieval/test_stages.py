"""Stages that fail, hang or give garbage: what is left answers, and nothing waits for long."""

import asyncio
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo

import numpy as np
import pybreaker
import pytest

from ctxguard.errors import (
    ConfigurationError,
    OverloadedError,
    QueryError,
    StageError,
    StageUnavailableError,
)
from ctxguard.retrieval import HybridRetriever
from ctxguard.retrieval.lexical import Bm25sIndex
from ctxguard.retrieval.protocols import Float32Array
from ctxguard.stages import Deadlines, Stage, UnansweredError, failure_of
from ctxguard.stages import breaker as breaker_module
from ctxguard.stages.breaker import FAILURES, MAX_RETRY_SECONDS, RETRY_SECONDS, Breaker, Refused
from ctxguard.stages.pool import DaemonPool, PoolFullError
from ctxguard.testing import WordHashEmbedder
from ctxguard.types import FailureKind, FloatArray, Passage, Route

QUERY = "deserialize a JSON string"
SOON = 0.05
NEVER = 600.0


class Clock:
    """The breaker's monotonic clock, set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(breaker_module, "monotonic", clock)
    return clock


@pytest.fixture
def hang() -> Iterator[Callable[[], None]]:
    """A call that does not return before the test is over."""
    over = threading.Event()

    def call() -> None:
        over.wait(NEVER)

    yield call
    over.set()


class TestPool:
    def test_work_runs_on_threads_that_do_not_keep_a_process_alive(self) -> None:
        pool = DaemonPool("test", workers=1, waiting=1)
        thread = pool.submit(threading.current_thread).result(NEVER)
        assert thread.daemon
        assert thread is not threading.current_thread()

    def test_no_more_calls_run_at_once_than_there_are_workers(self) -> None:
        pool = DaemonPool("test", workers=3, waiting=100)
        running = itertools.count()
        most, lock, now = 0, threading.Lock(), 0

        def call() -> None:
            nonlocal most, now
            with lock:
                now += 1
                most = max(most, now)
            next(running)
            with lock:
                now -= 1

        for future in [pool.submit(call) for _ in range(100)]:
            future.result(NEVER)
        assert most <= 3
        assert next(running) == 100

    def test_more_than_may_wait_are_refused(self, hang: Callable[[], None]) -> None:
        pool = DaemonPool("test", workers=1, waiting=2)
        begun = threading.Event()

        def busy() -> None:
            begun.set()
            hang()

        pool.submit(busy)
        assert begun.wait(NEVER)
        pool.submit(hang)
        pool.submit(hang)
        with pytest.raises(PoolFullError):
            pool.submit(hang)

    def test_a_call_that_waits_can_be_given_up_before_it_begins(
        self, hang: Callable[[], None]
    ) -> None:
        pool = DaemonPool("test", workers=1, waiting=2)
        pool.submit(hang)
        assert not pool.write_off(pool.submit(hang))
        assert pool.written_off == 0

    def test_a_hung_call_that_is_written_off_gives_its_place_to_another(
        self, hang: Callable[[], None]
    ) -> None:
        pool = DaemonPool("test", workers=1, waiting=2)
        begun = threading.Event()

        def busy() -> None:
            begun.set()
            hang()

        hung = pool.submit(busy)
        assert begun.wait(NEVER)
        assert pool.write_off(hung)
        assert pool.submit(lambda: "answered").result(NEVER) == "answered"

    def test_hung_threads_are_bounded_and_then_calls_are_refused_at_once(self) -> None:
        pool = DaemonPool("test", workers=2, waiting=100)
        over = threading.Event()
        for _ in range(4):
            begun = threading.Event()
            hung = pool.submit(lambda begun=begun: (begun.set(), over.wait(NEVER)))
            assert begun.wait(NEVER)
            assert pool.write_off(hung)
        with pytest.raises(PoolFullError):
            pool.submit(int)
        over.set()
        while pool.written_off:
            pass
        assert pool.submit(int).result(NEVER) == 0

    def test_a_system_without_threads_left_refuses_instead_of_waiting_for_ever(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def start(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(PoolFullError):
            DaemonPool("test", workers=2, waiting=2).submit(int)

    def test_a_process_with_hung_calls_ends(self) -> None:
        script = """
import time
from ctxguard.stages import Stage, UnansweredError
stage = Stage("dense")
for _ in range(2):
    try:
        stage.call(lambda: time.sleep(600), 0.01)
    except UnansweredError as error:
        print(error.kind)
stage.begin(lambda: time.sleep(600))
"""
        ended = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
        )
        assert ended.stdout.split() == ["timeout"] * 2

    def test_a_forked_child_has_threads_of_its_own(self) -> None:
        script = """
import os, threading, warnings
warnings.simplefilter("ignore")
from ctxguard.stages import Stage
stage = Stage("dense")
over = threading.Event()
stage.begin(lambda: over.wait(600))
assert stage.call(lambda: 1, 60.0) == 1
child = os.fork()
if child == 0:
    os._exit(0 if stage.call(lambda: 2, 60.0) == 2 else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
        subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


def opened() -> Breaker:
    breaker = Breaker("dense")
    for _ in range(FAILURES):
        breaker.failed(None)
    return breaker


class TestBreaker:
    def test_it_opens_after_failures_in_a_row(self, clock: Clock) -> None:
        breaker = Breaker("dense")
        for _ in range(FAILURES - 1):
            breaker.failed(None)
        assert breaker.admit(None) is None
        breaker.failed(None)
        assert breaker.admit(None) is Refused.OPEN

    def test_a_success_between_failures_starts_the_count_again(self, clock: Clock) -> None:
        breaker = Breaker("dense")
        for _ in range(3 * FAILURES):
            breaker.failed(None)
            breaker.succeeded(None)
        assert breaker.is_closed()

    def test_one_call_at_a_time_probes_once_that_is_due(self, clock: Clock) -> None:
        breaker = opened()
        clock.now += RETRY_SECONDS + 0.01
        probe = breaker.admit(None)
        assert isinstance(probe, breaker_module.Probe)
        assert breaker.admit(None) is Refused.OPEN
        breaker.succeeded(probe)
        assert breaker.admit(None) is None

    def test_every_failed_probe_doubles_the_wait_up_to_a_limit(self, clock: Clock) -> None:
        breaker = opened()
        wait = RETRY_SECONDS
        for _ in range(8):
            clock.now += wait - 0.01
            assert breaker.admit(None) is Refused.OPEN
            clock.now += 0.02
            probe = breaker.admit(None)
            assert isinstance(probe, breaker_module.Probe)
            breaker.failed(probe)
            wait = min(2.0 * wait, MAX_RETRY_SECONDS)
        clock.now += wait + 0.01
        probe = breaker.admit(None)
        assert isinstance(probe, breaker_module.Probe)
        breaker.succeeded(probe)
        for _ in range(FAILURES):
            breaker.failed(None)
        clock.now += RETRY_SECONDS + 0.01
        assert isinstance(breaker.admit(None), breaker_module.Probe)

    def test_a_probe_that_is_late_has_failed(self, clock: Clock) -> None:
        breaker = opened()
        clock.now += RETRY_SECONDS + 0.01
        late = breaker.admit(0.2)
        assert isinstance(late, breaker_module.Probe)
        clock.now += 0.3
        assert breaker.admit(0.2) is Refused.OPEN
        breaker.succeeded(late)
        assert not breaker.is_closed()
        clock.now += 2.0 * RETRY_SECONDS + 0.01
        assert isinstance(breaker.admit(0.2), breaker_module.Probe)

    def test_without_a_limit_a_lost_probe_does_not_keep_the_stage_out_for_ever(
        self, clock: Clock
    ) -> None:
        breaker = opened()
        clock.now += RETRY_SECONDS + 0.01
        breaker.admit(None)
        clock.now += MAX_RETRY_SECONDS + 0.01
        assert breaker.admit(None) is Refused.OPEN
        clock.now += MAX_RETRY_SECONDS
        assert isinstance(breaker.admit(None), breaker_module.Probe)

    def test_what_calls_from_before_the_opening_come_to_changes_nothing(self, clock: Clock) -> None:
        breaker = opened()
        breaker.succeeded(None)
        breaker.failed(None)
        assert breaker.admit(None) is Refused.OPEN
        clock.now += RETRY_SECONDS + 0.01
        probe = breaker.admit(None)
        assert isinstance(probe, breaker_module.Probe)
        breaker.failed(None)
        breaker.succeeded(None)
        assert not breaker.is_closed()
        breaker.succeeded(probe)
        assert breaker.is_closed()

    @pytest.mark.parametrize("hours", [-24, 24])
    def test_a_clock_that_is_set_changes_nothing(
        self, hours: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        breaker = opened()

        class Stepped(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:
                return datetime.now(tz) + timedelta(hours=hours)

        monkeypatch.setattr(pybreaker, "datetime", Stepped)
        monkeypatch.setattr(breaker_module, "datetime", Stepped)
        assert breaker.admit(None) is Refused.OPEN
        clock.now += RETRY_SECONDS + 0.01
        assert isinstance(breaker.admit(None), breaker_module.Probe)

    def test_watchers_are_told_once_when_it_opens_and_once_when_it_is_closed_again(
        self, clock: Clock
    ) -> None:
        told: list[tuple[str, bool]] = []
        breaker = Breaker("dense")

        def watcher(stage: str, is_open: bool) -> None:
            told.append((stage, is_open))
            raise RuntimeError("a watcher must not matter")

        breaker.watch(watcher)
        breaker.watch(watcher)
        for _ in range(FAILURES):
            breaker.failed(None)
        assert told == [("dense", True)]
        for _ in range(2):
            clock.now += MAX_RETRY_SECONDS
            probe = breaker.admit(None)
            assert isinstance(probe, breaker_module.Probe)
            breaker.failed(probe)
        assert told == [("dense", True)]
        clock.now += MAX_RETRY_SECONDS
        probe = breaker.admit(None)
        assert isinstance(probe, breaker_module.Probe)
        breaker.succeeded(probe)
        assert told == [("dense", True), ("dense", False)]


def fail() -> None:
    raise OSError("down")


def opened_stage() -> Stage:
    stage = Stage("dense")
    for _ in range(FAILURES):
        with pytest.raises(OSError, match="down"):
            stage.call(fail)
    return stage


class TestStage:
    def test_without_a_limit_the_call_is_made_on_the_callers_thread(self) -> None:
        assert Stage("dense").call(threading.current_thread) is threading.current_thread()

    def test_with_a_limit_on_another_that_sees_the_callers_context(self) -> None:
        variable: ContextVar[str] = ContextVar("variable", default="unset")
        variable.set("set")
        thread, value = Stage("dense").call(
            lambda: (threading.current_thread(), variable.get()), NEVER
        )
        assert thread is not threading.current_thread()
        assert value == "set"

    def test_a_late_call_is_left_to_itself(self, hang: Callable[[], None]) -> None:
        with pytest.raises(UnansweredError, match="no answer within 50 ms") as caught:
            Stage("dense").call(hang, SOON)
        assert failure_of("dense", caught.value).kind is FailureKind.TIMEOUT

    def test_no_time_left_is_no_call(self) -> None:
        with pytest.raises(UnansweredError, match="no time was left"):
            Stage("dense").call(pytest.fail, -0.001)

    @pytest.mark.parametrize("seconds", [None, NEVER])
    @pytest.mark.parametrize(
        "error", [OSError("down"), TimeoutError("its own"), StopIteration(), MemoryError()]
    )
    def test_what_a_call_raises_is_raised_as_it_is(
        self, error: Exception, seconds: float | None
    ) -> None:
        def call() -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            Stage("dense").call(call, seconds)
        assert caught.value is error

        async def awaited() -> None:
            await Stage("dense").begin(call, seconds).aresult()

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
    def test_every_error_has_one_label(self, error: Exception, kind: FailureKind) -> None:
        assert failure_of("dense", error).kind is kind

    @pytest.mark.parametrize("seconds", [None, NEVER])
    def test_after_repeated_failures_it_is_not_asked(self, seconds: float | None) -> None:
        stage = opened_stage()
        assert stage.is_open
        with pytest.raises(UnansweredError, match="circuit open") as caught:
            stage.call(pytest.fail, seconds)
        assert caught.value.kind is FailureKind.CIRCUIT_OPEN

    def test_a_refused_query_says_nothing_against_the_stage(self) -> None:
        stage = Stage("dense")

        def refuse() -> None:
            raise QueryError("empty")

        for _ in range(2 * FAILURES):
            with pytest.raises(QueryError):
                stage.call(refuse)
        assert not stage.is_open

    @pytest.mark.parametrize("seconds", [None, NEVER])
    def test_a_stage_that_recovers_is_found_out_beside_a_request_that_goes_on_without_it(
        self, seconds: float | None, clock: Clock
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
        self, seconds: float | None, clock: Clock
    ) -> None:
        stage = opened_stage()
        clock.now += RETRY_SECONDS + 0.01
        assert stage.call(lambda: "back", seconds, sole=True) == "back"
        assert not stage.is_open

    def test_hung_probes_do_not_use_up_the_threads_that_a_recovery_needs(
        self, clock: Clock
    ) -> None:
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
        assert stage.call(lambda: "back", NEVER, sole=True) == "back"
        assert stage.call(lambda: "as usual", NEVER) == "as usual"
        over.set()

    def test_a_full_pool_refuses_and_that_opens_no_circuit(self, hang: Callable[[], None]) -> None:
        stage = Stage("dense", workers=1, waiting=1)
        begun = threading.Event()
        stage.begin(lambda: (begun.set(), hang()))
        assert begun.wait(NEVER)
        stage.begin(hang)
        for _ in range(2 * FAILURES):
            with pytest.raises(UnansweredError) as caught:
                stage.begin(hang, NEVER)
            assert caught.value.kind is FailureKind.SATURATED
        assert not stage.is_open

    def test_a_call_that_no_thread_took_up_in_time_is_saturation(
        self, hang: Callable[[], None]
    ) -> None:
        stage, begun = Stage("dense", workers=1), threading.Event()
        stage.begin(lambda: (begun.set(), hang()))
        assert begun.wait(NEVER)
        with pytest.raises(UnansweredError, match="no thread was free") as caught:
            stage.call(pytest.fail, SOON)
        assert caught.value.kind is FailureKind.SATURATED

    def test_a_call_without_a_limit_is_made_by_the_caller_where_no_thread_took_it_up(
        self, hang: Callable[[], None]
    ) -> None:
        stage, begun = Stage("dense", workers=1), threading.Event()
        stage.begin(lambda: (begun.set(), hang()))
        assert begun.wait(NEVER)
        assert stage.begin(threading.current_thread).result() is threading.current_thread()

    def test_calls_are_not_made_one_at_a_time(self) -> None:
        stage = Stage("dense")
        together = threading.Barrier(4)
        pending = [stage.begin(lambda: together.wait(NEVER), NEVER) for _ in range(3)]
        together.wait(NEVER)
        assert {each.result() for each in pending} <= {0, 1, 2, 3}

    def test_giving_up_an_awaited_call_leaves_the_event_loop_free(
        self, hang: Callable[[], None]
    ) -> None:
        async def main() -> None:
            waiting = asyncio.create_task(Stage("dense").begin(hang).aresult())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        asyncio.run(main())


class Switched(WordHashEmbedder):
    """An embedder whose queries can be made to do something else."""

    def __init__(self) -> None:
        super().__init__()
        self.instead: Callable[[], object] | None = None
        self.queries = 0

    def encode_passages(self, texts: Sequence[str], progress: object = None) -> Float32Array:
        return np.stack([super(Switched, self).encode_query(text) for text in texts])

    def encode_query(self, text: str) -> Float32Array:
        self.queries += 1
        if self.instead is not None:
            return self.instead()  # type: ignore[return-value]
        return super().encode_query(text)


class Reranking:
    """A reranker that can be made to do something else."""

    fingerprint = "switched"

    def __init__(self) -> None:
        self.instead: Callable[[], object] | None = None

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        if self.instead is not None:
            return self.instead()  # type: ignore[return-value]
        return np.array([-float(len(text)) for text in texts])


class System:
    """A retriever with all three stages, each of which can be switched."""

    def __init__(self, corpus: list[Passage], monkeypatch: pytest.MonkeyPatch) -> None:
        self.embedder = Switched()
        self.reranker = Reranking()
        bare = HybridRetriever.build(corpus, embedder=self.embedder)
        bare.warm_up()
        self.bare = bare
        self.retriever = bare.with_reranker(self.reranker)
        lexical = bare._live.index.lexical
        words = lexical.words
        self.lexical_instead: Callable[[], object] | None = None
        monkeypatch.setattr(
            lexical,
            "words",
            lambda query: words(query) if self.lexical_instead is None else self.lexical_instead(),
        )

    def switch(self, stages: Sequence[str], instead: Callable[[], object] | None) -> None:
        if "lexical" in stages:
            self.lexical_instead = instead
        if "dense" in stages:
            self.embedder.instead = instead
        if "rerank" in stages:
            self.reranker.instead = instead


@pytest.fixture
def system(corpus: list[Passage], monkeypatch: pytest.MonkeyPatch) -> System:
    return System(corpus, monkeypatch)


AMPLE = Deadlines(NEVER, NEVER, NEVER, NEVER)
LEFT = {
    ("lexical",): Route.DENSE_RERANK,
    ("dense",): Route.LEXICAL_RERANK,
    ("rerank",): Route.HYBRID,
    ("lexical", "rerank"): Route.DENSE,
    ("dense", "rerank"): Route.LEXICAL,
}


class TestSearch:
    @pytest.mark.parametrize("gone", LEFT, ids="+".join)
    def test_hung_stages_are_left_out_and_the_others_answer(
        self, gone: tuple[str, ...], system: System, hang: Callable[[], None]
    ) -> None:
        system.switch(gone, hang)
        limits = replace(AMPLE, **{f"{stage}_seconds": SOON for stage in gone})
        ranking = system.retriever.with_deadlines(limits).retrieve(QUERY)
        assert ranking.route is LEFT[gone]
        assert tuple(failure.stage for failure in ranking.failures) == gone
        assert {failure.kind for failure in ranking.failures} == {FailureKind.TIMEOUT}
        assert len(ranking) > 0

    def test_a_probe_that_finds_both_legs_well_answers_where_nothing_else_does(
        self, system: System, clock: Clock
    ) -> None:
        lexical, asker = system.bare._live.index.lexical, threading.current_thread()
        system.switch(["dense"], fail)
        for _ in range(breaker_module.FAILURES):
            system.bare.retrieve(QUERY)
        system.switch(["dense"], None)
        clock.now += breaker_module.RETRY_SECONDS

        def only_beside_the_request() -> object:
            return (
                fail() if threading.current_thread() is asker else Bm25sIndex.words(lexical, QUERY)
            )

        system.switch(["lexical"], only_beside_the_request)
        ranking = system.bare.retrieve(QUERY)
        assert (ranking.route, ranking.failures) == (Route.HYBRID, ())

    @pytest.mark.parametrize("gone", LEFT, ids="+".join)
    def test_so_are_dead_ones_with_and_without_deadlines(
        self, gone: tuple[str, ...], system: System
    ) -> None:
        system.switch(gone, fail)
        for retriever in (system.retriever, system.retriever.with_deadlines(AMPLE)):
            ranking = retriever.retrieve(QUERY)
            assert ranking.route is LEFT[gone]
            assert all(failure.cause.startswith("OSError") for failure in ranking.failures)
            assert {failure.kind for failure in ranking.failures} == {FailureKind.ERROR}

    def test_with_every_leg_hung_it_is_an_outage_by_the_deadline(
        self, system: System, hang: Callable[[], None]
    ) -> None:
        system.switch(("lexical", "dense"), hang)
        with pytest.raises(StageUnavailableError, match="lexical and dense: no answer within"):
            system.retriever.with_deadlines(Deadlines(total_seconds=SOON)).retrieve(QUERY)

    def test_the_time_for_the_whole_bounds_every_stage(
        self, system: System, hang: Callable[[], None]
    ) -> None:
        system.switch(("dense",), hang)
        ranking = system.retriever.with_deadlines(Deadlines(total_seconds=0.5)).retrieve(QUERY)
        assert ranking.route is Route.LEXICAL
        assert [failure.stage for failure in ranking.failures] == ["dense", "rerank"]
        assert ranking.failures[1].cause == "no time was left when its turn came"

    def test_in_time_the_answer_is_the_one_without_deadlines(self, system: System) -> None:
        for retriever in (system.bare, system.retriever):
            unhurried = retriever.retrieve(QUERY)
            for limits in (
                AMPLE,
                Deadlines(lexical_seconds=NEVER),
                Deadlines(dense_seconds=NEVER),
            ):
                ranking = retriever.with_deadlines(limits).retrieve(QUERY)
                assert ranking.passage_ids == unhurried.passage_ids
                assert ranking.scores == unhurried.scores
                assert ranking.failures == ()

    def test_out_of_memory_in_the_reranker_is_a_failure_like_any_other(
        self, system: System
    ) -> None:
        def exhausted() -> None:
            raise MemoryError

        system.switch(("rerank",), exhausted)
        ranking = system.retriever.retrieve(QUERY)
        assert ranking.route is Route.HYBRID
        assert ranking.failures[0].kind is FailureKind.OUT_OF_MEMORY

    @pytest.mark.parametrize(
        "vector", [np.full(64, np.nan, np.float32), np.ones(32, np.float32)], ids=["NaN", "size"]
    )
    def test_garbage_is_labelled_as_such(self, vector: Float32Array, system: System) -> None:
        system.switch(("dense",), lambda: vector)
        assert system.bare.retrieve(QUERY).failures[0].kind is FailureKind.GARBAGE

    def test_a_dead_leg_is_not_asked_again_until_it_is_time(
        self, system: System, clock: Clock
    ) -> None:
        system.switch(("dense",), fail)
        system.embedder.queries = 0
        for _ in range(3 * FAILURES):
            ranking = system.bare.retrieve(QUERY)
        assert system.embedder.queries == FAILURES
        assert ranking.route is Route.LEXICAL
        assert ranking.failures[0].kind is FailureKind.CIRCUIT_OPEN

        system.switch(("dense",), None)
        recovered = threading.Event()
        system.bare.watch_stages(lambda stage, is_open: None if is_open else recovered.set())
        clock.now += RETRY_SECONDS + 0.01
        assert system.bare.retrieve(QUERY).route is Route.LEXICAL
        assert recovered.wait(NEVER)
        assert system.bare.retrieve(QUERY).failures == ()

    def test_with_all_circuits_open_the_request_that_tries_again_is_answered_by_it(
        self, system: System, clock: Clock
    ) -> None:
        system.switch(("lexical", "dense"), fail)
        for _ in range(2 * FAILURES):
            with pytest.raises(StageUnavailableError, match="OSError"):
                system.bare.retrieve(QUERY)
        system.switch(("lexical", "dense"), None)
        clock.now += RETRY_SECONDS + 0.01
        assert system.bare.retrieve(QUERY).route is Route.LEXICAL

    def test_a_vector_that_the_caller_got_wrong_says_nothing_against_the_leg(
        self, system: System
    ) -> None:
        for _ in range(2 * FAILURES):
            ranking = system.bare.retrieve(QUERY, query_vector=np.ones(32, np.float32))
            assert ranking.route is Route.LEXICAL
            assert "(32,)" in ranking.failures[0].cause
        assert system.bare.retrieve(QUERY).failures == ()

    def test_rerankers_have_circuits_of_their_own(self, system: System) -> None:
        system.switch(("rerank",), fail)
        for _ in range(FAILURES + 1):
            ranking = system.retriever.retrieve(QUERY)
        assert ranking.failures[0].kind is FailureKind.CIRCUIT_OPEN
        other = system.bare.with_reranker(Reranking())
        assert other.retrieve(QUERY).route is Route.HYBRID_RERANK

    def test_warming_up_takes_as_long_as_it_takes(self, system: System) -> None:
        system.retriever.with_deadlines(Deadlines(total_seconds=1e-9)).warm_up()

    def test_legs_without_a_free_thread_are_overload_not_an_outage(
        self, system: System, hang: Callable[[], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        legs = system.bare._live.legs
        for stage in (legs.lexical, legs.dense):
            monkeypatch.setattr(stage._pool, "_waiting_limit", 0)
        with pytest.raises(OverloadedError, match="lexical and dense: no thread is free"):
            system.bare.with_deadlines(AMPLE).retrieve(QUERY)

    def test_views_share_their_circuits(self, system: System) -> None:
        system.switch(("dense",), fail)
        for _ in range(FAILURES):
            system.bare.retrieve(QUERY)
        view = system.bare.with_deadlines(AMPLE)
        assert view.retrieve(QUERY).failures[0].kind is FailureKind.CIRCUIT_OPEN

    @pytest.mark.parametrize("limits", [Deadlines(), AMPLE], ids=["no limits", "limits"])
    def test_an_open_circuit_counts_only_while_something_else_answers(
        self, limits: Deadlines, system: System, clock: Clock
    ) -> None:
        retriever = system.bare.with_deadlines(limits)
        system.switch(("dense",), fail)
        for _ in range(FAILURES):
            retriever.retrieve(QUERY)
        assert retriever.retrieve(QUERY).failures[0].kind is FailureKind.CIRCUIT_OPEN
        system.switch(("dense",), None)
        system.switch(("lexical",), fail)
        assert retriever.retrieve(QUERY).route is Route.DENSE
        system.switch(("lexical",), None)
        assert retriever.retrieve(QUERY).route is Route.HYBRID


class TestDeadlines:
    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
    @pytest.mark.parametrize("name", ["total_seconds", "dense_seconds"])
    def test_what_is_no_duration_is_refused(self, name: str, seconds: float) -> None:
        with pytest.raises(ConfigurationError, match=f"{name}.* positive number of seconds"):
            Deadlines(**{name: seconds})
