"""Hybrid search beside the systems that people would use instead, and beside its own two engines.

    python -m benchmarks.search --sizes scifact 10k 100k 1m --json search.json
    python -m benchmarks.search --sizes 100k --peers ctxguard,ctxguard-none,txtai --clients 1,4
    python -m benchmarks.search --sizes scifact 100k --peers none

Without encoding: query vectors are given. Two comparisons for each size:

*direct*: the embedded retriever and its two engines called one after the other, in one process.
Both analyse the query with the same function and take depth 100 per leg; the direct side then
stops, the hybrid one unites, scores every candidate in both legs, fuses and sorts. Queries
alternate between the two sides, so that a busy machine slows both and neither finds its vectors in
the cache; the parts are timed after that, each by itself.

*peers*: every system in a process of its own (`benchmarks._search_peers`): a query of text and
vector, the ten best after its own fusion of its own legs, 100 deep where that can be set; first
ctxguard as a new user gets it, with all signals, then without. A system
that does not finish within the limits of time and memory is shown with what stopped it.

A size is ``scifact`` (the folder given with --scifact: real texts and queries with random unit
vectors, for *direct* only) or a number of generated passages (`benchmarks._search_data`).
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._search_data import DEPTH, DIMENSION, Corpus, prepare
from benchmarks._search_peers import OURS, PEERS
from benchmarks._search_run import Limits, run
from benchmarks._timing import environment
from ctxguard.core.types import Passage, Route
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.passages import searchable_text
from ctxguard.retrieval.protocols import Float32Array

DIRECT_BAR = 1.4
PEER_BAR = 4.0
DEFAULT_PEER_BAR = 1.0
RECALL_BAR = 0.98
CLIENTS_BAR = 2.5
MEMORY_BAR = 1.2
_WARM_UP_QUERIES = 20
_PACKAGES = ("ctxguard-rag", "bm25s", "faiss-cpu", "numpy")

Search = Callable[[int], object]


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


@dataclass(frozen=True)
class Workload:
    """Passages and queries with their vectors."""

    passages: list[Passage]
    vectors: Float32Array
    queries: list[str]
    query_vectors: Float32Array


def generated(corpus: Corpus, n_queries: int) -> Workload:
    """The data that the peers get too."""
    from benchmarks._search_peers.embedded import passages_of

    return Workload(
        passages_of(corpus),
        np.array(corpus.vectors),
        corpus.queries[:n_queries],
        corpus.query_vectors[:n_queries],
    )


def scifact(folder: Path, n_queries: int, seed: int) -> Workload:
    """Passages and the first queries of a BEIR folder, with random unit vectors."""

    def records(name: str) -> list[dict[str, str]]:
        with (folder / name).open(encoding="utf-8") as stream:
            return [json.loads(line) for line in stream]

    rng = np.random.default_rng(seed)

    def units(n: int) -> Float32Array:
        vectors = rng.standard_normal((n, DIMENSION), dtype=np.float32)
        scaled: Float32Array = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return scaled

    passages = [
        Passage(record["_id"], record["text"], record.get("title", ""))
        for record in records("corpus.jsonl")
    ]
    queries = [record["text"] for record in records("queries.jsonl")[:n_queries]]
    return Workload(passages, units(len(passages)), queries, units(len(queries)))


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


def compare_direct(load: Workload, repeats: int) -> dict[str, Any]:
    """Both sides' timings over the same queries, alternating, and each part's."""
    from benchmarks._search_peers.embedded import DirectDense, DirectLexical, GivenVectors

    queries, vectors = load.queries, load.query_vectors
    started = time.perf_counter()
    retriever = HybridRetriever.build(
        load.passages, embedder=GivenVectors(load.vectors), signals="none"
    )
    build_seconds = time.perf_counter() - started
    words, flat = DirectLexical(map(searchable_text, load.passages)), DirectDense(load.vectors)

    def both_direct(at: int) -> object:
        return words.search(queries[at]), flat.search(vectors[at])

    lexical, dense = (retriever.on_route(route) for route in (Route.LEXICAL, Route.DENSE))
    compared: dict[str, Search] = {
        "direct": both_direct,
        "hybrid": lambda at: retriever.retrieve(queries[at], depth=DEPTH, query_vector=vectors[at]),
    }
    parts: dict[str, Search] = {
        "bm25s_direct": lambda at: words.search(queries[at]),
        "lexical": lambda at: lexical.retrieve(queries[at], depth=DEPTH),
        "faiss_direct": lambda at: flat.search(vectors[at]),
        "dense": lambda at: dense.retrieve(queries[at], depth=DEPTH, query_vector=vectors[at]),
    }
    seconds = alternate(compared, len(queries), repeats)
    for side, search in parts.items():
        seconds |= alternate({side: search}, len(queries), repeats)
    timings = {side: Timing.of(taken) for side, taken in seconds.items()}
    return {
        "passages": len(load.passages),
        "queries": len(queries) * repeats,
        "build_seconds": round(build_seconds, 2),
        "milliseconds": {side: vars(timing) for side, timing in timings.items()},
        "ratio_hybrid_to_direct": round(timings["hybrid"].p50 / timings["direct"].p50, 3),
        "bar": DIRECT_BAR,
    }


def show_direct(size: str, result: dict[str, Any]) -> None:
    """One size's comparison with the engines, for people."""
    _say(f"\n{size}: {result['passages']} passages, {result['queries']} queries")
    for side, timing in result["milliseconds"].items():
        _say(f"  {side:14} p50 {timing['p50']:8.3f} ms   p99 {timing['p99']:8.3f} ms")
    _say(f"  hybrid / direct at p50: {result['ratio_hybrid_to_direct']} (bar {DIRECT_BAR})")


