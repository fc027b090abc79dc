"""How much memory indexing and calibrating take, beside the files that they map.

    python -m benchmarks.memory --json benchmarks/results/memory.json --check

No model runs: passages, vectors and sentences are drawn, so that times are those of indexing
without encoding. Each part is a process of its own, which is asked every 20 ms for its anonymous
resident memory (``RssAnon``): files that are mapped, which the system can drop at any time, do not
count.

Parts:
    index        short passages, in no order of their ids, indexed with all signals and saved
    search       that index opened and searched
    calibration  labelled queries of 100 candidates with all signals, on three routes
    depth        the guard, and the calibration of few queries, with 1,000 candidates beside 100
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._timing import environment, interleaved
from calibration.calibrate import Calibration, calibrate
from calibration.calibrate_route import Settings
from calibration.data.dataset import Dataset, Query
from ctxguard.core.decision import decide
from ctxguard.core.fusion import Fusion
from ctxguard.core.signals import TRANSFORMS
from ctxguard.core.types import Leg, Passage, PassagesBy, Ranking, Route, ScoreKind
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.protocols import (
    Float32Array,
    Progress,
    QueryStates,
    RowArray,
)

INDEX_BAR, CALIBRATION_BAR, DEPTH_BAR = 400, 1_000, 12.0
"""Megabytes, and times."""

_MB = 1e6
_DIMENSION, _PIECES, _PIECES_EACH = 384, 30_522, 16
_VOCABULARY, _WORDS, _DRAWN = 150_000, 20, 10_000
_CORPUS = 200_000
_DEPTH_QUERIES = 100
_PACKAGES = ("ctxguard-rag", "faiss-cpu", "numpy", "scikit-learn")


def _unit(rng: np.random.Generator, *shape: int) -> Float32Array:
    drawn = rng.standard_normal(shape, dtype=np.float32)
    unit: Float32Array = drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)
    return unit


class Drawn:
    """An embedder whose vectors and word pieces are drawn."""

    name = "drawn"
    dimension = _DIMENSION

    def fingerprint(self) -> str:
        return "drawn"

    def token_encoder(self) -> "DrawnPieces":
        return DrawnPieces()

    def encode_query(self, text: str) -> Float32Array:
        return self.token_encoder().query(text).vector

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        if progress is not None:
            progress(len(texts))
        return _unit(np.random.default_rng(len(texts[0])), len(texts), _DIMENSION)


class DrawnPieces:
    """Gives the word pieces of `Drawn`."""

    def query(self, text: str) -> QueryStates:
        rng = np.random.default_rng(len(text))
        pieces = rng.choice(_PIECES, 12, replace=False)
        return QueryStates(_unit(rng, _DIMENSION), pieces, _unit(rng, 12, _DIMENSION))

    def pieces(self, texts: Sequence[str]) -> list[RowArray]:
        rng = np.random.default_rng(len(texts))
        first = rng.integers(_PIECES - _PIECES_EACH, size=(len(texts), 1))
        return list(first + np.arange(_PIECES_EACH))

    @property
    def piece_table(self) -> Float32Array:
        return _piece_table()


@cache
def _piece_table() -> Float32Array:
    return _unit(np.random.default_rng(0), _PIECES, _DIMENSION)


def passages(n: int) -> Iterator[Passage]:
    """Draw passages of 20 words, frequent ones as in a language, in no order of their ids."""
    rng = np.random.default_rng(0)
    words = [f"w{number:x}q" for number in range(_VOCABULARY)]
    chances = (np.arange(_VOCABULARY) + 2.7) ** -1.07
    cumulative = np.cumsum(chances / chances.sum())[:-1]
    for first in range(0, n, _DRAWN):
        drawn = np.searchsorted(cumulative, rng.random((min(_DRAWN, n - first), _WORDS)))
        for row, own in enumerate(drawn.tolist(), start=first):
            # Prime to every n that is not a multiple of it: a permutation.
            yield Passage(f"p{row * 7_919 % n:08d}", " ".join([words[word] for word in own]) + ".")


class DrawnRoutes:
    """A retriever of three routes whose candidates, legs and signals are drawn from the query."""

    routes = (Route.HYBRID, Route.LEXICAL, Route.DENSE)
    has_signals = True

    def __init__(self, route: Route = Route.HYBRID) -> None:
        self.route = route

    def on_route(self, route: Route) -> "DrawnRoutes":
        return DrawnRoutes(route)

    def with_fusion(self, fusion: Fusion) -> "DrawnRoutes":
        del fusion
        return self

    def fingerprint(self) -> Mapping[str, str]:
        return {"system": "drawn"}

    def encode_query(self, query: str) -> QueryStates:
        return DrawnPieces().query(query)

    def retrieve(self, query: str, *, depth: int = 100, query_vector: object = None) -> Ranking:
        del query_vector
        rng = np.random.default_rng(int(query.rsplit(maxsplit=1)[-1]))
        rows, relevant = candidates(rng, depth)
        ids = tuple([f"p{row}" for row in rows.tolist()])
        lexical = np.sort(rng.gamma(2.0, 3.0, depth))[::-1].copy()
        dense = np.clip(0.3 + 0.2 * relevant + 0.1 * rng.standard_normal(depth), -1.0, 1.0)
        legs = {
            "lexical": Leg(lexical, ScoreKind.RATIO),
            "dense": Leg(dense, ScoreKind.COSINE),
        }
        fused = 1.0 / (60.0 + np.arange(depth))
        is_hybrid = self.route is Route.HYBRID
        return Ranking(
            passage_ids=ids,
            scores=tuple((fused if is_hybrid else lexical).tolist()),
            kind=ScoreKind.RATIO,
            passages=PassagesBy(lambda position: Passage(ids[position], "some words " * 20)),
            route=self.route,
            ranks=range(1, depth + 1),
            legs=legs if is_hybrid else {self.route.value: Leg(lexical, ScoreKind.RATIO)},
            signals={name: rng.standard_normal(depth) + 0.5 * relevant for name in TRANSFORMS}
            if is_hybrid
            else {},
        )


def candidates(
    rng: np.random.Generator, depth: int
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.bool_]]]:
    """Draw the rows of a query's candidates, and which are relevant: the first ones most often."""
    relevant = rng.random(depth) < 0.5 * np.exp(-np.arange(depth) / 5.0)
    return rng.choice(_CORPUS, depth, replace=False, shuffle=False), relevant


