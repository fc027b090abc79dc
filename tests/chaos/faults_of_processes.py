"""A process that is forked, one whose clock is set, and bursts of ten thousand requests."""

import asyncio
import resource
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

from children import begin_child, told_by_child
from faults_of_legs import DEADLINES, raises
from scene import Scene, Seen, Size, all_of, corpus, embedder_for, most, until

import ctxguard.guard
import ctxguard.stages.breaker
from ctxguard.context import Context
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.monitor import Monitor, Outcome
from ctxguard.retrieval import HybridRetriever
from ctxguard.stages import Deadlines
from ctxguard.types import Route

_DAY_SECONDS = 86_400.0
_MEBIBYTE = 2**20
_CHILDREN = 3
_CODED_PASSAGES = 1_500


def forked_after_warm_up(folder: Path, size: Size) -> Seen:
    """Forked after searches, with threads of faiss, of the writer and of the stages running."""
    embedder = embedder_for(size)
    # With codes, and searched by as many threads as there are processors: what hangs in children.
    retriever = HybridRetriever.build(
        corpus(_CODED_PASSAGES if size is Size.SMALL else 2_000),
        embedder=embedder,
        exact_limit=1_000,
    )
    limits = Deadlines(total_seconds=20.0, dense_seconds=15.0)
    scene = Scene(folder, size, retriever=retriever, deadlines=limits)
    n = scene.n(30, 200)
    before = all_of(scene.serve(n))
    children = [begin_child(scene, lambda: scene.serve(n)) for _ in range(_CHILDREN)]
    beside = all_of(scene.serve(n))
    told = [told_by_child(child) for child in children]
    books = [one for one in told if one is not None]
    routes = {answer.route for answer in [*before, *beside]}
    return scene.finish(
        f"{len(books)} of {_CHILDREN} children answered {sum(b.counted.ok for b in books)} of "
        f"{2 * n * _CHILDREN} requests in full, beside their parent's {len(beside)}",
        {
            "every child ends by itself": len(books) == _CHILDREN,
            "and answers in full": all(one.counted.ok == 2 * n for one in books),
            "so does their parent": routes == {Route.HYBRID}
            and len(before) == len(beside) == 2 * n,
        },
        *books,
    )


class Clock:
    """The wall clock, which someone sets."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead

    def stepped_datetime(self) -> type[datetime]:
        """``datetime`` by this clock."""
        clock = self

        class Stepped(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + timedelta(seconds=clock.ahead)

        return Stepped


def clock_stepped(folder: Path, size: Size) -> Seen:
    """The wall clock is set a day ahead and a day back while requests come and a leg fails."""
    import pybreaker

    clock = Clock()
    modules: Any = (ctxguard.guard, ctxguard.stages.breaker, pybreaker)
    modules[0].time = clock
    modules[1].datetime = modules[2].datetime = clock.stepped_datetime()
    scene = Scene(folder, size, deadlines=DEADLINES[size], clock=clock)
    judge = LabelJudge({query: {"p00001": 1} for query in scene.queries})
    monitor = Monitor(scene.store, judge, clock=clock)
    n = scene.n(15, 150)
    steps = [0.0, _DAY_SECONDS, -_DAY_SECONDS, 0.0]
    answers: list[Context] = []
    for ahead in steps:
        clock.ahead = ahead
        answers += all_of(scene.serve(n))
        scene.writer.flush()
        monitor.step(n)
        monitor.tend()
    with scene.dense.thrown(raises):
        failing = all_of(scene.serve(n))
    circuits = []
    for ahead in (_DAY_SECONDS, -_DAY_SECONDS):
        clock.ahead = ahead
        circuits.append(until(lambda: _route(scene.ask(0)) is Route.HYBRID, 20.0))
        with scene.dense.thrown(raises):
            scene.serve(5)
    circuits.append(until(lambda: _route(scene.ask(0)) is Route.HYBRID, 20.0))
    scene.writer.flush()
    while monitor.step():
        pass
    report = monitor.tend()
    judged = report.outcomes[Outcome.JUDGED]
    sampled = scene.sampler.sampled()
    age = report.live.age_seconds
    return scene.finish(
        f"a day ahead, a day back: {judged} of {sampled} samples judged, none deleted; the "
        f"circuit closed again each time; newest sample {age:.0f} s old",
        {
            "every request is answered": scene.tally.failed == scene.tally.shed == 0,
            "in full while the legs live": {each.route for each in answers} == {Route.HYBRID},
            "without the leg that fails": Route.LEXICAL in {each.route for each in failing},
            "circuits close again whatever the clock says": all(circuits),
            "every sample is judged, none is deleted": judged == sampled,
            "no age is negative": age is not None and age >= 0.0,
        },
    )


def burst_of_tasks(folder: Path, size: Size) -> Seen:
    """Ten thousand requests of one event loop."""
    scene = _bounded(folder, size)
    n = scene.n(1_000, 10_000)

    async def main() -> None:
        await asyncio.gather(*[scene.aask(number) for number in range(n)])

    before = _peak_mebibytes()
    asyncio.run(main())
    return _burst(scene, n, _peak_mebibytes() - before)


def burst_of_threads(folder: Path, size: Size) -> Seen:
    """Ten thousand threads with a request each."""
    scene = _bounded(folder, size)
    n = scene.n(500, 10_000)
    together = threading.Barrier(n + 1)

    def client(number: int) -> None:
        together.wait()
        scene.ask(number)

    before = _peak_mebibytes()
    usual = threading.stack_size(256 * 1024)
    threads = [threading.Thread(target=client, args=(number,)) for number in range(n)]
    for thread in threads:
        thread.start()
    threading.stack_size(usual)
    together.wait()
    for thread in threads:
        thread.join()
    return _burst(scene, n, _peak_mebibytes() - before)


_IN_FLIGHT = {Size.SMALL: 100, Size.FULL: 1_000}
_SEARCH_SECONDS = {Size.SMALL: 0.02, Size.FULL: 0.2}
_MOST_MEBIBYTES = 1_024.0


def _bounded(folder: Path, size: Size) -> Scene:
    scene = Scene(folder, size, guard_settings={"max_in_flight": _IN_FLIGHT[size]})
    # A search takes a fifth of a millisecond here: slow enough that requests pile up.
    seconds = _SEARCH_SECONDS[size]

    def slowly(work: Callable[[], Any]) -> Any:
        time.sleep(seconds)
        return work()

    scene.dense.fault = slowly
    return scene


def _burst(scene: Scene, n: int, grown: float) -> Seen:
    tally = scene.tally
    answered = tally.answers
    after = scene.ask(0)
    return scene.finish(
        f"{answered:,} of {n:,} answered, {tally.shed:,} refused ({most(tally.errors)}); "
        f"memory grew by {grown:.0f} MiB; slowest {tally.slowest_seconds:.1f} s",
        {
            "each is answered or refused": answered + tally.shed == n,
            "with a typed error": set(tally.errors) <= {"OverloadedError"},
            # How many more depends on how fast threads come: on one core none may be refused.
            "as many are answered as may be in flight": answered >= _IN_FLIGHT[scene.size],
            "memory is bounded": grown < _MOST_MEBIBYTES,
            "the next one is answered": after is not None,
        },
    )


def _peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MEBIBYTE


def _route(answer: Context | None) -> Route | None:
    return None if answer is None else answer.route
