"""The guard under faults and load: deadlines, circuits, refusals, and counted that add up."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ctxguard.core.context import Context
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import FailureKind, Hit, Passage, Ranking, ScoreKind
from ctxguard.errors import (
    ConfigurationError,
    CtxguardError,
    OverloadedError,
    QueryError,
    StageUnavailableError,
)
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.telemetry import FAILED_CAUSES
from ctxguard.resilience.bounded_caller import RequestLimits
from ctxguard.resilience.breaker import FAILURES, RETRY_SECONDS
from ctxguard.resilience.deadlines import Deadlines
from ctxguard.retrieval.hybrid import retriever
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from tests.counted import Counted
from tests.doubles import WordHashEmbedder
from tests.timing import NEVER, PATIENCE_SECONDS, SOON, Clock

RANKING = Ranking.from_hits([Hit("a", 2.0, "first"), Hit("b", 1.0, "second")], ScoreKind.RATIO)


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Set when the test is over, which ends what hangs."""
    event = threading.Event()
    yield event
    event.set()


def guard_of(search: object, counted: Counted, **settings: object) -> ContextGuard:
    return ContextGuard(search, policy=RatioPolicy(), telemetry=counted.telemetry, **settings)  # type: ignore[arg-type]


def asked(guard: ContextGuard, awaited: bool, query: str = "q?") -> Context:
    return asyncio.run(guard.aretrieve(query)) if awaited else guard.retrieve(query)


either_way = pytest.mark.parametrize("awaited", [False, True], ids=["called", "awaited"])


class TestDeadline:
    @either_way
    @pytest.mark.parametrize("one_by_one", [False, True])
    def test_hanging_retriever_is_an_outage_in_time(
        self, awaited: bool, one_by_one: bool, counted: Counted, over: threading.Event
    ) -> None:
        """Also one whose hits come one by one, and do not all come by it."""

        def search(query: str, depth: int) -> Iterator[Hit]:
            yield Hit("a", 2.0, "first")
            over.wait(NEVER)

        guard = guard_of(
            search if one_by_one else lambda query, depth: [*search(query, depth)],
            counted,
            limits=RequestLimits(deadline_seconds=SOON),
            score_kind="ratio",
        )
        with pytest.raises(StageUnavailableError, match="retriever: no answer within 50 ms"):
            asked(guard, awaited)
        assert counted.failed == {"timeout": 1}

    def test_late_asynchronous_retriever_is_cancelled(self, counted: Counted) -> None:
        cancelled = []

        async def search(query: str, *, depth: int) -> Ranking:
            try:
                await asyncio.sleep(NEVER)
            except asyncio.CancelledError:
                cancelled.append(query)
                raise
            return RANKING

        guard = guard_of(search, counted, limits=RequestLimits(deadline_seconds=SOON))
        with pytest.raises(StageUnavailableError, match="no answer within"):
            asyncio.run(guard.aretrieve("q?"))
        assert (cancelled, counted.failed) == (["q?"], {"timeout": 1})

    def test_uncancellable_retriever_is_not_awaited(self, counted: Counted) -> None:
        async def main() -> None:
            end = asyncio.Event()

            async def search(query: str, *, depth: int) -> Ranking:
                while not end.is_set():
                    try:
                        await end.wait()
                    except asyncio.CancelledError:
                        continue
                raise OSError("nobody reads this")

            guard = guard_of(search, counted, limits=RequestLimits(deadline_seconds=SOON))
            with pytest.raises(StageUnavailableError, match="no answer within"):
                await guard.aretrieve("q?")
            end.set()

        asyncio.run(main())

    @either_way
    def test_deadline_leaves_errors_the_same(self, awaited: bool, counted: Counted) -> None:
        def search(query: str, depth: int) -> Ranking:
            if query == "refused":
                raise QueryError("this query is refused")
            raise OSError("down")

        guard = guard_of(search, counted, limits=RequestLimits(deadline_seconds=NEVER))
        with pytest.raises(QueryError, match="this query is refused"):
            asked(guard, awaited, "refused")
        with pytest.raises(StageUnavailableError, match="retriever: OSError"):
            asked(guard, awaited)
        assert counted.failed == {"invalid_request": 1, "error": 1}

    def test_callable_returning_an_awaitable_has_one(self, counted: Counted) -> None:
        async def search(query: str, depth: int) -> Ranking:
            await asyncio.sleep(0.0 if query == "quick" else NEVER)
            return RANKING

        class Deferred:
            def retrieve(self, query: str, *, depth: int) -> object:
                return search(query, depth)

        guard = guard_of(Deferred(), counted, limits=RequestLimits(deadline_seconds=0.5))
        assert len(asyncio.run(guard.aretrieve("quick"))) == 2
        with pytest.raises(StageUnavailableError, match="no answer within"):
            asyncio.run(guard.aretrieve("slow"))

    @pytest.mark.parametrize(
        ("limits", "name", "value"),
        [
            *[
                (limits, name, seconds)
                for limits, name in (
                    (RequestLimits, "deadline_seconds"),
                    (Deadlines, "total_seconds"),
                    (Deadlines, "dense_seconds"),
                )
                for seconds in (0.0, -1.0, float("nan"), float("inf"))
            ],
            (RequestLimits, "max_in_flight", 0),
            (RequestLimits, "max_query_chars", 0),
        ],
    )
    def test_impossible_limit_is_refused_at_start(
        self, limits: Callable[..., object], name: str, value: float
    ) -> None:
        with pytest.raises(ConfigurationError, match=f"{name} .* must be"):
            limits(**{name: value})

    def test_process_ends_despite_hanging_retriever(self) -> None:
        script = """
import asyncio, time
from ctxguard import ContextGuard, CtxguardError, RequestLimits

guard = ContextGuard(lambda query, depth: time.sleep(600), limits=RequestLimits(0.05))

async def main():
    asks = [guard.aretrieve("q?") for _ in range(40)]
    for answer in await asyncio.gather(*asks, return_exceptions=True):
        assert isinstance(answer, CtxguardError), answer

asyncio.run(main())
"""
        subprocess.run([sys.executable, "-c", script], timeout=PATIENCE_SECONDS, check=True)


