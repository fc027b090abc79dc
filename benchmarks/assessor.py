"""Ask a simulated assessor where it pays, on queries that took no part in the fit.

    python -m benchmarks.assessor --data DIR … demo --json assessor.json

Each folder is a BEIR folder; ``demo`` is the demonstration's questions. In every repeat a random
half of the queries fits P(relevant), its policy, and the effect of the answers about the first 20
candidates by P; the other half measures. k and the threshold stay those that were tuned without
answers. A query's figures are averaged over the repeats that measured it; each set has the same
weight in the mean; intervals are 95% paired bootstraps over queries.

An answer about a candidate is d′ · relevant + noise. *Correlated*: the noise goes with our
log-odds, 0.5 within a class, and d′ is what is left beside them on the whole. *Shifted*: each
question moves all its answers by a standard normal times 0.7. *Refusing*: a fifth of the candidates
has no answer. *Garbage*: a twentieth has a huge number of either sign.

Net utility is strict UDCG less a price for each candidate asked about, a mean over queries. Asking
by value is compared with asking about the first n, where n is the best one for each set in
hindsight, or the best single one; with all 20; and with candidates drawn at random.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks._collection import Collection, View, default_cache
from benchmarks.policies import Gain, environment, few_labels, gain
from calibration.data.dataset import split_by_query
from calibration.fit import fit_relevance, out_of_fold, probabilities
from calibration.grid import utility_grid
from calibration.pool_labels import discounts
from ctxguard.core.asking import AnswerModel, log_odds
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import FloatArray
from ctxguard.errors import CalibrationError
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

SUMMARY = "Ask a simulated assessor where it pays."
FIRST = 20
"""Candidates that may be asked about: the first by P."""
PRICES = (0.001, 0.002, 0.005)
SHARES = (0.1, 0.2)
RANDOM_SHARES = (0.1, 0.2, 0.3)
FEW = (20, 50)
DRAWS = 5

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Assessor:
    """A simulated assessor; see the text of this module."""

    d: float
    correlation: float = 0.0
    shift: float = 0.0
    refusing: float = 0.0
    garbage: float = 0.0

    def answers(
        self, rng: np.random.Generator, chances: FloatArray, relevant: Mask, exists: Mask
    ) -> FloatArray:
        """Answers about candidates, shape (n_q, FIRST); NaN where it refuses."""
        noise = rng.standard_normal(chances.shape)
        d = self.d
        if self.correlation:
            odds = log_odds(np.where(exists, chances, 0.5))
            means = [odds[exists & (relevant == known)].mean() for known in (True, False)]
            ours = odds - np.where(relevant, *means)
            spread = float(ours[exists].std())
            left = np.sqrt(1.0 - self.correlation**2)
            d = d * left + self.correlation * (means[0] - means[1]) / spread
            noise = self.correlation * ours / spread + left * noise
        found = d * relevant + noise + self.shift * rng.standard_normal((len(chances), 1))
        wild = rng.random(chances.shape) < self.garbage
        found = np.where(wild, 1e3 * rng.standard_cauchy(chances.shape), found)
        return np.where(rng.random(chances.shape) < self.refusing, np.nan, found)


ASSESSORS: Mapping[str, Assessor] = {
    "d′ 1": Assessor(1.0),
    "d′ 1.6": Assessor(1.6),
    "d′ 1, correlated": Assessor(1.0, correlation=0.5),
    "d′ 1.6, correlated": Assessor(1.6, correlation=0.5),
    "d′ 1, shifted": Assessor(1.0, shift=0.7),
    "d′ 1, refusing": Assessor(1.0, refusing=0.2),
    "d′ 1, garbage": Assessor(1.0, garbage=0.05),
    "d′ 1.6, garbage": Assessor(1.6, garbage=0.05),
    "d′ 0": Assessor(0.0),
    "d′ −1": Assessor(-1.0),
}
LEAST_GAIN = {"d′ 1": (0.05, 0.03), "d′ 1.6": (0.14, 0.11)}
"""Full asking: the least mean gain, and its lower bound."""
LEAST_GARBAGE = 0.6
NO_WORTH = ("d′ 0", "d′ −1")


class Half:
    """One split of a set: P(relevant) and labels of both halves, best first by P."""

    def __init__(self, fitted: View, applied: View) -> None:
        model = fit_relevance(fitted.pools, fitted.labels)
        own = out_of_fold(fitted.pools, fitted.labels)
        grid = utility_grid(fitted.pools, fitted.labels, own, model)
        self.k, self.threshold = grid.settings(grid.means.best())
        order = np.argsort(-np.nan_to_num(own, nan=-1.0), axis=1, kind="stable")[:, :FIRST]
        self.fit_chances = np.take_along_axis(own, order, axis=1)
        self.fit_relevant = np.take_along_axis(fitted.labels.relevant, order, axis=1)
        chances = probabilities(model, applied.pools)
        order = np.argsort(-np.nan_to_num(chances, nan=-1.0), axis=1, kind="stable")
        labels = applied.labels.reordered(order)
        self.query_ids = applied.pools.query_ids
        self.n = applied.pools.lengths
        self.chances = np.take_along_axis(chances, order, axis=1)
        self.relevant, self.worth = labels.relevant, labels.utilities
        self.exists = ~np.isnan(self.chances[:, :FIRST])
        self.before = self.utility(self.chances)

    def utility(self, chances: FloatArray) -> FloatArray:
        """Strict UDCG of each query's context by these probabilities."""
        ranked = np.nan_to_num(chances, nan=-1.0)
        order = np.argsort(-ranked, axis=1, kind="stable")[:, : self.k]
        kept = np.take_along_axis(ranked, order, axis=1) >= self.threshold
        kept[:, 0] = self.n > 0
        worth = np.take_along_axis(self.worth, order, axis=1) * discounts(order.shape[1])
        sums: FloatArray = (worth * kept).sum(axis=1)
        return sums

    def gain(self, after: FloatArray, asked: Mask) -> FloatArray:
        """Strict UDCG with the answers about those asked, less that without."""
        chances = self.chances.copy()
        chances[:, :FIRST] = np.where(asked, after, chances[:, :FIRST])
        return self.utility(chances) - self.before

    def ceiling(self) -> FloatArray:
        """The gain of knowing the worth of the first 20 candidates."""
        worth = self.worth[:, :FIRST]
        return self.gain(np.where(worth > 0.0, 1.0 + worth, 0.0), self.exists)


