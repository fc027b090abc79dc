"""Calibrate from a judge's verdicts instead of labels, and measure by the labels.

    python -m benchmarks.judged_labels --data DIR… demo --json results/judged_labels.json --check

Half of the questions of each collection are judged, the first 20 candidates each, by simulated
judges; people grade 10 or 20 of them whole. The policy serves the other half, whose labels give
its worth: strict UDCG above the first 5, as a share of the same with all true labels instead. A
report that is there keeps the rows that are not measured again, so that several runs make one.

Judges (assumed: sensitivity 0.85, false yes 0.10):
    independent    as assumed, each verdict by itself
    misunderstood  as assumed, but of 20% of the questions it says yes to 30% of anything
    near_miss      as assumed on the mean, false yes mostly to what looks relevant
    unknown        sensitivity 0.92, false yes 0.20

Methods:
    naive      verdicts taken as labels
    ungraded   the mixture with assumed rates
    graded     the mixture with questions graded by people
    alone      the graded questions as the only labels
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
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
METHODS = ("naive", "ungraded", "graded", "alone")
SERVING_K, GRADED, MOST = 5, (10, 20), 200
_NEARNESS = 1.5
"""Change of a near-miss judge's log-odds of a false yes with one deviation of P's log-odds."""


Row = dict[str, float | str | None]


def bars(rows: Sequence[Row]) -> dict[str, bool]:
    """Say of each bar of the project whether it is met."""
    met = {}
    for method, judges, least in (
        ("graded", ("independent", "misunderstood", "near_miss"), 0.85),
        ("graded", ("unknown",), 0.80),
        ("ungraded", ("independent",), 0.85),
    ):
        for judge in judges:
            own = shares(rows, method, judge)
            name = (
                f"{method}, {judge}: mean {mean(own):.2f} >= {least}, worst {min(own):.2f} >= 0.60"
            )
            met[name] = mean(own) >= least and min(own) >= 0.60
    graded = [row for row in rows if row["method"] == "graded" and row["n_graded"] == GRADED[-1]]
    worst = min(_number(row, "gain") for row in graded)
    met[f"graded: at most 0.01 below the first 5 on any collection ({worst:+.3f})"] = worst >= -0.01
    error = _ppi_error(rows)
    met[f"graded: mean error of the estimated gain {error:+.3f}, at most 0.03"] = abs(error) <= 0.03
    few = GRADED[0]
    added = mean(
        mean(shares(rows, "graded", judge, few)) - mean(shares(rows, "alone", judge, few))
        for judge in JUDGES
    )
    met[f"{few} graded: the judge adds {added:+.2f} >= 0.05 to the grades alone"] = added >= 0.05
    return met


def shares(rows: Sequence[Row], method: str, judge: str, n_graded: int = GRADED[-1]) -> list[float]:
    """Return the share of the labels' gain on each collection."""
    n = n_graded if method in ("graded", "alone") else 0
    wanted = (method, judge, n)
    return [_number(r, "share") for r in rows if (r["method"], r["judge"], r["n_graded"]) == wanted]


