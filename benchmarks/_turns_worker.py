"""Times one checkout's cases on request: run by `benchmarks.turns` and `benchmarks.search_turns`.

    python _turns_worker.py                      # in the checkout's folder
    python _turns_worker.py DIR [PASSAGES...]    # the searches of a BEIR folder

Reads lines ``CASE SECONDS`` and answers each with the median nanoseconds of the processor time of
its calls. Imports `ctxguard` and `benchmarks` from the current folder, so that each checkout builds
its cases by its own code.
"""

import asyncio
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import get_type_hints

sys.path.insert(0, str(Path.cwd()))

from benchmarks import overhead
from benchmarks import store as store_benchmark
from benchmarks._collection import default_cache, indexed
from benchmarks._serve_app import ScoresAtHand, profile
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import Passage
from ctxguard.monitor.store import SampleStore, WorkerCounts
from ctxguard.retrieval import HybridRetriever
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.server.app import create_app

PASSAGES = 300
QUERIES = 200
DOCUMENTS = 50


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
    found["/rerank in process"] = rerank(folder)
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


def collection_searches(folder: Path, sizes: list[int]) -> dict[str, Callable[[], object]]:
    """Searches of a collection, and of larger ones made of it; query vectors are given."""
    embedder, cache = SentenceTransformerEmbedder(), default_cache()
    retriever = indexed(folder, cache, embedder)
    lines = (folder / "queries.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines[:QUERIES]]
    queries = [(text, retriever.encode_query(text)) for text in texts]
    found: dict[str, Callable[[], object]] = {}

    def add(name: str, retriever: HybridRetriever, depth: int = 100) -> None:
        turns = cycle(queries)

        def search() -> None:
            query, vector = next(turns)
            retriever.retrieve(query, depth=depth, query_vector=vector)

        for _ in queries:
            search()
        found[name] = search

    add("default", retriever)
    add("none", retriever.with_fusion(Fusion()))
    for size in sizes:
        # Former checkouts have no larger collections.
        from benchmarks._recycled import recycled

        add("default, depth 1,000", retriever, 1_000)
        add(f"default, {size:,} passages", recycled(retriever, embedder, size, cache))
    return found


def rerank(folder: Path) -> Callable[[], object]:
    """One request of the rerank protocol through the whole application, without a socket."""
    file = folder / "profile.json"
    profile().save(file)
    # The class has another name in former checkouts.
    settings = get_type_hints(create_app)["settings"](port=0, profile=file)
    app = create_app(settings, scorer=ScoresAtHand())
    body = json.dumps(
        {"query": "a question", "documents": [f"document {n} " * 20 for n in range(DOCUMENTS)]}
    ).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/rerank",
        "raw_path": b"/rerank",
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"127.0.0.1"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    loop = asyncio.new_event_loop()
    started = asyncio.Event()

    async def lifespan() -> None:
        sent = [{"type": "lifespan.startup"}]

        async def receive() -> dict[str, str]:
            if sent:
                return sent.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, object]) -> None:
            if message["type"] == "lifespan.startup.complete":
                started.set()

        await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)  # type: ignore[arg-type]

    async def ready() -> asyncio.Task[None]:
        task = asyncio.ensure_future(lifespan())
        await started.wait()
        return task

    kept_alive = loop.run_until_complete(ready())
    statuses: list[int] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])  # type: ignore[arg-type]

    async def one() -> None:
        await app(dict(scope), receive, send)  # type: ignore[arg-type]

    def call(_: object = kept_alive) -> None:
        statuses.clear()
        loop.run_until_complete(one())
        if statuses != [200]:
            raise RuntimeError(f"/rerank answered {statuses}")

    return call


def append(folder: Path) -> Callable[[], object]:
    """A batch of 100 samples into SQLite."""
    store = SampleStore.open(f"sqlite:///{folder}/samples.db")
    bodies, chance = store_benchmark.payloads(100, 0), random.Random(0)

    def call(turn: list[int] = [0]) -> None:  # noqa: B006
        turn[0] += store_benchmark.BATCH
        batch = store_benchmark.entries(bodies, turn[0], chance)
        store.append("worker", batch, WorkerCounts(store_benchmark.BATCH))

    return call


def main() -> None:
    """Announce the names of the cases, then answer requests until the input ends."""
    with tempfile.TemporaryDirectory() as folder:
        given = sys.argv[1:]
        calls = (
            collection_searches(Path(given[0]), list(map(int, given[1:])))
            if given
            else cases(Path(folder))
        )
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
        # The application's tasks run until their loop is gone: nothing of them is of use any more.
        os._exit(0)


if __name__ == "__main__":
    main()
