"""Measure what the verdict promises: recall in its mode, on queries that had no part in anything.

    D="DIR … demo"
    python -m benchmarks.verdict --data $D --splits 24 --json benchmarks/results/verdict.json

    python -m benchmarks.verdict --data $D --ladder --json benchmarks/results/ladder.json

    python -m benchmarks.verdict --traffic --json benchmarks/results/rise.json

Each folder is a BEIR folder; ``demo`` is the demonstration's corpus and questions. A corpus is
indexed and replayed once. In every split so many answerable queries (and a proportional number of
others) are labelled: they are dealt into those that choose and those held out as ``calibrate``
deals them, and end with its verdict. All other queries of the set are the truth. The sizes are
those that leave a fifth of the answerable queries, or ten, for that.

Recall is compared with the first 5 that are served today: of reciprocal ranks, as most engines fuse
their legs, and of the pooled ranker, which an embedded index serves without labels. The
probabilities are the same; the ranker leaves less to gain.

``always`` serves the choice whatever the verdict; ``in its mode`` serves it where the verdict is
``enforce``. A policy is refuted if the 90% upper bound (plain t) on its mean difference in recall
over the other queries lies below −0.01. Each set has the same weight in a mean. Splits are kept in
the cache folder, so that a run that was stopped goes on.

``--ladder`` measures the option of that name: from 100 labels on the most careful choice is tested
on the held-out queries first, then bolder ones, and the last that passes is the choice.

``--traffic`` simulates years of judged requests instead, with a look a day: how many let a policy
rise from shadow to enforce whose loss is at the limit, and after how many days one without a loss
rises.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._collection import Collection, View, default_cache
from benchmarks.policies import environment, few_labels
from calibration.calibrate import dealt
from calibration.calibrate_route import (
    FEWEST_FOR_LADDER,
    FEWEST_LABELS,
    LADDER,
    Settings,
    climbed,
)
from calibration.data.dataset import Dataset
from calibration.fit import fit_relevance, out_of_fold, probabilities
from calibration.grid import Grid, GridIndex, plain_grid, utility_grid
from calibration.objectives import keep_recall
from calibration.pool_labels import IntArray
from calibration.settings import MAX_LOSS, TOLERANCE
from calibration.verdict import CONFIDENCE, verdict
from ctxguard.core.fusion import Fusion
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.types import DEFAULT_K, FloatArray
from ctxguard.monitor.estimation.promotion import DELTA, FEWEST_LABELLED, log_wealth
from ctxguard.monitor.estimation.ratio import t_quantile
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

SUMMARY = "Measure what the verdict of calibration promises."
LABELS = (20, 30, 50, 70, 100, 200, 400)
TODAY = ("reciprocal ranks", "ranker")
TRUTH_SHARE, FEWEST_TRUE = 0.2, 10

BAR_MEAN, BAR_WORST, BAR_ALWAYS = 0.0, -0.005, -0.015
BAR_ENFORCED = {100: 0.4, 400: 0.75}
BAR_REFUTED = 0.05

Draw = Callable[[np.random.Generator, tuple[int, int]], FloatArray]

Split = dict[str, Any]
"""One split: ``decision``, and of the choice ``recall`` (less that of today), ``udcg`` (likewise),
``kept`` and ``refuted``, all over the other queries."""


class Splits:
    """The splits of one collection, under both orders of its candidates.

    Args:
        collection: Its queries, candidates and labels.
        cache: Folder that keeps what was measured.
        cautions: Of the choices that are tested one after the other.
    """

    def __init__(
        self, collection: Collection, cache: Path, cautions: Sequence[float] = LADDER[-1:]
    ) -> None:
        self._cautions = cautions
        self._dataset = collection.dataset
        self._ranked = collection.under(Fusion("ranker"))
        plain = collection.by_reciprocal_rank(with_signals=False)
        columns = np.stack([_columns(self._ranked, plain, row) for row in range(len(plain.pools))])
        as_ranked = np.tile(np.arange(columns.shape[1]), (len(columns), 1))
        self._today = {
            "reciprocal ranks": (plain, columns),
            "ranker": (self._ranked, as_ranked),
        }
        key = "\0".join([str(cautions), *map(str, self._sources()), collection.dataset.digest()])
        self._folder = cache / f"verdict-{hashlib.sha256(key.encode()).hexdigest()[:16]}"

    def _sources(self) -> Iterator[str]:
        """The modules whose change makes what was measured obsolete."""
        root = Path(__file__).resolve().parent.parent
        for name in ("objectives", "verdict", "grid", "fit", "trees"):
            yield (root / "calibration" / f"{name}.py").read_text(encoding="utf-8")

    def measure(self, n: int, split: int) -> dict[str, Split] | None:
        """One split under each order of today; None where the labels do not support a choice."""
        file = self._folder / f"{n}-{split}.json"
        if file.exists():
            known: dict[str, Split] | None = json.loads(file.read_text(encoding="utf-8"))
            return known
        found = self._measure(n, split)
        self._folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found), encoding="utf-8")
        return found

    def _measure(self, n: int, split: int) -> dict[str, Split] | None:
        settings = Settings(seed=split)
        labelled = few_labels(self._dataset, n, split)
        chosen_on, held_out = dealt(labelled, settings)
        if len(chosen_on.answerable) < FEWEST_LABELS:
            return None
        known = {query.query_id for query in labelled.queries}
        parts = [
            self._rows({query.query_id for query in queries})
            for queries in (
                chosen_on.queries,
                () if held_out is None else held_out.queries,
                [query for query in self._dataset.queries if query.query_id not in known],
            )
        ]
        choosing = self._ranked.rows(parts[0])
        model = fit_relevance(choosing.pools, choosing.labels)
        values = probabilities(model, self._ranked.pools)
        values[parts[0]] = out_of_fold(choosing.pools, choosing.labels)
        return {
            name: _split(
                view, np.take_along_axis(values, columns, axis=1), model, parts, self._cautions
            )
            for name, (view, columns) in self._today.items()
        }

    def _rows(self, query_ids: set[str]) -> IntArray:
        names = self._ranked.pools.query_ids
        return np.array([row for row, name in enumerate(names) if name in query_ids], dtype=int)


def _columns(ranked: View, plain: View, row: int) -> IntArray:
    """Where the ranked view has each candidate of a query of the plain one."""
    place = {name: column for column, name in enumerate(ranked.pools.passage_ids[row])}
    found = [place[name] for name in plain.pools.passage_ids[row]]
    return np.array([*found, *range(len(found), plain.pools.scores.shape[1])], dtype=int)


def _split(
    view: View,
    values: FloatArray,
    model: RelevanceModel,
    parts: Sequence[IntArray],
    cautions: Sequence[float],
) -> Split:
    """Choose on some queries, judge by others, and measure on the rest; values are P(relevant)."""

    def grids(rows: IntArray) -> tuple[Grid, Grid]:
        own = view.rows(rows)
        labels = own.labels.with_baseline(DEFAULT_K)
        return (
            utility_grid(own.pools, labels, values[rows], model),
            plain_grid(own.pools, labels, DEFAULT_K),
        )

    choosing, testing, true = (grids(rows) if rows.size else None for rows in parts)

    def differences(
        over: tuple[Grid, Grid] | None, index: GridIndex
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        if over is None:
            return np.zeros(0), np.zeros(0), np.zeros(0)
        grid, plain = over
        at, today = grid.at([index]), plain.at([(0, 0)])
        recall = at.recall_difference[:, 0]
        udcg = (at.udcg_strict - today.udcg_strict)[:, 0]
        return recall[~np.isnan(recall)], udcg, at.kept[:, 0]

    def decision(index: GridIndex) -> str:
        held_out, _, _ = differences(testing, index)
        return verdict(held_out, serving_k=DEFAULT_K, tolerance=TOLERANCE).decision

    assert choosing is not None
    rungs = [keep_recall(choosing[0], DEFAULT_K, caution=caution) for caution in cautions]
    index, _ = climbed(
        [each for each in rungs if each is not None], lambda each: decision(each) == "enforce"
    )
    if index is None:
        return {"decision": "keep", "recall": 0.0, "udcg": 0.0, "kept": float(DEFAULT_K)}
    recall, udcg, kept = differences(true, index)
    error = recall.std(ddof=1) / np.sqrt(recall.size)
    upper = recall.mean() + t_quantile(CONFIDENCE, recall.size - 1) * error
    return {
        "decision": decision(index),
        "recall": float(recall.mean()),
        "udcg": float(udcg.mean()),
        "kept": float(kept.mean()),
        "refuted": bool(upper < -TOLERANCE),
    }


def sizes_of(dataset: Dataset) -> list[int]:
    """How many answerable queries are labelled, as the set allows."""
    total = len(dataset.answerable)
    spared = max(FEWEST_TRUE, round(TRUTH_SHARE * total))
    return [n for n in LABELS if total - n >= spared]


def summarised(splits: Sequence[Split]) -> dict[str, float]:
    """Means over the splits of one set."""
    enforced = np.array([split["decision"] == "enforce" for split in splits])
    recall, udcg, kept = (
        np.array([split[name] for split in splits]) for name in ("recall", "udcg", "kept")
    )
    return {
        "splits": len(splits),
        "enforce": float(enforced.mean()),
        "shadow": float(np.mean([split["decision"] == "shadow" for split in splits])),
        "keep": float(np.mean([split["decision"] == "keep" for split in splits])),
        "always": float(recall.mean()),
        "served": float(np.where(enforced, recall, 0.0).mean()),
        "udcg": float(np.where(enforced, udcg, 0.0).mean()),
        "kept": float(np.where(enforced, kept, DEFAULT_K).mean()),
        "n_enforced": int(enforced.sum()),
        "n_refuted": sum(split.get("refuted", False) for split in splits if _enforced(split)),
        "enforced_recall": float(recall[enforced].sum()),
        "enforced_udcg": float(udcg[enforced].sum()),
        "enforced_kept": float(kept[enforced].sum()),
    }


def _enforced(split: Split) -> bool:
    return bool(split["decision"] == "enforce")


def by_labels(sets: dict[str, dict[int, dict[str, float]]]) -> dict[str, Any]:
    """Means and worst sets for each number of labels, from each set's summary."""
    rows: dict[str, Any] = {}
    for n in LABELS:
        own = {name: by_n[n] for name, by_n in sets.items() if n in by_n}
        if not own:
            continue
        row: dict[str, Any] = {
            name: float(np.mean([each[name] for each in own.values()]))
            for name in ("enforce", "shadow", "keep", "always", "served", "udcg", "kept")
        }
        enforced = sum(each["n_enforced"] for each in own.values())
        row |= {
            "worst_always": min(each["always"] for each in own.values()),
            "worst_served": min(each["served"] for each in own.values()),
            "n_enforced": enforced,
            "n_refuted": sum(each["n_refuted"] for each in own.values()),
        }
        for name in ("recall", "udcg", "kept"):
            total = sum(each[f"enforced_{name}"] for each in own.values())
            row[f"enforced_{name}"] = total / enforced if enforced else None
        rows[str(n)] = {"sets": own, **row}
    return rows


