"""What signals cost: the bytes and the build of an index, a query; and what they are worth.

    python -m benchmarks.signals --data DIR … demo --json signals.json

For each collection: bytes a passage by kind of file, the token table apart, of which a machine has
one for each model; and nDCG@10 of the default search over all labelled queries, by a ranker that
was not trained on the collection (``benchmarks._collection``). Then, for some passages of the first
one, in turns on one thread: passages a second at each level beside those that torch only encodes,
by the processor's time, so that other work on the machine counts little; and the median
milliseconds of a query by the steps in which signals are computed.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks._collection import DEMO, all_splits, default_cache, indexed, unseen_ranker
from benchmarks._timing import environment
from calibration.data.dataset import Dataset
from calibration.data.readers import read_corpus
from ctxguard.cli.demonstration.corpus import passages as demo_passages
from ctxguard.core.metrics import ndcg
from ctxguard.core.types import Passage
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.passages import searchable_text
from ctxguard.retrieval.index.segment import SignalLevel
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.protocols import token_encoder_of

SUMMARY = "Measure what signals cost an index, its build and a query, and what they are worth."
LEVELS: tuple[SignalLevel, ...] = ("none", "text", "full")
TORCH = "encoded by torch"
BYTES_BAR, RATE_BAR = 7_000, 3.3
"""At most so many bytes a passage of scifact; at least so many times the passages of torch."""

CUTOFF = 10


def bytes_by_kind(retriever: HybridRetriever) -> dict[str, float]:
    """Bytes a passage by the first part of a file's name, and of all files."""
    sizes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        retriever.save(Path(folder) / "index")
        for file in (Path(folder) / "index").rglob("*.*"):
            if file.is_file():
                sizes[file.name.partition(".")[0]] += file.stat().st_size
    sizes["all"] = sizes.total()
    return {kind: size / len(retriever) for kind, size in sizes.items()}


def mean_ndcg(retriever: HybridRetriever, dataset: Dataset) -> float:
    """nDCG@10 over the queries that have a relevant passage."""
    found = []
    for query in dataset.queries:
        grades = dataset.qrels.get(query.query_id, {})
        top = [grades.get(each, 0) for each in retriever.retrieve(query.text).passage_ids[:CUTOFF]]
        found.append(ndcg(top, list(grades.values()), CUTOFF))
    return statistics.fmean(each for each in found if each is not None)


def collection(folder: Path, embedder: SentenceTransformerEmbedder) -> dict[str, Any]:
    """Bytes and quality of one collection."""
    ranker = unseen_ranker(folder.resolve().name)
    retriever = indexed(folder, default_cache(), embedder, ranker)
    dataset = all_splits(folder)
    return {
        "passages": len(retriever),
        "queries": len(dataset.queries),
        "bytes_per_passage": bytes_by_kind(retriever),
        "ndcg": mean_ndcg(retriever, dataset),
    }


def rates(
    passages: Sequence[Passage], embedder: SentenceTransformerEmbedder, turns: int
) -> dict[str, Any]:
    """Passages a second by case, and each case's median multiple of torch's in the same turn."""
    torch = SentenceTransformerEmbedder(runtime="torch")
    texts = [searchable_text(passage) for passage in passages]

    def build(level: SignalLevel) -> Callable[[], object]:
        return lambda: HybridRetriever.build(passages, embedder=embedder, signals=level)

    cases: dict[str, Callable[[], object]] = {
        TORCH: lambda: torch.encode_passages(texts),
        "encoded": lambda: embedder.encode_passages(texts),
        **{level: build(level) for level in LEVELS},
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for warming in (True, *[False] * turns):
        for name, case in cases.items():
            start = time.process_time()
            case()
            if not warming:
                taken[name].append(time.process_time() - start)
    return {
        name: {
            "per_second": len(passages) / min(seconds),
            "times_torch": statistics.median(
                torch / own for torch, own in zip(taken[TORCH], seconds, strict=True)
            ),
        }
        for name, seconds in taken.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write the figures; the exit status is 1 if ``--check`` finds a bar missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.signals", description=SUMMARY)
    parser.add_argument("--data", type=Path, nargs="+", default=[DEMO], metavar="DIR")
    parser.add_argument("--passages", type=int, default=60, metavar="N", help="to build")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--queries", type=int, default=50, metavar="N", help="to time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    options = parser.parse_args(arguments)
    if min(options.passages, options.queries, options.turns) < 1:
        parser.error("--passages, --queries and --turns must be at least 1")
    os.environ["OMP_NUM_THREADS"] = "1"
    console, embedder = Console(width=120), SentenceTransformerEmbedder()
    collections = {}
    table = Table("collection", "passages", "bytes a passage", "sentences", "nDCG@10")
    for folder in options.data:
        found = collections[folder.name] = collection(folder, embedder)
        sizes = found["bytes_per_passage"]
        shown = f"{sizes['all']:,.0f}", f"{sizes['sentences']:,.0f}", f"{found['ndcg']:.4f}"
        table.add_row(folder.name, str(found["passages"]), *shown)
    console.print(table)
    first: Path = options.data[0]
    corpus = list(demo_passages() if first == DEMO else read_corpus(first))
    step = max(1, len(corpus) // options.passages)
    built = rates(corpus[::step][: options.passages], embedder, options.turns)
    table = Table("passages a second", "", "times torch")
    for name, rate in built.items():
        table.add_row(name, f"{rate['per_second']:.1f}", f"{rate['times_torch']:.2f}")
    console.print(table)
    retriever = indexed(first, default_cache(), embedder, unseen_ranker(first.resolve().name))
    queries = [query.text for query in all_splits(first).queries[: options.queries]]
    retriever.warm_up()
    encoder = token_encoder_of(embedder)
    report: dict[str, Any] = {
        "environment": environment(("ctxguard-rag", "openvino", "torch", "numpy")),
        "runtime": embedder.runtime,
        "token_table_mb": 0.0 if encoder is None else encoder.token_table().nbytes / 1e6,
        "collections": collections,
        "rates": built,
        "milliseconds": retriever.signal_milliseconds(queries),
        "bars": {
            f"at most {BYTES_BAR:,} bytes a passage of the first collection": (
                collections[first.name]["bytes_per_passage"]["all"] <= BYTES_BAR
            ),
            f"level full at {RATE_BAR} times torch's rate": (
                built["full"]["times_torch"] >= RATE_BAR
            ),
        },
    }
    for bar, met in report["bars"].items():
        console.print(f"{'met   ' if met else 'MISSED'} {bar}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if options.check and not all(report["bars"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
