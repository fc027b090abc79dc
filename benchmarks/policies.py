"""Compare policies on queries that took no part in their choice.

    D="DIR … demo"
    python -m benchmarks.policies --data $D --splits 20 --json policies.json
    python -m benchmarks.policies --data $D --splits 20 --labels 5 10 20 50 --json few_labels.json
    python -m benchmarks.policies --data $D --splits 10 --equal-recall --json equal_recall.json

Each folder is a BEIR folder; ``demo`` is the demonstration's corpus and questions. A corpus is
indexed once, and the queries of all its splits are used together on the hybrid route. In every
repeat a random half of the queries fits the fusion and every policy, and the other half measures
them. A query's figures are averaged over the repeats that measured it; intervals are 95% paired
bootstraps over queries. Each set has the same weight in the mean over sets.

``signals`` is expected utility with every signal, over the order of the pooled ranker, as
``calibrate`` has it by default. ``expected utility`` has the legs' scores alone, over convex
fusion.

Strict UDCG: +1 for a kept passage of the highest grade, +0.5 for a lower grade, −1 for a known
distractor, −0.5 for a passage judged not relevant, −0.2 for one that nobody judged, or −0.5 where
labels hold relevant passages only (the default ``Utilities``). Whatever is kept for a query that
nothing answers is harm.

With ``--labels N`` the calibration half is cut down to N answerable queries and a proportional
number of others, and the family is that of ``policy = "auto"``. Repeats whose half has fewer are
left out and counted.

With ``--equal-recall`` the default objective of ``calibrate`` stands beside the first 5 and the
first 10 by reciprocal ranks, whose recall it is to keep, with 20, 50 and all answerable queries of
the half that fits; with the legs' scores alone and with every signal.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._baselines import OVER_SIGNALS, RULES, Contexts, Rule
from benchmarks._collection import Collection, View, default_cache
from benchmarks._served import few_labels
from calibration.calibrate_route import FEWEST_LABELS
from calibration.data.dataset import Dataset, split_by_query
from calibration.evaluate import RESAMPLES
from calibration.pool_labels import discounts
from ctxguard.core.fusion import Fusion
from ctxguard.core.metrics import DEFAULT_UTILITIES
from ctxguard.core.types import FloatArray
from ctxguard.errors import CalibrationError
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

SUMMARY = "Compare policies on queries that took no part in their choice."
METRICS = ("udcg_strict", "udcg_heuristic", "recall", "precision", "harm", "kept", "empty")
SHOWN = ("udcg_strict", "udcg_heuristic", "recall", "precision", "kept", "empty")
POLICIES = (*RULES, *OVER_SIGNALS)
AGAINST = ("k 5", "ratio", "expected utility")
PAIRS = tuple((policy, other) for policy in POLICIES for other in AGAINST if policy != other)
MEAN_BAR = 0.4
SIGNALS_BAR = 0.12
"""Of every signal against the legs' scores alone, on the mean of the sets that are not small."""
LEAST_SIGNALS_GAIN = -0.02
FEWER_KEPT_BAR = 0.9
FEW_LABELS = ("auto", "ratio", "ranker, ratio", "signals")
SMALL_SET = 50
"""Queries below which a set is shown apart."""
LARGE_SET = 50
"""Test queries from which a set must show a gain by itself."""

EQUAL_RECALL = (5, 10)
"""Passages served today, whose recall is to be kept."""

KEEPING = {
    "first 5": "k 5",
    "first 10": "k 10",
    "keep recall 5": "keep recall 5",
    "keep recall 10": "keep recall 10",
}
"""Policies over the order of reciprocal ranks, and their rules."""

WITH_SIGNALS = "signals, "
"""Before the name of a policy over reciprocal ranks that sees every signal."""

EQUAL_RECALL_POLICIES = tuple(
    name
    for k in EQUAL_RECALL
    for name in (f"first {k}", f"keep recall {k}", f"{WITH_SIGNALS}keep recall {k}")
)

