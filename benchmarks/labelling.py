"""What do a month's grades of people give: intervals, and whether they hold the truth?

    python -m benchmarks.labelling --months 300 --json benchmarks/results/labelling.json

Each month draws questions of known quality, a judge that errs, and the passages that people grade
(``estimation.draw``); then every metric is estimated (``estimation.joint``) and held against the
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
from ctxguard.monitor.estimation import draw, joint
from ctxguard.monitor.estimation.joint import PASSAGE, Grades, Population, joint_estimates
from ctxguard.monitor.estimation.ratio import DEFAULT_MIN_N, Estimate
from ctxguard.monitor.estimation.relevance import (
    FAR,
    FOLDS,
    NEAR,
    NEAR_DROPPED,
    IntArray,
    JudgedPassages,
    Model,
    rank_group,
)
from ctxguard.monitor.estimation.sums import Sums
from ctxguard.monitor.estimation.terms import Metric

SUMMARY = "Simulate months of grading, and check what the grades give."
METRICS = (Metric.PRECISION, Metric.UDCG, Metric.SERVED_MRR, Metric.POOLED_RECALL)
BoolArray = NDArray[np.bool_]

_DEPTH = 20
_REQUESTS = 3_000
_DROPPED_RATE, _POOL_RATE = 0.2, 0.05
_GAIN, _HARM = 1.0, 0.5
_IS_NEAR = np.arange(_DEPTH - DEFAULT_K) < NEAR_DROPPED
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
        is_misled: Whether the draw rests on grades that say the opposite.
        whole: Whether whole requests are graded, as before.
        scores: Whether the judge gives probabilities, and not verdicts alone.
    """

    name: str
    precision: float = 0.6
    sensitivity: float = 0.85
    specificity: float = 0.90
    misunderstood: float = 0.0
    grades: int = 400
    spread: float = 2.0
    is_misled: bool = False
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
    Case("misguided pilot", is_misled=True),
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


