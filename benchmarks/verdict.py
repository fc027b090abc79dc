"""Measure what is served by the verdict of calibration, on queries that had no part in it.

    python -m benchmarks.verdict --check --json benchmarks/results/verdict.json
    python -m benchmarks.verdict --collections demo musique --labels 50 --splits 8

The collections are BEIR folders of ``--data``, and the demonstration's corpus and questions
(``demo``). Each is searched once by the hybrid route, in the order of a ranker that did not see it.
In every split so many answerable queries, and a
proportional number of others, are labelled: ``calibrate`` chooses by them and says its verdict. All
other queries are the truth: of the answerable ones a fifth, and ten at least.

Where the verdict is ``enforce`` the profile's policy is served, elsewhere the ranker's first 5, as
today. Strict UDCG and recall are less those of today. *Always* serves the choice whatever the
verdict. A policy that is enforced is *refuted* if the 90% upper bound (plain t) on its mean
difference in recall over the other queries lies below −0.01. In a mean over sets each has the same
weight.
"""

import argparse
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._collection import Collection, default_cache
from benchmarks._served import (
    Bars,
    Recorded,
    decision_of,
    few_labels,
    plain_table,
    print_bars,
    write_report,
)
from calibration.calibrate_route import Settings
from calibration.replay import replay
from calibration.settings import TOLERANCE
from calibration.verdict import CONFIDENCE
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import DEFAULT_K, FloatArray, Route
from ctxguard.errors import CalibrationError
from ctxguard.monitor.estimation.ratio import t_quantile
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

SUMMARY = "Measure what is served by the verdict of calibration."
DATA = Path("../shared/data")
COLLECTIONS = (
    *("demo", "anthropic_docs", "musique", "medquad_nih", "noveleval", "ramdocs_200", "scifact"),
)
LABELS = (20, 50, 100)

DENSE = ("demo", "anthropic_docs", "musique")
LEAST_DENSE, LEAST_ENFORCED, LEAST_DEMO = 0.08, 0.6, 0.10
LEAST_RECALL, LEAST_RECALL_OF_A_SET = 0.0, -0.005
MOST_REFUTED, FEWEST_ENFORCED = 0.05, 100

Split = dict[str, Any]
"""One split: ``decision``, and over the other queries of the choice ``recall`` and ``udcg`` less
those of today, ``kept``, and ``refuted``."""