LABELS: Mapping[str, int | None] = {"20": 20, "50": 50, "all": None}
LEAST_RECALL_DIFFERENCE = -0.015
LEAST_MEAN_RECALL_DIFFERENCE = -0.01


@dataclass
class Measured:
    """One set's figures, shape (splits, n_q) each, NaN where a query was not measured.

    Attributes:
        name: The set.
        query_ids: Length n_q.
        values: By policy, then by metric.
        choices: By policy, the settings chosen in each split.
        labelled: Answerable queries that each split was fitted on.
        left_out: Splits with too few labels.
    """

    name: str
    query_ids: tuple[str, ...]
    values: dict[str, dict[str, FloatArray]]
    choices: dict[str, list[str]] = field(default_factory=dict)
    labelled: list[int] = field(default_factory=list)
    left_out: int = 0

    def mean_by_query(self, policy: str, metric: str) -> FloatArray:
        """Shape (n_q,): the mean over the splits that define it, NaN where none does."""
        values = self.values[policy][metric]
        defined = ~np.isnan(values)
        n = defined.sum(axis=0)
        sums = np.where(defined, values, 0.0).sum(axis=0)
        return np.where(n > 0, sums / np.maximum(n, 1), np.nan)

    def gain_by_query(self, policy: str, other: str) -> FloatArray:
        """Strict UDCG of a policy less another's, of the queries that were measured."""
        gain = self.mean_by_query(policy, "udcg_strict") - self.mean_by_query(other, "udcg_strict")
        return gain[~np.isnan(gain)]

    def gain_by_split(self, policy: str, other: str) -> FloatArray:
        """Mean strict UDCG of a policy less another's, per split."""
        gains = self.values[policy]["udcg_strict"] - self.values[other]["udcg_strict"]
        means: FloatArray = np.nanmean(gains, axis=1)
        return means


@dataclass(frozen=True)
class Gain:
    """A difference of means with its 95% interval, over n queries (or sets)."""

    mean: float
    lower: float
    upper: float
    n: int


def measure_contexts(view: View, contexts: Contexts) -> dict[str, FloatArray]:
    """Every metric of every query, shape (n_q,); NaN where it is undefined."""
    labels = view.labels.reordered(contexts.order)
    scores = np.take_along_axis(view.pools.scores, contexts.order, axis=1)
    depth = scores.shape[1]
    ranks = np.arange(1, depth + 1)
    kept = ranks <= contexts.kept[:, None]
    found = (labels.relevant & kept).sum(axis=1)
    total = labels.n_relevant
    negative = labels.negatives != None  # noqa: E711  element by element
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = scores / np.nanmax(view.pools.scores, axis=1)[:, None]
        suspected = (relative > DEFAULT_UTILITIES.score_ratio) | (
            ranks <= DEFAULT_UTILITIES.rank_limit
        )
        recall = np.where(total > 0, found / total, np.nan)
        precision = np.where(contexts.kept > 0, found / contexts.kept, np.nan)
    heuristic = np.where(labels.relevant | negative | suspected, labels.utilities, 0.0)
    discounted = np.where(kept, discounts(depth), 0.0)
    return {
        "udcg_strict": (labels.utilities * discounted).sum(axis=1),
        "udcg_heuristic": (heuristic * discounted).sum(axis=1),
        "recall": recall,
        "precision": precision,
        "harm": np.maximum(-labels.utilities * discounted, 0.0).sum(axis=1),
        "kept": contexts.kept.astype(np.float64),
        "empty": (contexts.kept == 0).astype(np.float64),
    }