def judged(
    case: Case, relevant: BoolArray, rng: np.random.Generator
) -> tuple[BoolArray, Population, FloatArray]:
    """Judge requests.

    Returns:
        The verdicts; the judged requests; and shape (n, 15), of each dropped passage 1 / its
        probability of being judged, 0 if it is not.
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
    scores = (
        (above + below) * latent[:, :DEFAULT_K] if case.scores else np.zeros((len(seen), DEFAULT_K))
    )
    has_hit = verdicts[:, :DEFAULT_K].any(axis=1)
    pool = (rng.random(len(seen)) < _POOL_RATE) | ~has_hit
    alone = rng.random((len(seen), _DEPTH - DEFAULT_K)) < _DROPPED_RATE
    chance = np.where(has_hit, _POOL_RATE + (1.0 - _POOL_RATE) * _DROPPED_RATE, 1.0)
    sizes = (pool[:, None] | alone) / chance[:, None]
    says_yes = verdicts[:, DEFAULT_K:]
    dropped = [
        [(sizes * (says_yes == verdict) * near).sum(axis=1) for verdict in (False, True)]
        for near in (_IS_NEAR, ~_IS_NEAR)
    ]
    population = Population(
        verdicts[:, :DEFAULT_K].astype(np.int8),
        np.array(dropped).transpose(2, 0, 1),
        np.ones(len(seen)),
        chance,
        scores,
    )
    return verdicts, population, sizes


def month(case: Case, seed: int) -> Month:
    """Simulate one month: questions, judge, draw, grades, estimates."""
    rng = np.random.default_rng(seed)
    relevant = traffic(case, _REQUESTS, rng)
    verdicts, population, sizes = judged(case, relevant, rng)
    pilot = _pilot(case)
    m = draw.worth(population, pilot)
    plan = draw.plan(population, pilot, m, case.grades, whole=case.whole)
    opened = rng.permutation(_REQUESTS)[: plan.n_opened]
    row, column, chance, went_on = _run(relevant, verdicts, sizes, (m, opened, plan), rng)
    is_opened = np.zeros(_REQUESTS, np.bool_)
    is_opened[opened] = True
    units = draw.units(population, m, is_opened, plan.n_singles)
    taken = units[draw.systematic(units["probability"], float(rng.random()))]
    single, single_chance = _singles(taken, verdicts, sizes, rng)
    others, number = np.unique(taken["request"], return_inverse=True)
    labelled = np.concatenate([opened, others])
    request = np.concatenate([row, len(opened) + number])
    place = np.concatenate([column, single])
    found = relevant[labelled[request], place] * 1.0
    is_served = place < DEFAULT_K
    near = np.where(place - DEFAULT_K < NEAR_DROPPED, NEAR, FAR)
    passages = np.zeros(len(request), PASSAGE)
    for name, column_of in {
        "frame": np.repeat([joint.RUN, joint.SINGLE], [len(row), len(taken)]),
        "rank": np.where(is_served, place + 1, 0),
        "group": np.where(is_served, rank_group(place + 1), near),
        "verdict": verdicts[labelled[request], place],
        "relevant": found,
        "gain": _GAIN * found,
        "harm": _HARM * (1.0 - found),
        "size": np.column_stack([np.ones((len(labelled), DEFAULT_K)), sizes[labelled]])[
            request, place
        ],
        "probability": np.concatenate([chance, single_chance]),
        "go_on": plan.go_on,
        "went_on": np.concatenate([went_on[row], np.zeros(len(taken), np.bool_)]),
    }.items():
        passages[name] = column_of
    weight = passages["size"] / passages["probability"]
    weight[passages["frame"] == joint.RUN] *= _REQUESTS / len(opened)
    n = len(labelled)
    fold = rng.permutation(n) % FOLDS
    grades = Grades(passages, request, weight, population.take(labelled), fold, np.arange(n))
    model, sums = grades.fitted_model(), Sums(joint.N_COLUMNS)
    sums.add(joint.basis(population, model))
    estimates = joint_estimates(sums, grades, model, DEFAULT_MIN_N)
    return Month(estimates, len(request), n)


def _pilot(case: Case) -> Model:
    none = np.zeros(0, np.intp)
    nothing = JudgedPassages(none, none, none, none, np.zeros(0))
    pilot = Model.fitted(nothing, none, np.zeros(0))
    return Model(pilot.coefficients * np.where(case.is_misled, -1.0, 1.0), _GAIN, _HARM)


def _run(
    relevant: BoolArray,
    verdicts: BoolArray,
    sizes: FloatArray,
    drawn: tuple[draw.Worth, IntArray, draw.Plan],
    rng: np.random.Generator,
) -> tuple[IntArray, IntArray, FloatArray, BoolArray]:
    """Grade opened requests from the top down, and the coins below.

    Returns:
        Of each grade the opened request, the passage's rank from 0 and the probability; and of each
        run whether it went on below an irrelevant first passage.
    """
    m, opened, plan = drawn
    truth, served = relevant[opened], relevant[opened][:, :DEFAULT_K]
    n = len(opened)
    of_dropped = m[1][
        opened[:, None],
        np.where(_IS_NEAR, 0, 1)[None, :],
        verdicts[opened][:, DEFAULT_K:].astype(np.intp),
    ]
    worths = np.column_stack([m[0][opened], of_dropped * sizes[opened]])
    coins = np.minimum(np.where(worths > 0.0, plan.coin * worths.clip(1e-12), 0.0), 1.0)
    went_on = ~served[:, 0] & (rng.random(n) < plan.go_on)
    in_run = np.zeros(truth.shape, np.bool_)
    in_run[:, 0] = True
    in_run[:, 1:DEFAULT_K] = ~np.logical_or.accumulate(served, axis=1)[:, :-1]
    asked = (served[:, :1] | went_on[:, None]) & (in_run | (rng.random(truth.shape) < coins))
    asked[:, 0] = True
    asked[:, DEFAULT_K:] &= sizes[opened] > 0.0
    chance = np.where(served[:, :1], 1.0, plan.go_on) * np.where(in_run, 1.0, coins)
    chance[:, 0] = 1.0
    row, column = np.nonzero(asked)
    return row, column, chance[row, column], went_on


def _singles(
    taken: NDArray[np.void], verdicts: BoolArray, sizes: FloatArray, rng: np.random.Generator
) -> tuple[IntArray, FloatArray]:
    """Return each single passage's rank from 0, and its probability."""
    place, chance = taken["rank"] - 1, taken["probability"].copy()
    for each in np.flatnonzero(place < 0):
        request = taken["request"][each]
        near = (taken["group"][each] == NEAR) == _IS_NEAR
        alike = near & (verdicts[request, DEFAULT_K:] == taken["verdict"][each])
        shares = sizes[request] * alike / (sizes[request] @ alike)
        drawn = rng.choice(len(shares), p=shares)
        place[each], chance[each] = DEFAULT_K + drawn, chance[each] * shares[drawn]
    return place, chance


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
    for metric, truth in truths(replace(case, whole=False, is_misled=False)).items():
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