_HEADER = (
    f"  {'system':20} {'p50 ms':>9} {'p99 ms':>9} {'cpu ms':>9} {'q/s x1':>9} {'q/s x4':>9} "
    f"{'build s':>8} {'MiB':>7} {'disk':>6} {'hybrid':>7} {'words':>6} {'dense':>6}"
)


def row_of(name: str, figures: dict[str, Any]) -> str:
    """One system's line: what it told before it ended, and why it ended early."""
    one, four = figures.get("clients_1", {}), figures.get("clients_4", {})
    built, top = figures.get("built", {}), figures.get("agreement", {}).get("top_10", {})
    memory = figures.get("served", built)
    line = (
        f"  {name:20} {_number(one.get('p50_ms'), 3):>9} {_number(one.get('p99_ms'), 3):>9} "
        f"{_number(one.get('processor_ms'), 3):>9} "
        f"{_number(one.get('queries_per_second'), 1):>9} "
        f"{_number(four.get('queries_per_second'), 1):>9} "
        f"{_number(built.get('build_seconds'), 1):>8} "
        f"{_number(memory.get('memory_mib', memory.get('built_mib')), 0):>7} "
        f"{_number(built.get('disk_mib'), 0):>6} {_number(top.get('hybrid'), 3):>7} "
        f"{_number(top.get('lexical'), 3):>6} {_number(top.get('dense'), 3):>6}"
    )
    return line if figures["ended"] == "done" else f"{line}  {figures['ended']}"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def faster(
    rivals: dict[str, dict[str, float]], ours: dict[str, float] | None, figure: str
) -> float | None:
    """How many times the figure of the nearest peer is ours; None without either."""
    nearest = min((each[figure] for each in rivals.values()), default=None)
    return None if nearest is None or ours is None else round(nearest / ours[figure], 2)