class TestCircuit:
    @either_way
    def test_failing_retriever_is_left_alone_awhile(
        self, awaited: bool, counted: Counted, clock: Clock
    ) -> None:
        """A retriever that fails again and again is not asked for a while."""
        asks: list[str] = []
        healthy = False

        def search(query: str, depth: int) -> Ranking:
            asks.append(query)
            if not healthy:
                raise OSError("down")
            return RANKING

        guard = guard_of(search, counted, limits=RequestLimits(deadline_seconds=NEVER))
        for _ in range(FAILURES + 3):
            with pytest.raises(StageUnavailableError):
                asked(guard, awaited)
        assert (len(asks), counted.failed) == (FAILURES, {"error": FAILURES, "circuit_open": 3})
        assert counted.by_label("open_circuits") == {("retriever",): 1}

        healthy = True
        clock.now += RETRY_SECONDS + 0.01
        assert (len(asked(guard, awaited)), len(asked(guard, awaited))) == (2, 2)
        assert counted.by_label("open_circuits") == {}
        assert counted.by_label("circuit_changes") == {
            ("retriever", "open"): 1,
            ("retriever", "closed"): 1,
        }

    @either_way
    def test_without_deadline_always_asked(self, awaited: bool, counted: Counted) -> None:
        asks = []

        def search(query: str, depth: int) -> Ranking:
            asks.append(query)
            raise OSError("down")

        guard = guard_of(search, counted)
        for _ in range(2 * FAILURES):
            with pytest.raises(StageUnavailableError, match="OSError"):
                asked(guard, awaited)
        assert len(asks) == 2 * FAILURES

    def test_embedded_retrievers_stages_are_watched(self, counted: Counted) -> None:
        class Broken(WordHashEmbedder):
            def encode_query(self, text: str) -> None:  # type: ignore[override]
                raise OSError("down")

            def encode_passages(self, texts: object, progress: object = None) -> object:  # type: ignore[override]
                return WordHashEmbedder().encode_passages(texts)  # type: ignore[arg-type]

        embedder = Broken()
        passages = [Passage(f"p{n}", f"text number {n}") for n in range(9)]
        guard = guard_of(HybridRetriever.build(passages, embedder=embedder), counted)
        for _ in range(FAILURES + 2):
            guard.retrieve("text number 3")
        assert counted.by_label("stage_failures") == {
            ("dense", "error"): FAILURES,
            ("dense", "circuit_open"): 2,
        }
        assert counted.by_label("open_circuits") == {("dense",): 1}
        assert counted.requests("degraded") == FAILURES + 2


