"""A reranker that runs out of memory, and one whose process is stopped."""

import os
import resource
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from piped_scorer import PipedReranker, WordOverlap
from scene import SLACK_SECONDS, Scene, Seen, Size, all_of, most, until

from ctxguard.context import Context
from ctxguard.stages import Deadlines
from ctxguard.types import FailureKind, FloatArray, Route

_MEBIBYTE = 2**20
_LEFT_BYTES = 192 * _MEBIBYTE
DEADLINES = {
    Size.SMALL: Deadlines(total_seconds=1.0, rerank_seconds=0.3),
    # Twenty passages take a cross-encoder of this size a third of a second on one busy thread.
    Size.FULL: Deadlines(total_seconds=4.0, rerank_seconds=3.0),
}


class Hungry:
    """A scorer that takes memory for every word of every pair, as attention does."""

    fingerprint = "hungry"

    def __init__(self) -> None:
        self.bytes_per_call = 0
        self._scorer = WordOverlap()

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        attention = np.ones(self.bytes_per_call, np.uint8)
        return self._scorer.score(query, texts) * float(attention.max(initial=1))


def out_of_memory(folder: Path, size: Size) -> Seen:
    """The process may take little more memory than it has, and the reranker asks for more."""
    hungry = Hungry()
    scene = Scene(folder, size, reranker=hungry)
    n = scene.n(20, 200)
    before = all_of(scene.serve(n))
    usual = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_size_bytes() + _LEFT_BYTES, usual[1]))
    hungry.bytes_per_call = 64 * _LEFT_BYTES
    during = all_of(scene.serve(n))
    resource.setrlimit(resource.RLIMIT_AS, usual)
    hungry.bytes_per_call = 0
    recovered = until(lambda: _route(scene.ask(0)) is Route.HYBRID_RERANK)
    found = Counter([one.kind.value for each in during for one in each.failures])
    return scene.finish(
        f"route {most(Counter([each.route.value for each in during]))}; {most(found)}; "
        + ("reranked again" if recovered else "NOT RECOVERED"),
        {
            "every request is answered": scene.tally.failed == scene.tally.shed == 0,
            "without the reranker": {each.route for each in during} == {Route.HYBRID},
            "with the cause": set(found)
            == {FailureKind.OUT_OF_MEMORY.value, FailureKind.CIRCUIT_OPEN.value},
            "by the policy made for the route": all(
                map(scene.decided_by_its_route, [*before, *during])
            ),
            "reranked before and after": recovered
            and {each.route for each in before} == {Route.HYBRID_RERANK},
        },
    )


def stopped(folder: Path, size: Size) -> Seen:
    """The process that scores gets SIGSTOP, and later SIGCONT."""
    with PipedReranker(with_model=size is Size.FULL) as piped:
        piped.score("loads the model", ["before anyone waits"])
        limits = DEADLINES[size]
        scene = Scene(folder, size, reranker=piped, deadlines=limits)
        n = scene.n(20, 200)
        warm = until(lambda: _route(scene.ask(0)) is Route.HYBRID_RERANK)
        os.kill(piped.pid, signal.SIGSTOP)
        scene.tally.slowest_seconds = 0.0
        during = all_of(scene.serve(n))
        slowest = scene.tally.slowest_seconds
        os.kill(piped.pid, signal.SIGCONT)
        recovered = until(lambda: _route(scene.ask(0)) is Route.HYBRID_RERANK)
    found = Counter([one.kind.value for each in during for one in each.failures])
    return scene.finish(
        f"route {most(Counter([each.route.value for each in during]))}; {most(found)}; "
        f"slowest {1e3 * slowest:.0f} ms; " + ("reranked again" if recovered else "NOT RECOVERED"),
        {
            "every request is answered": scene.tally.failed == scene.tally.shed == 0,
            "without the reranker": {each.route for each in during} == {Route.HYBRID},
            "with the cause": FailureKind.TIMEOUT.value in found
            and set(found)
            <= {
                kind.value
                for kind in (
                    FailureKind.TIMEOUT,
                    FailureKind.CIRCUIT_OPEN,
                    FailureKind.SATURATED,
                )
            },
            "by the policy made for the route": all(map(scene.decided_by_its_route, during)),
            "in time": slowest < (limits.total_seconds or 0.0) + SLACK_SECONDS,
            "reranked before and after": warm and recovered,
        },
    )


def _size_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _route(answer: Context | None) -> Route | None:
    return None if answer is None else answer.route