def bars(figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the retriever promises, as measured in one size's run; None where it was not.

    ``default`` is the search with all signals; the other figures are of that without.
    """
    ours, default = figures.get("ctxguard-none", {}), figures.get("ctxguard", {})
    one, four, all_signals = ours.get("clients_1"), ours.get("clients_4"), default.get("clients_1")
    rivals = {
        name: each["clients_1"]
        for name, each in figures.items()
        if name not in (*OURS, "direct") and "clients_1" in each
    }
    nearest = min(rivals, key=lambda name: rivals[name]["p50_ms"]) if rivals else None
    served = ours.get("served", {})
    floor = served.get("vectors_and_postings_mib")
    return {
        "recall_of_exact_top_10": ours.get("agreement", {}).get("top_10", {}).get("hybrid"),
        "recall_bar": RECALL_BAR,
        "nearest_embedded_peer": nearest,
        "times_faster_at_p50": faster(rivals, one, "p50_ms"),
        "times_less_processor_time": faster(rivals, one, "processor_ms"),
        "faster_bar": PEER_BAR,
        "default_times_faster_at_p50": faster(rivals, all_signals, "p50_ms"),
        "default_times_less_processor_time": faster(rivals, all_signals, "processor_ms"),
        "default_faster_bar": DEFAULT_PEER_BAR,
        "four_clients_to_one": round(four["queries_per_second"] / one["queries_per_second"], 2)
        if one and four
        else None,
        "clients_bar": CLIENTS_BAR,
        "memory_to_vectors_and_postings": round(served["memory_mib"] / floor, 2) if floor else None,
        "memory_bar": MEMORY_BAR,
    }


def compare_peers(
    corpus: Corpus, peers: Sequence[str], clients: Sequence[int], limits: Limits
) -> dict[str, Any]:
    """Every system's figures over one corpus, one system after the other."""
    _say(
        f"\n{len(corpus):,} passages, {limits.threads} thread(s) a search, top 10 shared with exact"
    )
    _say(_HEADER)
    figures: dict[str, dict[str, Any]] = {}
    for name in peers:
        figures[name] = run(name, corpus, clients, limits)
        _say(row_of(name, figures[name]))
    measured = bars(figures)
    _say("  " + ", ".join(f"{name} {value}" for name, value in measured.items()))
    return {"systems": figures, "bars": measured}


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def size_of(text: str) -> int:
    """A number of passages: ``10k``, ``1m`` or digits.

    >>> size_of("10k"), size_of("1m"), size_of("250")
    (10000, 1000000, 250)
    """
    scale = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    return int(text if scale == 1 else text[:-1]) * scale


def peers_of(text: str) -> list[str]:
    """The systems named: ``all``, ``none``, or names with commas between.

    Raises:
        argparse.ArgumentTypeError: a name that is not known.
    """
    if text in ("all", "none"):
        return list(PEERS) if text == "all" else []
    unknown = [name for name in text.split(",") if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {unknown[0]!r}; one of {', '.join(PEERS)}")
    return text.split(",")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cores = len(os.sched_getaffinity(0))
    default_data = Path(tempfile.gettempdir()) / "ctxguard-search"
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--sizes", nargs="+", default=["scifact", "100k"])
    made.add_argument("--peers", type=peers_of, default=list(PEERS), help="all, none, or a,b,c")
    made.add_argument("--no-direct", action="store_true", help="leave the engines' comparison out")
    made.add_argument("--clients", default="1,4", help="numbers of clients, commas between")
    made.add_argument("--seconds", type=float, default=20.0, help="most of one measurement")
    made.add_argument("--limit-seconds", type=float, default=1_800.0, help="most of one system")
    made.add_argument("--limit-gib", type=float, default=14.0, help="most memory of one system")
    made.add_argument("--threads", type=int, default=1, help="of one search")
    made.add_argument("--build-threads", type=int, default=cores)
    made.add_argument("--data", type=Path, default=default_data, help="where the data is kept")
    made.add_argument("--scifact", type=Path, default=Path("../shared/data/scifact"))
    made.add_argument("--queries", type=int, default=300, help="of the engines' comparison")
    made.add_argument("--repeats", type=int, default=3, help="of the engines' comparison")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path, help="where to write the figures")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    given = parser().parse_args(arguments)
    limits = Limits(
        given.seconds, given.limit_seconds, given.limit_gib, given.build_threads, given.threads
    )
    clients = [int(number) for number in given.clients.split(",")]
    about = environment(_PACKAGES, given.threads) | {"build_threads": given.build_threads}
    report: dict[str, Any] = {"environment": about, "depth": DEPTH}
    _say(json.dumps(about, indent=2))
    for size in [size for sizes in given.sizes for size in sizes.split(",")]:
        figures: dict[str, Any] = {}
        if size == "scifact":
            load = scifact(given.scifact, given.queries, given.seed)
            figures["direct"] = compare_direct(load, given.repeats)
            show_direct(size, figures["direct"])
        else:
            corpus = prepare(size_of(size), given.data, seed=given.seed)
            if not given.no_direct:
                load = generated(corpus, given.queries)
                figures["direct"] = compare_direct(load, given.repeats)
                show_direct(size, figures["direct"])
                del load
            if given.peers:
                figures["peers"] = compare_peers(corpus, given.peers, clients, limits)
        report[size] = figures
        if given.json is not None:
            given.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
