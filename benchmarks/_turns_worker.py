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
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count, cycle
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))

from benchmarks import overhead
from benchmarks._collection import default_cache, indexed
from ctxguard.core.types import Passage
from ctxguard.monitor.store import Entry, SampleStore, WorkerCounts
from ctxguard.retrieval import HybridRetriever
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
    found |= searches()
    found["store, append a batch"] = append(folder)
    return found


def searches() -> dict[str, Callable[[], object]]:
    """The embedded search at both levels of signals; queries are encoded before the clock runs."""
    chance = random.Random(0)
    words = [f"word{n}" for n in range(300)]
    passages = [
        Passage(f"p{n}", ". ".join(" ".join(chance.choices(words, k=8)) for _ in range(4)))
        for n in range(PASSAGES)
    ]
    queries = [" ".join(chance.choices(words, k=8)) for _ in range(20)]
    found: dict[str, Callable[[], object]] = {}
    for level in ("none", "full"):
        embedder = SentenceTransformerEmbedder()
        encode = embedder.encode_query
        embedder.encode_query = lru_cache(encode)  # type: ignore[method-assign]
        retriever = HybridRetriever.build(
            passages,
            embedder=embedder,
            signals=level,
        )
        turns = cycle(queries)

        def search(retriever: HybridRetriever = retriever, turns: Iterator[str] = turns) -> None:
            retriever.retrieve(next(turns), depth=100)

        for _ in queries:
            search()
        found[f"search, signals {level}"] = search
    return found


def collection_searches(folder: Path) -> dict[str, Callable[[], object]]:
    """Searches of a collection at depth 100, with the encoding of the query and without."""
    retriever = indexed(folder, default_cache(), SentenceTransformerEmbedder())
    lines = (folder / "queries.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines[:QUERIES]]
    queries = [(text, retriever.encode_query(text)) for text in texts]
    encoded, given = cycle(texts), cycle(queries)

    def search() -> None:
        query, vector = next(given)
        retriever.retrieve(query, depth=100, query_vector=vector)

    return {
        f"{folder.name}, encoding included": lambda: retriever.retrieve(next(encoded), depth=100),
        f"{folder.name}, vector given": search,
    }


def append(folder: Path) -> Callable[[], object]:
    """A batch of 100 samples of 11.5 KB into SQLite."""
    store = SampleStore.open(f"sqlite:///{folder}/samples.db")
    body, chance, names = json.dumps(["word"] * 1_440).encode(), random.Random(0), count()

    def call() -> None:
        batch = [
            Entry(f"{next(names):032x}", time.time(), 0.05, None, chance.random(), body)
            for _ in range(BATCH)
        ]
        store.append("worker", batch, WorkerCounts(BATCH))

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
