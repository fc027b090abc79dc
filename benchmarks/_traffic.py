"""Replayed pools as traffic whose true quality is known, with a judge that errs and people.

A population is all there is: a request is a query drawn from it with replacement, so that the
truth of every metric is a sum over the population. Everything here is columns, one row a request,
because a simulation draws millions of them; ``test_coverage`` holds them equal to what
``ctxguard.monitor`` makes of the same requests one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks._collection import View
from calibration.pool_labels import IntArray, discounts
from ctxguard.core.metrics import DEFAULT_UTILITIES
from ctxguard.core.types import DEFAULT_K, FloatArray
from ctxguard.monitor.estimation.terms import Metric
from ctxguard.monitor.sampling.inclusion import JudgingRates

BoolArray = NDArray[np.bool_]

TILT_PER_RANK = 0.03
"""How much stricter the second kind of judge is from one served rank to the next."""


@dataclass(frozen=True)
class Population:
    """Queries with their pools, all labelled; the first ``DEFAULT_K`` passages are served.

    Attributes:
        name: What it is called in the tables.
        relevant: Shape (n_q, depth), false beyond a pool's end.
        utilities: Shape (n_q, k), what each served passage is worth.
        in_pool: Shape (n_q, depth).
        share: Shape (n_q,), each query's share of the traffic; adds up to 1.
    """

    name: str
    relevant: BoolArray
    utilities: FloatArray
    in_pool: BoolArray
    share: FloatArray

    @classmethod
    def of(cls, name: str, views: Sequence[View]) -> "Population":
        """The queries of some collections, each collection with the same share."""
        depth = views[0].labels.grades.shape[1]
        return cls(
            name,
            np.concatenate([view.labels.relevant for view in views]),
            np.concatenate([view.labels.utilities[:, :DEFAULT_K] for view in views]),
            np.concatenate([np.arange(depth) < view.pools.lengths[:, None] for view in views]),
            np.concatenate(
                [np.full(len(view.pools), 1.0 / len(views) / len(view.pools)) for view in views]
            ),
        )

    def answerable(self, name: str) -> "Population":
        """The queries whose pool holds a relevant passage, in the same proportions."""
        rows = self.relevant.any(axis=1)
        share = self.share[rows]
        return Population(
            name,
            self.relevant[rows],
            self.utilities[rows],
            self.in_pool[rows],
            share / share.sum(),
        )

    def truths(self) -> dict[Metric, float]:
        """Every metric over all of the traffic."""
        terms = metric_terms(
            self.relevant[:, :DEFAULT_K],
            self.utilities,
            dropped=self.relevant[:, DEFAULT_K:].sum(axis=1) * 1.0,
        )
        sums = {metric: self.share @ columns for metric, columns in terms.items()}
        return {metric: float(a / b) for metric, (a, b) in sums.items()}


class ErrorRates(NamedTuple):
    """How often a judge is right, by rank; shape (depth,) each."""

    sensitivity: FloatArray
    specificity: FloatArray


def error_rates(
    population: Population, sensitivity: float, specificity: float, *, by_rank: bool
) -> ErrorRates:
    """A judge that is right with these probabilities over what this traffic is served.

    With ``by_rank`` it trusts the ranking: it calls a passage relevant the more readily the
    higher it stands, so that it finds more at the top and is wrong more often there. Its
    sensitivity and specificity over all served passages stay the same.
    """
    depth = population.relevant.shape[1]
    if not by_rank:
        return ErrorRates(np.full(depth, sensitivity), np.full(depth, specificity))
    ranks = np.minimum(np.arange(1, depth + 1), DEFAULT_K)
    served = population.relevant[:, :DEFAULT_K]
    relevant, others = population.share @ served, population.share @ ~served
    centre_relevant = relevant @ ranks[:DEFAULT_K] / relevant.sum()
    centre_others = others @ ranks[:DEFAULT_K] / others.sum()
    return ErrorRates(
        np.clip(sensitivity - TILT_PER_RANK * (ranks - centre_relevant), 0.0, 1.0),
        np.clip(specificity + TILT_PER_RANK * (ranks - centre_others), 0.0, 1.0),
    )


@dataclass(frozen=True)
class Requests:
    """Some traffic, as it is and as a judge saw it.

    Attributes:
        relevant: Shape (n, depth), the truth, which is also what people say.
        verdicts: Shape (n, depth), what the judge would say of each passage.
        utilities: Shape (n, k).
        sampled: Shape (n, depth), dropped passages that are judged by themselves.
        chance: Shape (n,), uniform; a full pool is judged where it is below the rate.
        baseline: Shape (n,), whether the first few of the pool are all judged.
        rates: How much of what was dropped is judged, by the judge and by people.
    """

    relevant: BoolArray
    verdicts: BoolArray
    utilities: FloatArray
    sampled: BoolArray
    chance: FloatArray
    baseline: BoolArray
    rates: JudgingRates

    def human_terms(self) -> dict[Metric, FloatArray]:
        """Numerator and denominator of each metric by the labels of people, shape (n, 2)."""
        return _terms(self, self.relevant, self.utilities)

    def human_inclusion(self, metric: Metric) -> FloatArray:
        """A metric's inclusion, as of ``request_terms``, by the labels of people, shape (n,)."""
        rates = self.rates
        if metric is Metric.MRR:
            return np.full(len(self.chance), rates.full_pool_rate_if_no_hit)
        if metric is not Metric.RECALL:
            return np.ones(len(self.chance))
        by_hit = [
            rates.dropped_probability(has_hit=has_hit, in_baseline=False)
            for has_hit in (False, True)
        ]
        has_hit = self.relevant[:, :DEFAULT_K].any(axis=1)
        return np.where(has_hit, by_hit[True], by_hit[False])

    def judge_controls(self) -> dict[Metric, FloatArray]:
        """The columns of ``sums.control_columns``, shape (n, 5), by metric."""
        served = self.verdicts[:, :DEFAULT_K]
        worth = np.where(served, DEFAULT_UTILITIES.relevant, DEFAULT_UTILITIES.irrelevant)
        terms = _terms(self, self.verdicts, worth)
        seen = np.column_stack([served[:, 0], served.any(axis=1), served.sum(axis=1)])
        return {metric: np.column_stack([columns, seen]) for metric, columns in terms.items()}


