"""Can the guard tell that nothing relevant was kept, and does the certificate on it hold?

    python -m benchmarks.sufficiency --data DIR … demo --splits 20 --json sufficiency.json

**Collections.** Each folder is a BEIR folder; the demo's questions come with the program. A
context is sufficient if it holds a relevant passage. Where nearly every question has an answer, a
random half of the questions loses its relevant passages in every repeat. Candidates have the
served order and all signals (the pooled ranker, DESIGN.md §5). In every repeat a random half of
the queries fits P(relevant), a quarter sets the threshold and a quarter counts false alarms; AUROC
is over both quarters. Contexts are the 5 of highest P(relevant). Beside P of the best passage,
which the guard uses, stand raw scores, the probability that any kept passage is relevant if they
were independent, and two logistic regressions on contexts of the fitting half, with out-of-fold P:
on signals of the whole list (number kept; each leg's best score, the gap to its fifth, its score
of the best passage), and on these with the log-odds of the best P. Intervals are 95% paired
bootstraps over queries; each collection has the same weight in the mean.

**Simulation.** The true share of false alarms of each threshold is known: ``uniform`` and ``tied``
draw probabilities directly, and ``retriever`` certifies on simulated rankings and counts over a
large population of them.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks._collection import Collection, default_cache
from benchmarks.policies import environment
from calibration.data.dataset import Dataset, Query, split_by_query
from calibration.evaluate import interval_bounds
from calibration.fit import fit_relevance, folds
from calibration.pool_labels import PoolLabels, label
from calibration.replay import Pools
from calibration.sufficiency import (
    DEFAULT_FALSE_ALARMS,
    calibrate_sufficiency,
    certified_threshold,
)
from ctxguard.core.decision import Decision, decide
from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import ExpectedUtilityPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.sufficiency import p_sufficient
from ctxguard.core.types import FloatArray, Route, ScoreKind
from ctxguard.errors import CalibrationError
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

SUMMARY = "Can the guard tell that nothing relevant was kept, and does its certificate hold?"
K = 5
ALPHA = DEFAULT_FALSE_ALARMS
DELTA = 0.1
ANSWERABLE = 0.95
"""Collections with a larger share of answerable questions lose passages."""

NOTABLE = 0.02
"""A scorer that beats the guard's by this much should replace it."""

OURS = "top P"
RESAMPLES = 500
POPULATION_SIZE = 20_000
DEPTH = 20
GAP_RANK = 5
TIES = 0.2
"""Step to which ``tied`` probabilities are rounded."""

Scorer = Callable[[Decision], float]


def _top(leg: str) -> Scorer:
    return lambda decision: float(np.nanmax(decision.ranking.legs[leg].scores))


def _any_relevant(decision: Decision) -> float:
    kept = (decision.probabilities or ())[: decision.n_kept]
    return 1.0 - math.prod([1.0 - probability for probability in kept])


SCORERS: Mapping[str, Scorer] = {
    OURS: lambda decision: p_sufficient(decision) or 0.0,
    "1 − Π(1 − P)": _any_relevant,
    "top score": lambda decision: max(score or 0.0 for score in decision.ranking.scores),
    "top cosine": _top("dense"),
    "top BM25": _top("lexical"),
}


def list_signals(decision: Decision) -> list[float]:
    """What the whole list says: the number kept, and of each leg its best scores."""
    values = [math.log(decision.n_kept)]
    for name in sorted(decision.ranking.legs):
        leg = decision.ranking.legs[name]
        scores = (
            np.log1p(np.maximum(leg.scores, 0.0)) if leg.kind is ScoreKind.RATIO else leg.scores
        )
        best = np.sort(scores[~np.isnan(scores)])[::-1][:GAP_RANK]
        values += [best[0], best[0] - best[-1], float(np.nan_to_num(scores[decision.order[0]]))]
    return values


def with_log_odds(decision: Decision) -> list[float]:
    """The same, with the log-odds of the best passage's P."""
    p = min(max(p_sufficient(decision) or 0.0, 1e-6), 1.0 - 1e-6)
    return [math.log(p / (1.0 - p)), *list_signals(decision)]


FITTED: Mapping[str, Callable[[Decision], list[float]]] = {
    "list": list_signals,
    "list and P": with_log_odds,
}