@dataclass(frozen=True)
class Run:
    """One assessor asked about one half.

    Attributes:
        half: The half.
        values: Shape (n_q, FIRST), the value of asking.
        after: Shape (n_q, FIRST), P after the answer.
        random: Shape (n_q, FIRST), uniform numbers.
    """

    half: Half
    values: FloatArray
    after: FloatArray
    random: FloatArray


def ask(half: Half, assessor: Assessor, rng: np.random.Generator) -> Run:
    """Fit on one half's answers; values and updates on the other half."""
    there = ~np.isnan(half.fit_chances)
    answers = assessor.answers(rng, half.fit_chances, half.fit_relevant, there)
    groups = np.broadcast_to(np.arange(len(there))[:, None], there.shape)
    model = AnswerModel.fit(
        answers[there], half.fit_chances[there], half.fit_relevant[there], groups[there]
    )
    chances = half.chances[:, :FIRST]
    answers = assessor.answers(rng, chances, half.relevant[:, :FIRST], half.exists)
    values, after = np.zeros(chances.shape), chances.copy()
    if model is not None:
        for row, n in enumerate(half.n.tolist()):
            own = min(n, FIRST)
            found = model.values(half.chances[row, :n], half.k, half.threshold)
            values[row, :own] = found[:own]
            after[row, :own] = model.updated(chances[row, :own], answers[row, :own])
    return Run(half, values, after, rng.random(chances.shape))