def bars(rows: dict[str, Any]) -> dict[str, bool]:
    """What must hold, in words, and whether it does."""
    served = [row["served"] for row in rows.values()]
    enforced = sum(row["n_enforced"] for row in rows.values())
    refuted = sum(row["n_refuted"] for row in rows.values())
    found = {
        f"recall in the verdict's mode ≥ {BAR_MEAN:g} on the mean, at every n": min(served)
        >= BAR_MEAN,
        f"≥ {BAR_WORST:g} on the worst set": min(row["worst_served"] for row in rows.values())
        >= BAR_WORST,
        f"always served, ≥ {BAR_ALWAYS:g} on the worst set": min(
            row["worst_always"] for row in rows.values()
        )
        >= BAR_ALWAYS,
        f"of those enforced, {BAR_REFUTED:.0%} at most are refuted": refuted
        <= BAR_REFUTED * max(enforced, 1),
    }
    for n, share in BAR_ENFORCED.items():
        if str(n) in rows:
            found[f"{n} labels enforce in {share:.0%} of splits"] = rows[str(n)]["enforce"] >= share
    return found


def print_rows(today: str, rows: dict[str, Any], console: Console) -> None:
    """One table of what each number of labels gives."""
    table = Table(title=f"against the first {DEFAULT_K} by {today}", title_justify="left")
    for column in (
        *("labels", "sets", "enforce / shadow / keep", "always: recall", "worst set"),
        *("in its mode: recall", "worst set", "enforced: recall", "kept", "UDCG", "refuted"),
    ):
        table.add_column(column, justify="right")
    for n, row in rows.items():
        enforced = [row[f"enforced_{name}"] for name in ("recall", "kept", "udcg")]
        forms = ("+.3f", ".2f", "+.2f")
        table.add_row(
            n,
            str(len(row["sets"])),
            " / ".join(f"{row[name]:.2f}" for name in ("enforce", "shadow", "keep")),
            *(f"{row[name]:+.4f}" for name in ("always", "worst_always", "served", "worst_served")),
            *(
                "" if v is None else format(v, form)
                for v, form in zip(enforced, forms, strict=True)
            ),
            f"{row['n_refuted']} of {row['n_enforced']}",
        )
    console.print(table)


