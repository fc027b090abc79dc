"""Calibrate from a judge's verdicts instead of labels, and measure by the labels.

    python -m benchmarks.judged_labels --data DIR… demo --json results/judged_labels.json --check

Half of the questions of each collection are judged, the first 20 candidates each, by simulated
judges; people grade 20 of them whole. The policy serves the other half, whose labels say what it
is worth: strict UDCG above the first 5, as a share of the same with all true labels instead.

Judges (assumed: sensitivity 0.85, false yes 0.10):
    independent    as assumed, each verdict by itself
    misunderstood  as assumed, but of 20% of the questions it says yes to 30% of anything
    near_miss      as assumed on the mean, false yes mostly to what looks relevant
    unknown        sensitivity 0.92, false yes 0.20

Methods:
    naive      verdicts taken as labels
    ungraded   the mixture with assumed rates
    graded     the mixture with 20 questions graded by people
    alone      the 20 graded questions as the only labels
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks._collection import Collection, View, default_cache
from benchmarks._timing import environment
from calibration.fit import probabilities
from calibration.grid import plain_grid, utility_grid
from calibration.judged_route import JUDGED_DEPTH, judged_policy, judged_route
from calibration.pool_labels import discounts
from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import ExpectedUtilityPolicy
from ctxguard.core.types import FloatArray
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

SUMMARY = "Calibrate from a judge's verdicts instead of labels, and measure by the labels."
JUDGES = ("independent", "misunderstood", "near_miss", "unknown")
SERVING_K, GRADED, MOST = 5, 20, 200
_NEARNESS = 1.5
"""Change of a near-miss judge's log-odds of a false yes with one deviation of P's log-odds."""


def bars(rows: Sequence[Mapping[str, float | str]]) -> dict[str, bool]:
    """Whether each bar of the project is met, by what it says."""

    def share(method: str, judge: str) -> tuple[float, float]:
        own = shares(rows, method, judge)
        return mean(own), min(own)

    met = {}
    for method, judges, least in (
        ("graded", ("independent", "misunderstood", "near_miss"), 0.85),
        ("graded", ("unknown",), 0.80),
        ("ungraded", ("independent",), 0.85),
    ):
        for judge in judges:
            average, worst = share(method, judge)
            name = f"{method}, {judge}: mean {average:.2f} >= {least}, worst {worst:.2f} >= 0.60"
            met[name] = average >= least and worst >= 0.60
    graded = [row for row in rows if row["method"] == "graded"]
    worst = min(float(row["gain"]) for row in graded)
    met[f"graded: at most 0.01 below the first 5 on any collection ({worst:+.3f})"] = worst >= -0.01
    error = mean(float(row["ppi_error"]) for row in graded)
    met[f"graded: mean error of the estimated gain {error:+.3f}, at most 0.03"] = abs(error) <= 0.03
    return met


def shares(rows: Sequence[Mapping[str, float | str]], method: str, judge: str) -> list[float]:
    """The share of the labels' gain on each collection."""
    return [float(r["share"]) for r in rows if (r["method"], r["judge"]) == (method, judge)]