def dataset(n: int, depth: int) -> Dataset:
    """Label the candidates of drawn queries."""
    queries, qrels = [], {}
    for number in range(n):
        rows, relevant = candidates(np.random.default_rng(number), depth)
        queries.append(Query(f"q{number}", f"query {number}"))
        qrels[f"q{number}"] = {f"p{row}": 1 for row in rows[relevant].tolist()}
    return Dataset("drawn", tuple(queries), qrels)


def calibrated(n: int, depth: int) -> Calibration:
    """Calibrate on drawn queries."""
    return calibrate(DrawnRoutes(), dataset(n, depth), Settings(depth=depth, serving_k=5))


def index_part(n: int, folder: Path) -> dict[str, Any]:
    """Index passages and save the index."""
    retriever = HybridRetriever.build(passages(n), embedder=Drawn())
    retriever.save(folder)
    n_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {"passages": n, "bytes_on_disk": n_bytes}


def search_part(n: int, folder: Path) -> dict[str, Any]:
    """Open the index and search it, with the vectors of queries given."""
    retriever = HybridRetriever.load(folder, embedder=Drawn())
    texts = [f"{one.text.split('.')[0]} {at}" for at, one in enumerate(passages(min(n, 100)))]
    vectors = [retriever.encode_query(text) for text in texts]
    taken = []
    for text, vector in zip(texts, vectors, strict=True):
        start = time.perf_counter()
        retriever.retrieve(text, query_vector=vector)
        taken.append(time.perf_counter() - start)
    return {"passages": n, "search_milliseconds": round(float(np.median(taken)) * 1e3, 2)}


