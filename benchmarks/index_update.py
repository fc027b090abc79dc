"""Time an update of 1% of an index, without encoding, and search it meanwhile.

    python -m benchmarks.index_update --check

An index of generated passages with vectors at hand is built, saved and opened twice. A hundredth of
the corpus is replaced by ``HybridRetriever.update``, while another thread searches: every answer
must be of one generation or the other. Then it is saved, followed by a reader, and compared with
one that was built anew.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from threading import Event, Thread
from typing import Any

from benchmarks._command import CONSOLE, command, ended
from benchmarks._search_data import DEPTH, Corpus, prepare
from benchmarks._search_peers.embedded import GivenVectors, passages_of
from benchmarks._search_tokens import query_states
from benchmarks._timing import environment
from ctxguard.core.types import Route
from ctxguard.retrieval.hybrid.retriever import HybridRetriever

BAR_SECONDS = 3.0
FEWEST = 100


def measure(corpus: Corpus, n: int, folder: Path) -> dict[str, Any]:
    """Measure an index of the first ``n`` passages, of which a hundredth is replaced."""
    passages = passages_of(corpus)
    changed = len(passages) - n
    now = passages[changed:]
    embedder = GivenVectors(corpus.vectors)  # hands them out in order: n, then the new ones
    states = query_states(corpus.queries, corpus.query_vectors)
    queries = list(zip(corpus.queries, states, strict=True))

    def found(retriever: HybridRetriever, query: str, given: Any) -> Sequence[str]:
        return retriever.retrieve(query, depth=DEPTH, query_vector=given).passage_ids

    build_seconds, built = _timed(lambda: HybridRetriever.build(passages[:n], embedder=embedder))
    save_seconds, _ = _timed(lambda: built.save(folder))
    writer, reader = (HybridRetriever.load(folder, embedder=embedder) for _ in range(2))
    generations = [{each.passage_id for each in own} for own in (passages[:n], now)]
    over, answered = Event(), [0]

    def ask() -> None:
        for query, given in cycle(queries):
            if over.is_set():
                return
            ids = {*found(writer, query, given)}
            assert any(ids <= each for each in generations)
            answered[0] += 1

    asking = Thread(target=ask)
    asking.start()
    update_seconds, changes = _timed(lambda: writer.update(now))
    over.set()
    asking.join()
    durable_seconds, _ = _timed(lambda: writer.save(folder))
    followed_seconds, _ = _timed(reader.reload)
    anew = HybridRetriever.build(now, embedder=GivenVectors(corpus.vectors[changed:]))
    shared = {}
    for route in (Route.LEXICAL, Route.HYBRID):
        both = [each.on_route(route) for each in (writer, anew)]
        tops = [[{*found(one, *asked)[:10]} for one in both] for asked in queries]
        shares = [len(one & other) / len(other) for one, other in tops if other]
        shared[route.value] = round(statistics.mean(shares), 4)
    return {
        "passages": n,
        "changed": changes.added + changes.deleted,
        "build_seconds": build_seconds,
        "save_seconds": save_seconds,
        "update_seconds": update_seconds,
        "durable_seconds": update_seconds + durable_seconds,
        "followed_seconds": followed_seconds,
        "searches_meanwhile": answered[0],
        "rankings_shared": shared,
    }


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return round(time.perf_counter() - start, 4), result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 where a bar that was checked is missed."""
    parser = command("Time an update of 1% of an index, without encoding.")
    parser.add_argument("--passages", type=int, default=10_000)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    options = parser.parse_args(arguments)
    if options.passages < FEWEST or options.queries < 1:
        parser.error(f"--passages must be at least {FEWEST}, and --queries positive")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        new = options.passages // 100
        corpus = prepare(options.passages + new, Path(name), n_queries=options.queries)
        found = measure(corpus, options.passages, Path(name) / "index")
    CONSOLE.print_json(data=found)
    seconds = found["update_seconds"]
    missed = [f"an update takes {seconds:g} s"] if seconds > BAR_SECONDS else []
    return ended(options, {"environment": environment(("ctxguard-rag", "numpy")), **found}, missed)


if __name__ == "__main__":
    sys.exit(main())
