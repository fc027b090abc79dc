"""What does it cost to update 1% of an index, without encoding, and is it searched meanwhile?

    python -m benchmarks.index_update --check

An index of generated passages with vectors at hand is built, saved and opened twice. A hundredth of
the corpus is replaced by ``HybridRetriever.update``, while another thread searches: every answer
must be of one generation or the other. Then it is saved, followed by a reader, and compared with
one that was built anew.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from threading import Event, Thread
from typing import Any

from rich.console import Console

from benchmarks._search_data import DEPTH, DIMENSION, Corpus, prepare
from benchmarks._timing import environment
from ctxguard.core.types import Passage, Route
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.protocols import Float32Array, Progress

BAR_SECONDS = 3.0
FEWEST = 100

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
    """Every figure for an index of the first ``n`` passages, of which a hundredth is replaced."""
    texts = corpus.texts()
    embedder = KnownVectors(texts, corpus.vectors)
    passages = [Passage(f"p{row:08d}", text) for row, text in enumerate(texts)]
    build_seconds, built = _timed(lambda: HybridRetriever.build(passages[:n], embedder=embedder))
    save_seconds, _ = _timed(lambda: built.save(folder))
    writer, reader = (HybridRetriever.load(folder, embedder=embedder) for _ in range(2))
    changed = len(passages) - n
    now = [*passages[changed:n], *passages[n:]]
    over, answered = Event(), [0]

    def ask() -> None:
        queries = cycle(zip(corpus.queries, corpus.query_vectors, strict=True))
        while not over.is_set():
            query, vector = next(queries)
            ids = set(writer.retrieve(query, depth=DEPTH, query_vector=vector).passage_ids)
            first = {each.passage_id for each in passages[:n]}
            assert ids <= first or ids <= {each.passage_id for each in now}
            answered[0] += 1

    asking = Thread(target=ask)
    asking.start()
    update_seconds, changes = _timed(lambda: writer.update(now))
    over.set()
    asking.join()
    durable_seconds, _ = _timed(lambda: writer.save(folder))
    followed_seconds, _ = _timed(reader.reload)
    anew = HybridRetriever.build(now, embedder=embedder)
    return {
        "passages": n,
        "changed": changes.added + changes.deleted,
        "build_seconds": build_seconds,
        "save_seconds": save_seconds,
        "update_seconds": update_seconds,
        "durable_seconds": update_seconds + durable_seconds,
        "followed_seconds": followed_seconds,
        "searches_meanwhile": answered[0],
        "rankings_shared": _shared(writer, anew, corpus),
        "bar_seconds": BAR_SECONDS,
    }


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
        The exit status: 1 if ``--check`` was given and the bar was missed.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--passages", type=int, default=10_000)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the bar is missed")
    options = parser.parse_args(arguments)
    if options.passages < FEWEST or options.queries < 1:
        parser.error(f"--passages must be at least {FEWEST}, and --queries positive")
    console = Console(width=120, highlight=False)
    report: dict[str, Any] = {"environment": environment(_PACKAGES)}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        new = options.passages // 100
        corpus = prepare(options.passages + new, Path(name), n_queries=options.queries)
        report |= measure(corpus, options.passages, Path(name) / "index")
    console.print_json(data=report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    missed = report["update_seconds"] > BAR_SECONDS
    if missed:
        console.print(f"MISSED: an update takes more than {BAR_SECONDS:g} s")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
