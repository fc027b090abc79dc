"""What do a month's grades of people give: intervals, and whether they hold the truth?

    python -m benchmarks.labelling --months 300 --json benchmarks/results/labelling.json

Each month draws questions of known quality, a judge that errs, and the passages that people grade
(``sampling_design``); then every metric is estimated (``prediction_powered``) and held against the
truth of the questions' distribution. Five passages are served of twenty; of the dropped ones those
are judged that the default rates choose.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist, fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ctxguard.core.types import DEFAULT_K, FloatArray
from ctxguard.measure.corrected import (
    FOLDS,
    N_COLUMNS,
    Graded,
    Model,
    corrected_estimates,
    predicted,
)
from ctxguard.measure.estimate import DEFAULT_MIN_N, Estimate, Sums
from ctxguard.measure.metrics import Metric
from ctxguard.measure.rows import (
    FAR,
    NEAR,
    NEAR_DROPPED,
    PASSAGE,
    REQUEST,
    UNGRADED,
    IntArray,
    Rows,
    rank_group,
)
from ctxguard.monitor.estimation.sampling_design import DROPPED_COINS, GO_ON, SERVED_COIN

SUMMARY = "Simulate months of grading, and check what the grades give."
METRICS = (Metric.PRECISION, Metric.UDCG, Metric.SERVED_MRR, Metric.POOLED_RECALL)
BoolArray = NDArray[np.bool_]

_DEPTH = 20
_REQUESTS = 3_000
_DROPPED_RATE, _POOL_RATE = 0.2, 0.05
_GAIN, _HARM = 1.0, 0.5
_LEAST_COVERAGE = 0.92
"""Of 300 months; their error is 1.3 points."""
_LEAST_SHOWN = 0.1
"""What fewer months show says nothing of coverage."""


@dataclass(frozen=True)
class Case:
    """One kind of traffic, judge and budget.

    Attributes:
        name: In the table.
        precision: Mean precision of what is served.
        sensitivity, specificity: The judge's.
        misunderstood: Share of the questions that the judge takes for another one.
        grades: The month's budget.
        spread: How alike questions are: the sum of their beta distribution's parameters.
        whole: Whether whole requests are graded, as before.
        scores: Whether the judge gives probabilities, and not grades alone.
    """

    name: str
    precision: float = 0.6
    sensitivity: float = 0.85
    specificity: float = 0.90
    misunderstood: float = 0.0
    grades: int = 400
    spread: float = 2.0
    whole: bool = False
    scores: bool = False


CASES = (
    Case("good judge"),
    Case("20% misunderstood", misunderstood=0.2),
    Case("good judge, scores", scores=True),
    Case("20% misunderstood, scores", misunderstood=0.2, scores=True),
    Case("whole requests", whole=True),
    Case("whole, misunderstood", misunderstood=0.2, whole=True),
    Case("precision .97", precision=0.97, spread=20.0, grades=100),
    Case("all relevant", precision=1.0, grades=100),
    Case("precision .15", precision=0.15),
    Case("perfect judge", sensitivity=1.0, specificity=1.0),
    Case("60 grades", grades=60),
    Case("100 grades", grades=100),
)


class Month(NamedTuple):
    """The result of one month.

    Attributes:
        estimates: By metric.
        grades: How many passages people graded.
        questions: Of how many questions.
    """

    estimates: Mapping[Metric, Estimate]
    grades: int
    questions: int


def traffic(case: Case, n: int, rng: np.random.Generator) -> BoolArray:
    """Draw the relevance of n questions' passages by rank, shape (n, 20)."""
    p = case.precision
    quality = np.ones(n) if p == 1.0 else rng.beta(case.spread * p, case.spread * (1.0 - p), n)
    ranks = np.arange(_DEPTH)
    served = 1.0 if p == 1.0 else 1.0 - 0.1 * (ranks - (DEFAULT_K - 1) / 2.0)
    by_rank = np.where(ranks < DEFAULT_K, served, 0.5 * np.exp(-(ranks - DEFAULT_K) / 5.0))
    return np.asarray(rng.random((n, _DEPTH)) < quality[:, None] * by_rank)


@cache
def truths(case: Case) -> dict[Metric, float]:
    """Every metric over 400,000 questions of a kind."""
    relevant = traffic(case, 400_000, np.random.default_rng(1))
    served = relevant[:, :DEFAULT_K]
    discounts = 1.0 / np.log2(np.arange(2, DEFAULT_K + 2))
    return {
        Metric.PRECISION: float(served.mean()),
        Metric.UDCG: float(((_GAIN + _HARM) * served - _HARM).mean(axis=0) @ discounts),
        Metric.SERVED_MRR: float(_reciprocal_rank(served).mean()),
        Metric.POOLED_RECALL: float(served.sum() / relevant.sum()),
    }


