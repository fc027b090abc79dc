"""Compare the compiled search with its numpy reference: python -m benchmarks.equality --data DIR…

Each query is searched twice over the same index: by the compiled module and by the reference, which
serves where the module was not built. Told for each collection: the share of queries whose first
ten are equal in order, nDCG@10 of both, and by family the largest difference of a signal between
the two, over the candidates that both have. Decisions are compared by
``tests/compiled/test_decision.py``, over 10,000 rankings.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._collection import all_splits, default_cache, indexed, unseen_ranker
from benchmarks._timing import environment
from ctxguard._support import _compiled
from ctxguard.core.metrics.relevance import ndcg
from ctxguard.core.types import FloatArray, Ranking
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.signals import candidates, second_pass, sentences, text

K = 10
FAMILIES = {
    "text": text.NAMES,
    "lists": tuple(name for name in candidates.NAMES if not name.startswith("term")),
    "terms": tuple(name for name in candidates.NAMES if name.startswith("term")),
    "sentences": sentences.NAMES,
    "second pass": second_pass.NAMES,
}
LEAST_EQUAL, MOST_NDCG, MOST_SIGNAL = 0.99, 0.001, 1e-6
EXACT = ("text", "lists", "terms")


@contextmanager
def reference() -> Iterator[None]:
    """Compute by numpy."""
    kernels, _compiled.kernels = _compiled.kernels, None
    try:
        yield
    finally:
        _compiled.kernels = kernels


def differences(one: Ranking, other: Ranking) -> dict[str, float]:
    """The largest difference of each family over the candidates that both rankings have."""
    place = {passage_id: at for at, passage_id in enumerate(other.passage_ids)}
    both = [(at, place[each]) for at, each in enumerate(one.passage_ids) if each in place]
    ours, theirs = np.array(both, np.intp).reshape(-1, 2).T
    found = {}
    for family, names in FAMILIES.items():
        pairs: list[tuple[FloatArray, FloatArray]] = [
            (one.signals[name][ours], other.signals[name][theirs]) for name in names
        ]
        found[family] = max(float(np.nanmax(np.abs(a - b), initial=0.0)) for a, b in pairs)
    return found


def gain(ranking: Ranking, grades: Mapping[str, int]) -> float | None:
    """nDCG@10; None without a relevant passage."""
    own = [grades.get(passage_id, 0) for passage_id in ranking.passage_ids]
    return ndcg(own, list(grades.values()), K)


def compared(folder: Path, n_queries: int) -> dict[str, Any]:
    """The figures of one collection."""
    dataset = all_splits(folder)
    retriever = indexed(
        folder, default_cache(), SentenceTransformerEmbedder(), unseen_ranker(folder.name)
    )
    equal, gains, found = [], [], dict.fromkeys(FAMILIES, 0.0)
    for query in dataset.queries[:n_queries]:
        vector = retriever.encode_query(query.text)
        compiled = retriever.retrieve(query.text, query_vector=vector)
        with reference():
            expected = retriever.retrieve(query.text, query_vector=vector)
        equal.append(compiled.passage_ids[:K] == expected.passage_ids[:K])
        grades = dataset.qrels.get(query.query_id, {})
        pair = [gain(each, grades) for each in (compiled, expected)]
        if None not in pair:
            gains.append(pair)
        for family, value in differences(compiled, expected).items():
            found[family] = max(found[family], value)
    ours, theirs = np.array(gains, float).mean(axis=0).tolist()
    return {
        "queries": len(equal),
        "first_ten_equal": sum(equal) / len(equal),
        "ndcg": ours,
        "ndcg_of_reference": theirs,
        "largest_difference": found,
    }


def holds(figures: Mapping[str, Any]) -> bool:
    """Whether a collection is within the bars."""
    return (
        figures["first_ten_equal"] >= LEAST_EQUAL
        and abs(figures["ndcg"] - figures["ndcg_of_reference"]) <= MOST_NDCG
        and all(figures["largest_difference"][family] <= MOST_SIGNAL for family in EXACT)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="DIR")
    parser.add_argument("--queries", type=int, default=200, help="the most of a collection")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    table = Table("collection", "queries", "first ten", "nDCG@10", "reference", *FAMILIES)
    results = {folder.resolve().name: compared(folder, given.queries) for folder in given.data}
    for name, figures in results.items():
        table.add_row(
            name,
            str(figures["queries"]),
            f"{figures['first_ten_equal']:.3f}",
            f"{figures['ndcg']:.4f}",
            f"{figures['ndcg_of_reference']:.4f}",
            *(f"{value:.0e}" for value in figures["largest_difference"].values()),
        )
    Console(width=120).print(table)
    if given.json:
        about = environment(("ctxguard-rag", "numpy"))
        given.json.write_text(
            json.dumps({"environment": about, "collections": results}, indent=1) + "\n"
        )
    return int(given.check and not all(map(holds, results.values())))


if __name__ == "__main__":
    sys.exit(main())