Summaries = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Of each collection by the number of labels."""


def recorded(name: str, data: Path, cache: Path, embedder: SentenceTransformerEmbedder) -> Recorded:
    """Search a collection once for all its queries."""
    collection = Collection(Path(name) if name == "demo" else data / name, cache, embedder)
    by_ranker = collection.retriever.with_fusion(Fusion("ranker")).on_route(Route.HYBRID)
    queries, depth = collection.dataset.queries, collection.depth
    pools = replay(by_ranker, queries, depth=depth)
    return Recorded(name, collection.dataset, pools)


def measured(collection: Recorded, n: int, seed: int) -> Split:
    """Calibrate on ``n`` labels, and measure the choice on the other queries."""
    labelled = few_labels(collection.dataset, n, seed)
    try:
        profile = collection.calibrated(labelled, Settings(seed=seed)).profile
    except CalibrationError:
        profile = None
    decision = "keep" if profile is None else decision_of(profile)
    if profile is None or decision == "keep":
        kept = float(DEFAULT_K)
        return {"decision": "keep", "recall": 0.0, "udcg": 0.0, "kept": kept, "refuted": False}
    rows = collection.others(labelled)
    today, found = collection.first(rows), collection.served(profile, rows, mode="enforce")
    recall = found.recall - today.recall
    return {
        "decision": decision,
        **found.means(today),
        "refuted": is_refuted(recall[~np.isnan(recall)]),
    }


def is_refuted(differences: FloatArray) -> bool:
    """Tell whether recall is shown to be lower than today's by more than the tolerance.

    >>> is_refuted(np.tile([-0.1, 0.0], 50)), is_refuted(np.tile([-0.1, 0.1], 50))
    (True, False)
    """
    error = differences.std(ddof=1) / np.sqrt(differences.size)
    upper = differences.mean() + t_quantile(CONFIDENCE, differences.size - 1) * error
    return bool(upper < -TOLERANCE)


def summarised(splits: Sequence[Split]) -> dict[str, float]:
    """Means over the splits of one collection with one number of labels."""
    decisions = np.array([split["decision"] for split in splits])
    enforced = decisions == "enforce"
    recall, udcg, kept, refuted = (
        np.array([split[name] for split in splits])
        for name in ("recall", "udcg", "kept", "refuted")
    )
    served = np.where(enforced, udcg, 0.0)
    return {
        "splits": len(splits),
        **{name: float((decisions == name).mean()) for name in ("enforce", "shadow", "keep")},
        "udcg": float(served.mean()),
        "udcg_error": float(served.std() / np.sqrt(max(len(splits) - 1, 1))),
        "recall": float(np.where(enforced, recall, 0.0).mean()),
        "kept": float(np.where(enforced, kept, float(DEFAULT_K)).mean()),
        "always_udcg": float(udcg.mean()),
        "always_recall": float(recall.mean()),
        "always_kept": float(kept.mean()),
        "n_enforced": int(enforced.sum()),
        "n_refuted": int((enforced & refuted).sum()),
    }


def by_labels(sets: Summaries, names: Sequence[str]) -> dict[int, dict[str, float]]:
    """Means over those collections that have so many labels, by their number."""
    found: dict[int, dict[str, float]] = {}
    for n in sorted({n for name in names for n in sets.get(name, {})}):
        own = [sets[name][n] for name in names if n in sets.get(name, {})]
        found[n] = {
            "sets": len(own),
            **{
                name: float(np.mean([each[name] for each in own]))
                for name in ("enforce", "udcg", "recall", "kept", "always_udcg", "always_recall")
            },
            "worst_recall": min(each["recall"] for each in own),
            "worst_udcg": min(each["udcg"] for each in own),
            **{name: sum(each[name] for each in own) for name in ("n_enforced", "n_refuted")},
        }
    return found


def bars(sets: Summaries) -> Bars:
    """What must hold, with the figure in words and whether it does; of what was measured."""
    found: Bars = {}
    dense = by_labels(sets, DENSE).get(50)
    if dense is not None and dense["sets"] == len(DENSE):
        udcg, share = dense["udcg"], dense["enforce"]
        found[f"{', '.join(DENSE)} at 50 labels: UDCG ≥ {LEAST_DENSE:+g}"] = (
            f"{udcg:+.3f}",
            udcg >= LEAST_DENSE,
        )
        found[f"of these enforced: ≥ {LEAST_ENFORCED:.0%}"] = (
            f"{share:.0%}",
            share >= LEAST_ENFORCED,
        )
    if 100 in sets.get("demo", {}):
        udcg = sets["demo"][100]["udcg"]
        found[f"demo at 100 labels: UDCG ≥ {LEAST_DEMO:+g}"] = f"{udcg:+.3f}", udcg >= LEAST_DEMO
    each = [(own["recall"], f"{name} at {n}") for name, by in sets.items() for n, own in by.items()]
    if each:
        recall = float(np.mean([value for value, _ in each]))
        found[f"recall ≥ {LEAST_RECALL:g} on the mean"] = f"{recall:+.4f}", recall >= LEAST_RECALL
        worst, where = min(each)
        found[f"recall ≥ {LEAST_RECALL_OF_A_SET:g} in the worst set"] = (
            f"{worst:+.4f}, {where}",
            worst >= LEAST_RECALL_OF_A_SET,
        )
    enforced, refuted = (
        int(sum(own[name] for by in sets.values() for own in by.values()))
        for name in ("n_enforced", "n_refuted")
    )
    found[f"refuted ≤ {MOST_REFUTED:.0%} of {FEWEST_ENFORCED} enforced or more"] = (
        f"{refuted} of {enforced}",
        enforced >= FEWEST_ENFORCED and refuted <= MOST_REFUTED * enforced,
    )
    return found


def table(sets: Summaries) -> Table:
    """One row for each collection and number of labels."""
    columns = ("labels", "enforced", "UDCG", "recall", "kept", "refuted", "always", "recall")
    title = f"served less today's first {DEFAULT_K}, and always served"
    found = plain_table(title, ("collection",), columns)
    for name, by_n in sets.items():
        for n, own in by_n.items():
            found.add_row(
                name,
                str(n),
                f"{own['enforce']:.0%}",
                f"{own['udcg']:+.3f}",
                f"{own['recall']:+.3f}",
                f"{own['kept']:.2f}",
                f"{own['n_refuted']} of {own['n_enforced']}",
                f"{own['always_udcg']:+.3f}",
                f"{own['always_recall']:+.3f}",
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; with ``--check`` the exit status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.verdict", description=SUMMARY)
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="of BEIR folders")
    parser.add_argument("--collections", nargs="+", default=COLLECTIONS, metavar="NAME")
    parser.add_argument("--labels", type=int, nargs="+", default=LABELS, metavar="N")
    parser.add_argument("--splits", type=int, default=60)
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR")
    parser.add_argument("--check", action="store_true", help="print what must hold")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    logging.getLogger("ctxguard").setLevel(logging.ERROR)  # modes are set by hand here
    console = Console(width=80)
    embedder, start = SentenceTransformerEmbedder(), time.perf_counter()
    sets: dict[str, dict[int, dict[str, float]]] = {}
    for name in options.collections:
        collection = recorded(name, options.data, options.cache, embedder)
        for n in collection.sizes(options.labels):
            splits = [measured(collection, n, seed) for seed in range(options.splits)]
            sets.setdefault(name, {})[n] = summarised(splits)
            taken = time.perf_counter() - start
            console.print(f"[dim]{name}, {n} labels: {taken:.0f} s so far[/dim]")
        if name not in sets:
            console.print(f"{name}: {len(collection.dataset.answerable)} answerable are too few")
    console.print(table(sets))
    found = bars(sets)
    if options.check:
        print_bars(found, console)
    write_report(
        options.json,
        found,
        {
            "splits": options.splits,
            "sets": sets,
            "means": by_labels(sets, list(sets)),
            "dense": by_labels(sets, DENSE),
        },
    )
    return int(options.check and not all(holds for _, holds in found.values()))


if __name__ == "__main__":
    sys.exit(main())
