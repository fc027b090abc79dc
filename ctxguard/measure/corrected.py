"""Estimates metrics from a judge's grades of all requests and people's grades of some passages.

``Model`` predicts the relevance of each judged passage: a ridge-penalised logistic regression of
people's grade on the judge's and its score, on where the passage stands and on how many of the
request's other served passages the judge calls relevant, since a judge that misunderstands a
question is wrong about all of its passages. It is fitted five times, each without a fifth of the
graded requests, so that no passage is predicted by its own grade.

So every judged request has a predicted value of each metric. The grades correct the predictions by
their mean error, one for served and one for dropped passages (Hájek's estimator, with the inverse
of the probability with which each grade was asked for), and the predictions count as far as they
narrow the result, as in PPI++ (Angelopoulos, Duchi and Zrnic, 2023, arXiv 2311.01453). The centre
is right whatever the judge's errors; they only set the width. If everything is graded, the result
equals that of the grades. Pure.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, nan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.scores import discounts, logistic
from ctxguard.core.types import FloatArray
from ctxguard.measure.estimate import GRADES_COUNT, Estimate, Sums, lacks_grades, linearised
from ctxguard.measure.metrics import (
    GAIN,
    HARM,
    KEPT,
    N_QUANTITIES,
    POOL,
    PRECISION,
    RANK,
    Metric,
    discounted,
    never_judged,
    quantities,
    reciprocal_ranks,
)
from ctxguard.measure.rows import MISSING, N_GROUPS, NEAR, YES, IntArray, Rows

FOLDS = 5

_PRIOR = np.array([-0.8, 2.2, 1.0, 0.0, 0.0, -1.5, -2.0, 1.0, 0.0, 0.3])
"""Coefficients before anyone has graded: those of a judge with rates of about 0.85 and 0.9."""
_PENALTY = np.array([0.1, 0.5, 0.5, 1.0, 1.0, 0.3, 0.3, 0.5, 1.0, 1.0])
_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Model:
    """Predicts P(relevant) from the judge's grade and score, the rank group and its other grades.

    Attributes:
        coefficients: Shape (FOLDS, 10); each row was fitted without one fold.
        gain: Mean gain of a passage that people call relevant.
        harm: Mean harm of one that they do not.
    """

    coefficients: FloatArray
    gain: float = 1.0
    harm: float = 0.5

    @classmethod
    def fitted(cls, graded: Rows, fold: IntArray) -> "Model":
        """Fit the regression to the passages graded for a draw; without any, it is the prior.

        Args:
            graded: Requests, n of them.
            fold: Shape (n,), below ``FOLDS``.
        """
        own = graded.passages["asked_probability"] > 0.0
        if not own.any():
            return cls(np.tile(_PRIOR, (FOLDS, 1)))
        columns = _columns(graded)[own]
        relevant = (graded.passages["people_grade"][own] > 0) * 1.0
        of_passage = fold[graded.request[own]]
        worth = graded.passages["people_worth"][own].astype(np.float64)
        gains, harms = worth[relevant > 0.0], -worth[relevant == 0.0]
        others = [of_passage != one for one in range(FOLDS)]
        return cls(
            np.array([_fit(columns[each], relevant[each]) for each in others]),
            gain=float(gains.mean()) if len(gains) else 1.0,
            harm=float(harms.mean()) if len(harms) else 0.5,
        )

    def of(self, rows: Rows, fold: IntArray | None = None) -> FloatArray:
        """Predict P(relevant) of every passage, shape (m,).

        Args:
            fold: Shape (n,), the fold that is left out of each request, −1 for none; None for none
                of all. Without one it is the mean of all fits.
        """
        by_fit = logistic(self.coefficients @ _columns(rows).T)
        of_all = by_fit.mean(axis=0)
        if fold is None:
            return np.asarray(of_all)
        own = fold[rows.request]
        return np.where(own < 0, of_all, by_fit[own, np.arange(own.size)])


def _columns(rows: Rows) -> FloatArray:
    passages = rows.passages
    is_served, is_yes = (passages["rank"] > 0) * 1.0, (passages["judge_grade"] == YES) * 1.0
    n_yes = rows.total(is_yes * is_served)[rows.request]
    n_others = rows.requests["n_served"][rows.request] - is_served
    share = (n_yes - is_yes * is_served + 0.5) / np.maximum(n_others + 1.0, 1.0)
    share = np.clip(share, 0.0, 1.0) - 0.5
    columns = np.empty((len(_PRIOR), len(passages)))
    columns[:3] = np.ones(len(passages)), is_yes, passages["judge_grade"] >= MISSING
    columns[3 : 2 + N_GROUPS] = passages["group"] == np.arange(1, N_GROUPS)[:, None]
    columns[2 + N_GROUPS :] = share, share * is_yes, passages["score"]
    return columns.T


def _fit(columns: FloatArray, relevant: FloatArray) -> FloatArray:
    """Fit by Newton's method, halving steps until the penalised likelihood rises."""

    def loss(coefficients: FloatArray) -> float:
        odds = columns @ coefficients
        apart = coefficients - _PRIOR
        likelihood = np.logaddexp(0.0, odds).sum() - relevant @ odds
        return float(likelihood + 0.5 * _PENALTY @ apart**2)

    coefficients = _PRIOR.copy()
    for _ in range(_ROUNDS):
        p = logistic(columns @ coefficients)
        gradient = columns.T @ (relevant - p) - _PENALTY * (coefficients - _PRIOR)
        curvature = (columns.T * (p * (1.0 - p))) @ columns + np.diag(_PENALTY)
        step, before = np.linalg.solve(curvature, gradient), loss(coefficients)
        while loss(coefficients + step) > before and np.abs(step).max() >= 1e-6:
            step = step / 2.0
        coefficients = coefficients + step
        if np.abs(step).max() < 1e-6:
            break
    return coefficients


