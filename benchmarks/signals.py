"""What signals are worth and cost: each family by itself, an index's bytes, a search's time.

    python -m benchmarks.signals --data DIR … demo --json signals.json

For each collection, by a ranker that was not trained on it (``benchmarks._collection``): bytes a
passage by kind of file; nDCG@10 of the default search over all labelled queries; UDCG of
P(relevant) with all signals, less that without each family; and the median milliseconds of a
search with signals and without, vectors given.
"""

import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._collection import DEMO, Collection, default_cache
from benchmarks._command import CONSOLE, command, ended, figures
from benchmarks._timing import environment
from calibration.fit import fit_relevance, out_of_fold
from calibration.grid import utility_grid
from calibration.pools import LabelledPools
from ctxguard.core.fusion import Fusion
from ctxguard.measure.metrics import ndcg as of_ranks
from ctxguard.measure.worth import READERS
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "match": ("match", "vector_match"),
    "length": ("length",),
    "ranker": ("ranker",),
    "support": (
        "term_support_3",
        "term_support",
        "vector_support_3",
        "smoothed_by_vectors",
        "smoothed_by_terms",
        "vector_redundancy",
        "term_redundancy",
    ),
}
"""The families of `ctxguard.retrieval.signals`; the legs' own scores are one beside them."""


def udcg_gains(pools: LabelledPools) -> dict[str, float]:
    """What each family that the retriever gives adds to UDCG, by P(relevant) without it.

    Passages are kept while they are worth it by the utilities, P ≥ c / (c + 1) where c is what an
    irrelevant one costs: no threshold is tuned. The ranker keeps its inputs and the pools their
    candidates; what is taken away is taken from P alone, of queries that the fit did not see.
    """
    families = {"legs": tuple(pools.legs), **FAMILIES}
    whole = _udcg(pools)
    found = {}
    for family, names in families.items():
        rest = replace(
            pools,
            legs={name: values for name, values in pools.legs.items() if name not in names},
            signals={name: own for name, own in pools.signals.items() if name not in names},
        )
        found[family] = whole - _udcg(rest)
    return found


def _udcg(pools: LabelledPools) -> float:
    model = fit_relevance(pools)
    values = out_of_fold(pools, model)
    cost = max(-READERS.irrelevant, 0.0)
    ks, thresholds = (values.shape[1],), np.array([cost / (cost + 1.0)])
    grid = utility_grid(pools, values, model, ks=ks, thresholds=thresholds, min_keep=1)
    return float(np.nanmean(grid.at([(0, 0)])[0]))


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


def search_milliseconds(retriever: HybridRetriever, queries: Sequence[str]) -> float:
    """The median of a search whose query is encoded already."""
    taken = []
    for query in queries:
        given = retriever.encode_query(query)
        start = time.perf_counter()
        retriever.retrieve(query, query_vector=given)
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken)


def measured(folder: Path, embedder: SentenceTransformerEmbedder, n_timed: int) -> dict[str, Any]:
    """The figures of one collection."""
    own = Collection(folder, default_cache(), embedder)
    pools = own.under(Fusion("ranker"))
    ndcg = of_ranks(pools.grades, pools.best_grades)
    timed = [query.text for query in own.dataset.queries[:n_timed]]
    plain = own.retriever.with_fusion(Fusion())
    return {
        "passages": len(own.retriever),
        "queries": len(own.dataset.queries),
        "bytes_per_passage": bytes_by_kind(own.retriever),
        "ndcg": statistics.fmean(ndcg[~np.isnan(ndcg)].tolist()),
        "udcg_gain": udcg_gains(pools),
        "milliseconds": {
            "signals": search_milliseconds(own.retriever, timed),
            "none": search_milliseconds(plain, timed),
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write the figures."""
    parser = command("Measure what signals are worth by family, and what they cost.")
    parser.add_argument("--data", type=Path, nargs="+", default=[DEMO], metavar="DIR")
    parser.add_argument("--queries", type=int, default=50, metavar="N", help="to time")
    options = parser.parse_args(arguments)
    embedder = SentenceTransformerEmbedder()
    collections = {}
    columns = ("passages", "bytes a passage", "nDCG@10", "ms", "without signals")
    table = figures("cost", ("collection",), columns)
    for folder in options.data:
        found = collections[folder.name] = measured(folder, embedder, options.queries)
        sizes, taken = found["bytes_per_passage"], found["milliseconds"]
        shown = f"{sizes['all']:,.0f}", f"{found['ndcg']:.4f}"
        milliseconds = [f"{taken[name]:.1f}" for name in ("signals", "none")]
        table.add_row(folder.name, str(found["passages"]), *shown, *milliseconds)
    CONSOLE.print(table)
    families = figures("UDCG that a family adds", ("family",), tuple(collections))
    for family in dict.fromkeys(
        name for each in collections.values() for name in each["udcg_gain"]
    ):
        gains = [each["udcg_gain"].get(family, 0.0) for each in collections.values()]
        families.add_row(family, *[f"{gain:+.3f}" for gain in gains])
    CONSOLE.print(families)
    report = {
        "environment": environment(("ctxguard-rag", "onnxruntime", "torch", "numpy")),
        "collections": collections,
    }
    return ended(options, report)


if __name__ == "__main__":
    sys.exit(main())