def calibration_part(n: int, folder: Path) -> dict[str, Any]:
    """Calibrate three routes."""
    del folder
    found = calibrated(n, 100)
    return {"queries": n, "candidates": 100, "routes": len(found.pools)}


def depth_part(n: int, folder: Path) -> dict[str, Any]:
    """Compare 1,000 candidates with 100, in the guard and in a calibration."""
    del folder
    seconds, found = {}, None
    for depth in (100, 1_000):
        start = time.process_time()
        found = calibrated(n, depth)
        seconds[depth] = time.process_time() - start
    assert found is not None
    policy = found.outcomes[Route.HYBRID].highest_utility.policy
    rankings = {depth: DrawnRoutes().retrieve("query 1", depth=depth) for depth in seconds}
    cases = {str(depth): lambda depth=depth: decide(rankings[depth], policy) for depth in seconds}
    guard = interleaved(cases, rounds=15, calls=50, seconds=2.0)
    return {
        "queries": n,
        "guard": round(guard["1000"].p50 / guard["100"].p50, 2),
        "calibration": round(seconds[1_000] / seconds[100], 2),
        "guard_microseconds": round(guard["1000"].p50, 1),
    }


PARTS = {
    "index": index_part,
    "search": search_part,
    "calibration": calibration_part,
    "depth": depth_part,
}


def anonymous_mb() -> float:
    """Resident memory of this process that is no file's, in megabytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1_024 / _MB


def watched(name: str, n: int, folder: Path) -> dict[str, Any]:
    """Run a part in this process, and watch its memory."""
    before = peak = anonymous_mb()
    ended = False

    def watch() -> None:
        nonlocal peak
        while not ended:
            peak = max(peak, anonymous_mb())
            time.sleep(0.02)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    found = PARTS[name](n, folder)
    ended = True
    thread.join()
    cpu = time.process_time()
    return found | {
        "libraries_mb": round(before),
        "peak_mb": round(max(peak, anonymous_mb())),
        "processor_seconds": round(cpu, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
        The exit status: 1 if ``--check`` was given and a bar was missed.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=10_000)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--folder", type=Path, help="on the disk to use; default: temporary")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--watch", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if min(options.passages, options.queries) < 1:
        parser.error("--passages and --queries must be positive")
    numbers = {
        "index": options.passages,
        "search": options.passages,
        "calibration": options.queries,
        "depth": min(options.queries, _DEPTH_QUERIES),
    }
    if options.watch:
        found = watched(options.watch, numbers[options.watch], options.folder)
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    report: dict[str, Any] = {"environment": environment(_PACKAGES)}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for part in options.only:
            own = ("--watch", part, "--folder", f"{name}/index")
            sizes = ("--passages", str(options.passages), "--queries", str(options.queries))
            done = subprocess.run(  # noqa: S603 - this module
                [sys.executable, "-m", "benchmarks.memory", *own, *sizes],
                stdout=subprocess.PIPE,
                check=True,
            )
            report[part] = json.loads(done.stdout)
    console = Console(width=120, highlight=False)
    table = Table("part", "peak, MB", "processor, s", "figures")
    for part in options.only:
        figures = {key: value for key, value in report[part].items() if not key.endswith("_mb")}
        seconds = figures.pop("processor_seconds")
        shown = ", ".join(f"{key} {value:,}" for key, value in figures.items())
        table.add_row(part, f"{report[part]['peak_mb']:,}", f"{seconds:,}", shown)
    console.print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    bars = {"index": INDEX_BAR, "search": INDEX_BAR, "calibration": CALIBRATION_BAR}
    missed = [
        f"{part}: {report[part]['peak_mb']} MB, bar {bar}"
        for part, bar in bars.items()
        if part in report and report[part]["peak_mb"] > bar
    ]
    missed += [
        f"{what} at depth 1,000: {report['depth'][what]} times, bar {DEPTH_BAR:g}"
        for what in ("guard", "calibration")
        if "depth" in report and report["depth"][what] > DEPTH_BAR
    ]
    for each in missed:
        console.print(f"MISSED: {each}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