SERVED, DROPPED, ANY_SERVED, ONE, DISCOUNTED, NEVER = range(N_QUANTITIES, N_QUANTITIES + 6)
N_COLUMNS = NEVER + 1
"""Columns of ``predicted``: the quantities; how many passages the judged ones stand for, of those
that the request was served and of the others; whether any is served; one; the rank discounts of
all; and the harm of those that could not be judged."""

REQUESTS_COUNT = 1.8
"""How much a graded request counts towards ``min_n``, if ``GRADES_COUNT`` grades count as 1. So
60 grades of 17 requests suffice for 30; MRR takes 30 requests, recall 30 dropped passages."""

_QUANTITY, _COLUMN = np.eye(N_QUANTITIES), np.eye(N_COLUMNS)
QUOTIENTS: Mapping[Metric, tuple[FloatArray, FloatArray]] = {
    Metric.PRECISION: (_QUANTITY[PRECISION], _COLUMN[ANY_SERVED]),
    Metric.SERVED_MRR: (_QUANTITY[RANK], _COLUMN[ANY_SERVED]),
    Metric.GAIN: (_QUANTITY[GAIN], _COLUMN[ONE]),
    Metric.HARM: (_QUANTITY[HARM], _COLUMN[ONE]),
    Metric.UDCG: (_QUANTITY[GAIN] - _QUANTITY[HARM], _COLUMN[ONE]),
    Metric.POOLED_RECALL: (_QUANTITY[KEPT], _QUANTITY[POOL]),
}
"""The metrics that people's labels correct: the numerator, of the quantities of a request; and the
denominator, of these or of the columns of ``predicted``."""


def predicted(rows: Rows, p: FloatArray, model: Model) -> FloatArray:
    """Compute the columns from which every estimate is made, before weighting by 1/π.

    Graded requests must be predicted without their own grades, so that the predictions cancel if
    everything is graded.

    Args:
        p: Shape (m,), P(relevant) of each passage, by ``model``.

    Returns:
        Shape (n, N_COLUMNS).
    """
    size, was_dropped = rows.passages["size"], rows.passages["group"] >= NEAR
    return np.column_stack(
        [
            quantities(rows, p, p * model.gain, (1.0 - p) * model.harm),
            rows.total(size * ~was_dropped),
            rows.total(size * was_dropped),
            rows.requests["n_served"] > 0,
            np.ones(len(rows.requests)),
            discounted(rows.by_rank(np.ones(len(p)))).sum(axis=1),
            never_judged(rows),
        ]
    )