def summary(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Mean and worst share by number of graded questions, judge and method."""
    return {
        str(n): {
            judge: {
                method: {"mean": mean(own), "worst": min(own)}
                for method in METHODS
                if (own := shares(rows, method, judge, n))
            }
            for judge in JUDGES
        }
        for n in GRADED
    }


def _ppi_error(rows: Sequence[Row]) -> float:
    return mean(_number(row, "ppi_error") for row in rows if row["ppi_error"] is not None)


def outcomes(
    name: str, view: View, repeats: int, graded: Sequence[int], estimates: int
) -> Iterator[Row]:
    """Yield a row for each judge and method over one collection, means over the repeats.

    Nothing but the grades is measured without the largest number of ``graded`` questions, and the
    estimated gain in the first ``estimates`` repeats only.
    """
    counts = (0, *graded) if GRADED[-1] in graded else graded
    found: dict[tuple[str, str, int], list[tuple[float, float, float]]] = {}
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(view.pools))
        half = min(len(order) // 2, MOST)
        judged, served = view.rows(order[:half]), view.rows(order[half:])
        truth = _by_question(judged, _first(judged.labels.relevant))
        base = float(plain_grid(served.pools, served.labels, SERVING_K).means.udcg_strict[0, 0])
        everything = judged_policy(judged.pools, truth, truth)
        most = _served(everything, served) - base
        people = [judged.pools.query_ids[row] for row in rng.permutation(half)]
        by_people = {n: {name: truth[name] for name in people[: min(n, half // 2)]} for n in counts}
        alone = {
            n: _served(judged_policy(judged.pools, by_people[n], by_people[n]), served) - base
            for n in graded
        }
        near = _nearness(everything, judged)
        for judge in JUDGES:
            said = _by_question(judged, _verdicts(judge, judged, near, rng))
            if 0 in counts:
                naive = _served(judged_policy(judged.pools, said, said), served) - base
                found.setdefault(("naive", judge, 0), []).append((naive, most, np.nan))
            for n, grades in by_people.items():
                policy, error = judged_policy(judged.pools, said, grades), np.nan
                if n == GRADED[-1] and seed < estimates:
                    estimated = judged_route(judged.pools, said, grades).gain
                    if estimated is not None and estimated.value is not None:
                        error = estimated.value - _plain_gain(policy, served)
                key = ("graded" if n else "ungraded", judge, n)
                found.setdefault(key, []).append((_served(policy, served) - base, most, error))
                if n:
                    found.setdefault(("alone", judge, n), []).append((alone[n], most, np.nan))
    for (method, judge, n), values in found.items():
        gains, labels, errors = map(np.array, zip(*values, strict=True))
        measured, most = errors[~np.isnan(errors)], float(labels.mean())
        yield {
            "collection": name,
            "method": method,
            "judge": judge,
            "n_graded": n,
            "repeats": repeats,
            "gain": float(gains.mean()),
            "gain_of_labels": most,
            "share": float(gains.mean()) / most,
            "ppi_error": float(measured.mean()) if measured.size else None,
        }


def _number(row: Row, name: str) -> float:
    return float(row[name] or 0.0)


def _identity(row: Row) -> tuple[object, ...]:
    return row["collection"], row["method"], row["judge"], row["n_graded"]


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
        probabilities(policy.model, view.pools),
        policy.model,
        ks=(policy.k,),
        thresholds=np.array([policy.min_probability]),
    )
    return float(grid.means.udcg_strict[0, 0])


def _plain_gain(policy: ExpectedUtilityPolicy, view: View) -> float:
    """Mean gain in the utilities that `judged_route` counts: relevant or not."""
    discount = discounts(view.pools.scores.shape[1])
    values = probabilities(policy.model, view.pools)
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
    p = probabilities(policy.model, view.pools)[:, :JUDGED_DEPTH]
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
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="BEIR folders, or demo")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--estimates", type=int, default=1_000, help="repeats that estimate gains")
    parser.add_argument("--graded", type=int, nargs="+", choices=GRADED, default=GRADED)
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--json", type=Path, help="write a report, or add to one")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    options = parser.parse_args(arguments)
    embedder, console = SentenceTransformerEmbedder(), Console()
    is_there = options.json is not None and options.json.exists()
    rows: list[Row] = json.loads(options.json.read_text())["outcomes"] if is_there else []
    for folder in options.data:
        collection = Collection(folder, options.cache, embedder)
        view = collection.under(Fusion("ranker"))
        new = list(
            outcomes(collection.name, view, options.repeats, options.graded, options.estimates)
        )
        measured = {_identity(row) for row in new}
        rows = [*(row for row in rows if _identity(row) not in measured), *new]
        if options.json is not None:
            report = {
                "environment": environment(["numpy", "scikit-learn"]),
                "shares": summary(rows),
                "ppi_error": _ppi_error(rows),
                "outcomes": rows,
            }
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for n in GRADED:
        table = Table("judge", *METHODS, title=f"share (worst collection), {n} questions graded")
        for judge in JUDGES:
            own = [shares(rows, method, judge, n) for method in METHODS]
            table.add_row(judge, *[f"{mean(each):.2f} ({min(each):.2f})" for each in own])
        console.print(table)
    met = bars(rows)
    for text, is_met in met.items():
        console.print(f"{'met   ' if is_met else 'MISSED'} {text}", soft_wrap=True)
    return 1 if options.check and not all(met.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