class TestOverload:
    def test_too_many_at_once_are_refused(self, counted: Counted, over: threading.Event) -> None:
        begun = threading.Event()

        def search(query: str, depth: int) -> Ranking:
            begun.set()
            over.wait(NEVER)
            return RANKING

        guard = guard_of(search, counted, limits=RequestLimits(max_in_flight=1))
        with ThreadPoolExecutor(1) as one:
            waiting = one.submit(guard.retrieve, "q?")
            assert begun.wait(NEVER)
            with pytest.raises(OverloadedError, match="1 requests are in progress"):
                guard.retrieve("q?")
            with pytest.raises(OverloadedError, match="max_in_flight"):
                asyncio.run(guard.aretrieve("q?"))
            over.set()
            assert len(waiting.result()) == 2
        assert len(guard.retrieve("q?")) == 2
        assert (counted["shed_requests"], counted.requests("ok")) == (2, 2)
        assert counted.add_up()

    def test_badly_ended_request_makes_room(self, counted: Counted) -> None:
        def search(query: str, depth: int) -> Ranking:
            raise KeyboardInterrupt if query == "stop" else OSError("down")

        guard = guard_of(search, counted, limits=RequestLimits(max_in_flight=1))
        for _ in range(3):
            with pytest.raises(StageUnavailableError):
                guard.retrieve("q?")
            with pytest.raises(KeyboardInterrupt):
                guard.retrieve("stop")
        assert counted.failed == {"error": 3, "cancelled": 3}
        assert counted.add_up()


def test_abandoned_request_counts_as_failed(counted: Counted, over: threading.Event) -> None:
    """An asynchronous retriever is cancelled with it."""

    def plain(query: str, depth: int) -> Ranking:
        over.wait(NEVER)
        return RANKING

    async def search(query: str, *, depth: int) -> Ranking:
        await asyncio.sleep(NEVER)
        return RANKING

    async def main(retriever: object, **settings: RequestLimits) -> None:
        guard = guard_of(retriever, counted, **settings)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(guard.aretrieve("q?"), SOON)
        await asyncio.sleep(0)  # a task that was cancelled ends on the loop's next turn
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main(plain))
    asyncio.run(main(search))
    asyncio.run(main(search, limits=RequestLimits(deadline_seconds=NEVER)))
    assert counted.failed == {"cancelled": 3}
    assert counted.add_up()


