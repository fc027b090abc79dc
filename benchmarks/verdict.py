"""Measure what is served by the verdict of calibration, on queries that had no part in it.

    python -m benchmarks.verdict --check --json benchmarks/results/verdict.json
    python -m benchmarks.verdict --collections demo musique --labels 50 --splits 8 --today 10

The collections are BEIR folders of ``--data``, and the demonstration's corpus and questions
(``demo``). Each is searched once by the hybrid route, in the order of a ranker that did not see it.
In every split so many answerable queries, and a
proportional number of others, are labelled: ``calibrate`` chooses by them and says its verdict. All
other queries are the truth: of the answerable ones a fifth, and ten at least.

Each size of context is calibrated: where its verdict is ``enforce`` the profile's policy is served,
elsewhere the ranker's first k, as today (``--today``). Recall, UDCG, tokens and misleading passages
are compared with those of today; *equal* is recall less that of the first k of every k at the same
tokens. A policy that is enforced is *refuted* if the 90% upper bound (plain t) on its mean
difference in recall over the other queries lies below −0.01. In a mean over sets each has the same
weight.

*Reachable* is what P gives where it is known best: fitted to all labels of a set, each query by a
model of the other four fifths, at a share of today's tokens on the mean, with the threshold that
spends just that.
"""

import argparse
import itertools
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

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
from calibration.fit import fit_relevance, out_of_fold
from calibration.replay import replay
from calibration.settings import TOLERANCE, Context, Settings
from calibration.verdict import CONFIDENCE
from ctxguard.core.fusion import Fusion
from ctxguard.core.passages import weight_of
from ctxguard.core.types import FloatArray, Route
from ctxguard.errors import CalibrationError
from ctxguard.measure.interval import t_quantile
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

SUMMARY = "Measure what is served by the verdict of calibration."
DATA = Path("../shared/data")
COLLECTIONS = (
    *("demo", "anthropic_docs", "musique", "medquad_nih", "noveleval", "ramdocs_200", "scifact"),
)
LABELS = (20, 50, 100)
TODAY = (5, 10)
CONTEXTS: tuple[Context, ...] = get_args(Context)

DENSE = ("demo", "anthropic_docs", "musique", "ramdocs_200")
"""The sets by which the bars are judged."""

BARS: Mapping[Context, Mapping[str, float]] = {
    "leaner": {"tokens": -0.12, "recall": -0.005, "worst": -0.015},
    "balanced": {"tokens": 0.01, "recall": 0.03, "worst": -0.005, "enforce": 0.7, "equal": 0.03},
    "richer": {"tokens": 1.0, "recall": 0.08},
}
"""At 50 labels: tokens at most, recall at least on the mean and in the worst set, and so on."""

SHARES = (0.88, 1.0, 2.0)
"""Of today's tokens, by which what is reachable is measured: those of the bars."""

MOST_REFUTED, FEWEST_ENFORCED = 0.05, 100
AT = 50

MISLED = ("demo", "musique", "ramdocs_200")
"""The sets with labelled distractors by which the bar on misleading passages is judged."""
MOST_MISLEADING, OF_MISLED, AT_MISLED = -0.08, 2, 100

FIGURES = ("enforced", "recall", "udcg", "tokens", "equal", "kept", "misleading", "refuted")
"""Of one split: whether it is enforced; recall and UDCG less today's, tokens as a share of today's,
recall less that of the first k of equal tokens, passages, misleading ones as a share of today's;
refuted."""

Split = dict[str, float]
Summary = dict[str, float]
Key = tuple[str, Context, int, int]
"""Collection, context, passages served today, labels."""


def recorded(name: str, data: Path, cache: Path, embedder: SentenceTransformerEmbedder) -> Recorded:
    """Search a collection once for all its queries."""
    collection = Collection(Path(name) if name == "demo" else data / name, cache, embedder)
    by_ranker = collection.retriever.with_fusion(Fusion("ranker")).on_route(Route.HYBRID)
    queries, depth = collection.dataset.queries, collection.depth
    pools = replay(by_ranker, queries, depth=depth)
    return Recorded(name, collection.dataset, pools)