def judged(case: Case, relevant: BoolArray, rng: np.random.Generator) -> tuple[Rows, IntArray]:
    """Judge n requests.

    Returns:
        The judged passages, and the place of each among the 20, from 0.
    """
    seen = relevant.copy()
    wrong = rng.random(len(seen)) < case.misunderstood
    seen[wrong] = relevant[rng.permutation(len(seen))[: np.count_nonzero(wrong)]]
    # A normal latent, cut where it gives the judge's rates; its scores are their log-odds.
    above, below = (
        NormalDist().inv_cdf(min(one, 0.9999)) for one in (case.sensitivity, case.specificity)
    )
    latent = rng.normal(size=seen.shape) + np.where(seen, above, -below)
    verdicts = latent > 0.0
    has_hit = verdicts[:, :DEFAULT_K].any(axis=1)
    pool = (rng.random(len(seen)) < _POOL_RATE) | ~has_hit
    is_judged = pool[:, None] | (rng.random(seen.shape) < _DROPPED_RATE)
    is_judged[:, :DEFAULT_K] = True
    chance = np.where(has_hit, _POOL_RATE + (1.0 - _POOL_RATE) * _DROPPED_RATE, 1.0)
    request, place = np.nonzero(is_judged)
    is_served = place < DEFAULT_K
    near = np.where(place - DEFAULT_K < NEAR_DROPPED, NEAR, FAR)
    passages, requests = np.zeros(len(request), PASSAGE), np.zeros(len(seen), REQUEST)
    passages["rank"] = np.where(is_served, place + 1, 0)
    passages["group"] = np.where(is_served, rank_group(place + 1), near)
    passages["judge_grade"] = verdicts[request, place]
    if case.scores:
        passages["score"] = np.where(is_served, (above + below) * latent[request, place], 0.0)
    passages["size"] = np.where(is_served, 1.0, 1.0 / chance[request])
    passages["people_grade"] = UNGRADED
    requests["n_passages"], requests["n_served"] = is_judged.sum(axis=1), DEFAULT_K
    requests["probability"], requests["dropped_probability"] = 1.0, chance
    return Rows(requests, passages, request), place


def month(case: Case, seed: int) -> Month:
    """Simulate one month: questions, judge, draw, grades, estimates."""
    rng = np.random.default_rng(seed)
    relevant = traffic(case, _REQUESTS, rng)
    rows, place = judged(case, relevant, rng)
    coins, coin = _coins(case, rows), rng.random(len(place))
    is_relevant = relevant[rows.request, place]
    above = np.logical_or.accumulate(relevant[:, :DEFAULT_K], axis=1)
    above = np.column_stack([np.zeros(len(above), np.bool_), above])
    in_run = (place < DEFAULT_K) & ~above[rows.request, np.minimum(place, DEFAULT_K)]
    go_on = 1.0 if case.whole else GO_ON
    goes_on = rng.random(_REQUESTS) < go_on
    in_run &= goes_on[rows.request]
    asked, chance = in_run | (coin < coins), np.where(in_run, 1.0, coins)
    # Requests are opened in random order until what is expected of them fills the budget.
    order = rng.permutation(_REQUESTS)
    likely = np.where(rows.passages["judge_grade"] == 1, 0.8, 0.2)
    reached = np.cumprod(np.column_stack([np.ones(_REQUESTS), 1.0 - rows.by_rank(likely)]), axis=1)
    run = np.where(place < DEFAULT_K, reached[rows.request, np.minimum(place, DEFAULT_K)], 0.0)
    run *= goes_on[rows.request]
    expected = rows.total(np.where(coin < coins, 1.0, run))
    is_opened = np.zeros(_REQUESTS, np.bool_)
    is_opened[order[: np.searchsorted(np.cumsum(expected[order]), case.grades) + 1]] = True
    own = asked & is_opened[rows.request]
    for name, values in {
        "people_grade": is_relevant,
        "people_worth": np.where(is_relevant, _GAIN, -_HARM),
        "asked_probability": chance,
    }.items():
        rows.passages[name][own] = values[own]
    rows.requests["is_run"], rows.requests["run_probability"] = goes_on, go_on
    n, fold = int(np.count_nonzero(is_opened)), np.full(_REQUESTS, -1)
    fold[is_opened] = rng.permutation(n) % FOLDS
    model, sums = Model.fitted(rows, fold), Sums.of(N_COLUMNS)
    p = model.of(rows, fold)
    sums.add(predicted(rows, p, model), rows.requests["session"])
    graded = Graded.of(rows, p, np.where(is_opened, _REQUESTS / n, 0.0))
    estimates = corrected_estimates(sums.ended(), graded, model, DEFAULT_MIN_N)
    return Month(estimates, int(np.count_nonzero(own)), n)