class TestAccounting:
    def test_the_causes_are_a_closed_set(self) -> None:
        assert set(FailureKind) < FAILED_CAUSES

    def test_every_ending_is_counted_once(self, counted: Counted, over: threading.Event) -> None:
        def search(query: str, depth: int) -> object:
            kind = int(query) % 7
            if kind == 0:
                raise OSError("down")
            if kind == 1:
                raise QueryError("refused")
            if kind == 2:
                raise MemoryError
            if kind == 3:
                return "no result"
            if kind == 4 and int(query) < 8:
                over.wait(NEVER)
            return RANKING

        guard = guard_of(
            search, counted, limits=RequestLimits(deadline_seconds=0.5, max_in_flight=40)
        )

        def in_thread(number: int) -> str:
            try:
                guard.retrieve(str(number))
            except OverloadedError:
                return "shed"
            except CtxguardError:
                return "failed"
            return "ok"

        async def in_loop() -> list[str]:
            tasks = [asyncio.create_task(guard.aretrieve(str(n))) for n in range(300)]
            await asyncio.sleep(0)
            for task in tasks[::10]:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            return [
                "shed"
                if isinstance(end, OverloadedError)
                else "failed"
                if isinstance(end, BaseException)
                else "ok"
                for end in ended
            ]

        with ThreadPoolExecutor(16) as threads:
            looped = threads.submit(lambda: asyncio.run(in_loop()))
            ends = list(threads.map(in_thread, range(700)))
            ends += looped.result()
        assert counted["received_requests"] == len(ends) == 1000
        assert counted.requests("ok") == ends.count("ok")
        assert counted["failed_requests"] == ends.count("failed")
        assert counted["shed_requests"] == ends.count("shed")
        assert counted.add_up()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_forked_child_has_own_circuits() -> None:
    """A forked child has threads and circuits of its own."""
    script = """
import os, threading, warnings
warnings.simplefilter("ignore")
from prometheus_client import CollectorRegistry
from ctxguard.guard.telemetry import Telemetry
from ctxguard.resilience.stage import Stage
registry, stage = CollectorRegistry(), Stage("dense")
telemetry = Telemetry(registry, all_metrics=True)
stage.watch(telemetry.circuit_changed)

def opened():
    for _ in range(3):
        try:
            stage.call(lambda: 1 / 0)
        except ZeroDivisionError:
            pass
    return counted()

def counted():
    return registry.get_sample_value("ctxguard_open_circuits", {"stage": "dense"})

busy = Stage("lexical")
busy.submit(threading.Event().wait)
assert busy.call(lambda: 1, 60.0) == opened() == 1
child = os.fork()
if child == 0:
    seen = busy.call(lambda: 2, 60.0), counted(), stage.is_open, opened()
    os._exit(0 if seen == (2, 0, False, 1) else 1)
assert counted() == 1
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


class Counting:
    """Notes how many of its calls run at once."""

    def __init__(self, concurrency: int | None = None) -> None:
        if concurrency is not None:
            self.concurrency = concurrency
        self.lock, self.running, self.most = threading.Lock(), 0, 0
        self.gathered = threading.Event()

    def retrieve(self, query: str, *, depth: int) -> Ranking:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            if self.running >= 8:
                self.gathered.set()
        self.gathered.wait(0.02)
        with self.lock:
            self.running -= 1
        return RANKING


class TestConcurrency:
    """One that computes here declares how many threads its calls are worth."""

    @pytest.mark.parametrize("seconds", [None, NEVER])
    @pytest.mark.parametrize("concurrency", [1, 2, 3])
    def test_calls_at_once_are_bounded(
        self, counted: Counted, concurrency: int, seconds: float | None
    ) -> None:
        search = Counting(concurrency)
        guard = guard_of(search, counted, limits=RequestLimits(deadline_seconds=seconds))

        async def all_at_once() -> list[Context]:
            return await asyncio.gather(*[guard.aretrieve(f"q{n}") for n in range(12)])

        assert all(len(context) == 2 for context in asyncio.run(all_at_once()))
        assert search.most <= concurrency

    def test_remote_retriever_has_threads_enough(self, counted: Counted) -> None:
        search = Counting()
        search.gathered.wait = lambda _: threading.Event.wait(search.gathered, NEVER)  # type: ignore[method-assign]
        guard = guard_of(search, counted)

        async def all_at_once() -> None:
            await asyncio.gather(*[guard.aretrieve(f"q{n}") for n in range(8)])

        asyncio.run(all_at_once())
        assert search.most == 8

    def test_hanging_calls_leave_its_threads(self, counted: Counted, over: threading.Event) -> None:
        class Hanging(Counting):
            def retrieve(self, query: str, *, depth: int) -> Ranking:
                if query == "hangs":
                    over.wait(NEVER)
                return RANKING

        guard = guard_of(Hanging(1), counted, limits=RequestLimits(deadline_seconds=SOON))
        for _ in range(FAILURES - 1):
            with pytest.raises(StageUnavailableError):
                asked(guard, awaited=True, query="hangs")
        assert len(asked(guard, awaited=True)) == 2

    @pytest.mark.parametrize("n", [1, 2, 4, 16, 64])
    def test_index_has_processors_plus_two_threads(
        self, monkeypatch: pytest.MonkeyPatch, n: int
    ) -> None:
        monkeypatch.setattr(retriever, "processors", lambda: n)
        index = HybridRetriever.build([Passage("a", "text")], embedder=WordHashEmbedder())
        assert index.concurrency >= 1
        assert index.concurrency + 2 * retriever.leg_threads() == n + 2
