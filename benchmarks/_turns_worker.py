"""Times one checkout's cases on request: run by `benchmarks.turns`.

    python _turns_worker.py [DIR…]    # in the checkout's folder; DIR: BEIR folders to search too

Reads lines ``CASE SECONDS`` and answers each with the median nanoseconds of the processor time of
its calls. Imports `ctxguard` and `benchmarks` from the current folder, so that each checkout builds
its cases by its own code.
"""

import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path.cwd()))

from benchmarks import overhead
from benchmarks._collection import default_cache, indexed
from benchmarks._search_data import prepare
from benchmarks._search_peers.embedded import GivenVectors, passages_of
from benchmarks._search_tokens import query_states
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import Hit
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.monitor.sampling.record import record_of
from ctxguard.monitor.store import Batch, SampleStore
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

PASSAGES = 300
QUERIES = 200
BATCH = 100


def cases(folder: Path) -> dict[str, Callable[[], object]]:
    """Every case by its name."""
    pool = overhead.make_pool(overhead.BAR_SIZE, 0)
    ours, samplers = overhead.our_cases(pool, 0)

    def drained(call: Callable[[], object]) -> Callable[[], object]:
        def one() -> None:
            call()
            for sampler in samplers:
                sampler.drain(sampler.capacity)

        return one

    found: dict[str, Callable[[], object]] = {
        "decide, ratio": ours[overhead.DECIDE].call,
        "guard, hits": drained(ours[overhead.GUARD_HITS].call),
        "guard, ratio": drained(ours[overhead.GUARD].call),
        "guard, P of legs": drained(ours[overhead.GUARD_UTILITY].call),
    }
    found |= searches(folder)
    found["store, append a batch"] = append(folder)
    return found


def searches(folder: Path) -> dict[str, Callable[[], object]]:
    """The embedded search at both levels of signals, with the states of its queries given."""
    corpus = prepare(PASSAGES, folder, n_queries=20)
    queries = list(
        zip(corpus.queries, query_states(corpus.queries, corpus.query_vectors), strict=True)
    )
    built = HybridRetriever.build(passages_of(corpus), embedder=GivenVectors(corpus.vectors))
    return {
        "search, signals none": _search(built.with_fusion(Fusion()), queries),
        "search, signals full": _search(built, queries),
    }


def _search(retriever: HybridRetriever, queries: Sequence[tuple[str, Any]]) -> Callable[[], object]:
    given = cycle(queries)

    def search() -> None:
        query, vector = next(given)
        retriever.retrieve(query, depth=100, query_vector=vector)

    return search


def collection_searches(folder: Path) -> dict[str, Callable[[], object]]:
    """Searches of a collection at depth 100, with the encoding of the query and without."""
    retriever = indexed(folder, default_cache(), SentenceTransformerEmbedder())
    lines = (folder / "queries.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines[:QUERIES]]
    queries = [(text, retriever.encode_query(text)) for text in texts]
    encoded = cycle(texts)
    return {
        f"{folder.name}, encoding included": lambda: retriever.retrieve(next(encoded), depth=100),
        f"{folder.name}, vector given": _search(retriever, queries),
    }


def append(folder: Path) -> Callable[[], object]:
    """A batch of 100 samples of 11.5 KB into SQLite."""
    store = SampleStore.open(f"sqlite:///{folder}/samples.db")
    body, chance, names = json.dumps(["word"] * 1_440).encode(), random.Random(0), count()
    context = ContextGuard(score_kind="ratio").filter("q", [Hit("p", 1.0, "text")])
    record = record_of(context, 0.05, 0.0)

    def call() -> None:
        batch = [
            replace(
                record,
                request_id=f"{next(names):032x}",
                time_seconds=time.time(),
                label_order=chance.random(),
            )
            for _ in range(BATCH)
        ]
        store.append("worker", Batch([(one, body) for one in batch], BATCH))

    return call


def main() -> None:
    """Announce the names of the cases, then answer requests until the input ends."""
    with tempfile.TemporaryDirectory() as folder:
        calls = cases(Path(folder))
        for collection in sys.argv[1:]:
            calls |= collection_searches(Path(collection))
        for call in calls.values():
            for _ in range(5):
                call()
        gc.collect()
        print(json.dumps(list(calls)), flush=True)  # noqa: T201
        for line in sys.stdin:
            name, seconds = json.loads(line)
            call, end = calls[name], time.perf_counter() + seconds
            taken: list[int] = []
            while time.perf_counter() < end or len(taken) < 10:
                before = time.process_time_ns()
                call()
                taken.append(time.process_time_ns() - before)
            print(json.dumps(statistics.median(taken)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