@dataclass(frozen=True)
class Measured:
    """One collection.

    Attributes:
        auroc: By scorer, the mean over splits.
        gains: AUROC of each other scorer less that of the guard's: mean, lower and upper.
        insufficient: Share of contexts without a relevant passage.
        fitted_on: Mean number of queries that fitted.
        thresholds: Splits that gave a threshold.
        false_alarms: Mean share of sufficient contexts below it, on queries that set nothing.
        detected: Mean share of insufficient contexts below it.
    """

    name: str
    auroc: dict[str, float]
    gains: dict[str, dict[str, float]]
    insufficient: float
    fitted_on: float
    thresholds: int
    false_alarms: float | None
    detected: float | None


def without_relevant(
    pools: Pools, dataset: Dataset, query_ids: frozenset[str]
) -> tuple[Pools, PoolLabels]:
    """The candidates as if the relevant passages of some queries had never been retrieved."""
    tables = {"": pools.scores, **pools.legs, **pools.signals}
    left_of = {name: np.full_like(values, np.nan) for name, values in tables.items()}
    all_ids, qrels = [], dict(dataset.qrels)
    for row, (query_id, ids) in enumerate(zip(pools.query_ids, pools.passage_ids, strict=True)):
        left = list(range(len(ids)))
        if query_id in query_ids:
            relevant = dataset.relevant(query_id)
            left = [column for column in left if ids[column] not in relevant]
            grades = dataset.qrels[query_id].items()
            qrels[query_id] = {name: grade for name, grade in grades if name not in relevant}
        for name, values in tables.items():
            left_of[name][row, : len(left)] = values[row, left]
        all_ids.append(tuple([ids[column] for column in left]))
    stripped = replace(
        pools,
        passage_ids=tuple(all_ids),
        scores=left_of[""],
        legs={name: left_of[name] for name in pools.legs},
        signals={name: left_of[name] for name in pools.signals},
    )
    return stripped, label(stripped, replace(dataset, qrels=qrels))


def rows_of(pools: Pools, labels: PoolLabels, query_ids: Sequence[str]) -> tuple[Pools, PoolLabels]:
    """The candidates and labels of some queries."""
    wanted = frozenset(query_ids)
    rows = [row for row, query_id in enumerate(pools.query_ids) if query_id in wanted]
    own = pools.subset([pools.query_ids[row] for row in rows])
    return own, labels.rows(np.array(rows, dtype=np.int64))


def auroc(values: FloatArray, holds: NDArray[np.bool_]) -> FloatArray:
    """Of every pair of a sufficient and an insufficient context, 1 if the first is higher.

    Returns:
        Shape (n_sufficient, n_insufficient), ½ for ties; its mean is the AUROC.
    """
    return np.heaviside(np.subtract.outer(values[holds], values[~holds]), 0.5)


@dataclass(frozen=True)
class _Split:
    """What one split measured, on the queries that did not fit."""

    query_ids: tuple[str, ...]
    holds: NDArray[np.bool_]
    values: dict[str, FloatArray]
    fitted_on: int
    false_alarms: float | None
    detected: float | None


def measure(collection: Collection, splits: int, seed: int) -> Measured:
    """Every scorer on every split of one collection."""
    dataset, view = collection.dataset, collection.under(Fusion("ranker"))
    answerable = len(dataset.answerable) / len(dataset)
    measured = []
    for split in range(splits):
        parts = split_by_query(dataset, (0.5, 0.25, 0.25), seed=seed + split)
        ids = [[query.query_id for query in part.queries] for part in parts]
        pools, labels = view.pools, view.labels
        if answerable > ANSWERABLE:
            random = np.random.default_rng([seed, split])
            names = np.array(pools.query_ids)
            lost = frozenset(names[random.random(names.size) < 0.5].tolist())
            pools, labels = without_relevant(pools, dataset, lost)
        fit, setting, counting = (rows_of(pools, labels, part) for part in ids)
        try:
            measured.append(_measure_split(fit, setting, counting))
        except CalibrationError:
            continue  # too few labels on this half
    return _summary(collection.name, measured, seed)


def _policy(model: RelevanceModel) -> ExpectedUtilityPolicy:
    return ExpectedUtilityPolicy(model, k=K, cost=0.0)