def draw(
    population: Population,
    errors: ErrorRates,
    rates: JudgingRates,
    n: int,
    rng: np.random.Generator,
) -> Requests:
    """Draw ``n`` requests with replacement and have them judged."""
    rows = rng.choice(population.share.size, n, p=population.share)
    relevant = population.relevant[rows]
    says_relevant = np.where(relevant, errors.sensitivity, 1.0 - errors.specificity)
    sampled = rng.random(relevant.shape) < rates.dropped_rate
    sampled[:, :DEFAULT_K] = False
    return Requests(
        relevant=relevant,
        verdicts=(rng.random(relevant.shape) < says_relevant) & population.in_pool[rows],
        utilities=population.utilities[rows],
        sampled=sampled,
        chance=rng.random(n),
        baseline=rng.random(n) < rates.baseline_rate,
        rates=rates,
    )


def _terms(requests: Requests, found: BoolArray, utilities: FloatArray) -> dict[Metric, FloatArray]:
    rates = requests.rates
    served, dropped = found[:, :DEFAULT_K], found[:, DEFAULT_K:]
    rate = np.where(served.any(axis=1), rates.full_pool_rate, rates.full_pool_rate_if_no_hit)
    full_pool = requests.chance < rate
    in_baseline = np.arange(DEFAULT_K, found.shape[1]) < rates.baseline_k
    seen = dropped & (
        requests.sampled[:, DEFAULT_K:]
        | full_pool[:, None]
        | (requests.baseline[:, None] & in_baseline)
    )
    alone = rate + (1.0 - rate) * rates.dropped_rate
    among_first = alone + (1.0 - alone) * rates.baseline_rate
    return metric_terms(
        served,
        utilities,
        dropped=(seen & in_baseline).sum(axis=1) / among_first
        + (seen & ~in_baseline).sum(axis=1) / alone,
    )


def metric_terms(
    served: BoolArray, utilities: FloatArray, *, dropped: FloatArray
) -> dict[Metric, FloatArray]:
    """What ``terms.term`` says of each request, shape (n, 2) by metric.

    Args:
        served: Shape (n, k), which of the served are relevant.
        utilities: Shape (n, k).
        dropped: Shape (n,), the estimated number of relevant passages dropped.
    """
    kept = served.sum(axis=1).astype(np.float64)
    has_hit = kept > 0
    one = np.ones(len(served))
    worth = utilities * discounts(served.shape[1])
    return {
        Metric.PRECISION: np.column_stack([kept / served.shape[1], one]),
        Metric.MRR: np.column_stack(
            [
                np.where(has_hit, 1.0 / (served.argmax(axis=1) + 1), 0.0),
                one,
            ]
        ),
        Metric.UDCG: np.column_stack([worth.sum(axis=1), one]),
        Metric.GAIN: np.column_stack([np.maximum(worth, 0.0).sum(axis=1), one]),
        Metric.HARM: np.column_stack([np.maximum(-worth, 0.0).sum(axis=1), one]),
        Metric.RECALL: np.column_stack([kept, kept + dropped]),
    }


def pick(weights: FloatArray, n: int, rng: np.random.Generator) -> IntArray:
    """``n`` different rows, each with a chance in proportion to its weight.

    Systematic sampling in random order (Madow, "On the theory of systematic sampling, II",
    1949). No row may weigh more than a share 1/n of all.
    """
    order = rng.permutation(weights.size)
    steps = weights[order].cumsum() * (n / weights.sum())
    rows: IntArray = order[np.searchsorted(steps, np.arange(n) + rng.random(), side="right")]
    return rows