def outcomes(name: str, view: View, repeats: int, graded: int) -> Iterator[dict[str, float | str]]:
    """A row for each judge and method over one collection, means over the repeats."""
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(view.pools))
        half = min(len(order) // 2, MOST)
        judged, served = view.rows(order[:half]), view.rows(order[half:])
        truth = _by_question(judged, _first(judged.labels.relevant))
        base = float(plain_grid(served.pools, served.labels, SERVING_K).means.udcg_strict[0, 0])
        everything = judged_policy(judged.pools, truth, truth)
        most = _served(everything, served) - base
        people = rng.permutation(half)[: min(graded, half // 2)]
        named = [judged.pools.query_ids[row] for row in people]
        by_people = {query_id: truth[query_id] for query_id in named}
        alone = _served(judged_policy(judged.pools, by_people, by_people), served) - base
        near = _nearness(everything, judged)
        for judge in JUDGES:
            said = _by_question(judged, _verdicts(judge, judged, near, rng))
            with_people = judged_route(judged.pools, said, by_people, serving_k=SERVING_K)
            estimated = with_people.gain.value if with_people.gain is not None else None
            served_gain = _plain_gain(with_people.policy, served)
            error = np.nan if estimated is None else estimated - served_gain
            gains = {
                "naive": _served(judged_policy(judged.pools, said, said), served) - base,
                "ungraded": _served(judged_policy(judged.pools, said, {}), served) - base,
                "graded": _served(with_people.policy, served) - base,
                "alone": alone,
            }
            for method, gain in gains.items():
                own_error = error if method == "graded" else np.nan
                found.setdefault((method, judge), []).append((gain, most, own_error))
    for (method, judge), values in found.items():
        gain, most, error = (float(np.mean(column)) for column in zip(*values, strict=True))
        yield {
            "collection": name,
            "method": method,
            "judge": judge,
            "gain": gain,
            "gain_of_labels": most,
            "share": gain / most,
            "ppi_error": error,
        }


def _first(values: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return values[:, :JUDGED_DEPTH]


def _by_question(view: View, values: NDArray[np.bool_]) -> dict[str, dict[str, bool]]:
    """Values of the first candidates, by question and passage."""
    return {
        query_id: dict(zip(view.pools.passage_ids[row], values[row].tolist(), strict=False))
        for row, query_id in enumerate(view.pools.query_ids)
    }


def _served(policy: ExpectedUtilityPolicy, view: View) -> float:
    """Mean strict UDCG of the policy over questions that it has not seen."""
    grid = utility_grid(
        view.pools,
        view.labels,
        probabilities(policy.model, view.pools, view.table),
        policy.model,
        ks=(policy.k,),
        thresholds=np.array([policy.min_probability]),
    )
    return float(grid.means.udcg_strict[0, 0])


def _plain_gain(policy: ExpectedUtilityPolicy, view: View) -> float:
    """Mean gain in the utilities that `judged_route` counts: relevant or not."""
    discount = discounts(view.pools.scores.shape[1])
    values = probabilities(policy.model, view.pools, view.table)
    gains = []
    for row, n in enumerate(view.pools.lengths.tolist()):
        worth = np.where(view.labels.relevant[row, :n], policy.gain, -policy.cost)
        order = np.argsort(-values[row, :n], kind="stable")
        kept = int((values[row, order] >= policy.min_probability).sum())
        kept = min(max(kept, 1), policy.k, n)
        today = min(SERVING_K, n)
        gains.append(worth[order[:kept]] @ discount[:kept] - worth[:today] @ discount[:today])
    return float(np.mean(gains))


def _nearness(policy: ExpectedUtilityPolicy, view: View) -> FloatArray:
    """Standardised log-odds of relevance of the first candidates, by a model of all labels."""
    p = probabilities(policy.model, view.pools, view.table)[:, :JUDGED_DEPTH]
    log_odds: FloatArray = np.log(p / (1.0 - p))
    standardised: FloatArray = (log_odds - np.nanmean(log_odds)) / np.nanstd(log_odds)
    return np.nan_to_num(standardised)


def _verdicts(
    judge: str, view: View, near: FloatArray, rng: np.random.Generator
) -> NDArray[np.bool_]:
    relevant = _first(view.labels.relevant)
    sensitivity, false_yes = (0.92, 0.20) if judge == "unknown" else (0.85, 0.10)
    of_others = np.full(relevant.shape, false_yes)
    if judge == "near_miss":
        low, high = -12.0, 4.0
        for _ in range(50):
            level = (low + high) / 2
            of_others = 1.0 / (1.0 + np.exp(-level - _NEARNESS * near))
            low, high = (low, level) if of_others[~relevant].mean() > false_yes else (level, high)
    says_yes = np.where(relevant, sensitivity, of_others)
    if judge == "misunderstood":
        says_yes[rng.random(len(relevant)) < 0.2] = 0.3
    return np.asarray(rng.random(relevant.shape) < says_yes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write a report if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="BEIR folders, or demo")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--graded", type=int, default=GRADED)
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--json", type=Path, help="write a report")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    options = parser.parse_args(arguments)
    embedder, console = SentenceTransformerEmbedder(), Console()
    rows: list[dict[str, float | str]] = []
    for folder in options.data:
        collection = Collection(folder, options.cache, embedder)
        view = collection.under(Fusion("ranker"))
        rows += outcomes(collection.name, view, options.repeats, options.graded)
    table = Table("judge", "naive", "ungraded", "graded", "alone", title="share (worst collection)")
    for judge in JUDGES:
        cells = []
        for method in ("naive", "ungraded", "graded", "alone"):
            own = shares(rows, method, judge)
            cells.append(f"{mean(own):.2f} ({min(own):.2f})")
        table.add_row(judge, *cells)
    console.print(table)
    met = bars(rows)
    for text, is_met in met.items():
        console.print(f"{'met   ' if is_met else 'MISSED'} {text}", soft_wrap=True)
    if options.json is not None:
        report = {
            "environment": environment(["numpy", "scikit-learn"]),
            "repeats": options.repeats,
            "graded": options.graded,
            "outcomes": rows,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if options.check and not all(met.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
