"""The embedded retriever with stages that can be made to raise or to hang while it serves."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from ctxguard._support.extras import require
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Hit, Passage, Ranking, ScoreKind
from ctxguard.guard import ContextGuard
from ctxguard.monitor.sampling.sampler import Sampler
from ctxguard.request.telemetry import Telemetry
from ctxguard.resilience import Deadlines
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.protocols import AnyRetriever, Float32Array, Progress
from tests.doubles import Fault, FaultyRetriever

CANDIDATES = 100
PASSAGES = 10_000
QUERIES = 256
DIMENSION = 384

DEAD = "dead"
HUNG = "hung"
FOURTH = "hung at every fourth call"
FAULTS = (DEAD, HUNG, FOURTH)
_HANG_SECONDS = 3600.0
_SHORT_HANG_SECONDS = 0.5


class LookedUp:
    """An embedder that knows the vectors of all queries."""

    name = "looked up"
    dimension = DIMENSION

    def __init__(self, queries: Sequence[str], seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._known = dict(zip(queries, self.encode_passages(queries), strict=True))
        self._other = self.encode_passages(["any other"])[0]

    def encode_query(self, text: str) -> Float32Array:
        known: Float32Array = self._known.get(text, self._other)
        return known

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        vectors = self._rng.standard_normal((len(texts), DIMENSION), dtype=np.float32)
        if progress is not None:
            progress(len(texts))
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)

    def fingerprint(self) -> str:
        return "looked up"


class System:
    """The embedded retriever, whose stages can be made to fail."""

    def __init__(self, seed: int) -> None:
        # Of one search: clients are what runs side by side here.
        require("faiss", "embedded").omp_set_num_threads(1)
        rng = random.Random(seed)
        words = [f"word{number}" for number in range(20_000)]
        weights = [1.0 / (rank + 3.0) for rank in range(len(words))]

        def text(length: int) -> str:
            return " ".join(rng.choices(words, weights, k=length))

        self.queries = [text(8) for _ in range(QUERIES)]
        self._faulty = FaultyRetriever(
            [Passage(f"passage-{row:06d}", text(60)) for row in range(PASSAGES)],
            LookedUp(self.queries, seed),
        )
        self.faults = self._faulty.faults

    def retriever(self, *, rerank: bool = False, deadlines: Deadlines | None = None) -> Any:
        """One with circuits of its own, all closed."""
        made = HybridRetriever(
            self._faulty.retriever.generation,
            embedder=self._faulty.embedder,
            reranker=self._faulty.reranker if rerank else None,
        )
        made.warm_up()
        return made if deadlines is None else made.with_deadlines(deadlines)


def stub_ranking() -> Ranking:
    """Candidates ready to be handed over."""
    hits = [Hit(f"p{row}", 100.0 - row, f"text {row} " * 50) for row in range(CANDIDATES)]
    return Ranking.from_hits(hits, ScoreKind.RATIO)


def guarded(
    retriever: AnyRetriever, *, sampler: Sampler | None = None, **settings: Any
) -> tuple[ContextGuard, CollectorRegistry]:
    """A guard with metrics of its own, and their registry."""
    registry = CollectorRegistry()
    guard = ContextGuard(
        retriever,
        policy=RatioPolicy(k=10, min_ratio=0.0),
        sampler=sampler,
        telemetry=Telemetry(registry),
        **settings,
    )
    return guard, registry


@contextmanager
def faulty(stage: Fault, fault: str) -> Iterator[None]:
    """Make a stage fail until the block ends; a call that hangs returns then."""
    ended, calls = threading.Event(), count(1)

    def instead(work: Callable[[], Any]) -> Any:
        if fault == DEAD:
            raise ConnectionError("the stage is dead")
        if fault == HUNG:
            ended.wait(_HANG_SECONDS)
        elif next(calls) % 4 == 0:
            ended.wait(_SHORT_HANG_SECONDS)
        return work()

    try:
        with stage.injected(instead):
            yield
    finally:
        ended.set()
