"""What signals cost: a query, an index and its build, by level.

    python -m benchmarks.signals --data demo --passages 300 --json signals.json

Each level is built in turn from the same passages, with the model and the token table loaded
before. Times of a build are of the processor, so that other work on the machine counts little;
times of a query are medians, by the steps in which signals are computed.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks._collection import DEMO, all_splits
from benchmarks.policies import environment
from calibration.data.readers import read_corpus
from ctxguard.cli.demonstration.corpus import passages as demo_passages
from ctxguard.core.types import Passage
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.segment import SignalLevel
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

SUMMARY = "Measure what signals cost a query, an index and its build."
LEVELS: tuple[SignalLevel, ...] = ("none", "text", "full")
PARTS = {"text": "forward.*", "full": "sentences.*"}
"""The files that a level adds, by what the files of an index are called."""


def measure(
    passages: Sequence[Passage], queries: Sequence[str], embedder: SentenceTransformerEmbedder
) -> dict[str, Any]:
    """Seconds of each level's build, bytes a passage, and milliseconds a query by step."""
    HybridRetriever.build(passages[:2], embedder=embedder)  # the token table, and compiled loops
    results: dict[str, Any] = {"build_seconds": {}, "bytes_per_passage": {}}
    for level in LEVELS:
        start = time.process_time()
        retriever = HybridRetriever.build(passages, embedder=embedder, signals=level)
        results["build_seconds"][level] = time.process_time() - start
    with tempfile.TemporaryDirectory() as folder:
        retriever.save(Path(folder) / "index")
        for part, names in PARTS.items():
            size = sum(file.stat().st_size for file in Path(folder).rglob(names))
            results["bytes_per_passage"][part] = size / len(passages)
    retriever.warm_up()
    results["milliseconds"] = retriever.signal_milliseconds(queries)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.signals", description=SUMMARY)
    parser.add_argument("--data", type=Path, default=DEMO, metavar="DIR", help="or demo")
    parser.add_argument("--passages", type=int, default=300, metavar="N")
    parser.add_argument("--queries", type=int, default=50, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    if min(options.passages, options.queries) < 1:
        parser.error("--passages and --queries must be at least 1")
    corpus = list(demo_passages() if options.data == DEMO else read_corpus(options.data))
    queries = [query.text for query in all_splits(options.data).queries[: options.queries]]
    step = max(1, len(corpus) // options.passages)
    found = measure(corpus[::step][: options.passages], queries, SentenceTransformerEmbedder())
    table = Table(title=f"{options.data.name}: {options.passages} passages", title_justify="left")
    for column in ("figure", "level or step", "value"):
        table.add_column(column)
    for figure, values in found.items():
        for name, value in values.items():
            table.add_row(figure, name, f"{value:.3g}")
    Console(width=80).print(table)
    if options.json is not None:
        results = {"environment": environment(), **found}
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