def _fitted_scorers(fit: tuple[Pools, PoolLabels]) -> dict[str, Scorer]:
    """Logistic regressions on the contexts of the fitting half, by P that did not fit on them."""
    pools, labels = fit
    rankings, of_row = list(pools.rankings()), {}
    for inside, others in folds(pools.query_ids):
        policy = _policy(fit_relevance(pools, labels, others))
        of_row.update({row: decide(rankings[row], policy) for row in inside.tolist()})
    decisions = [of_row[row] for row in range(len(pools))]
    holds = np.array([_holds(decision, labels, row) for row, decision in enumerate(decisions)])
    if not 5 <= holds.sum() <= holds.size - 5:
        raise CalibrationError("too few contexts of either kind")
    scorers: dict[str, Scorer] = {}
    for name, signals in FITTED.items():
        model = make_pipeline(StandardScaler(), LogisticRegression(C=0.3, max_iter=1_000))
        model.fit(np.array([signals(decision) for decision in decisions]), holds)
        scorers[name] = partial(_probability, model, signals)
    return scorers


def _probability(
    model: Pipeline, signals: Callable[[Decision], list[float]], decision: Decision
) -> float:
    return float(model.predict_proba(np.array([signals(decision)]))[0, 1])


def _holds(decision: Decision, labels: PoolLabels, row: int) -> bool:
    return bool(labels.relevant[row, list(decision.kept)].any())


def _measure_split(
    fit: tuple[Pools, PoolLabels],
    setting: tuple[Pools, PoolLabels],
    counting: tuple[Pools, PoolLabels],
) -> _Split:
    policy = _policy(fit_relevance(*fit))
    certified = calibrate_sufficiency(policy, None, setting, false_alarms=ALPHA, delta=DELTA)
    assert certified is not None
    scorers = {**SCORERS, **_fitted_scorers(fit)}
    decisions, holds = [], []
    for pools, labels in (setting, counting):
        for row, ranking in enumerate(pools.rankings()):
            decisions.append(decide(ranking, policy))
            holds.append(_holds(decisions[-1], labels, row))
    held = np.array(holds)
    values = {key: np.array([score(each) for each in decisions]) for key, score in scorers.items()}
    apart = np.arange(held.size) >= len(setting[0])
    return _Split(
        query_ids=(*setting[0].query_ids, *counting[0].query_ids),
        holds=held,
        values=values,
        fitted_on=len(fit[0]),
        false_alarms=_share_below(values[OURS][apart & held], certified.threshold),
        detected=_share_below(values[OURS][apart & ~held], certified.threshold),
    )


def _share_below(values: FloatArray, threshold: float | None) -> float | None:
    return None if threshold is None or values.size == 0 else float((values < threshold).mean())


def _summary(name: str, measured: Sequence[_Split], seed: int) -> Measured:
    measured = [one for one in measured if one.holds.any() and not one.holds.all()]
    if not measured:
        raise CalibrationError(f"{name}: no half has enough contexts of either kind")
    areas = {
        key: float(np.mean([auroc(one.values[key], one.holds).mean() for one in measured]))
        for key in measured[0].values
    }
    gains = {}
    for key, area in areas.items():
        if key != OURS:
            lower, upper = interval_bounds(_gain_samples(measured, key, seed)[:, None])[:, 0]
            gains[key] = {"mean": area - areas[OURS], "lower": float(lower), "upper": float(upper)}
    false_alarms = [one.false_alarms for one in measured if one.false_alarms is not None]
    detected = [one.detected for one in measured if one.detected is not None]
    return Measured(
        name=name,
        auroc=areas,
        gains=gains,
        insufficient=float(np.mean([1.0 - one.holds.mean() for one in measured])),
        fitted_on=float(np.mean([one.fitted_on for one in measured])),
        thresholds=len(false_alarms),
        false_alarms=float(np.mean(false_alarms)) if false_alarms else None,
        detected=float(np.mean(detected)) if detected else None,
    )


def _gain_samples(measured: Sequence[_Split], key: str, seed: int) -> FloatArray:
    """Bootstrap samples of a scorer's mean gain over the guard's, by queries and not by splits."""
    names = sorted({query_id for one in measured for query_id in one.query_ids})
    row_of = {query_id: row for row, query_id in enumerate(names)}
    random = np.random.default_rng(seed)
    n = len(names)
    weights = random.multinomial(n, np.full(n, 1.0 / n), size=RESAMPLES).astype(np.float64)
    total = np.zeros(RESAMPLES)
    for one in measured:
        difference = auroc(one.values[key], one.holds) - auroc(one.values[OURS], one.holds)
        own = weights[:, [row_of[query_id] for query_id in one.query_ids]]
        above, below = own[:, one.holds], own[:, ~one.holds]
        pairs = np.maximum(above.sum(axis=1) * below.sum(axis=1), 1.0)
        total += np.einsum("ri,ij,rj->r", above, difference, below, optimize=True) / pairs
    return total / len(measured)