def measure(
    collection: Collection,
    splits: int,
    seed: int,
    n_labels: int | None = None,
    policies: Sequence[str] = (),
) -> Measured:
    """Some policies on every split of one set; all of them unless they are named."""
    dataset = collection.dataset
    row_of = {query.query_id: row for row, query in enumerate(dataset.queries)}
    if not policies:
        policies = POLICIES if n_labels is None else ("k 5", *FEW_LABELS)
    shape = (splits, len(dataset))
    measured = Measured(
        collection.name,
        tuple(row_of),
        {policy: {metric: np.full(shape, np.nan) for metric in METRICS} for policy in policies},
        {policy: [] for policy in policies},
    )
    for split in range(splits):
        fit_half, test_half = split_by_query(dataset, (0.5, 0.5), seed=seed + split)
        if n_labels is not None:
            if len(fit_half.answerable) < n_labels:
                measured.left_out += 1
                continue
            fit_half = few_labels(fit_half, n_labels, seed + split)
        measured.labelled.append(len(fit_half.answerable))
        fit_ids = [query.query_id for query in fit_half.queries]
        test_ids = [query.query_id for query in test_half.queries]
        fusion = collection.fitted_fusion(fit_ids)
        for policy in policies:
            rule, view = _rule_and_view(policy, collection, fusion, fit_half)
            applied = view.of(test_ids)
            rows = [row_of[query_id] for query_id in applied.pools.query_ids]
            contexts = rule(view.of(fit_ids), applied)
            measured.choices[policy].append(contexts.choice)
            for metric, values in measure_contexts(applied, contexts).items():
                measured.values[policy][metric][split, rows] = values
    return measured


def _rule_and_view(
    policy: str, collection: Collection, fusion: Fusion, fit_half: Dataset
) -> tuple[Rule, View]:
    """What a policy does, and the candidates that it is for.

    ``auto`` is as ``calibrate`` resolves it with so many labels.
    """
    name = policy.removeprefix(WITH_SIGNALS)
    if name != policy or name in KEEPING:
        view = collection.by_reciprocal_rank(with_signals=name != policy)
        return RULES[KEEPING.get(name, name)], view
    if policy in OVER_SIGNALS:
        return OVER_SIGNALS[policy], collection.under(Fusion("ranker"))
    if policy == "auto":
        few = len(fit_half.answerable) < FEWEST_LABELS
        policy = "ratio" if few else "expected utility"
    return RULES[policy], collection.under(fusion)


def resampled(values: FloatArray, seed: int) -> FloatArray:
    """Means of resamples of the queries, shape (resamples,)."""
    counts = np.random.default_rng(seed).multinomial(
        values.size, np.full(values.size, 1.0 / values.size), size=RESAMPLES
    )
    means: FloatArray = counts @ values / values.size
    return means


def gain(values: Sequence[FloatArray], seed: int) -> Gain:
    """The mean over sets of the mean over queries; queries are resampled within each set."""
    means = np.mean([resampled(own, seed + row) for row, own in enumerate(values)], axis=0)
    lower, upper = np.quantile(means, (0.025, 0.975))
    return Gain(
        float(np.mean([own.mean() for own in values])),
        float(lower),
        float(upper),
        values[0].size if len(values) == 1 else len(values),
    )


def gains(sets: Sequence[Measured], seed: int) -> dict[str, dict[str, Gain]]:
    """Of every policy against every other that it is compared with, over these sets."""
    found: dict[str, dict[str, Gain]] = {}
    for policy, other in PAIRS:
        values = [measured.gain_by_query(policy, other) for measured in sets]
        found.setdefault(policy, {})[other] = gain(values, seed)
    return found