def _coins(case: Case, rows: Rows) -> FloatArray:
    """Return the coin of each judged passage, as of ``sampling_design``."""
    if case.whole:
        return np.ones(len(rows.passages))
    says_yes = rows.passages["judge_grade"] == 1
    dropped = np.where(says_yes, DROPPED_COINS[True], DROPPED_COINS[False])
    coins = np.where(rows.passages["rank"] > 0, SERVED_COIN, dropped)
    return np.asarray(np.where(rows.passages["rank"] == 1, 1.0, coins))


def _reciprocal_rank(served: BoolArray) -> FloatArray:
    return np.where(served.any(axis=1), 1.0 / (served.argmax(axis=1) + 1.0), 0.0)


@dataclass(frozen=True)
class Outcome:
    """One metric of one case over all months.

    Attributes:
        shown: Share of the months with an estimate; the other numbers are of these, and None if
            they are fewer than a tenth.
        coverage: Share of the intervals that hold the truth.
        half_width: Mean.
        deviation: Root mean square of the estimates less the truth.
        bias: Mean of the same.
        text: Half-width and coverage for a table.
    """

    truth: float
    shown: float
    coverage: float | None = None
    half_width: float | None = None
    deviation: float | None = None
    bias: float | None = None
    text: str = "–"


def outcomes(case: Case, months: Sequence[Month]) -> dict[str, Outcome]:
    """Summarise the months of a case by metric."""
    found = {}
    for metric, truth in truths(replace(case, whole=False)).items():
        estimated = [one.estimates[metric] for one in months]
        ends = [
            (one.lower, one.value, one.upper)
            for one in estimated
            if one.lower is not None and one.value is not None and one.upper is not None
        ]
        found[metric.value] = Outcome(truth, share := len(ends) / len(months))
        if share < _LEAST_SHOWN:
            continue
        off = np.array([value - truth for _, value, _ in ends])
        coverage = fmean(lower - 1e-9 <= truth <= upper + 1e-9 for lower, _, upper in ends)
        half_width = fmean((upper - lower) / 2.0 for lower, _, upper in ends)
        found[metric.value] = Outcome(
            truth,
            share,
            coverage,
            half_width,
            deviation=float(np.sqrt(np.mean(off**2))),
            bias=float(off.mean()),
            text=f"{half_width:.3f} ({coverage:.0%})",
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation; the exit status is 1 where an interval does not hold what it says."""
    parser = argparse.ArgumentParser(prog="benchmarks.labelling", description=SUMMARY)
    parser.add_argument("--months", type=int, default=300)
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=[""], help="cases by name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    console = Console(width=100, highlight=False)
    table = Table(title=f"{options.months} months: half-width (coverage)", title_justify="left")
    for name in ("case", "grades", "questions", "P@5", "UDCG", "served MRR", "pooled recall"):
        table.add_column(name, justify="left" if name == "case" else "right", no_wrap=True)
    start, cases, refuted = time.perf_counter(), {}, 0
    for case in CASES:
        if not any(text in case.name for text in options.only):
            continue
        months = [month(case, options.seed + number) for number in range(options.months)]
        own = outcomes(case, months)
        refuted += sum((one.coverage or 1.0) < _LEAST_COVERAGE for one in own.values())
        grades, questions = (
            fmean(getattr(one, name) for one in months) for name in ("grades", "questions")
        )
        table.add_row(
            case.name,
            f"{grades:.0f}",
            f"{questions:.0f}",
            *(own[one.value].text for one in METRICS),
        )
        cases[case.name] = {
            **asdict(case),
            "graded": round(grades, 1),
            "questions": round(questions, 1),
            "metrics": {
                name: {
                    key: round(value, 4) if isinstance(value, float) else value
                    for key, value in asdict(one).items()
                }
                for name, one in own.items()
            },
        }
    console.print(table)
    seconds = time.perf_counter() - start
    console.print(f"{seconds:.0f} s")
    if options.json is not None:
        results = {
            "months": options.months,
            "requests": _REQUESTS,
            "seed": options.seed,
            "seconds": round(seconds, 1),
            "cases": cases,
        }
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if refuted else 0


if __name__ == "__main__":
    sys.exit(main())