def _differences(losses: float, share: float, gains: float) -> Draw:
    """Some requests lose a share of their relevant passages, some gain as much, others nothing."""

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
        chances = [losses, gains, 1.0 - losses - gains]
        return share * rng.choice([-1.0, 1.0, 0.0], shape, p=chances)

    return draw


AT_THE_LIMIT: dict[str, Draw] = {
    "a tenth of requests lose half": _differences(0.1, 0.5, 0.0),
    "15% lose half, 5% gain half": _differences(0.15, 0.5, 0.05),
    "a twentieth lose everything": _differences(0.05, 1.0, 0.0),
    "a fifth lose a quarter": _differences(0.2, 0.25, 0.0),
}
OF_NO_LOSS: dict[str, Draw] = {
    "2% lose half, 2% gain half": _differences(0.02, 0.5, 0.02),
    "5% lose half, 5% gain half": _differences(0.05, 0.5, 0.05),
    "5% lose everything, 5% gain as much": _differences(0.05, 1.0, 0.05),
}
REQUESTS_A_DAY = (50, 200, 500)
DAYS = 365
_RUNS_AT_ONCE = 20
MISSED = 0.2
"""Share of losses that a judge misses who errs."""
_GRADED_A_DAY = 10


def days_to_rise(draw: Draw, per_day: int, years: int, *, meets_mean: bool) -> FloatArray:
    """The first day at whose end a policy rises, of each simulated year; infinite where none.

    Args:
        draw: Differences in recall of judged requests.
        per_day: Requests that are judged each day.
        years: How many to simulate.
        meets_mean: Whether the mean so far must not lie below −tolerance either.
    """
    rng, days = np.random.default_rng(per_day), []
    for _ in range(years // _RUNS_AT_ONCE):
        differences = draw(rng, (per_day * DAYS, _RUNS_AT_ONCE))
        wealth = np.maximum.accumulate(log_wealth(differences, MAX_LOSS), axis=0)
        risen = wealth[per_day - 1 :: per_day] >= -np.log(DELTA)
        if meets_mean:
            n = np.arange(1, len(differences) + 1)[:, None]
            risen &= (differences.cumsum(axis=0) / n)[per_day - 1 :: per_day] >= -TOLERANCE
        days.append(np.where(risen.any(axis=0), risen.argmax(axis=0) + 1.0, np.inf))
    return np.concatenate(days)


def risen_by_erring_judge(draw: Draw, years: int) -> float:
    """The share of years that rise where the judge misses losses and people grade some requests.

    Fifty requests are judged a day and ten graded; people's grades replace the judge's.
    """
    rng, risen = np.random.default_rng(0), 0
    days = np.arange(1, DAYS + 1)
    for _ in range(years // _RUNS_AT_ONCE):
        truth = draw(rng, (50 * DAYS, _RUNS_AT_ONCE))
        is_graded = (np.arange(len(truth)) % 50 < _GRADED_A_DAY)[:, None]
        is_missed = (truth < 0.0) & (rng.random(truth.shape) < MISSED) & ~is_graded
        seen = np.where(is_missed, 0.0, truth)
        wealth = np.maximum.accumulate(log_wealth(seen, MAX_LOSS), axis=0)[49::50]
        graded = truth[is_graded[:, 0]].cumsum(axis=0)[_GRADED_A_DAY - 1 :: _GRADED_A_DAY]
        n_graded = (_GRADED_A_DAY * days)[:, None]
        agrees = (n_graded >= FEWEST_LABELLED) & (graded / n_graded >= -TOLERANCE)
        risen += int(((wealth >= -np.log(DELTA)) & agrees).any(axis=0).sum())
    return risen / years


def traffic(years: int, console: Console) -> dict[str, Any]:
    """Print and return how often and how soon simulated traffic lets a policy rise."""
    limit = {
        name: float(np.isfinite(days_to_rise(draw, 50, years, meets_mean=False)).mean())
        for name, draw in AT_THE_LIMIT.items()
    }
    median = {
        name: {
            str(n): float(np.median(days_to_rise(draw, n, min(years, 200), meets_mean=True)))
            for n in REQUESTS_A_DAY
        }
        for name, draw in OF_NO_LOSS.items()
    }
    for name, share in limit.items():
        console.print(f"loss at the limit, {name}: {share:.1%} of {years:,} years rise")
    for name, own in median.items():
        days = ", ".join(f"{n} a day: {day:g}" for n, day in own.items())
        console.print(f"no loss, {name}: median days to rise, {days}")
    erring = {name: risen_by_erring_judge(draw, years) for name, draw in AT_THE_LIMIT.items()}
    for name, share in erring.items():
        console.print(f"a judge misses {MISSED:.0%} of losses, {name}: {share:.1%} of years rise")
    words = f"with the loss at the limit {DELTA:.0%} of years rise at most"
    of_erring = f"so do those of a judge that misses {MISSED:.0%} of losses"
    kept = {words: max(limit.values()) <= DELTA, of_erring: max(erring.values()) <= DELTA}
    for each, holds in kept.items():
        console.print(f"{'holds' if holds else 'MISSED'}: {each}")
    return {
        "years": years,
        "limit": limit,
        "limit_by_erring_judge": erring,
        "median_days": median,
        "bars": kept,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.verdict", description=SUMMARY)
    parser.add_argument("--data", type=Path, nargs="+", default=[], metavar="DIR", help="or demo")
    parser.add_argument("--traffic", action="store_true", help="simulate traffic instead")
    parser.add_argument(
        "--ladder", action="store_true", help="with several choices, from 100 labels"
    )
    parser.add_argument("--splits", type=int, default=24)
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    console = Console(width=180)
    if options.traffic:
        simulated = traffic(1_000, console)
        if options.json is not None:
            options.json.write_text(json.dumps(simulated, indent=2) + "\n", encoding="utf-8")
        return 0 if all(simulated["bars"].values()) else 1
    if not options.data:
        parser.error("--data or --traffic is needed")
    embedder = SentenceTransformerEmbedder()
    sets: dict[str, dict[str, dict[int, dict[str, float]]]] = {name: {} for name in TODAY}
    for folder in options.data:
        collection = Collection(folder, options.cache, embedder)
        splits = Splits(collection, options.cache, LADDER if options.ladder else LADDER[-1:])
        for n in sizes_of(collection.dataset):
            if options.ladder and n < FEWEST_FOR_LADDER:
                continue
            measured = [splits.measure(n, split) for split in range(options.splits)]
            for name in TODAY:
                own = [split[name] for split in measured if split is not None]
                if own:
                    sets[name].setdefault(collection.name, {})[n] = summarised(own)
            console.print(f"[dim]{collection.name}: {n} labels[/dim]")
    results: dict[str, Any] = {"splits": options.splits, "environment": environment(), "today": {}}
    for name in TODAY:
        rows = by_labels(sets[name])
        print_rows(name, rows, console)
        kept = bars(rows)
        for words, holds in kept.items():
            console.print(f"{'holds' if holds else 'MISSED'}: {words}")
        results["today"][name] = {"labels": rows, "bars": kept}
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0 if all(all(own["bars"].values()) for own in results["today"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
