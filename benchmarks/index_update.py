"""What it costs to add, delete and replace one passage of a saved index, and to follow it.

    python -m benchmarks.index_update --passages 100000 --json index_update.json --check

Without encoding: texts and vectors are generated (`benchmarks._search_data`) and given. Each
change is timed from the call to the end of the save, after which it would survive a loss of power;
a second retriever then reloads the folder. Changes come in turns: one added, one deleted, one
replaced.

Searches are timed in turns as well: of the index as it was built, of the edited one, and of one
that is built anew from the same passages. The rankings of the last two are compared.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._search_data import DEPTH, DIMENSION, Corpus, prepare
from benchmarks._timing import environment, interleaved
from ctxguard.core.types import Passage, Route
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.protocols import Float32Array, Progress

BAR_SECONDS = 0.5
_PACKAGES = ("ctxguard-rag", "faiss-cpu", "numpy")


class KnownVectors:
    """An embedder of texts whose vectors are at hand."""

    name = "known vectors"
    dimension = DIMENSION

    def __init__(self, texts: Sequence[str], vectors: Float32Array) -> None:
        self._rows = {text: row for row, text in enumerate(texts)}
        self._vectors = vectors

    def encode_query(self, text: str) -> Float32Array:
        raise RuntimeError(f"the vector of {text!r} was not given")

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        if progress is not None:
            progress(len(texts))
        return self._vectors[[self._rows[text] for text in texts]]

    def fingerprint(self) -> str:
        return "given"


def measure(corpus: Corpus, n: int, folder: Path) -> dict[str, Any]:
    """Every figure for an index of the first ``n`` passages; the others are for the changes."""
    texts = corpus.texts()
    embedder = KnownVectors(texts, corpus.vectors)
    passages = [Passage(f"p{row:08d}", text) for row, text in enumerate(texts)]
    build_seconds, plain = _timed(lambda: HybridRetriever.build(passages[:n], embedder=embedder))
    save_seconds, _ = _timed(lambda: plain.save(folder))
    writer, reader = (HybridRetriever.load(folder, embedder=embedder) for _ in range(2))
    taken = _changes(writer, reader, folder, passages, n)
    merged = HybridRetriever.build(
        [writer.passage(passage_id) for passage_id in writer.passage_ids], embedder=embedder
    )
    return {
        "passages": n,
        "build_seconds": build_seconds,
        "save_seconds": save_seconds,
        "changes": taken,
        "searches": _searches({"built": plain, "edited": writer, "built anew": merged}, corpus),
        "rankings_shared": _shared(writer, merged, corpus),
        "bar_seconds": BAR_SECONDS,
    }


def _changes(
    writer: HybridRetriever,
    reader: HybridRetriever,
    folder: Path,
    passages: Sequence[Passage],
    n: int,
) -> dict[str, dict[str, float]]:
    """Seconds of each kind of change: in memory, until it is durable, and of following it."""
    turns = (len(passages) - n) // 2
    rows = np.random.default_rng(0).permutation(n)[: 2 * turns]
    taken: dict[str, list[tuple[float, float, float]]] = {}

    def change(kind: str, apply: Callable[[], object]) -> None:
        in_memory, _ = _timed(apply)
        saved, _ = _timed(lambda: writer.save(folder))
        followed, _ = _timed(reader.reload)
        taken.setdefault(kind, []).append((in_memory, in_memory + saved, followed))

    for turn in range(turns):
        added, edited = passages[n + turn], passages[n + turns + turn]
        gone, replaced = (passages[row].passage_id for row in rows[2 * turn : 2 * turn + 2])
        change("add", partial(writer.add, [added]))
        change("delete", partial(writer.delete, [gone]))
        change("upsert", partial(writer.upsert, [replace(edited, passage_id=replaced)]))
        if turn == 0:
            # The first edit on a machine also compiles its loops.
            taken.clear()
    return {kind: _summary(seconds) for kind, seconds in taken.items()}


def _summary(seconds: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    in_memory, durable, followed = zip(*seconds, strict=True)
    return {
        "changes": len(seconds),
        "in_memory_p50": round(statistics.median(in_memory), 4),
        "durable_p50": round(statistics.median(durable), 4),
        "durable_slowest": round(max(durable), 4),
        "followed_p50": round(statistics.median(followed), 4),
    }


def _searches(retrievers: dict[str, HybridRetriever], corpus: Corpus) -> dict[str, float]:
    """Milliseconds of a search at the median, in turns."""

    def searching(retriever: HybridRetriever) -> Callable[[], object]:
        queries = cycle(zip(corpus.queries, corpus.query_vectors, strict=True))

        def search() -> object:
            query, vector = next(queries)
            return retriever.retrieve(query, depth=DEPTH, query_vector=vector)

        return search

    cases = {name: searching(retriever) for name, retriever in retrievers.items()}
    timings = interleaved(cases, rounds=15, calls=50, seconds=2.0)
    return {name: round(timing.p50 / 1e3, 3) for name, timing in timings.items()}


def _shared(one: HybridRetriever, other: HybridRetriever, corpus: Corpus) -> dict[str, float]:
    """The mean share of the ten best that two indexes have in common, by route."""
    shares: dict[str, list[float]] = {}
    for query, vector in zip(corpus.queries, corpus.query_vectors, strict=True):
        for route in (Route.LEXICAL, Route.HYBRID):
            found = [
                set(
                    each.on_route(route)
                    .retrieve(query, depth=DEPTH, query_vector=vector)
                    .passage_ids[:10]
                )
                for each in (one, other)
            ]
            if found[1]:
                share = len(found[0] & found[1]) / len(found[1])
                shares.setdefault(route.value, []).append(share)
    return {route: round(statistics.mean(each), 4) for route, each in shares.items()}


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return round(time.perf_counter() - start, 4), result


def _table(result: dict[str, Any]) -> Table:
    table = Table("one passage", "in memory, s", "durable, s", "slowest, s", "followed, s")
    for kind, seconds in result["changes"].items():
        names = ("in_memory_p50", "durable_p50", "durable_slowest", "followed_p50")
        table.add_row(kind, *(f"{seconds[name]:.3f}" for name in names))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
        The exit status: 1 if ``--check`` was given and the bar was missed.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=21, help="of three changes; one warms up")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the bar is missed")
    options = parser.parse_args(arguments)
    if min(options.passages, options.turns - 1, options.queries) < 1:
        parser.error("--passages and --queries must be positive, --turns at least 2")
    console = Console(width=120, highlight=False)
    report: dict[str, Any] = {"environment": environment(_PACKAGES)}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        corpus = prepare(
            options.passages + 2 * options.turns, Path(name), n_queries=options.queries
        )
        report |= measure(corpus, options.passages, Path(name) / "index")
    console.print(_table(report))
    console.print_json(data={key: value for key, value in report.items() if key != "changes"})
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    missed = [kind for kind, each in report["changes"].items() if each["durable_p50"] > BAR_SECONDS]
    if missed:
        console.print(f"MISSED: {', '.join(missed)}: more than {BAR_SECONDS:g} s")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
