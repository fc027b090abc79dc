"""Can the guard tell that nothing relevant was kept, and does the certificate on it hold?

    python -m benchmarks.sufficiency --data DIR … --splits 20 --repeats 1000 --json sufficiency.json

**Collections.** Each folder is a BEIR folder; the demo's questions come with the program. A context
is sufficient if it holds a relevant passage. Where nearly every question has an answer, a random
half of the questions loses its relevant passages in every repeat, and the rest of the candidates is
fused anew, as if those passages had never been in the corpus. In every repeat a random half of the
queries fits, a quarter sets the threshold and a quarter counts false alarms; AUROC is over both
quarters. Contexts are the first 5 in the fused order (no probabilities), and the 5 of highest
P(relevant). Intervals are 95% paired bootstraps over queries; each collection has the same weight
in the mean.

**Simulation.** The true share of false alarms of each threshold is known: ``uniform`` and ``tied``
draw probabilities directly, and ``retriever`` calibrates on simulated rankings and counts over a
large population of them.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks._collection import Collection, default_cache
from benchmarks.policies import environment
from calibration.data.dataset import Dataset, Query, split_by_query
from calibration.evaluate import interval_bounds
from calibration.fit import fit_relevance, pool_features
from calibration.pool_labels import IntArray, PoolLabels, label
from calibration.replay import Pools
from calibration.sufficiency import (
    DEFAULT_FALSE_ALARMS,
    calibrate_sufficiency,
    certified_threshold,
)
from ctxguard.cli.demonstration.corpus import passages
from ctxguard.cli.demonstration.labelled_questions import questions
from ctxguard.core.decision import Decision, decide
from ctxguard.core.fusion import Fusion, fuse
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy, RatioPolicy
from ctxguard.core.sufficiency import list_signals
from ctxguard.core.types import FloatArray, Leg, Route, ScoreKind
from ctxguard.errors import CalibrationError
from ctxguard.profile.schema import SufficiencyProfile
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

SUMMARY = "Can the guard tell that nothing relevant was kept, and does its certificate hold?"
K = 5
ALPHA = DEFAULT_FALSE_ALARMS
DELTA = 0.1
ANSWERABLE = 0.95
"""Collections with a larger share of answerable questions lose passages."""

LEAST_GAIN = 0.05
OURS = "P(sufficient)"
TOP_SCORE = "top score"
RESAMPLES = 500
POPULATION_SIZE = 20_000
DEPTH = 20
TIES = 0.2
"""Step to which ``tied`` probabilities are rounded."""

Scorer = Callable[[Decision], float]


def _top(leg: str) -> Scorer:
    return lambda decision: float(np.max(decision.ranking.legs[leg].scores))


def _any_relevant(decision: Decision) -> float:
    kept = (decision.probabilities or ())[: decision.n_kept]
    return 1.0 - math.prod([1.0 - probability for probability in kept])


BASELINES: Mapping[str, Scorer] = {
    TOP_SCORE: lambda decision: max(score or 0.0 for score in decision.ranking.scores),
    "top cosine": _top("dense"),
    "top BM25": _top("lexical"),
}
BY_PROBABILITY: Mapping[str, Scorer] = {
    "top P": lambda decision: (decision.probabilities or (0.0,))[0],
    "1 − Π(1 − P)": _any_relevant,
}


@dataclass(frozen=True)
class Measured:
    """One collection under one policy.

    Attributes:
        auroc: By scorer, the mean over splits.
        gain: AUROC of P(sufficient) less the top score's: mean, lower and upper.
        insufficient: Share of contexts without a relevant passage.
        fitted_on: Mean number of queries that fitted.
        thresholds: Splits that gave a threshold.
        false_alarms: Mean share of sufficient contexts below it, on queries that set nothing.
        detected: Mean share of insufficient contexts below it.
    """

    name: str
    policy: str
    auroc: dict[str, float]
    gain: dict[str, float]
    insufficient: float
    fitted_on: float
    thresholds: int
    false_alarms: float | None
    detected: float | None


def demo_folder(cache: Path) -> Path:
    """The demo's passages and questions as a BEIR folder, by version of Python."""
    folder = cache / f"python-{sys.version_info.major}.{sys.version_info.minor}" / "demo"
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    dataset = questions()
    files: Mapping[str, Sequence[str]] = {
        "corpus.jsonl": [
            json.dumps({"_id": each.passage_id, "title": each.title, "text": each.text})
            for each in passages()
        ],
        "queries.jsonl": [
            json.dumps({"_id": query.query_id, "text": query.text}) for query in dataset.queries
        ],
        "qrels/test.tsv": [
            "query-id\tcorpus-id\tscore",
            *[
                f"{query_id}\t{passage_id}\t{grade}"
                for query_id, grades in dataset.qrels.items()
                for passage_id, grade in grades.items()
            ],
        ],
    }
    for name, lines in files.items():
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def without_relevant(
    pools: Pools, dataset: Dataset, fusion: Fusion, query_ids: frozenset[str]
) -> tuple[Pools, PoolLabels]:
    """The candidates as if the relevant passages of some queries had never been in the corpus."""
    qrels = {
        query_id: {
            passage_id: grade
            for passage_id, grade in grades.items()
            if grade < 1 or query_id not in query_ids
        }
        for query_id, grades in dataset.qrels.items()
    }
    scores = np.full_like(pools.scores, np.nan)
    legs = {name: np.full_like(own, np.nan) for name, own in pools.legs.items()}
    all_ids = []
    for row, (query_id, ids) in enumerate(zip(pools.query_ids, pools.passage_ids, strict=True)):
        left = [
            column
            for column, passage_id in enumerate(ids)
            if query_id not in query_ids or dataset.qrels[query_id].get(passage_id, 0) < 1
        ]
        own = {
            name: Leg(values[row, left], pools.leg_kinds[name])
            for name, values in pools.legs.items()
        }
        fused = fuse(own, fusion)
        order = np.argsort(-fused, kind="stable")
        scores[row, : order.size] = fused[order]
        for name, leg in own.items():
            legs[name][row, : order.size] = leg.scores[order]
        all_ids.append(tuple([ids[left[at]] for at in order.tolist()]))
    stripped = replace(pools, passage_ids=tuple(all_ids), scores=scores, legs=legs)
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