def stands_for(
    first_pick: IntArray, is_graded: NDArray[np.bool_], n_by_pick: Mapping[int, int]
) -> FloatArray:
    """Return how many judged requests each graded one stands for, shape (n,).

    Requests of one first pick were opened in the order of a hash, by whichever draw, so each graded
    one stands for the same number of those that the pick could have opened.

    Args:
        first_pick: Shape (n,), the first pick that could have opened each.
        is_graded: Shape (n,), whether people graded all that was asked of it.
        n_by_pick: The judged requests of each first pick.

    Returns:
        0 for a request that is not graded, NaN where none of its pick is.

    >>> first_pick, is_graded = np.array([1, 1, 1, 2]), np.array([True, False, True, False])
    >>> stands_for(first_pick, is_graded, {1: 30, 2: 10}).tolist()
    [15.0, 0.0, 15.0, nan]
    """
    n_graded = Counter(first_pick[is_graded].tolist())
    shares = [
        n_by_pick[one] / n_graded[one] if n_graded[one] else nan for one in first_pick.tolist()
    ]
    of_pick = np.array(shares, np.float64)
    return np.where(is_graded | np.isnan(of_pick), of_pick, 0.0)


class Graded(NamedTuple):
    """The l requests for which people graded everything that a draw asked about.

    Attributes:
        rows: Their m judged passages.
        p: Shape (m,), P(relevant) as ``predicted`` has it.
        weight: Shape (l,), how many requests each stands for, up to a common factor.
        before: The same in the contexts that theirs are compared with; None where none are.
    """

    rows: Rows
    p: FloatArray
    weight: FloatArray
    before: Rows | None = None

    @classmethod
    def of(
        cls, rows: Rows, p: FloatArray, stands_for: FloatArray, before: Rows | None = None
    ) -> "Graded":
        """Select the graded requests from n requests.

        Args:
            p, before: As in ``Graded``, of all n.
            stands_for: Shape (n,), as returned by ``stands_for``.
        """
        chosen = stands_for > 0.0
        return cls(
            rows.take(chosen),
            p[chosen[rows.request]],
            stands_for[chosen] / rows.requests["probability"][chosen],
            None if before is None else before.take(chosen),
        )

    @property
    def cluster(self) -> IntArray:
        """Each request's cluster, shape (l,), from 0: its session, or itself if it has none."""
        session = self.rows.requests["session"]
        alone = np.where(session == 0, np.arange(len(session)), -1)
        keys = np.column_stack([session, alone])
        return np.unique(keys, axis=0, return_inverse=True)[1].ravel()

    def contributions(self, relevant: FloatArray, gain: FloatArray, harm: FloatArray) -> FloatArray:
        """Compute each passage's contribution to its request's ``quantities``, minus ``before``'s.

        No passage adds to reciprocal rank by itself, nor does one stand for others here.

        Returns:
            Shape (m, N_QUANTITIES).
        """
        found = _contributions(self.rows, relevant, gain, harm)
        if self.before is not None:
            found[:, :POOL] -= _contributions(self.before, relevant, gain, harm)[:, :POOL]
        return found


def _contributions(
    rows: Rows, relevant: FloatArray, gain: FloatArray, harm: FloatArray
) -> FloatArray:
    rank = rows.passages["rank"]
    discount = np.pad(discounts(int(rank.max(initial=0))), (1, 0))[rank]
    kept = relevant * (rank > 0)
    n_served = np.maximum(rows.requests["n_served"], 1)[rows.request]
    parts = kept / n_served, np.zeros(len(kept)), discount * gain, discount * harm, kept, relevant
    return np.column_stack(parts)


