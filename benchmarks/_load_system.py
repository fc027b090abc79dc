"""The embedded retriever with stages that can be made to raise or to hang while it serves."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from ctxguard._extras import require
from ctxguard.guard import ContextGuard
from ctxguard.monitor.sampler import Sampler
from ctxguard.policy import RatioPolicy
from ctxguard.retrieval.hybrid import HybridRetriever
from ctxguard.retrieval.protocols import Float32Array, Progress
from ctxguard.stages import Deadlines
from ctxguard.telemetry import Telemetry
from ctxguard.types import FloatArray, Hit, Passage, Ranking, ScoreKind

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


class Switched:
    """What a stage does at each of its calls, to be changed while it runs."""

    def __init__(self) -> None:
        self.fault: Callable[[], None] | None = None

    def work(self) -> None:
        """Called at the start of every call."""
        if self.fault is not None:
            self.fault()


class LookedUp:
    """An embedder that knows the vectors of all queries."""

    name = "looked up"
    dimension = DIMENSION

    def __init__(self, queries: Sequence[str], switch: Switched, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._switch = switch
        self._known = dict(zip(queries, self.encode_passages(queries), strict=True))
        self._other = self.encode_passages(["any other"])[0]

    def encode_query(self, text: str) -> Float32Array:
        self._switch.work()
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


class ByLength:
    """A reranker that costs next to nothing."""

    fingerprint = "by length"

    def __init__(self, switch: Switched) -> None:
        self._switch = switch

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:  # noqa: ARG002
        self._switch.work()
        return np.array([-float(len(text)) for text in texts])


class System:
    """The embedded retriever, each of whose stages can be switched."""

    def __init__(self, seed: int) -> None:
        # Of one search: clients are what runs side by side here.
        require("faiss", "embedded").omp_set_num_threads(1)
        rng = random.Random(seed)
        words = [f"word{number}" for number in range(20_000)]
        weights = [1.0 / (rank + 3.0) for rank in range(len(words))]

        def text(length: int) -> str:
            return " ".join(rng.choices(words, weights, k=length))

        self.queries = [text(8) for _ in range(QUERIES)]
        self.switches = {"lexical": Switched(), "dense": Switched(), "rerank": Switched()}
        self._embedder = LookedUp(self.queries, self.switches["dense"], seed)
        built = HybridRetriever.build(
            [Passage(f"passage-{row:06d}", text(60)) for row in range(PASSAGES)],
            embedder=self._embedder,
        )
        lexical: Any = built._live.index.lexical
        words = lexical.words

        def switched(query: str) -> object:
            self.switches["lexical"].work()
            return words(query)

        lexical.words = switched
        self._index = built._live.index

    def retriever(self, *, rerank: bool = False, deadlines: Deadlines | None = None) -> Any:
        """One with circuits of its own, all closed."""
        made = HybridRetriever(
            self._index,
            embedder=self._embedder,
            reranker=ByLength(self.switches["rerank"]) if rerank else None,
        )
        made.warm_up()
        return made if deadlines is None else made.with_deadlines(deadlines)


def stub_ranking() -> Ranking:
    """Candidates ready to be handed over."""
    hits = [Hit(f"p{row}", 100.0 - row, f"text {row} " * 50) for row in range(CANDIDATES)]
    return Ranking.from_hits(hits, ScoreKind.RATIO)


def guarded(
    retriever: object, *, sampler: Sampler | None = None, **settings: Any
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
def faulty(switch: Switched, fault: str) -> Iterator[None]:
    """Have a stage fail for as long as the block lasts; what hangs returns when it ends."""
    ended, calls = threading.Event(), count(1)

    def work() -> None:
        if fault == DEAD:
            raise ConnectionError("the stage is dead")
        if fault == HUNG:
            ended.wait(_HANG_SECONDS)
        elif next(calls) % 4 == 0:
            ended.wait(_SHORT_HANG_SECONDS)

    switch.fault = work
    try:
        yield
    finally:
        switch.fault = None
        ended.set()