def measure(collection: Collection, policy: str, splits: int, seed: int) -> Measured:
    """Every scorer on every split of one collection."""
    dataset = collection.dataset
    answerable = len(dataset.answerable) / len(dataset)
    measured = []
    for split in range(splits):
        parts = split_by_query(dataset, (0.5, 0.25, 0.25), seed=seed + split)
        ids = [[query.query_id for query in part.queries] for part in parts]
        fusion = collection.fitted_fusion(ids[0])
        view = collection.under(fusion)
        pools, labels = view.pools, view.labels
        if answerable > ANSWERABLE:
            random = np.random.default_rng([seed, split])
            names = np.array(pools.query_ids)
            lost = frozenset(names[random.random(names.size) < 0.5].tolist())
            pools, labels = without_relevant(pools, dataset, fusion, lost)
        fit, setting, counting = (rows_of(pools, labels, part) for part in ids)
        try:
            measured.append(_measure_split(policy, fit, setting, counting))
        except CalibrationError:
            continue  # too few labels on this half
    return _summary(collection.name, policy, measured, seed)


def _measure_split(
    name: str,
    fit: tuple[Pools, PoolLabels],
    setting: tuple[Pools, PoolLabels],
    counting: tuple[Pools, PoolLabels],
) -> _Split:
    policy: Policy = RatioPolicy(k=K)
    if name != "first 5":
        model = fit_relevance(*fit, pool_features(fit[0]))
        policy = ExpectedUtilityPolicy(model, k=K, cost=0.0)
    fitted = calibrate_sufficiency(policy, fit, setting, false_alarms=ALPHA, delta=DELTA)
    if fitted is None:
        raise CalibrationError("too few contexts of either kind")
    scorers: dict[str, Scorer] = {
        OURS: lambda decision: fitted.model.probability(decision) or 0.0,
        **BASELINES,
        **(BY_PROBABILITY if name != "first 5" else {}),
    }
    decisions, holds = [], []
    for pools, labels in (setting, counting):
        for row, ranking in enumerate(pools.rankings()):
            decisions.append(decide(ranking, policy))
            holds.append(bool(labels.relevant[row, list(decisions[-1].kept)].any()))
    held = np.array(holds)
    values = {key: np.array([score(each) for each in decisions]) for key, score in scorers.items()}
    apart = np.arange(held.size) >= len(setting[0])
    return _Split(
        query_ids=(*setting[0].query_ids, *counting[0].query_ids),
        holds=held,
        values=values,
        fitted_on=len(fit[0]),
        false_alarms=_share_below(values[OURS][apart & held], fitted),
        detected=_share_below(values[OURS][apart & ~held], fitted),
    )


def _share_below(values: FloatArray, fitted: SufficiencyProfile) -> float | None:
    threshold = fitted.model.threshold
    return None if threshold is None or values.size == 0 else float((values < threshold).mean())


def _summary(name: str, policy: str, measured: Sequence[_Split], seed: int) -> Measured:
    measured = [one for one in measured if one.holds.any() and not one.holds.all()]
    if not measured:
        raise CalibrationError(f"{name}: no half has enough contexts of either kind")
    areas = {
        key: float(np.mean([auroc(one.values[key], one.holds).mean() for one in measured]))
        for key in measured[0].values
    }
    false_alarms = [one.false_alarms for one in measured if one.false_alarms is not None]
    detected = [one.detected for one in measured if one.detected is not None]
    samples = _gain_samples(measured, seed)
    lower, upper = interval_bounds(samples[:, None])[:, 0].tolist()
    return Measured(
        name=name,
        policy=policy,
        auroc=areas,
        gain={"mean": areas[OURS] - areas[TOP_SCORE], "lower": lower, "upper": upper},
        insufficient=float(np.mean([1.0 - one.holds.mean() for one in measured])),
        fitted_on=float(np.mean([one.fitted_on for one in measured])),
        thresholds=len(false_alarms),
        false_alarms=float(np.mean(false_alarms)) if false_alarms else None,
        detected=float(np.mean(detected)) if detected else None,
    )


