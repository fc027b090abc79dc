"""Do intervals on live traffic hold what they say, and what do human labels gain from a judge?

    python -m benchmarks.coverage --repeats 2000 --json coverage.json

Labelled collections are replayed and taken as traffic whose truth is known (``_traffic``): the
hybrid route, the first 5 passages served. In each repeat ``--requests`` requests are drawn and
judged by a judge that errs, ``--labels`` of them are labelled by people too, and every interval
is held against the truth.

Traffic:
    answerable   queries whose pool holds a relevant passage
    all          every query, also those that nothing in the pool answers

Judges, right as often as ``--judge-sensitivity`` and ``--judge-specificity`` say:
    even         whatever the rank
    by rank      readier to call a passage relevant the higher it stands

Labels:
    weighted     picked with ``ppi.label_weights``, that is where they tell most
    random       all requests alike

The widths of PPI++ are compared with those of human labels alone, which are always random ones.
A pool in which nothing relevant was served is judged and labelled whole
(``--full-pool-rate-if-no-hit 1``): MRR rests on these.
*Best* is the narrowing that the most able predictor could reach with random labels from the
judge's verdicts on the served passages.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._collection import Collection, default_cache
from benchmarks._traffic import ErrorRates, Population, draw, error_rates, pick
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import DEFAULT_K
from ctxguard.monitor.estimation.ppi import TOLD_LESS_WEIGHT, estimate_from_clusters
from ctxguard.monitor.estimation.ratio import Estimate
from ctxguard.monitor.estimation.sums import ControlSums
from ctxguard.monitor.estimation.terms import Metric
from ctxguard.monitor.sampling.inclusion import JudgingRates
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

SUMMARY = "Do intervals on live traffic hold what they say, and what do labels gain from a judge?"
DEFAULT_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
METRICS = (
    Metric.PRECISION,
    Metric.MRR,
    Metric.UDCG,
    Metric.GAIN,
    Metric.HARM,
    Metric.RECALL,
)
NARROWED = METRICS[:3]
"""The metrics with a bar for coverage and width; recall has one for coverage alone."""

COVERAGE_BAR = (0.93, 0.97)
RECALL_COVERAGE_BAR = 0.90
NARROWER_BAR = 0.25
JUDGES = ("even", "by rank")
LABELLINGS = ("weighted", "random")
_BEST_REQUESTS, _BEST_CHUNK = 200_000, 10_000


@dataclass(frozen=True)
class Outcome:
    """One metric under one traffic, judge and way of labelling.

    Attributes:
        coverage: Share of the intervals that held the truth, among those given.
        coverage_error: Its Monte Carlo error, one standard deviation.
        width: Mean width of the PPI++ intervals.
        human_width: That of random human labels alone.
        narrower: 1 − width / human_width.
        best_narrower: What a perfect predictor from the served verdicts would reach with random
            labels; None for recall, which rests on dropped passages too.
        human_coverage: Coverage of the labels alone.
        judge_bias: Mean of the judge's own figure less the truth.
        judge_coverage: Coverage of the judge's own interval.
        estimates: Repeats with an estimate.
        without: Repeats without one.
    """

    traffic: str
    judge: str
    labelling: str
    metric: Metric
    truth: float
    coverage: float
    coverage_error: float
    width: float
    human_width: float
    narrower: float
    best_narrower: float | None
    human_coverage: float
    judge_bias: float
    judge_coverage: float
    estimates: int
    without: int


class _Tally:
    """The intervals of all repeats of one metric and method."""

    def __init__(self, truth: float) -> None:
        self._truth = truth
        self._rows: list[tuple[float, float, float]] = []
        self.without = 0

    def add(self, found: Estimate) -> None:
        if found.value is None or found.lower is None or found.upper is None:
            self.without += 1
        else:
            self._rows.append((found.value, found.lower, found.upper))

    @property
    def n(self) -> int:
        return len(self._rows)

    def coverage(self) -> float:
        held = [lower <= self._truth <= upper for _, lower, upper in self._rows]
        return sum(held) / len(held) if held else float("nan")

    def width(self) -> float:
        widths = [upper - lower for _, lower, upper in self._rows]
        return sum(widths) / len(widths) if widths else float("nan")

    def bias(self) -> float:
        values = [value for value, _, _ in self._rows]
        return sum(values) / len(values) - self._truth if values else float("nan")


def simulate(
    population: Population,
    judge: str,
    errors: ErrorRates,
    rates: JudgingRates,
    *,
    n_requests: int,
    n_labels: int,
    repeats: int,
    seed: int,
) -> list[Outcome]:
    """Every metric and way of labelling under one traffic and one judge."""
    rng = np.random.default_rng(seed)
    truths = population.truths()
    names = (*LABELLINGS, "human", "judge")
    tallies = {(name, metric): _Tally(truths[metric]) for name in names for metric in METRICS}
    for _ in range(repeats):
        requests = draw(population, errors, rates, n_requests, rng)
        human, judged = requests.human_terms(), requests.judge_controls()
        told_less = ~requests.verdicts[:, 0]
        labellings = {
            "weighted": np.where(told_less, TOLD_LESS_WEIGHT, 1.0),
            "random": np.ones(n_requests),
        }
        for labelling, weights in labellings.items():
            labelled = pick(weights, n_labels, rng)
            rest = np.ones(n_requests, dtype=bool)
            rest[labelled] = False
            for metric in METRICS:
                own, controls = human[metric][labelled], judged[metric][labelled]
                others = ControlSums.of(judged[metric][rest])
                inverse = 1.0 / weights[labelled]
                inclusion = requests.human_inclusion(metric)[labelled]
                tallies[labelling, metric].add(
                    estimate_from_clusters(
                        metric, own, controls, others, inverse, inclusion=inclusion
                    )
                )
                if labelling == "random":
                    nobody = ControlSums.of(controls[:0])
                    tallies["human", metric].add(
                        estimate_from_clusters(
                            metric, own, controls, nobody, inverse, inclusion=inclusion
                        )
                    )
        for metric in METRICS:
            own = judged[metric]
            nobody = ControlSums.of(own[:0])
            tallies["judge", metric].add(
                estimate_from_clusters(metric, own[:, :2], own, nobody, np.ones(n_requests))
            )
    best = best_narrower(population, errors, rates, n_labels / n_requests, rng)
    outcomes = []
    for labelling in LABELLINGS:
        for metric in METRICS:
            found, alone = tallies[labelling, metric], tallies["human", metric]
            raw = tallies["judge", metric]
            coverage = found.coverage()
            outcomes.append(
                Outcome(
                    traffic=population.name,
                    judge=judge,
                    labelling=labelling,
                    metric=metric,
                    truth=truths[metric],
                    coverage=coverage,
                    coverage_error=sqrt(coverage * (1.0 - coverage) / max(found.n, 1)),
                    width=found.width(),
                    human_width=alone.width(),
                    narrower=1.0 - found.width() / alone.width(),
                    best_narrower=best.get(metric),
                    human_coverage=alone.coverage(),
                    judge_bias=raw.bias(),
                    judge_coverage=raw.coverage(),
                    estimates=found.n,
                    without=found.without,
                )
            )
    return outcomes


def best_narrower(
    population: Population,
    errors: ErrorRates,
    rates: JudgingRates,
    label_share: float,
    rng: np.random.Generator,
) -> dict[Metric, float]:
    """How much narrower than labels alone an interval can be, given the served verdicts.

    The best predictor of a metric's terms is their mean given the pattern of verdicts. With a
    share R² of the variance explained and a share s of the requests labelled, the variance is
    1 − R²(1 − s) of that of labels alone.
    """
    truths = population.truths()
    metrics = [metric for metric in METRICS if metric is not Metric.RECALL]
    n_patterns = 2**DEFAULT_K
    counts = np.zeros(n_patterns)
    sums = {metric: np.zeros((2, n_patterns)) for metric in metrics}
    for _ in range(_BEST_REQUESTS // _BEST_CHUNK):
        requests = draw(population, errors, rates, _BEST_CHUNK, rng)
        patterns = requests.verdicts[:, :DEFAULT_K] @ (1 << np.arange(DEFAULT_K))
        counts += np.bincount(patterns, minlength=n_patterns)
        terms = requests.human_terms()
        for metric in metrics:
            linear = terms[metric] @ (1.0, -truths[metric])
            for row, values in enumerate((linear, linear**2)):
                sums[metric][row] += np.bincount(patterns, values, minlength=n_patterns)
    found: dict[Metric, float] = {}
    for metric in metrics:
        first, second = sums[metric]
        n = counts.sum()
        variance = second.sum() / n - (first.sum() / n) ** 2
        between = np.sum(first**2 / np.maximum(counts, 1.0)) / n - (first.sum() / n) ** 2
        found[metric] = 1.0 - sqrt(1.0 - between / variance * (1.0 - label_share))
    return found


def bars(outcomes: Sequence[Outcome]) -> dict[str, bool]:
    """The bars for one traffic and way of labelling, by what they say."""
    low, high = COVERAGE_BAR
    narrowed = [outcome for outcome in outcomes if outcome.metric in NARROWED]
    recall = [outcome for outcome in outcomes if outcome.metric is Metric.RECALL]
    return {
        f"intervals for P@5, MRR and UDCG cover between {low:.0%} and {high:.0%}": all(
            low <= outcome.coverage <= high for outcome in narrowed
        ),
        f"intervals for recall cover {RECALL_COVERAGE_BAR:.0%} or more": all(
            outcome.coverage >= RECALL_COVERAGE_BAR for outcome in recall
        ),
        f"P@5, MRR and UDCG at least {NARROWER_BAR:.0%} narrower than labels alone": all(
            outcome.narrower >= NARROWER_BAR for outcome in narrowed
        ),
    }


def outcome_table(title: str, outcomes: Sequence[Outcome]) -> Table:
    """One traffic and way of labelling as a person reads it."""
    table = Table(title=title, title_justify="left")
    table.add_column("judge", no_wrap=True)
    table.add_column("metric", no_wrap=True)
    for name in (
        "truth",
        "coverage",
        "width",
        "labels alone",
        "narrower",
        "best",
        "alone covers",
        "judge's bias",
        "judge covers",
        "no estimate",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        best = "" if outcome.best_narrower is None else f"{outcome.best_narrower:.1%}"
        table.add_row(
            outcome.judge,
            "P@5" if outcome.metric is Metric.PRECISION else outcome.metric.value,
            f"{outcome.truth:.3f}",
            f"{outcome.coverage:.1%} ± {outcome.coverage_error:.1%}",
            f"{outcome.width:.3f}",
            f"{outcome.human_width:.3f}",
            f"{outcome.narrower:.1%}",
            best,
            f"{outcome.human_coverage:.1%}",
            f"{outcome.judge_bias:+.3f}",
            f"{outcome.judge_coverage:.1%}",
            str(outcome.without),
        )
    return table


def populations(data: Path, cache: Path) -> tuple[Population, ...]:
    """The collections of a folder as traffic, each with the same share.

    Raises:
        FileNotFoundError: the folder holds no collection.
    """
    folders = sorted(path.parent for path in data.glob("*/corpus.jsonl"))
    if not folders:
        raise FileNotFoundError(f"{data} holds no folder with a corpus.jsonl")
    embedder = SentenceTransformerEmbedder()
    views = [Collection(folder, cache, embedder).under(Fusion()) for folder in folders]
    everything = Population.of("all", views)
    return everything.answerable("answerable"), everything


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation; the exit status is 1 where a bar is missed on answerable traffic."""
    parser = argparse.ArgumentParser(prog="benchmarks.coverage", description=SUMMARY)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, metavar="DIR")
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR")
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=2000, help="judged requests a repeat")
    parser.add_argument("--labels", type=int, default=150, help="labelled requests a repeat")
    parser.add_argument("--judge-sensitivity", type=float, default=0.85)
    parser.add_argument("--judge-specificity", type=float, default=0.90)
    parser.add_argument(
        "--full-pool-rate-if-no-hit",
        type=float,
        default=1.0,
        metavar="RATE",
        help="of the pools with nothing relevant served, how many are judged whole (default 1)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or not 1 <= options.labels * TOLD_LESS_WEIGHT <= options.requests:
        parser.error("at least 1 repeat, and twice as many requests as labels, are needed")
    try:
        traffic = populations(options.data, options.cache)
    except FileNotFoundError as error:
        parser.error(str(error))
    console = Console(width=150)
    rates = JudgingRates(full_pool_rate_if_no_hit=options.full_pool_rate_if_no_hit)
    start = time.perf_counter()
    outcomes = []
    for population in traffic:
        for judge in JUDGES:
            errors = error_rates(
                population,
                options.judge_sensitivity,
                options.judge_specificity,
                by_rank=judge == "by rank",
            )
            outcomes += simulate(
                population,
                judge,
                errors,
                rates,
                n_requests=options.requests,
                n_labels=options.labels,
                repeats=options.repeats,
                seed=options.seed,
            )
    seconds = time.perf_counter() - start
    results: dict[str, Any] = {
        "repeats": options.repeats,
        "requests": options.requests,
        "labels": options.labels,
        "judge_sensitivity": options.judge_sensitivity,
        "judge_specificity": options.judge_specificity,
        "full_pool_rate_if_no_hit": options.full_pool_rate_if_no_hit,
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "bars": {},
    }
    for population in traffic:
        for labelling in LABELLINGS:
            own = [
                outcome
                for outcome in outcomes
                if (outcome.traffic, outcome.labelling) == (population.name, labelling)
            ]
            title = f"{population.name} traffic, {options.labels} {labelling} labels"
            console.print(outcome_table(title, own))
            results["bars"][title] = kept = bars(own)
            for bar, met in kept.items():
                console.print(f"{'met   ' if met else 'MISSED'} {bar}")
    console.print(f"{options.repeats} repeats in {seconds:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    headline = results["bars"][f"answerable traffic, {options.labels} weighted labels"]
    return 0 if all(headline.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