def _mean_gain(gains: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over collections, whose intervals are taken as normal and independent."""
    mean = float(np.mean([gain["mean"] for gain in gains]))
    half = math.sqrt(sum(((gain["upper"] - gain["lower"]) / 2.0) ** 2 for gain in gains))
    half /= len(gains)
    return {"mean": mean, "lower": mean - half, "upper": mean + half}


@dataclass(frozen=True)
class Outcome:
    """One population at one number of labels.

    Attributes:
        n: Held-out contexts with a relevant passage; ``retriever``: held-out queries.
        certified: Share of repeats with a threshold.
        violations: Share of repeats whose threshold has more false alarms than promised.
        false_alarms: Their mean true share, where there is a threshold.
        detected: Mean true share of insufficient contexts below it; None where not simulated.
    """

    population: str
    n: int
    repeats: int
    certified: float
    violations: float
    false_alarms: float | None
    detected: float | None


def simulate_threshold(population: str, n: int, repeats: int, seed: int) -> Outcome:
    """Thresholds on probabilities drawn from [0, 1], rounded to ``TIES`` where tied."""
    random = np.random.default_rng([seed, n, len(population)])
    shares = []
    for _ in range(repeats):
        drawn = random.random(n)
        if population == "tied":
            drawn = np.floor(drawn / TIES) * TIES
        threshold = certified_threshold(drawn, ALPHA, DELTA)
        if threshold is not None:
            # Of values rounded down to a multiple, exactly this share lies below it.
            shares.append(threshold)
    return _outcome(population, n, repeats, np.array(shares), None)


def simulated_rankings(n: int, seed: int) -> tuple[Pools, PoolLabels]:
    """Rankings of two noisy scorers; a third of the queries has no relevant passage."""
    random = np.random.default_rng(seed)
    truth = random.random((n, DEPTH)) < 0.12
    truth[random.random(n) < 1 / 3] = False
    legs = {
        name: np.clip(random.normal(np.where(truth, 0.6, 0.4), 0.15), 0.0, 1.0)
        for name in ("dense", "lexical")
    }
    order = np.argsort(-(legs["dense"] + legs["lexical"]), axis=1)
    legs = {name: np.take_along_axis(values, order, axis=1) for name, values in legs.items()}
    truth = np.take_along_axis(truth, order, axis=1)
    ids = tuple([f"p{column:02d}" for column in range(DEPTH)])
    query_ids = tuple([f"q{row:05d}" for row in range(n)])
    pools = Pools(
        route=Route.HYBRID,
        kind=ScoreKind.RATIO,
        query_ids=query_ids,
        passage_ids=(ids,) * n,
        scores=(legs["dense"] + legs["lexical"]) / 2.0,
        legs=legs,
        leg_kinds={"dense": ScoreKind.COSINE, "lexical": ScoreKind.RATIO},
    )
    qrels = {
        query_id: {ids[column]: 1 for column in np.flatnonzero(row).tolist()}
        for query_id, row in zip(query_ids, truth, strict=True)
    }
    queries = tuple([Query(query_id, query_id) for query_id in query_ids])
    return pools, label(pools, Dataset("simulated", queries, qrels))


def simulate_retriever(n: int, repeats: int, seed: int) -> Outcome:
    """Thresholds by n held-out queries, for a P(relevant) that other queries fitted."""
    fitted = simulated_rankings(400, seed + 1)
    policy = replace(_policy(fit_relevance(*fitted)), k=3)
    pools, labels = simulated_rankings(POPULATION_SIZE, seed)
    decisions = [decide(ranking, policy) for ranking in pools.rankings()]
    probabilities = np.array([p_sufficient(decision) for decision in decisions], dtype=np.float64)
    holds = np.array([_holds(decision, labels, row) for row, decision in enumerate(decisions)])
    random = np.random.default_rng([seed, n])
    shares, detected = [], []
    for _ in range(repeats):
        rows = random.choice(POPULATION_SIZE, n, replace=False)
        threshold = certified_threshold(probabilities[rows][holds[rows]], ALPHA, DELTA)
        if threshold is not None:
            below = probabilities < threshold
            shares.append(float(below[holds].mean()))
            detected.append(float(below[~holds].mean()))
    return _outcome("retriever", n, repeats, np.array(shares), detected)


def _outcome(
    population: str, n: int, repeats: int, shares: FloatArray, detected: Sequence[float] | None
) -> Outcome:
    certified = shares.size > 0
    return Outcome(
        population=population,
        n=n,
        repeats=repeats,
        certified=shares.size / repeats,
        violations=float((shares > ALPHA).sum()) / repeats,
        false_alarms=float(shares.mean()) if certified else None,
        detected=float(np.mean(detected)) if detected else None,
    )


def simulate(repeats: int, seed: int) -> list[Outcome]:
    """Every population at every number of labels."""
    return [
        *[
            simulate_threshold(population, n, repeats, seed)
            for population in ("uniform", "tied")
            for n in (45, 77, 200, 1000)
        ],
        *[simulate_retriever(n, repeats, seed) for n in (75, 200)],
    ]


def _show(sets: Sequence[Measured], outcomes: Sequence[Outcome], console: Console) -> None:
    if sets:
        names = list(sets[0].auroc)
        table = Table(title="AUROC", title_justify="left")
        for column in ("set", *names, "insufficient", "thresholds", "false", "detected"):
            table.add_column(column)
        for one in sets:
            table.add_row(
                one.name,
                *[f"{one.auroc[name]:.3f}" for name in names],
                f"{one.insufficient:.2f}",
                str(one.thresholds),
                "–" if one.false_alarms is None else f"{one.false_alarms:.3f}",
                "–" if one.detected is None else f"{one.detected:.3f}",
            )
        console.print(table)
    table = Table(title="Simulated certificates", title_justify="left")
    for column in ("population", "n", "certified", "violations", "false alarms", "detected"):
        table.add_column(column)
    for each in outcomes:
        table.add_row(
            each.population,
            str(each.n),
            f"{each.certified:.3f}",
            f"{each.violations:.3f}",
            "–" if each.false_alarms is None else f"{each.false_alarms:.3f}",
            "–" if each.detected is None else f"{each.detected:.3f}",
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both parts; the exit status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.sufficiency", description=SUMMARY)
    parser.add_argument("--data", type=Path, nargs="*", default=[], metavar="DIR")
    parser.add_argument("--splits", type=int, default=20, help="repeats on collections")
    parser.add_argument("--repeats", type=int, default=1_000, help="simulated repeats")
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    if options.splits < 1 or options.repeats < 1:
        parser.error("--splits and --repeats must be at least 1")
    console = Console(width=150)
    start = time.perf_counter()
    outcomes = simulate(options.repeats, options.seed)
    sets, left_out = [], []
    for folder in options.data:
        collection = Collection(folder, options.cache, SentenceTransformerEmbedder())
        try:
            sets.append(measure(collection, options.splits, options.seed))
        except CalibrationError as error:
            left_out.append(str(error))
        console.print(f"[dim]{folder.name}: {time.perf_counter() - start:.0f} s so far[/dim]")
    _show(sets, outcomes, console)
    for line in left_out:
        console.print(f"left out: {line}")
    # Three standard errors of a share of repeats.
    noise = 3.0 * math.sqrt(DELTA * (1.0 - DELTA) / options.repeats)
    bars = {"violations": all(one.violations <= DELTA + noise for one in outcomes)}
    means: dict[str, float] = {}
    gains: dict[str, dict[str, float]] = {}
    if sets:
        means = {name: float(np.mean([one.auroc[name] for one in sets])) for name in sets[0].auroc}
        gains = {name: _mean_gain([one.gains[name] for one in sets]) for name in sets[0].gains}
        bars["no other scorer is notably better"] = not any(
            gain["mean"] >= NOTABLE and gain["lower"] > 0.0 for gain in gains.values()
        )
        for name, gain in gains.items():
            console.print(
                "{}: {:.3f}, {mean:+.3f} [{lower:.3f}, {upper:.3f}] over {}".format(
                    name, means[name], OURS, **gain
                )
            )
    console.print(f"bars: {bars}")
    if options.json is not None:
        results: dict[str, Any] = {
            "splits": options.splits,
            "seed": options.seed,
            "alpha": ALPHA,
            "delta": DELTA,
            "environment": environment(),
            "sets": [asdict(one) for one in sets],
            "left_out": left_out,
            "means": means,
            "gains": gains,
            "simulated": [asdict(one) for one in outcomes],
            "bars": bars,
        }
        text = json.dumps(results, indent=2, ensure_ascii=False)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