def by_query(runs: Sequence[Run], measured: Callable[[Run], FloatArray]) -> FloatArray:
    """The mean of a figure of each query over the runs that have it, shape (n_q,)."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for query_id, value in zip(run.half.query_ids, measured(run).tolist(), strict=True):
            found.setdefault(query_id, []).append(value)
    return np.array([np.mean(values) for values in found.values()])


class Measured:
    """One assessor on all sets."""

    def __init__(self, runs: Mapping[str, Sequence[Run]]) -> None:
        self.runs = runs
        self.full = self.gains(lambda run: run.half.exists)
        self.firsts = [
            (self.gains(first), self.asked(first))
            for first in (self.first(n) for n in range(FIRST + 1))
        ]

    @staticmethod
    def first(n: int) -> Callable[[Run], Mask]:
        """Ask about the first n candidates."""
        return lambda run: run.half.exists & (np.arange(FIRST) < n)

    def gains(self, asked: Callable[[Run], Mask]) -> dict[str, FloatArray]:
        """The gain of every query by set."""
        return {
            name: by_query(runs, lambda run: run.half.gain(run.after, asked(run)))
            for name, runs in self.runs.items()
        }

    def asked(self, asked: Callable[[Run], Mask]) -> dict[str, float]:
        """Mean number of candidates asked about, by set."""
        return {
            name: float(by_query(runs, lambda run: asked(run).sum(axis=1)).mean())
            for name, runs in self.runs.items()
        }

    def shares(self, asked: Callable[[Run], Mask]) -> dict[str, list[float]]:
        """The share of the first 20 asked about in each run, by set."""
        return {
            name: [float(asked(run).sum() / run.half.exists.sum()) for run in runs]
            for name, runs in self.runs.items()
        }

    def at_price(self, price: float) -> dict[str, Any]:
        """Net utility of asking by value, and of fixed numbers, by set and on the mean."""
        gains, asked = (
            self.gains(lambda run: run.values > price),
            self.asked(lambda run: run.values > price),
        )
        nets = {name: float(own.mean()) - price * asked[name] for name, own in gains.items()}
        fixed = {
            name: [float(own[name].mean()) - price * n[name] for own, n in self.firsts]
            for name in self.runs
        }
        by_n = np.mean(list(fixed.values()), axis=0)
        shares = self.shares(lambda run: run.values > price)
        return {
            "net": mean(nets),
            "gain": mean({name: float(own.mean()) for name, own in gains.items()}),
            "hindsight": mean({name: max(own) for name, own in fixed.items()}),
            "single": float(by_n.max()),
            "single_n": int(by_n.argmax()),
            "all": float(by_n[-1]),
            "share": mean({name: float(np.mean(own)) for name, own in shares.items()}),
            "most_asked": max(max(own) for own in shares.values()),
            "sets": {
                name: {
                    "net": nets[name],
                    "hindsight": max(fixed[name]),
                    "n": int(np.argmax(fixed[name])),
                    "share": float(np.mean(shares[name])),
                }
                for name in self.runs
            },
        }

    def at_share(self, share: float, seed: int) -> dict[str, Any]:
        """One price for all sets, at which this share is asked about on their mean."""
        low, high = 0.0, 1.0
        for _ in range(20):
            price = 0.5 * (low + high)
            shares = self.shares(lambda run: run.values > price)  # noqa: B023
            asked = float(np.mean([np.mean(own) for own in shares.values()]))
            low, high = (price, high) if asked > share else (low, price)
        gains = self.gains(lambda run: run.values > high)
        first = self.firsts[round(share * FIRST)][0]
        above = [gains[name] - first[name] for name in gains]
        return {
            "price": high,
            "gain": overall(gains),
            "of_full": overall(gains) / overall(self.full),
            "above_first": asdict(gain(above, seed)),
        }


def mean(values: Mapping[str, float]) -> float:
    """The mean over the sets."""
    return float(np.mean(list(values.values())))


def overall(gains: Mapping[str, FloatArray]) -> float:
    """The mean over the sets of the mean over their queries."""
    return mean({name: float(own.mean()) for name, own in gains.items()})


def halves(collection: Collection, splits: int, seed: int, n_labels: int | None) -> list[Half]:
    """The splits of a set; none if its halves have fewer labels."""
    view, found = collection.under(Fusion("ranker")), []
    for split in range(splits):
        fit_half, test_half = split_by_query(collection.dataset, (0.5, 0.5), seed=seed + split)
        if n_labels is not None:
            if len(fit_half.answerable) < n_labels:
                continue
            fit_half = few_labels(fit_half, n_labels, seed + split)
        fit_ids, test_ids = (
            [query.query_id for query in part.queries] for part in (fit_half, test_half)
        )
        found.append(Half(view.of(fit_ids), view.of(test_ids)))
    return found


def measured(sets: Mapping[str, Sequence[Half]], assessor: Assessor, seed: int) -> Measured:
    """One assessor on every split of every set, ``DRAWS`` times."""
    return Measured(
        {
            name: [
                ask(half, assessor, np.random.default_rng([seed, split, draw]))
                for split, half in enumerate(own)
                for draw in range(DRAWS)
            ]
            for name, own in sets.items()
            if own
        }
    )


def of_assessor(found: Measured, seed: int) -> dict[str, Any]:
    """The figures of one assessor with all labels."""
    full: Gain = gain(list(found.full.values()), seed)
    report: dict[str, Any] = {
        "full": asdict(full),
        "sets": {name: float(own.mean()) for name, own in found.full.items()},
        "prices": {f"{price:g}": found.at_price(price) for price in PRICES},
    }
    if full.lower > 0.0:
        report["shares"] = {f"{share:g}": found.at_share(share, seed) for share in SHARES}
        report["random"] = {
            f"{share:g}": overall(
                found.gains(lambda run: run.half.exists & (run.random < share))  # noqa: B023
            )
            for share in RANDOM_SHARES
        }
    return report


def bars(assessors: Mapping[str, Any], few: Mapping[str, Any]) -> dict[str, bool]:
    """What the issue asks for."""
    kept: dict[str, bool] = {}
    for name in ("d′ 1", "d′ 1.6", "d′ 1, correlated", "d′ 1.6, correlated"):
        own = assessors[name]
        for price, at in own["prices"].items():
            kept[f"{name}, price {price}: net at least the best n of each set − 0.01"] = (
                at["net"] >= at["hindsight"] - 0.01
            )
            kept[f"{name}, price {price}: net at least the best single n, and all 20"] = at[
                "net"
            ] >= max(at["single"], at["all"])
        least, lower = LEAST_GAIN[name.split(",")[0]]
        kept[f"{name}: all 20 gain {least:+.2f}, lower bound above {lower:+.2f}"] = (
            own["full"]["mean"] >= least and own["full"]["lower"] > lower
        )
        shares = own["shares"]
        kept[f"{name}: 80% of that with 20% asked"] = shares["0.2"]["of_full"] >= 0.8
        kept[f"{name}: with 10% better than the first 2, and than 30% at random"] = shares["0.1"][
            "above_first"
        ]["lower"] > 0.0 and shares["0.1"]["gain"] > max(own["random"].values())
    for name in ("d′ 1", "d′ 1.6"):
        kept[f"{name}: {LEAST_GARBAGE:.0%} of the gain with 5% garbage"] = (
            assessors[f"{name}, garbage"]["full"]["mean"]
            >= LEAST_GARBAGE * assessors[name]["full"]["mean"]
        )
    for name in NO_WORTH:
        at = assessors[name]["prices"]["0.001"]
        kept[f"{name}: at most 1% asked, 5% in any run, difference within 0.005"] = (
            at["share"] <= 0.01 and at["most_asked"] <= 0.05 and abs(at["gain"]) <= 0.005
        )
    for labels, by_assessor in few.items():
        own = by_assessor["d′ 1"]
        kept[f"{labels} labels, d′ 1: +0.04, and no set below −0.005"] = (
            own["full"] >= 0.04 and min(own["sets"].values()) >= -0.005
        )
        for name in NO_WORTH:
            own = by_assessor[name]
            kept[f"{labels} labels, {name}: at most 1% asked, 5% in any run, within 0.005"] = (
                own["share"] <= 0.01 and own["most_asked"] <= 0.05 and abs(own["full"]) <= 0.005
            )
    return kept


def report(
    sets: Mapping[str, Sequence[Half]],
    few: Mapping[int, Mapping[str, Sequence[Half]]],
    seed: int,
    console: Console,
) -> dict[str, Any]:
    """Print and return everything."""
    ceiling = {
        name: float(np.mean([half.ceiling().mean() for half in own])) for name, own in sets.items()
    }
    listed = ", ".join(f"{name} {value:+.3f}" for name, value in ceiling.items())
    console.print(f"ceiling, the first {FIRST} known: {mean(ceiling):+.3f} ({listed})")
    table = Table(title="strict UDCG, mean over sets", title_justify="left")
    columns = ("all 20", *(f"net at {price:g} (best n, asked)" for price in PRICES))
    for column in ("assessor", *columns, *(f"gain with {share:.0%}" for share in SHARES)):
        table.add_column(column, justify="left" if column == "assessor" else "right")
    assessors: dict[str, Any] = {}
    own: dict[str, Any]
    for name, assessor in ASSESSORS.items():
        own = assessors[name] = of_assessor(measured(sets, assessor, seed), seed)
        full = own["full"]
        by_share = own.get("shares", {}).values()
        table.add_row(
            name,
            f"{full['mean']:+.3f} [{full['lower']:.3f}, {full['upper']:.3f}]",
            *(
                f"{at['net']:+.3f} ({at['hindsight']:+.3f}, {at['share']:.0%})"
                for at in own["prices"].values()
            ),
            *(f"{at['gain']:+.3f} ({at['of_full']:.0%})" for at in by_share),
        )
    console.print(table)
    small: dict[str, Any] = {}
    for n_labels, own_sets in few.items():
        small[str(n_labels)] = {}
        for name in ("d′ 1", "d′ 1.6", *NO_WORTH):
            found = measured(own_sets, ASSESSORS[name], seed)
            shares = found.shares(lambda run: run.values > PRICES[0])
            own = {
                "full": overall(found.full),
                "sets": {name: float(gains.mean()) for name, gains in found.full.items()},
                "share": mean({name: float(np.mean(each)) for name, each in shares.items()}),
                "most_asked": max(max(each) for each in shares.values()),
            }
            small[str(n_labels)][name] = own
            console.print(
                f"{n_labels} labels, {name}: {own['full']:+.3f}, worst set "
                f"{min(own['sets'].values()):+.3f}; asked {own['share']:.1%}, at most "
                f"{own['most_asked']:.1%} in a run"
            )
    kept = bars(assessors, small)
    for bar, met in kept.items():
        console.print(f"{'met   ' if met else 'MISSED'} {bar}")
    return {"ceiling": ceiling, "assessors": assessors, "labels": small, "bars": kept}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulations; the exit status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.assessor", description=SUMMARY)
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, metavar="DIR", help="or demo"
    )
    parser.add_argument("--splits", type=int, default=5, help="halves of each set (default 5)")
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    if options.splits < 1:
        parser.error("--splits must be at least 1")
    console = Console(width=150)
    embedder = SentenceTransformerEmbedder()
    start = time.perf_counter()
    sets: dict[str, list[Half]] = {}
    few: dict[int, dict[str, list[Half]]] = {n: {} for n in FEW}
    for folder in options.data:
        try:
            collection = Collection(folder, options.cache, embedder)
            sets[collection.name] = halves(collection, options.splits, options.seed, None)
            for n, own in few.items():
                own[collection.name] = halves(collection, options.splits, options.seed, n)
        except CalibrationError as error:
            parser.error(f"{folder}: {error}")
        console.print(f"[dim]{folder.name}: {time.perf_counter() - start:.0f} s so far[/dim]")
    found = report(sets, few, options.seed, console)
    results = {
        "splits": options.splits,
        "draws": DRAWS,
        "first": FIRST,
        "seed": options.seed,
        "environment": environment(),
        **found,
    }
    if options.json is not None:
        options.json.write_text(
            json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    return 0 if all(found["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
