"""Embedded hybrid search beside its own two engines called directly, one after the other.

    python -m benchmarks.search --sizes scifact 100000 --json search.json

Without encoding: the query vectors are given. Both sides analyse the query with the same function
and take depth 100 per leg; the direct side then stops, the hybrid one unites, scores every
candidate in both legs, fuses and sorts. Queries alternate between the two sides, so that a busy
machine slows both and neither finds its vectors in the cache; the parts are timed after that, each
by itself. A size is ``scifact`` (the folder given with --scifact: real texts and queries)
or a number of synthetic passages of Zipf-distributed words. Vectors are random unit vectors.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from ctxguard.retrieval.analysis import analyse
from ctxguard.retrieval.hybrid import HybridRetriever
from ctxguard.retrieval.passages import searchable_text
from ctxguard.retrieval.protocols import Float32Array, Progress
from ctxguard.types import Passage, Route

DEPTH = 100
DIMENSION = 384
ZIPF_EXPONENT = 1.3
VOCABULARY = 50_000
WORDS_PER_PASSAGE = 60
WORDS_PER_QUERY = 8
BAR = 1.4
_WARM_UP_QUERIES = 20


Search = Callable[[int], object]


class RandomEmbedder:
    """Random unit vectors: a search takes as long as over real ones where it is exact."""

    name = "random unit vectors"
    dimension = DIMENSION

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def encode_query(self, text: str) -> Float32Array:
        return self.encode_passages([text]).reshape(-1)

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        vectors = self._rng.standard_normal((len(texts), self.dimension), dtype=np.float32)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        if progress is not None:
            progress(len(texts))
        return np.asarray(vectors / lengths, dtype=np.float32)

    def fingerprint(self) -> str:
        return "random"


@dataclass(frozen=True)
class Timing:
    """Milliseconds per query.

    Attributes:
        p50: The median.
        p99: The 99th percentile.
    """

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        p50, p99 = np.quantile(seconds, (0.5, 0.99)) * 1e3
        return cls(round(float(p50), 4), round(float(p99), 4))


def synthetic(n: int, n_queries: int, seed: int) -> tuple[list[Passage], list[str]]:
    """Passages and queries of words drawn from one Zipf law."""
    rng = np.random.default_rng(seed)

    def text(length: int) -> str:
        words = np.minimum(rng.zipf(ZIPF_EXPONENT, length), VOCABULARY)
        return " ".join([f"word{word}" for word in words.tolist()])

    passages = [Passage(f"p{row:07d}", text(WORDS_PER_PASSAGE)) for row in range(n)]
    return passages, [text(WORDS_PER_QUERY) for _ in range(n_queries)]


def scifact(folder: Path, n_queries: int) -> tuple[list[Passage], list[str]]:
    """Passages and the first queries of a BEIR folder."""

    def records(name: str) -> list[dict[str, str]]:
        with (folder / name).open(encoding="utf-8") as stream:
            return [json.loads(line) for line in stream]

    passages = [
        Passage(record["_id"], record["text"], record.get("title", ""))
        for record in records("corpus.jsonl")
    ]
    return passages, [record["text"] for record in records("queries.jsonl")[:n_queries]]


def alternate(sides: dict[str, Search], n_queries: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of every search, each query going to every side in turn."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for at in range(min(_WARM_UP_QUERIES, n_queries)):
        for search in sides.values():
            search(at)
    for _ in range(repeats):
        for at in range(n_queries):
            for side, search in sides.items():
                started = time.perf_counter()
                search(at)
                seconds[side].append(time.perf_counter() - started)
    return seconds


def measure(
    passages: list[Passage], queries: list[str], repeats: int, seed: int
) -> dict[str, object]:
    """Every side's timings over the same queries, alternating."""
    import bm25s
    import faiss

    embedder = RandomEmbedder(seed)
    started = time.perf_counter()
    retriever = HybridRetriever.build(passages, embedder=embedder)
    build_seconds = time.perf_counter() - started
    vectors = embedder.encode_passages(queries)

    words = bm25s.BM25(backend="numba")
    words.index([analyse(searchable_text(passage)) for passage in passages], show_progress=False)
    flat = faiss.IndexFlatIP(DIMENSION)
    flat.add(embedder.encode_passages([""] * len(passages)))

    def lexical_direct(at: int) -> object:
        return words.retrieve([analyse(queries[at])], k=DEPTH, n_threads=1, show_progress=False)

    def dense_direct(at: int) -> object:
        return flat.search(vectors[at : at + 1], DEPTH)

    def both_direct(at: int) -> object:
        return lexical_direct(at), dense_direct(at)

    lexical_route, dense_route = (
        retriever.on_route(route) for route in (Route.LEXICAL, Route.DENSE)
    )
    compared: dict[str, Search] = {
        "direct": both_direct,
        "hybrid": lambda at: retriever.retrieve(queries[at], depth=DEPTH, query_vector=vectors[at]),
    }
    parts: dict[str, Search] = {
        "bm25s_direct": lexical_direct,
        "lexical": lambda at: lexical_route.retrieve(queries[at], depth=DEPTH),
        "faiss_direct": dense_direct,
        "dense": lambda at: dense_route.retrieve(
            queries[at], depth=DEPTH, query_vector=vectors[at]
        ),
    }
    seconds = alternate(compared, len(queries), repeats)
    for side, search in parts.items():
        seconds |= alternate({side: search}, len(queries), repeats)
    timings = {side: Timing.of(taken) for side, taken in seconds.items()}
    return {
        "passages": len(passages),
        "queries": len(queries) * repeats,
        "build_seconds": round(build_seconds, 2),
        "milliseconds": {side: vars(timing) for side, timing in timings.items()},
        "ratio_hybrid_to_direct": round(timings["hybrid"].p50 / timings["direct"].p50, 3),
        "bar": BAR,
    }


def environment() -> dict[str, object]:
    """What the figures depend on."""
    import faiss

    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "faiss_threads": faiss.omp_get_max_threads(),
        "clients": 1,
        "versions": {name: version(name) for name in ("bm25s", "faiss-cpu", "numba", "numpy")},
    }


def show(size: str, result: dict[str, object]) -> None:
    """One size's figures, for people."""
    timings = result["milliseconds"]
    assert isinstance(timings, dict)
    sys.stdout.write(f"\n{size}: {result['passages']} passages, {result['queries']} queries\n")
    for side, timing in timings.items():
        sys.stdout.write(f"  {side:14} p50 {timing['p50']:8.3f} ms   p99 {timing['p99']:8.3f} ms\n")
    sys.stdout.write(f"  hybrid / direct at p50: {result['ratio_hybrid_to_direct']} (bar {BAR})\n")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Embedded hybrid search beside its engines.")
    parser.add_argument("--sizes", nargs="+", default=["scifact", "100000"])
    parser.add_argument("--scifact", type=Path, default=Path("../shared/data/scifact"))
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    report: dict[str, object] = {"environment": environment(), "depth": DEPTH}
    sys.stdout.write(json.dumps(report["environment"], indent=2) + "\n")
    for size in arguments.sizes:
        if size == "scifact":
            passages, queries = scifact(arguments.scifact, arguments.queries)
        else:
            passages, queries = synthetic(int(size), arguments.queries, arguments.seed)
        result = measure(passages, queries, arguments.repeats, arguments.seed)
        show(size, result)
        report[size] = result
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