def corrected_estimates(
    sums: Sums, graded: Graded, model: Model, min_n: int
) -> dict[Metric, Estimate]:
    """Estimate the metrics of ``QUOTIENTS`` from predictions for all requests and people's grades.

    Args:
        sums: Sums of the columns of ``predicted``, by ``model``, over the judged requests.
        graded: At least one.
        min_n: Least number of labels, counted as ``REQUESTS_COUNT`` says.
    """
    requests, passages = graded.rows.requests, graded.rows.passages
    is_graded = passages["asked_probability"] > 0.0
    coefficients, errors = _correction(sums.totals, graded, model)
    n, n_grades = len(errors), int(np.count_nonzero(is_graded))
    n_dropped = int(np.count_nonzero(is_graded & (passages["group"] >= NEAR)))
    weight = graded.weight[requests["n_served"] > 0]
    n_opened = float(weight.sum() ** 2 / np.sum(weight**2)) if len(weight) else 0.0
    # The requests whose reciprocal rank would have been seen.
    n_seen = n_opened * float(requests["run_probability"].mean())
    enough = min(n * REQUESTS_COUNT, n_grades / GRADES_COUNT)
    usual = min(n, n_grades / GRADES_COUNT)
    # By metric: the effective number, and what counts towards ``min_n``.
    numbers = dict.fromkeys(QUOTIENTS, (usual, enough)) | {
        Metric.PRECISION: (usual, min(enough, len(weight) * REQUESTS_COUNT)),
        Metric.SERVED_MRR: (min(n, n_seen), min(n, n_opened)),
        Metric.POOLED_RECALL: (min(n, n_dropped), min(enough, n_dropped)),
    }
    most, least = np.array([model.gain, -model.harm]) * sums.totals[DISCOUNTED] / sums.totals[ONE]
    bounds = {Metric.GAIN: (0.0, most), Metric.HARM: (0.0, -least), Metric.UDCG: (least, most)}
    estimates: dict[Metric, Estimate] = {}
    for metric in QUOTIENTS:
        effective, counted = numbers[metric]
        is_mrr = metric is Metric.SERVED_MRR
        if counted < min_n - 1e-9:
            # Unequal weights may lower what a further grade counts, but never the number of grades.
            counted = min(n, len(weight)) if is_mrr else counted
            estimates[metric] = lacks_grades(min_n, n, counted, n_grades)
        elif is_mrr and (requests["run_probability"] == 0.0).any():
            estimates[metric] = Estimate.undefined(n)
        else:
            found = _corrected_ratio(
                metric,
                sums,
                coefficients,
                errors,
                effective=effective,
                n_observable=effective,
                bounds=bounds.get(metric, (0.0, 1.0)),
            )
            estimates[metric] = replace(found, grades=n_grades)
    return estimates


def corrected_differences(sums: Sums, graded: Graded, model: Model) -> dict[Metric, Estimate]:
    """Estimate the gain of some contexts over others in UDCG and pooled recall, in pairs.

    Args:
        sums: Sums of the columns of ``predicted``, by ``model``, the quantities below ``POOL`` and
            ``NEVER`` less those of the others.
        graded: At least one, with ``before``.
    """
    coefficients, errors = _correction(sums.totals, graded, model)
    return {
        metric: _corrected_ratio(metric, sums, coefficients, errors, effective=float(len(errors)))
        for metric in (Metric.UDCG, Metric.POOLED_RECALL)
    }


def _corrected_ratio(
    metric: Metric,
    sums: Sums,
    coefficients: FloatArray,
    errors: FloatArray,
    *,
    effective: float,
    n_observable: float = inf,
    bounds: tuple[float, float] | None = None,
) -> Estimate:
    """Estimate the quotient of a metric from the totals that ``corrected_totals`` returns.

    Args:
        bounds: As in ``linearised``; None for a difference, which has no bounds to reason from.

    Returns:
        Without a value where the denominator is not above 0.
    """
    n, (numerator, denominator) = len(errors), QUOTIENTS[metric]
    is_corrected = denominator.shape == numerator.shape
    ratio = sums.combined(
        numerator @ coefficients, denominator @ coefficients if is_corrected else denominator
    )
    if not ratio.totals[1] > 0.0 or ratio.n < 2:
        return Estimate(None, None, None, n, n_effective=effective)
    of_ratio = errors @ numerator
    if is_corrected:
        of_ratio = of_ratio - ratio.value * (errors @ denominator)
    return linearised(
        Metric.UDCG if bounds is None else metric,
        ratio,
        of_ratio,
        squares=ratio.squares(ratio.value),
        n=n,
        effective=effective,
        n_observable=n_observable,
        bounds=bounds or (-inf, inf),
    )


