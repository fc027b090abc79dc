"""Encoding with our encoder and with sentence-transformers alone.

    python -m benchmarks.encode --threads 1 --scifact DIR --json encode.json

A query and passages a second, in turns, and the least cosine of a vector with the library's own.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._collection import all_splits
from benchmarks._command import CONSOLE, command, ended, figures
from benchmarks._timing import Timing, environment, interleaved
from calibration.data.readers import read_corpus
from ctxguard.retrieval.index.passages import searchable_text
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.models.files import bundled_model
from ctxguard.retrieval.models.loading import quiet_loading

LIBRARY = "sentence-transformers"
RUNTIMES = ("default", "onnxruntime", "torch")
PASSAGES, QUERIES = 64, 200
QUERY_BAR, PASSAGES_BAR, COSINE_BAR = 2.0, 2.0, 0.9999
"""Times as fast as the library, and as near to its vectors."""
_PACKAGES = (LIBRARY, "transformers", "tokenizers", "torch", "onnxruntime", "numpy")

Work = Mapping[str, Callable[[Any], Any]]


def systems() -> tuple[Work, Work]:
    """Open every system; give what encodes a query and what encodes passages."""
    from sentence_transformers import SentenceTransformer

    with quiet_loading():
        library: Any = SentenceTransformer(str(bundled_model()), device="cpu")
    options = {"normalize_embeddings": True, "show_progress_bar": False}
    query: dict[str, Callable[[Any], Any]] = {
        LIBRARY: lambda text: library.encode_query(text, **options)
    }
    passages: dict[str, Callable[[Any], Any]] = {
        LIBRARY: lambda texts: library.encode_document(texts, **options)
    }
    for runtime in RUNTIMES:
        given = None if runtime == "default" else runtime
        encoder = SentenceTransformerEmbedder(runtime=given, remembered=0)
        query[runtime], passages[runtime] = encoder.query, encoder.encode_passages
    return query, passages


def timed(work: Work, items: Sequence[Any], rounds: int, calls: int) -> dict[str, Timing]:
    """Time every system on the same items, in turns."""

    def case(run: Callable[[Any], Any]) -> Callable[[], object]:
        given = cycle(items)
        return lambda: run(next(given))

    cases = {name: case(run) for name, run in work.items()}
    return interleaved(cases, rounds=rounds, calls=calls, seconds=1.0)


def show(title: str, timings: Mapping[str, Timing], n_texts: int) -> None:
    """Print a table of timings, against the library."""
    table = figures(title, ("encoder",), ("p50, ms", "p99, ms", "times as fast", "a second"))
    for name, timing in timings.items():
        times = f"{timings[LIBRARY].p50 / timing.p50:.1f}", f"{n_texts / timing.p50 * 1e6:.1f}"
        table.add_row(name, f"{timing.p50 / 1e3:.2f}", f"{timing.p99 / 1e3:.2f}", *times)
    CONSOLE.print(table)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every figure, printed as it is found."""
    corpus = islice(read_corpus(arguments.scifact), PASSAGES)
    texts = [searchable_text(passage) for passage in corpus]
    queries = [query.text for query in all_splits(arguments.scifact).queries[:QUERIES]]
    query, passages = systems()
    report: dict[str, Any] = {"environment": environment(_PACKAGES, arguments.threads)}
    for name, title, work, items, n_texts in (
        ("query", "one query", query, queries, 1),
        ("passages", f"{PASSAGES} passages", passages, [texts], PASSAGES),
    ):
        calls = len(items) if name == "query" else 1
        timings = timed(work, items, arguments.rounds, calls)
        report[name] = {system: asdict(timing) for system, timing in timings.items()}
        show(title, timings, n_texts)
    expected = passages[LIBRARY](texts)
    report["least_cosine"] = {
        runtime: float(np.sum(passages[runtime](texts) * expected, axis=1).min())
        for runtime in RUNTIMES
    }
    CONSOLE.print(f"least cosine to {LIBRARY}: {report['least_cosine']}")
    ours, theirs = RUNTIMES[0], LIBRARY
    report["bars"] = {
        f"a query {QUERY_BAR:g} times as fast": report["query"][theirs]["p50"]
        >= QUERY_BAR * report["query"][ours]["p50"],
        f"passages {PASSAGES_BAR:g} times as fast": report["passages"][theirs]["p50"]
        >= PASSAGES_BAR * report["passages"][ours]["p50"],
        f"cosine at least {COSINE_BAR:g}": min(report["least_cosine"].values()) >= COSINE_BAR,
    }
    return report


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 where a bar that was checked is missed."""
    parser = command("Time encoding with our encoder and with sentence-transformers alone.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scifact", type=Path, default=Path("../shared/data/scifact"))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(given)
    # Read by our encoder when it shares passages, and by torch when it is imported.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    report = measure(arguments)
    return ended(arguments, report, [bar for bar, met in report["bars"].items() if not met])


if __name__ == "__main__":
    sys.exit(main())