def measured(collection: Recorded, context: Context, k: int, n: int, seed: int) -> Split:
    """Calibrate on ``n`` labels, and measure what is served on the other queries."""
    labelled = few_labels(collection.dataset, n, seed)
    try:
        settings = Settings(seed=seed, serving_k=k, context=context)
        profile = collection.calibrated(labelled, settings).profile
    except CalibrationError:
        profile = None
    if profile is None or decision_of(profile) != "enforce":
        return {**dict.fromkeys(FIGURES, 0.0), "kept": float(k)}
    rows = collection.others(labelled)
    today, found = collection.first(rows, k), collection.served(profile, rows)
    recall = (found.recall - today.recall)[~np.isnan(found.recall)]
    at_tokens = collection.recall_at(rows, float(found.tokens.mean()))
    return {
        "enforced": 1.0,
        "recall": float(recall.mean()),
        "udcg": float((found.udcg - today.udcg).mean()),
        "tokens": float(found.tokens.mean() / today.tokens.mean()) - 1.0,
        "equal": float(np.nanmean(found.recall)) - at_tokens,
        "kept": float(found.kept.mean()),
        "misleading": float(found.misleading.sum() / max(today.misleading.sum(), 1.0)) - 1.0
        if today.misleading.any()
        else 0.0,
        "refuted": float(is_refuted(recall)),
    }


def reachable(collection: Recorded, k: int) -> dict[str, float]:
    """Recall less that of the first k, by P from all labels at some shares of their tokens."""
    pools = collection.pools
    some, tokens = pools.n_relevant > 0, pools.sizes
    share = pools.relevant[some] / pools.n_relevant[some, None]
    probabilities = np.nan_to_num(out_of_fold(pools, fit_relevance(pools)))
    worth = probabilities * weight_of(tokens) * pools.retrieved
    order = np.argsort(-worth, axis=None)
    spent = tokens.ravel()[order].cumsum()
    today, found = float(tokens[:, :k].sum()), {}
    for part in SHARES:
        kept = np.zeros(worth.size, dtype=bool)
        kept[order[: np.searchsorted(spent, part * today, side="right")]] = True
        recall = (share * kept.reshape(worth.shape)[some]).sum(axis=1)
        found[f"{part:g}"] = float((recall - share[:, :k].sum(axis=1)).mean())
    return found


def table_of_reachable(found: Mapping[tuple[str, int], Mapping[str, float]]) -> Table:
    """One row for each collection and size of today's context, and the mean of the sets."""
    columns = ("today", *(f"tokens × {part:g}" for part in SHARES))
    rows = plain_table("reachable: recall less today's, by P from all labels", ("set",), columns)
    for (name, k), values in found.items():
        rows.add_row(name[:12], str(k), *(f"{value:+.3f}" for value in values.values()))
    return rows


def is_refuted(differences: FloatArray) -> bool:
    """Tell whether recall is shown to be lower than today's by more than the tolerance.

    >>> is_refuted(np.tile([-0.1, 0.0], 50)), is_refuted(np.tile([-0.1, 0.1], 50))
    (True, False)
    """
    error = differences.std(ddof=1) / np.sqrt(differences.size)
    upper = differences.mean() + t_quantile(CONFIDENCE, differences.size - 1) * error
    return bool(upper < -TOLERANCE)


def summarised(splits: Sequence[Split]) -> Summary:
    """Means over the splits of one collection; of ``refuted`` and ``enforced`` the counts too."""
    found = {name: float(np.mean([split[name] for split in splits])) for name in FIGURES}
    counts = {
        f"n_{name}": float(sum(split[name] for split in splits)) for name in ("enforced", "refuted")
    }
    return {**found, **counts, "splits": float(len(splits))}


def mean_of(sets: Mapping[Key, Summary], context: Context, k: int, n: int) -> Summary | None:
    """Means over the sets of the bars, with the worst recall; None where one is missing."""
    own = [sets[name, context, k, n] for name in DENSE if (name, context, k, n) in sets]
    if len(own) < len(DENSE):
        return None
    found = {name: float(np.mean([each[name] for each in own])) for name in FIGURES}
    return {**found, "worst": min(each["recall"] for each in own)}


