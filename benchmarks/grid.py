"""Time a whole grid of policies over many queries, beside a naive loop and ranx.

    python -m benchmarks.grid --queries 10000 --depth 100 --json grid.json

Simulated rankings: scores on a ratio scale, relevance rarer at lower ranks. Three sides in the same
run, on one thread: ``Grid.means`` and the loop call no threaded library (processor time is shown
beside wall time), and ranx's compiled loops are limited to one thread.

    Grid.means   mean strict UDCG, harm, recall loss and kept count of 50 × 100 (k, min_ratio)
    naive loop   the same by a loop over queries and settings, on a part of the queries, with its
                 time scaled up in proportion; its means must agree to 1e-9
    ranx         recall, precision and nDCG at every k from 1 to 50, the nearest that it offers,
                 since it has no filter by score; building its objects is not timed

ranx is optional (benchmarks/requirements.txt).
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from calibration.grid import Grid, thresholds_reached
from calibration.pool_labels import NDCG_CUTOFF, PoolLabels
from ctxguard.core.metrics import DEFAULT_UTILITIES
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import FloatArray

SUMMARY = "Time a whole grid of policies over many queries, beside a naive loop and ranx."
KS = tuple(range(1, 51))
RATIOS: FloatArray = np.arange(100) / 100
BAR_SECONDS = 0.5
TOLERANCE = 1e-9

Means = Mapping[str, FloatArray]


def rankings(n_queries: int, depth: int, seed: int) -> tuple[FloatArray, PoolLabels]:
    """Relative scores, shape (n_queries, depth), and labels of simulated rankings."""
    rng = np.random.default_rng(seed)
    falls = rng.exponential(rng.gamma(2.0, 0.02, (n_queries, 1)), (n_queries, depth))
    falls[:, 0] = 0.0
    relative = np.exp(-falls.cumsum(axis=1))
    likely = 0.5 / np.arange(1, depth + 1) ** 0.8
    grades = np.where(rng.random(relative.shape) < likely, rng.integers(1, 3, relative.shape), 0)
    utilities = np.select(
        [grades == 2, grades == 1],
        [DEFAULT_UTILITIES.relevant, DEFAULT_UTILITIES.partial],
        DEFAULT_UTILITIES.irrelevant,
    )
    labels = PoolLabels(
        grades=grades,
        retrieved=np.ones_like(grades, dtype=bool),
        judged=np.ones_like(grades, dtype=bool),
        utilities=utilities,
        negatives=np.full(relative.shape, None, dtype=object),
        in_baseline=np.ones_like(grades, dtype=bool),
        served=np.zeros((n_queries, 2)),
        best_grades=-np.sort(-grades, axis=1)[:, :NDCG_CUTOFF],
        n_relevant=(grades > 0).sum(axis=1),
        top_grade=2,
        rules=DEFAULT_UTILITIES,
        positives_only=False,
        weights=np.ones(n_queries),
    )
    return relative, labels


def vectorised(relative: FloatArray, labels: PoolLabels) -> Means:
    """What calibration does: compares every candidate with every threshold, takes all means."""
    means = Grid(labels, KS, RATIOS, thresholds_reached(relative, RATIOS), RatioPolicy).means
    return vars(means)


def naive(relative: FloatArray, labels: PoolLabels) -> Means:
    """The same, one query and one setting at a time."""
    n_queries, depth = relative.shape
    sums = {
        name: np.zeros((len(KS), RATIOS.size))
        for name in ("udcg_strict", "harm", "recall_loss", "recall_difference", "kept")
    }
    discount = [1.0 / np.log2(rank + 1.0) for rank in range(1, depth + 1)]
    defined = 0
    for scores, grades, worth in zip(
        relative.tolist(), labels.grades.tolist(), labels.utilities.tolist(), strict=True
    ):
        n_relevant = sum(grade > 0 for grade in grades)
        defined += n_relevant > 0
        for row, k in enumerate(KS):
            for column, min_ratio in enumerate(RATIOS.tolist()):
                value = harm = 0.0
                found = kept = 0
                while kept < min(k, depth) and (kept == 0 or scores[kept] >= min_ratio):
                    gain = worth[kept] * discount[kept]
                    value += gain
                    harm += max(-gain, 0.0)
                    found += grades[kept] > 0
                    kept += 1
                sums["udcg_strict"][row, column] += value
                sums["harm"][row, column] += harm
                sums["kept"][row, column] += kept
                if n_relevant:
                    sums["recall_loss"][row, column] += 1.0 - found / n_relevant
                    # The baseline is the whole pool, whose recall is 1.
                    sums["recall_difference"][row, column] += found / n_relevant - 1.0
    return {
        name: values / (defined if name.startswith("recall") else n_queries)
        for name, values in sums.items()
    }


def ranx_at_every_k(relative: FloatArray, labels: PoolLabels) -> Callable[[], object] | None:
    """The function to time ranx with, its objects built; None if it is not installed."""
    try:
        from numba import set_num_threads
        from ranx import Qrels, Run, evaluate
    except ImportError:
        return None
    set_num_threads(1)
    ids = [f"p{column}" for column in range(relative.shape[1])]
    qrels = Qrels(
        {
            f"q{row}": {ids[column]: grade for column, grade in enumerate(grades) if grade > 0}
            for row, grades in enumerate(labels.grades.tolist())
            if any(grades)
        }
    )
    run = Run(
        {
            f"q{row}": dict(zip(ids, scores, strict=True))
            for row, scores in enumerate(relative.tolist())
            if labels.n_relevant[row]
        }
    )
    metrics = [f"{name}@{k}" for name in ("recall", "precision", "ndcg") for k in KS]
    return lambda: evaluate(qrels, run, metrics)


class Timing(NamedTuple):
    """Seconds of several runs, after one that is not counted.

    Attributes:
        clock: Wall time.
        processor: Processor time, summed over threads.
    """

    clock: list[float]
    processor: list[float]

    @classmethod
    def of(cls, action: Callable[[], object], runs: int) -> "Timing":
        action()
        taken = cls([], [])
        for _ in range(runs):
            started, busy = time.perf_counter(), time.process_time()
            action()
            taken.clock.append(time.perf_counter() - started)
            taken.processor.append(time.process_time() - busy)
        return taken

    def __str__(self) -> str:
        clock, processor = statistics.median(self.clock), statistics.median(self.processor)
        return f"{clock:.3f} ({processor:.3f})"


def largest_difference(first: Means, second: Means) -> float:
    """The largest difference over all policies and means."""
    return max(float(np.abs(first[name] - second[name]).max()) for name in first)


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    versions = {}
    for name in ("ctxguard-rag", "numpy", "ranx", "numba"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": 1,
        "versions": versions,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit status is 1 where the bar is missed or the loop disagrees."""
    parser = argparse.ArgumentParser(prog="benchmarks.grid", description=SUMMARY)
    parser.add_argument("--queries", type=int, default=10_000)
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--naive-queries", type=int, default=50, help="of the loop (default 50)")
    parser.add_argument("--runs", type=int, default=5, help="of which the median is taken")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    if min(options.queries, options.depth, options.naive_queries, options.runs) < 1:
        parser.error("--queries, --depth, --naive-queries and --runs must be at least 1")
    relative, labels = rankings(options.queries, options.depth, options.seed)
    few = min(options.naive_queries, options.queries)
    some = np.arange(few)
    few_relative, few_labels = relative[some], labels.rows(some)

    ours = Timing.of(lambda: vectorised(relative, labels), options.runs)
    started = time.perf_counter()
    expected = naive(few_relative, few_labels)
    loop = (time.perf_counter() - started) * options.queries / few
    difference = largest_difference(vectorised(few_relative, few_labels), expected)
    peer = ranx_at_every_k(relative, labels)
    theirs = None if peer is None else Timing.of(peer, options.runs)

    median = statistics.median(ours.clock)
    met, agrees = median <= BAR_SECONDS, difference <= TOLERANCE
    report = {
        "environment": environment(),
        "queries": options.queries,
        "depth": options.depth,
        "grid": [len(KS), RATIOS.size],
        "seed": options.seed,
        "grid_means_seconds": ours._asdict(),
        "naive_queries": few,
        "naive_scaled_seconds": loop,
        "largest_difference": difference,
        "ranx_seconds": None if theirs is None else theirs._asdict(),
        "bar_seconds": BAR_SECONDS,
        "bar_met": met,
        "agrees": agrees,
    }
    console = Console(width=110)
    console.print_json(data=report["environment"])
    table = Table(
        title=f"{options.queries} queries × {options.depth} candidates, median of {options.runs}",
        title_justify="left",
    )
    table.add_column("side")
    table.add_column("what")
    table.add_column("seconds (processor)", justify="right")
    cells = f"{len(KS)} × {RATIOS.size} (k, min_ratio)"
    table.add_row("Grid.means", f"4 means over {cells}", str(ours))
    table.add_row("naive loop", f"the same; {few} queries, scaled up", f"{loop:.0f}")
    table.add_row(
        "ranx",
        f"3 metrics at {len(KS)} k, no filter by score",
        "not installed" if theirs is None else str(theirs),
    )
    console.print(table)
    console.print(f"largest difference to the loop: {difference:.1e} (at most {TOLERANCE:g})")
    console.print(f"{'met   ' if met else 'MISSED'} at most {BAR_SECONDS:g} s on one thread")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if met and agrees else 1


if __name__ == "__main__":
    sys.exit(main())