def _correction(totals: FloatArray, graded: Graded, model: Model) -> tuple[FloatArray, FloatArray]:
    """Correct the quantities' totals by people's grades, as ``corrected_totals`` returns them."""
    rows, of_request = graded.rows, graded.cluster
    p, passages, own = graded.p, rows.passages, rows.passages["asked_probability"] > 0.0
    worth = passages["people_worth"].astype(np.float64)
    relevant = np.asarray(passages["people_grade"] > 0, np.float64)
    found, expected = (
        graded.contributions(*each)[own]
        for each in (
            (relevant, np.maximum(worth, 0.0), np.maximum(-worth, 0.0)),
            (p, p * model.gain, (1.0 - p) * model.harm),
        )
    )
    probability = np.where(own, passages["asked_probability"], 1.0)
    weight = graded.weight[rows.request] * passages["size"] / probability
    # Served or dropped at the time of judging and grading.
    cells, place = np.unique((passages["group"] >= NEAR)[own] * 1, return_inverse=True)
    coefficients, errors = corrected_totals(
        totals,
        SERVED + cells,
        cell=place,
        weight=weight[own],
        found=found,
        expected=expected,
        cluster=of_request[rows.request[own]],
        n_clusters=int(of_request.max()) + 1,
    )
    coefficients[HARM, NEVER] = 1.0
    coefficients[RANK] = 0.0
    is_served = rows.requests["n_served"] > 0
    if is_served.any() and (rows.requests["run_probability"] > 0.0).all():
        by_rank = rows.by_rank(relevant), rows.by_rank(p)
        seen, told = (each[is_served, None] for each in _ranks_found(rows.requests, *by_rank))
        [coefficients[RANK]], of_rank = corrected_totals(
            totals,
            np.array([ANY_SERVED]),
            cell=np.zeros(len(seen), np.intp),
            weight=graded.weight[is_served],
            found=seen,
            expected=told,
            cluster=of_request[is_served],
            n_clusters=len(errors),
            first=RANK,
        )
        errors[:, RANK] = of_rank[:, 0]
    return coefficients, errors


def corrected_totals(
    totals: FloatArray,
    sizes: IntArray,
    *,
    cell: IntArray,
    weight: FloatArray,
    found: FloatArray,
    expected: FloatArray,
    cluster: IntArray,
    n_clusters: int,
    first: int = 0,
) -> tuple[FloatArray, FloatArray]:
    """Correct the totals of q of p columns using the mean error of each cell.

    The prediction counts only as far as it helps: by its power, in [0, 1], the slope of the found
    on the predicted, within cells.

    Args:
        totals: Shape (p,), over all requests.
        sizes: Shape (cells,), the columns that hold the size of each cell.
        cell: Shape (m,), the cell of each observation; each cell has one.
        weight: Shape (m,), how many each represents, up to a common factor by cell.
        found, expected: Shape (m, q), as observed and as predicted.
        cluster: Shape (m,), below ``n_clusters``.
        first: The first of the q columns.

    Returns:
        Shape (q, p), a corrected total as a linear combination of all totals; and shape
        (n_clusters, q), the contribution of each cluster to its error.
    """
    count = np.bincount(cell)
    shares = weight * (totals[sizes] / np.bincount(cell, weight))[cell]

    def means(values: FloatArray) -> FloatArray:
        added = [np.bincount(cell, shares * column) for column in values.T]
        seen = np.bincount(cell, shares).clip(1e-300)
        return np.asarray(np.column_stack(added) / seen[:, None], np.float64)

    observed, told = found - means(found)[cell], expected - means(expected)[cell]
    both, squares = shares @ (observed * told), shares @ told**2
    is_told = squares > 1e-12 * shares.sum()
    power = np.divide(both, squares, out=np.zeros_like(both), where=is_told).clip(0.0, 1.0)
    coefficients = np.eye(len(power), len(totals), first) * power[:, None]
    coefficients[:, sizes] = means(found - power * expected).T
    errors = np.zeros((n_clusters, len(power)))
    scale = shares * np.sqrt(count / np.maximum(count - 1, 1))[cell]
    np.add.at(errors, cluster, (observed - power * told) * scale[:, None])
    return coefficients, errors


def _ranks_found(
    requests: NDArray[np.void], found: FloatArray, likely: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return each request's reciprocal rank, as people found it and as predicted, shape (l,).

    One that was not graded on below an irrelevant first passage stands for those that were: 1 if
    the first is relevant, else h + is_run/run_probability · (RR − h), with the predicted h.

    Args:
        found: Shape (l, k), whether people call each relevant, by rank; 0 where they did not grade.
        likely: Shape (l, k), P(relevant).
    """
    told, top = reciprocal_ranks(likely), likely[:, :1].sum(axis=1)
    below = (told - top) / np.maximum(1.0 - top, 1e-9)
    share = requests["is_run"] / requests["run_probability"]
    later = below + share * (reciprocal_ranks(found) - below)
    return np.where(found[:, :1].any(axis=1), 1.0, later), told