def means(sets: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Of every metric of every policy, each set with the same weight."""
    return {
        policy: {
            metric: float(np.mean([np.nanmean(own.mean_by_query(policy, metric)) for own in sets]))
            for metric in METRICS
        }
        for policy in POLICIES
    }


def bars(sets: Sequence[Measured], seed: int) -> dict[str, bool]:
    """What must hold, in words, and whether it does."""

    def of(policy: str, other: str, own: Sequence[Measured]) -> Gain:
        return gain([measured.gain_by_query(policy, other) for measured in own], seed)

    large = [own for own in sets if len(own.query_ids) // 2 >= LARGE_SET]
    not_small = [own for own in sets if len(own.query_ids) >= SMALL_SET]
    utility = "expected utility"
    by_signals = of("signals", utility, not_small)
    return {
        f"signals beat the legs' scores alone by {SIGNALS_BAR} or more on the mean of sets with "
        f"{SMALL_SET} queries or more, interval above 0": (
            by_signals.mean >= SIGNALS_BAR and by_signals.lower > 0.0
        ),
        f"signals are on no set worse than {LEAST_SIGNALS_GAIN}": all(
            of("signals", utility, [own]).mean >= LEAST_SIGNALS_GAIN for own in sets
        ),
        f"signals beat k 5 on every set with {LARGE_SET} test queries or more": all(
            of("signals", "k 5", [own]).lower > 0.0 for own in large
        ),
        f"signals beat k 5 on the mean by {MEAN_BAR} or more": (
            of("signals", "k 5", sets).mean >= MEAN_BAR
        ),
        "signals beat ratio on the mean, interval above 0": (
            of("signals", "ratio", sets).lower > 0.0
        ),
        "signals are never worse than k 5": all(
            of("signals", "k 5", [own]).mean >= 0.0 for own in sets
        ),
    }


def policy_table(
    title: str, figures: Mapping[str, Mapping[str, float]], found: Mapping[str, Mapping[str, Gain]]
) -> Table:
    """One set, or the mean over sets, as a person reads it."""
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    for metric in SHOWN:
        table.add_column(metric.replace("udcg_", "UDCG "), justify="right")
    for other in AGAINST:
        table.add_column(f"strict UDCG − {other}", justify="right", no_wrap=True)
    for policy, own in figures.items():
        cells = [f"{own[metric]:.3f}" for metric in SHOWN]
        for other in AGAINST:
            difference = found.get(policy, {}).get(other)
            cells.append("" if difference is None else _shown(difference))
        table.add_row(policy, *cells)
    return table


def _shown(difference: Gain) -> str:
    return f"{difference.mean:+.3f} [{difference.lower:+.3f}, {difference.upper:+.3f}]"


def full_report(sets: Sequence[Measured], seed: int, console: Console) -> dict[str, Any]:
    """Print the tables and return the figures."""
    results: dict[str, Any] = {"sets": {}}
    for own in sets:
        figures, found = means([own]), gains([own], seed)
        title = f"{own.name}: {len(own.query_ids)} queries, half of them tested in each split"
        console.print(policy_table(title, figures, found))
        results["sets"][own.name] = {
            "queries": len(own.query_ids),
            "means": figures,
            "gains": _plain(found),
            "choices": own.choices,
        }
    figures, found = means(sets), gains(sets, seed)
    console.print(policy_table(f"mean over {len(sets)} sets", figures, found))
    not_small = [own for own in sets if len(own.query_ids) >= SMALL_SET]
    without = gains(not_small, seed)
    title = f"mean over the {len(not_small)} sets with {SMALL_SET} queries or more"
    console.print(policy_table(title, means(not_small), without))
    results["mean_without_small"] = {"means": means(not_small), "gains": _plain(without)}
    kept = bars(sets, seed)
    _print_bars(kept, console)
    return results | {"mean": {"means": figures, "gains": _plain(found)}, "bars": kept}


def _plain(found: Mapping[str, Mapping[str, Gain]]) -> dict[str, dict[str, Any]]:
    return {
        policy: {other: vars(difference) for other, difference in own.items()}
        for policy, own in found.items()
    }


def labels_report(by_labels: Mapping[int, Sequence[Measured]], console: Console) -> dict[str, Any]:
    """Strict UDCG less that of the first 5, by number of labels and set; printed and returned."""
    results: dict[str, Any] = {"labels": {}}
    for n_labels, sets in by_labels.items():
        table = Table(
            title=f"{n_labels} answerable queries to calibrate on: mean strict UDCG − k 5",
            title_justify="left",
        )
        table.add_column("set", no_wrap=True)
        for column in ("repeats", *FEW_LABELS, "signals − auto", "signals worse than k 5"):
            table.add_column(column, justify="right")
        rows = {}
        for own in sets:
            if not own.labelled:
                table.add_row(own.name, "0", "no half has so many")
                continue
            used = ~np.isnan(own.values["k 5"]["udcg_strict"]).all(axis=1)
            today = own.values["k 5"]["udcg_strict"][used]
            by_repeat = {
                policy: np.nanmean(own.values[policy]["udcg_strict"][used] - today, axis=1)
                for policy in FEW_LABELS
            }
            row = {policy: float(gains.mean()) for policy, gains in by_repeat.items()}
            row["worse"] = float((by_repeat["signals"] < 0.0).mean())
            rows[own.name] = {
                "repeats": len(own.labelled),
                "queries": len(own.query_ids),
                **row,
                "by_repeat": {policy: each.tolist() for policy, each in by_repeat.items()},
            }
            table.add_row(
                own.name,
                str(len(own.labelled)),
                *(f"{row[policy]:+.3f}" for policy in FEW_LABELS),
                f"{row['signals'] - row['auto']:+.3f}",
                f"{row['worse']:.0%}",
            )
        mean = {
            policy: float(np.mean([row[policy] for row in rows.values()])) for policy in FEW_LABELS
        }
        table.add_row(
            "mean",
            "",
            *(f"{value:+.3f}" for value in mean.values()),
            f"{mean['signals'] - mean['auto']:+.3f}",
        )
        console.print(table)
        results["labels"][str(n_labels)] = {"sets": rows, "mean": mean}
    results["bars"] = {
        f"{name} labels: signals are on no set's mean below k 5": all(
            row["signals"] >= 0.0 for row in one["sets"].values()
        )
        for name, one in results["labels"].items()
        if int(name) >= FEWEST_LABELS
    }
    _print_bars(results["bars"], console)
    return results


def _print_bars(bars: Mapping[str, bool], console: Console) -> None:
    for bar, met in bars.items():
        console.print(f"{'met   ' if met else 'MISSED'} {bar}")


def equal_recall_report(sets: Mapping[str, Sequence[Measured]], console: Console) -> dict[str, Any]:
    """The default objective less the first k, by number of labels, printed and returned."""
    results: dict[str, Any] = {"labels": {}}
    bars: dict[str, bool] = {}
    for labels, measured in sets.items():
        results["labels"][labels] = {}
        for k in EQUAL_RECALL:
            both: dict[str, dict[str, Any]] = {}
            for shown, name in (("legs", ""), ("signals", WITH_SIGNALS)):
                title = f"recall kept of the first {k}, {labels} labelled queries, {shown}"
                rows, mean = _against_first(measured, k, f"{name}keep recall {k}", title, console)
                both[shown] = {"sets": rows, "mean": mean}
            bars |= _equal_recall_bars(
                both["signals"]["sets"], both["signals"]["mean"], f"k {k}, {labels} labels"
            )
            kept = {shown: k + one["mean"]["kept"] for shown, one in both.items()}
            ratio = kept["signals"] / kept["legs"]
            console.print(
                f"passages kept with signals / with the legs' scores alone: {kept['signals']:.2f} "
                f"/ {kept['legs']:.2f} = {ratio:.2f}"
            )
            results["labels"][labels][str(k)] = {**both, "kept_ratio": ratio}
    for k in EQUAL_RECALL[:1]:
        ratio = results["labels"]["all"][str(k)]["kept_ratio"]
        bars[f"k {k}: at most {FEWER_KEPT_BAR} of the passages"] = ratio <= FEWER_KEPT_BAR
    _print_bars(bars, console)
    return results | {"bars": bars}


def _against_first(
    measured: Sequence[Measured], k: int, policy: str, title: str, console: Console
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """A policy less the first k by reciprocal ranks, by set and on their mean."""
    metrics = ("recall", "udcg_strict", "harm", "kept")
    table = Table(title=f"{title}: differences", title_justify="left")
    table.add_column("set", no_wrap=True)
    for column in ("repeats", "as today", "recall", "strict UDCG", "harm", "kept"):
        table.add_column(column, justify="right")
    rows: dict[str, dict[str, Any]] = {}
    for own in measured:
        repeats = len(own.labelled)
        if repeats == 0:
            continue
        differences = {
            metric: float(
                np.nanmean(own.mean_by_query(policy, metric))
                - np.nanmean(own.mean_by_query(f"first {k}", metric))
            )
            for metric in metrics
        }
        as_today = sum(choice.startswith(f"k={k}") for choice in own.choices[policy]) / repeats
        rows[own.name] = {
            "queries": len(own.query_ids),
            "repeats": repeats,
            "as_today": as_today,
            **differences,
        }
        shown = [f"{value:+.3f}" for value in differences.values()]
        table.add_row(own.name, str(repeats), f"{as_today:.0%}", *shown)
    mean = {metric: float(np.mean([row[metric] for row in rows.values()])) for metric in metrics}
    table.add_row("mean", "", "", *(f"{value:+.3f}" for value in mean.values()))
    console.print(table)
    return rows, mean


def _equal_recall_bars(
    rows: Mapping[str, Mapping[str, float]], mean: Mapping[str, float], where: str
) -> dict[str, bool]:
    large = [row for row in rows.values() if row["queries"] // 2 >= LARGE_SET]
    worst = min(row["recall"] for row in large)
    return {
        f"{where}: recall difference ≥ {LEAST_RECALL_DIFFERENCE:g} on every set with {LARGE_SET} "
        "test queries or more": worst >= LEAST_RECALL_DIFFERENCE,
        f"{where}: ≥ {LEAST_MEAN_RECALL_DIFFERENCE:g} on the mean": (
            mean["recall"] >= LEAST_MEAN_RECALL_DIFFERENCE
        ),
        f"{where}: fewer passages and less harm on each of those": all(
            row["kept"] < 0.0 and row["harm"] < 0.0 for row in large
        ),
        f"{where}: strict UDCG never lower": all(
            row["udcg_strict"] >= 0.0 for row in rows.values()
        ),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.policies", description=SUMMARY)
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, metavar="DIR", help="or demo"
    )
    parser.add_argument("--splits", type=int, default=20, help="repeats (default 20)")
    parser.add_argument(
        "--labels", type=int, nargs="+", metavar="N", help="answerable queries to choose on"
    )
    parser.add_argument(
        "--equal-recall", action="store_true", help="the default objective beside the first k"
    )
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    if min(options.splits, *(options.labels or [1])) < 1:
        parser.error("--splits and --labels must be at least 1")
    console = Console(width=150)
    embedder = SentenceTransformerEmbedder()
    start = time.perf_counter()
    policies: tuple[str, ...] = ()
    amounts: Mapping[str, int | None] = {"all": None}
    if options.equal_recall:
        policies, amounts = EQUAL_RECALL_POLICIES, LABELS
    elif options.labels is not None:
        amounts = {str(n): n for n in options.labels}
    measured: dict[str, list[Measured]] = {name: [] for name in amounts}
    for folder in options.data:
        try:
            collection = Collection(folder, options.cache, embedder)
            for name, n in amounts.items():
                own = measure(collection, options.splits, options.seed, n, policies)
                measured[name].append(own)
        except CalibrationError as error:
            parser.error(f"{folder}: {error}")
        console.print(f"[dim]{folder.name}: {time.perf_counter() - start:.0f} s so far[/dim]")
    if options.equal_recall:
        found = equal_recall_report(measured, console)
    elif options.labels is not None:
        found = labels_report({int(name): sets for name, sets in measured.items()}, console)
    else:
        found = full_report(measured["all"], options.seed, console)
    results = {
        "splits": options.splits,
        "seed": options.seed,
        "environment": environment(),
        **found,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0 if all(found["bars"].values()) else 1


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    names = ("ctxguard-rag", "numpy", "scikit-learn", "sentence-transformers", "bm25s", "faiss-cpu")
    return {
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
    }


if __name__ == "__main__":
    sys.exit(main())
