"""A process that is forked, one whose clock is set, and bursts of ten thousand requests."""

import asyncio
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leg_faults import DEADLINES, raises
from serving import (
    Report,
    ServingProcess,
    Size,
    corpus,
    embedder_for,
    fault,
    in_words,
    routes_of,
)

import ctxguard.guard
from ctxguard.core.context import Context
from ctxguard.core.types import Route
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.service import JudgingOutcome, Monitor
from ctxguard.resilience.bounded_caller import RequestLimits
from ctxguard.resilience.deadlines import Deadlines
from ctxguard.retrieval.hybrid.retriever import HybridRetriever

_DAY_SECONDS = 86_400.0
_MEBIBYTE = 2**20
_CHILDREN = 3
_CODED_PASSAGES = 1_500


@fault("forked after warm-up", "children answer in full, with samples of their own")
def _forked_after_warm_up(folder: Path, size: Size) -> Report:
    """Forked after searches, with threads of faiss, of the writer and of the stages running."""
    embedder = embedder_for(size)
    # With codes, and searched by as many threads as there are processors: what hangs in children.
    retriever = HybridRetriever.build(
        corpus(_CODED_PASSAGES if size is Size.SMALL else 2_000),
        embedder=embedder,
        exact_limit=1_000,
    )
    limits = Deadlines(total_seconds=120.0, dense_seconds=90.0)
    serving = ServingProcess(folder, size, retriever=retriever, deadlines=limits)
    n = serving.by_size(30, 200)
    before = serving.serve(n)
    children = [serving.fork(lambda: serving.serve(n)) for _ in range(_CHILDREN)]
    beside = serving.serve(n)
    reports = [accounts() for accounts in children]
    ended = [one for one in reports if one is not None]
    return serving.finish(
        f"{len(ended)} of {_CHILDREN} children answered {sum(b.metrics['ok'] for b in ended)} of "
        f"{2 * n * _CHILDREN} requests in full, beside their parent's {len(beside)}",
        {
            "every child answers in full": all(one.metrics["ok"] == 2 * n for one in ended),
            "so does their parent": routes_of(before, beside) == {Route.HYBRID}
            and len(before) == len(beside) == 2 * n,
        },
        *reports,
    )


@fault("clock stepped by a day", "nothing is deleted or left unjudged; circuits close again")
def _clock_stepped(folder: Path, size: Size) -> Report:
    """The wall clock is set a day ahead and a day back while requests come and a leg fails."""
    ahead = {"seconds": 0.0}

    def clock() -> float:
        return time.time() + ahead["seconds"]

    guard_module: Any = ctxguard.guard
    guard_module.time = clock
    serving = ServingProcess(folder, size, deadlines=DEADLINES, clock=clock)
    judge = LabelJudge({query: {"p00001": 1} for query in serving.queries})
    monitor = Monitor(serving.store, judge, clock=clock)
    n = serving.by_size(15, 150)
    steps = [0.0, _DAY_SECONDS, -_DAY_SECONDS, 0.0]
    answers: list[Context] = []
    for ahead["seconds"] in steps:
        answers += serving.serve(n)
        serving.writer.flush()
        monitor.step(n)
        monitor.maintain()
    with serving.dense.injected(raises):
        failing = serving.serve(n)
    circuits = []
    for ahead["seconds"] in (_DAY_SECONDS, -_DAY_SECONDS):
        circuits.append(serving.comes_to_answer_by(Route.HYBRID))
        with serving.dense.injected(raises):
            serving.serve(5)
    circuits.append(serving.comes_to_answer_by(Route.HYBRID))
    serving.writer.flush()
    while monitor.step():
        pass
    report = monitor.maintain()
    judged = report.outcomes[JudgingOutcome.JUDGED]
    sampled = serving.sampler.sampled()
    age = report.age_seconds
    return serving.finish(
        f"a day ahead, a day back: {judged} of {sampled} samples judged, none deleted; the "
        f"circuit closed again each time; newest sample {age:.0f} s old",
        {
            "in full while the legs live": routes_of(answers) == {Route.HYBRID},
            "without the leg that fails": Route.LEXICAL in routes_of(failing),
            "circuits close again whatever the clock says": all(circuits),
            "every sample is judged, none is deleted": judged == sampled,
            "no age is negative": age is not None and age >= 0.0,
        },
    )


_ANSWERED_OR_REFUSED = "answered, or refused with a typed error; memory bounded"


@fault("burst of requests, asyncio", _ANSWERED_OR_REFUSED)
def _burst_of_tasks(folder: Path, size: Size) -> Report:
    """Ten thousand requests of one event loop."""
    serving = _bounded(folder, size)
    n = serving.by_size(1_000, 10_000)

    async def main() -> None:
        await asyncio.gather(*[serving.arequest(number) for number in range(n)])

    before = _peak_mebibytes()
    asyncio.run(main())
    return _burst(serving, n, _peak_mebibytes() - before)


@fault("burst of requests, threads", _ANSWERED_OR_REFUSED)
def _burst_of_threads(folder: Path, size: Size) -> Report:
    """Ten thousand threads with a request each."""
    serving = _bounded(folder, size)
    n = serving.by_size(500, 10_000)
    together = threading.Barrier(n + 1)

    def client(number: int) -> None:
        together.wait()
        serving.request(number)

    before = _peak_mebibytes()
    usual = threading.stack_size(256 * 1024)
    threads = [threading.Thread(target=client, args=(number,)) for number in range(n)]
    for thread in threads:
        thread.start()
    threading.stack_size(usual)
    together.wait()
    for thread in threads:
        thread.join()
    return _burst(serving, n, _peak_mebibytes() - before)


_IN_FLIGHT = {Size.SMALL: 100, Size.FULL: 1_000}
_SEARCH_SECONDS = {Size.SMALL: 0.02, Size.FULL: 0.2}
_MOST_MEBIBYTES = 1_024.0


def _bounded(folder: Path, size: Size) -> ServingProcess:
    serving = ServingProcess(
        folder, size, guard_settings={"limits": RequestLimits(max_in_flight=_IN_FLIGHT[size])}
    )
    # A search takes a fifth of a millisecond here: slow enough that requests pile up.
    seconds = _SEARCH_SECONDS[size]

    def slowly(work: Callable[[], Any]) -> Any:
        time.sleep(seconds)
        return work()

    serving.dense.instead = slowly
    return serving


def _burst(serving: ServingProcess, n: int, grown: float) -> Report:
    callers = serving.callers
    answered, shed = callers.answers, callers.counts["shed"]
    after = serving.request(0)
    return serving.finish(
        f"{answered:,} of {n:,} answered, {shed:,} refused ({in_words(callers.errors)}); "
        f"memory grew by {grown:.0f} MiB; slowest {callers.slowest_seconds:.1f} s",
        {
            "each is answered or refused": answered + shed == n,
            "with a typed error": set(callers.errors) <= {"OverloadedError"},
            # How many more depends on how fast threads come: on one core none may be refused.
            "as many are answered as may be in flight": answered >= _IN_FLIGHT[serving.size],
            "memory is bounded": grown < _MOST_MEBIBYTES,
            "the next one is answered": after is not None,
        },
        may_fail=True,
    )


def _peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MEBIBYTE