def _gain_samples(measured: Sequence[_Split], seed: int) -> FloatArray:
    """Bootstrap samples of the mean gain over the top score: queries are resampled, not splits."""
    names = sorted({query_id for one in measured for query_id in one.query_ids})
    row_of = {query_id: row for row, query_id in enumerate(names)}
    random = np.random.default_rng(seed)
    n = len(names)
    weights = random.multinomial(n, np.full(n, 1.0 / n), size=RESAMPLES).astype(np.float64)
    total = np.zeros(RESAMPLES)
    for one in measured:
        difference = auroc(one.values[OURS], one.holds) - auroc(one.values[TOP_SCORE], one.holds)
        own = weights[:, [row_of[query_id] for query_id in one.query_ids]]
        above, below = own[:, one.holds], own[:, ~one.holds]
        pairs = np.maximum(above.sum(axis=1) * below.sum(axis=1), 1.0)
        total += np.einsum("ri,ij,rj->r", above, difference, below, optimize=True) / pairs
    return total / len(measured)


@dataclass(frozen=True)
class Outcome:
    """One population at one number of labels.

    Attributes:
        n: Held-out contexts with a relevant passage; ``retriever``: labelled queries.
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
    """The whole calibration on n labelled queries, half of them held out."""
    pools, labels = simulated_rankings(POPULATION_SIZE, seed)
    policy = RatioPolicy(k=3)
    legs = tuple(sorted(pools.legs))
    rows = [list_signals(decide(ranking, policy), legs) for ranking in pools.rankings()]
    signals = np.array(rows, dtype=np.float64)
    holds = labels.relevant[:, : policy.k].any(axis=1)
    random = np.random.default_rng([seed, n])
    shares, detected = [], []

    def drawn(rows: IntArray) -> tuple[Pools, PoolLabels]:
        return pools.subset([pools.query_ids[row] for row in rows.tolist()]), labels.rows(rows)

    for _ in range(repeats):
        sample = random.choice(POPULATION_SIZE, n, replace=False)
        fitted = calibrate_sufficiency(
            policy,
            drawn(sample[: n // 2]),
            drawn(sample[n // 2 :]),
            false_alarms=ALPHA,
            delta=DELTA,
        )
        if fitted is None or fitted.model.threshold is None:
            continue
        model, threshold = fitted.model, fitted.model.threshold
        standardised = (signals - np.array(model.means)) / np.array(model.scales)
        log_odds = standardised @ np.array(model.coefficients) + model.intercept
        below = 1.0 / (1.0 + np.exp(-log_odds)) < threshold
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
        *[simulate_retriever(n, repeats, seed) for n in (150, 400)],
    ]


def _show(sets: Sequence[Measured], outcomes: Sequence[Outcome], console: Console) -> None:
    for policy in dict.fromkeys(one.policy for one in sets):
        own = [one for one in sets if one.policy == policy]
        names = list(own[0].auroc)
        table = Table(title=f"AUROC, {policy}", title_justify="left")
        for column in ("set", *names, "gain", "insufficient", "thresholds", "false", "detected"):
            table.add_column(column)
        for one in own:
            table.add_row(
                one.name,
                *[f"{one.auroc[name]:.3f}" for name in names],
                "{mean:+.3f} [{lower:.3f}, {upper:.3f}]".format(**one.gain),
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
    parser.add_argument("--demo", action="store_true", help="measure the demo's questions too")
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
    folders = [*options.data, *([demo_folder(options.cache)] if options.demo else [])]
    for folder in folders:
        collection = Collection(folder, options.cache, SentenceTransformerEmbedder())
        for policy in ("first 5", "5 most probable"):
            try:
                sets.append(measure(collection, policy, options.splits, options.seed))
            except CalibrationError as error:
                left_out.append(str(error))
        console.print(f"[dim]{folder.name}: {time.perf_counter() - start:.0f} s so far[/dim]")
    _show(sets, outcomes, console)
    for line in left_out:
        console.print(f"left out: {line}")
    # Three standard errors of a share of repeats.
    noise = 3.0 * math.sqrt(DELTA * (1.0 - DELTA) / options.repeats)
    bars = {"violations": all(one.violations <= DELTA + noise for one in outcomes)}
    means = {}
    for policy in dict.fromkeys(one.policy for one in sets):
        own = [one for one in sets if one.policy == policy]
        means[policy] = {
            name: float(np.mean([one.auroc[name] for one in own])) for name in own[0].auroc
        }
        means[policy]["gain"] = means[policy][OURS] - means[policy][TOP_SCORE]
        bars[f"gain, {policy}"] = means[policy]["gain"] >= LEAST_GAIN
        console.print(f"mean, {policy}: " + json.dumps(means[policy], ensure_ascii=False))
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
            "simulated": [asdict(one) for one in outcomes],
            "bars": bars,
        }
        text = json.dumps(results, indent=2, ensure_ascii=False)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