def bars(sets: Mapping[Key, Summary]) -> Bars:
    """What must hold, with the figure in words and whether it does; of what was measured."""
    found: Bars = {}
    for k in sorted({k for _, _, k, _ in sets}):
        for context, wanted in BARS.items():
            means = mean_of(sets, context, k, AT)
            if means is None:
                continue
            for name, limit in wanted.items():
                value = means["enforced" if name == "enforce" else name]
                holds = value <= limit if name == "tokens" else value >= limit
                sign = "≤" if name == "tokens" else "≥"
                words = f"{context}, today first {k}, {AT} labels: {name} {sign} {limit:+g}"
                found[words] = f"{value:+.3f}", holds
    for context, k in itertools.product(CONTEXTS, sorted({k for _, _, k, _ in sets})):
        labels = most_labels(sets, context, k)
        own = {name: sets[name, context, k, n] for name, n in labels.items()}
        if own.keys() >= set(MISLED) and AT_MISLED in labels.values():
            fewer = [
                each["misleading"] <= MOST_MISLEADING and each["recall"] >= 0.0
                for each in map(own.__getitem__, MISLED)
            ]
            found[
                f"{context}, today first {k}: misleading ≤ {MOST_MISLEADING:+.0%} "
                f"in {OF_MISLED} of {len(MISLED)} sets"
            ] = (
                ", ".join(f"{name} {own[name]['misleading']:+.0%}" for name in MISLED),
                sum(fewer) >= OF_MISLED,
            )
    enforced, refuted = (
        sum(own[f"n_{name}"] for own in sets.values()) for name in ("enforced", "refuted")
    )
    found[f"refuted ≤ {MOST_REFUTED:.0%} of {FEWEST_ENFORCED} enforced or more"] = (
        f"{refuted:.0f} of {enforced:.0f}",
        enforced >= FEWEST_ENFORCED and refuted <= MOST_REFUTED * enforced,
    )
    return found


def most_labels(sets: Mapping[Key, Summary], context: Context, k: int) -> dict[str, int]:
    """The largest number of labels up to 100 that was measured, by set: some have no more."""
    found: dict[str, int] = {}
    for name, own, size, n in sets:
        if own == context and size == k and n <= AT_MISLED:
            found[name] = max(n, found.get(name, 0))
    return found


def table(sets: Mapping[Key, Summary]) -> Table:
    """One row for each collection, context, size of today's context and number of labels."""
    columns = (
        "today",
        "labels",
        "enforced",
        "recall",
        "tokens",
        "equal",
        "misleading",
        "kept",
        "refuted",
    )
    found = plain_table("served less today's first k", ("collection", "context"), columns)
    for (name, context, k, n), own in sets.items():
        found.add_row(
            name[:12],
            context,
            str(k),
            str(n),
            f"{own['enforced']:.0%}",
            f"{own['recall']:+.3f}",
            f"{own['tokens']:+.0%}",
            f"{own['equal']:+.3f}",
            f"{own['misleading']:+.0%}",
            f"{own['kept']:.1f}",
            f"{own['n_refuted']:.0f}/{own['n_enforced']:.0f}",
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; with ``--check`` the exit status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.verdict", description=SUMMARY)
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="of BEIR folders")
    parser.add_argument("--collections", nargs="+", default=COLLECTIONS, metavar="NAME")
    parser.add_argument("--labels", type=int, nargs="+", default=LABELS, metavar="N")
    parser.add_argument("--today", type=int, nargs="+", default=TODAY, metavar="K")
    parser.add_argument("--contexts", nargs="+", choices=CONTEXTS, default=CONTEXTS)
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR")
    parser.add_argument("--check", action="store_true", help="print what must hold")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    logging.getLogger("ctxguard").setLevel(logging.ERROR)  # modes are set by hand here
    console = Console(width=110)
    embedder, start = SentenceTransformerEmbedder(), time.perf_counter()
    sets: dict[Key, Summary] = {}
    best: dict[tuple[str, int], dict[str, float]] = {}
    for name in options.collections:
        collection = recorded(name, options.data, options.cache, embedder)
        sizes = collection.sizes(options.labels)
        if not sizes:
            console.print(f"{name}: {len(collection.dataset.answerable)} answerable are too few")
        for context, k, n in itertools.product(options.contexts, options.today, sizes):
            splits = [measured(collection, context, k, n, seed) for seed in range(options.splits)]
            sets[name, context, k, n] = summarised(splits)
        best |= {(name, k): reachable(collection, k) for k in options.today if sizes}
        console.print(f"[dim]{name}: {time.perf_counter() - start:.0f} s so far[/dim]")
    console.print(table(sets))
    console.print(table_of_reachable(best))
    found = bars(sets)
    if options.check:
        print_bars(found, console)
    rows: dict[str, Any] = {" ".join(map(str, key)): own for key, own in sets.items()}
    means = {
        f"{context} {k} {n}": mean
        for context, k, n in dict.fromkeys(key[1:] for key in sets)
        if (mean := mean_of(sets, context, k, n)) is not None
    }
    reach = {
        str(k): {
            part: float(np.mean([best[name, k][part] for name in DENSE]))
            for part in map("{:g}".format, SHARES)
        }
        for k in options.today
        if all((name, k) in best for name in DENSE)
    }
    measures = {"sets": rows, "means": means, "reachable": reach}
    write_report(options.json, found, {"splits": options.splits, **measures})
    return int(options.check and not all(holds for _, holds in found.values()))


if __name__ == "__main__":
    sys.exit(main())
