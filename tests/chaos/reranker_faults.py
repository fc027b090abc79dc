"""A reranker that runs out of memory, and one whose process is stopped."""

import os
import resource
import signal
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from reranker_process import PipedReranker, WordOverlap
from serving import Report, ServingProcess, Size, answered, causes_of, routes_of, seen

from ctxguard.core.types import FloatArray, Route
from ctxguard.resilience import Deadlines

_MEBIBYTE = 2**20
_LEFT_BYTES = 192 * _MEBIBYTE
DEADLINES = {
    Size.SMALL: Deadlines(total_seconds=12.0, rerank_seconds=1.0),
    Size.FULL: Deadlines(total_seconds=12.0, rerank_seconds=3.0),
}
"""Only a process that is stopped takes as long, also on a busy machine and with the model."""


class Hungry:
    """A scorer that takes memory for every word of every pair, as attention does."""

    fingerprint = "hungry"

    def __init__(self) -> None:
        self.bytes_per_call = 0
        self._scorer = WordOverlap()

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        attention = np.ones(self.bytes_per_call, np.uint8)
        return self._scorer.score(query, texts) * float(attention.max(initial=1))


def out_of_memory(folder: Path, size: Size) -> Report:
    """The process may take little more memory than it has, and the reranker asks for more."""
    hungry = Hungry()
    serving = ServingProcess(folder, size, reranker=hungry)
    n = serving.by_size(20, 200)
    before = answered(serving.serve(n))
    usual = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_size_bytes() + _LEFT_BYTES, usual[1]))
    hungry.bytes_per_call = 64 * _LEFT_BYTES
    during = answered(serving.serve(n))
    resource.setrlimit(resource.RLIMIT_AS, usual)
    hungry.bytes_per_call = 0
    recovered = serving.comes_to_answer_by(Route.HYBRID_RERANK)
    return serving.finish(
        seen(during),
        {
            "without the reranker": routes_of(during) == {Route.HYBRID},
            "with the cause": set(causes_of(during)) == {"out_of_memory", "circuit_open"},
            "by the policy made for the route": serving.decided_by_route(before, during),
            "reranked before and after": recovered and routes_of(before) == {Route.HYBRID_RERANK},
        },
    )


def stopped(folder: Path, size: Size) -> Report:
    """The process that scores gets SIGSTOP, and later SIGCONT."""
    with closing(PipedReranker(with_model=size is Size.FULL)) as piped:
        piped.score("loads the model", ["before anyone waits"])
        serving = ServingProcess(folder, size, reranker=piped, deadlines=DEADLINES[size])
        n = serving.by_size(20, 200)
        warm = serving.comes_to_answer_by(Route.HYBRID_RERANK)
        os.kill(piped.pid, signal.SIGSTOP)
        serving.callers.slowest_seconds = 0.0
        during = answered(serving.serve(n))
        slowest = serving.callers.slowest_seconds
        os.kill(piped.pid, signal.SIGCONT)
        recovered = serving.comes_to_answer_by(Route.HYBRID_RERANK)
    causes = set(causes_of(during))
    return serving.finish(
        f"{seen(during)}; slowest {1e3 * slowest:.0f} ms",
        {
            "without the reranker": routes_of(during) == {Route.HYBRID},
            "with the cause": {"timeout"} <= causes <= {"timeout", "circuit_open", "saturated"},
            "by the policy made for the route": serving.decided_by_route(during),
            "reranked before and after": warm and recovered,
        },
    )


def _size_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
