"""Metrics from a judge's verdicts on all requests and people's grades of single passages.

A request's later passages teach little, so people grade passages, not requests (``draw``): opened
requests from the top down, and single passages of others. Every judged request has a predicted
value of each metric (``relevance``), which the grades correct: by the mean error of each cell of
rank group and verdict (Hájek's estimator, with the inverse of the probability with which each
passage was asked for), the two frames mixed by Kish's effective numbers. Reciprocal rank follows
the run from the top instead. The predictions count as far as they narrow the result, as in PPI++
(Angelopoulos, Duchi and Zrnic, 2023, arXiv 2311.01453). The centre is right whatever the judge's
errors; they only set the width. Pure: no I/O, no clock, no logging.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray
from ctxguard.monitor.estimation.ratio import (
    GRADES_COUNT,
    Estimate,
    lacks_grades,
    linearised,
)
from ctxguard.monitor.estimation.relevance import (
    FAR,
    FOLDS,
    MISSING,
    N_GROUPS,
    N_VERDICTS,
    NEAR,
    NO,
    YES,
    IntArray,
    JudgedPassages,
    Model,
    rank_group,
)
from ctxguard.monitor.estimation.sums import Sums
from ctxguard.monitor.estimation.terms import DROPPED, Metric, Table, scores_of

PRECISION, RANK, GAIN, HARM, KEPT, POOL = range(6)
"""Quantities of a request: precision, reciprocal rank, gain, harm, relevant served, relevant in the
pool."""
N_QUANTITIES = 6

CELLS = slice(N_QUANTITIES, N_QUANTITIES + N_VERDICTS * N_GROUPS)
FIRSTS = slice(CELLS.stop, CELLS.stop + N_VERDICTS)
ANY_SERVED, ONE, JUDGE_PRECISION, JUDGE_DISCOUNTED, DISCOUNTED = range(FIRSTS.stop, FIRSTS.stop + 5)
N_COLUMNS = DISCOUNTED + 1

RUN, SINGLE = 0, 1
"""Frames: opened requests, and single passages of others."""

PASSAGE = np.dtype(
    [
        ("pick", "<i8"),
        ("frame", "<i1"),
        ("rank", "<i2"),
        ("group", "<i1"),
        ("verdict", "<i1"),
        ("went_on", "<i1"),
        *((name, "<f8") for name in ("relevant", "gain", "harm", "size", "probability", "go_on")),
    ]
)
"""One graded passage: the draw that asked for it, its frame, its rank, 1-based among those served
(0 for a dropped passage), rank group and verdict as in ``relevance``; by people's grade whether it
is relevant, its utility, and the same below 0. ``size`` is 1 / its probability of being judged,
``probability`` that of its grade, in an opened request that within it; ``went_on`` is whether its
run was to go on below an irrelevant first passage, ``go_on`` the probability of that."""

REQUESTS_COUNT = 1.5
"""What a request with grades counts towards ``min_n``, where ``GRADES_COUNT`` grades count 1. So
60 grades of 20 requests suffice for 30; MRR takes 30 runs from the top, recall 30 dropped
passages."""

_FEWEST_IN_CELL = 10
"""Cells with fewer grades share the mean error of their nearest neighbour."""


class Population(NamedTuple):
    """Judged requests, n of them.

    Attributes:
        verdict: Shape (n, k), of the served passages by rank; −1 past the last.
        dropped: Shape (n, 2, 2), judged dropped passages by nearness and verdict (no, yes), each
            divided by its probability of being judged.
        weight: Shape (n,), 1/π of the request.
        chance: Shape (n,), the lowest probability with which a dropped passage was judged.
        score: Shape (n, k), the judge's log-odds of the served passages, as in ``relevance``.
    """

    verdict: NDArray[np.int8]
    dropped: FloatArray
    weight: FloatArray
    chance: FloatArray
    score: FloatArray

    @classmethod
    def of(cls, table: Table) -> "Population":
        """Read the rows of judged requests."""
        n = table["n_served"].astype(np.int64)
        places = np.arange(n.max(initial=0))
        yes, missing = ((table[name][:, None] >> places) & 1 for name in ("yes", "missing"))
        verdict = np.where(missing > 0, MISSING, np.where(yes > 0, YES, NO))
        return cls(
            np.where(places < n[:, None], verdict, -1).astype(np.int8),
            np.stack([table[name] for name in DROPPED], axis=1).reshape(-1, 2, 2),
            1.0 / table["probability"],
            table["dropped_probability"],
            scores_of(table, len(places)),
        )

    @property
    def n_served(self) -> IntArray:
        """Number of served passages of each request, shape (n,)."""
        return np.asarray(np.count_nonzero(self.verdict >= 0, axis=1), np.intp)

    @property
    def n_yes(self) -> IntArray:
        """Number of these that the judge calls relevant, shape (n,)."""
        return np.asarray(np.count_nonzero(self.verdict == YES, axis=1), np.intp)

    def take(self, rows: IntArray | NDArray[np.bool_]) -> "Population":
        """Return some of the requests."""
        return Population._make(column[rows] for column in self)


class Grades(NamedTuple):
    """Passages that people graded: m passages of l labelled requests.

    Attributes:
        passages: Shape (m,), as ``PASSAGE``.
        request: Shape (m,), the labelled request of each, below l.
        weight: Shape (m,), how many judged passages each stands for in its own frame, each divided
            by its probability of being judged; up to a common factor by frame.
        judged: The l requests.
        fold: Shape (l,), below ``FOLDS``.
        cluster: Shape (l,), from 0.
    """

    passages: NDArray[np.void]
    request: IntArray
    weight: FloatArray
    judged: Population
    fold: IntArray
    cluster: IntArray

    def take(self, chosen: NDArray[np.bool_]) -> "Grades":
        """Return those of some requests."""
        own = chosen[self.request]
        return Grades(
            self.passages[own],
            (np.cumsum(chosen) - 1)[self.request[own]],
            self.weight[own],
            self.judged.take(chosen),
            self.fold[chosen],
            np.unique(self.cluster[chosen], return_inverse=True)[1],
        )

    @property
    def is_first(self) -> NDArray[np.bool_]:
        """Shape (m,), whether each is the first passage of a run."""
        return np.asarray((self.passages["frame"] == RUN) & (self.passages["rank"] == 1))

    def described(self) -> JudgedPassages:
        """Return what the judge said of the passages and of what else their requests served."""
        row, rank = self.request, self.passages["rank"].astype(np.intp)
        score = np.zeros(len(row))
        is_served = rank > 0
        score[is_served] = self.judged.score[row[is_served], rank[is_served] - 1]
        return JudgedPassages(
            self.passages["verdict"].astype(np.intp),
            self.passages["group"].astype(np.intp),
            self.judged.n_served[row],
            self.judged.n_yes[row],
            score,
        )

    def fitted_model(self) -> Model:
        """Fit what is predicted of passages to these grades."""
        is_relevant = self.passages["relevant"] > 0.0
        gains, harms = self.passages["gain"][is_relevant], self.passages["harm"][~is_relevant]
        model = Model.fitted(self.described(), self.fold[self.request], self.passages["relevant"])
        return replace(
            model,
            gain=float(gains.mean()) if len(gains) else 1.0,
            harm=float(harms.mean()) if len(harms) else 0.5,
        )


def predicted(
    population: Population, model: Model, fold: IntArray | None = None
) -> tuple[FloatArray, FloatArray]:
    """Predict the relevance of every judged passage.

    Args:
        population: n requests.
        model: The fitted model.
        fold: Shape (n,), the fold that is left out; None for the mean of all fits.

    Returns:
        Shape (n, k), of the served, 0 past the last; and (n, 2, 2), of the dropped by nearness and
        verdict.
    """
    n, k = population.verdict.shape
    n_served, n_yes = population.n_served, population.n_yes
    verdict = np.maximum(population.verdict, 0).astype(np.intp)
    group = np.broadcast_to(rank_group(np.arange(1, k + 1)), (n, k))
    wide = (None if fold is None else fold[:, None]), n_served[:, None], n_yes[:, None]
    served = model.of(JudgedPassages(verdict, group, *wide[1:], population.score), wide[0])
    # Dropped passages have no scores: one prediction for all requests with as many verdicts.
    folds = np.zeros(n, np.intp) if fold is None else fold
    codes, of_request = np.unique((n_served * (k + 1) + n_yes) * FOLDS + folds, return_inverse=True)
    counts, own_fold = np.divmod(codes[:, None], FOLDS)
    shape = len(codes), 4
    of_kind = model.of(
        JudgedPassages(
            np.broadcast_to([NO, YES, NO, YES], shape),
            np.broadcast_to([NEAR, NEAR, FAR, FAR], shape),
            *np.divmod(counts, k + 1),
            np.zeros(shape),
        ),
        None if fold is None else own_fold,
    )
    return np.where(population.verdict >= 0, served, 0.0), of_kind[of_request].reshape(n, 2, 2)


def basis(population: Population, model: Model) -> FloatArray:
    """Compute the columns from which every estimate is made, before weighting by 1/π.

    Returns:
        Shape (n, N_COLUMNS): the predicted quantities; the number of passages in each cell of
        verdict and rank group; whether the first passage has each verdict; whether any was served;
        ones; the judge's precision; and the rank discounts of what it calls relevant and of all.
    """
    served, dropped = predicted(population, model)
    is_served, n_served = population.verdict >= 0, population.n_served
    n, k = served.shape
    discounts = 1.0 / np.log2(np.arange(2, k + 2))
    kept = served.sum(axis=1)
    first, below = reciprocal_ranks(served)
    cells = np.zeros((n, N_VERDICTS, N_GROUPS))
    firsts = np.zeros((n, N_VERDICTS))
    for verdict in range(N_VERDICTS):
        has = population.verdict == verdict
        firsts[:, verdict] = has[:, :1].any(axis=1)
        for group in range(NEAR):
            cells[:, verdict, group] = has[:, rank_group(np.arange(1, k + 1)) == group].sum(axis=1)
    # A dropped passage without a verdict is treated as missing at random.
    cells[:, :MISSING, NEAR:] = population.dropped.transpose(0, 2, 1)
    return np.column_stack(
        [
            kept / np.maximum(n_served, 1),
            first + (1.0 - first) * below,
            model.gain * served @ discounts,
            model.harm * (is_served - served) @ discounts,
            kept,
            kept + (dropped * population.dropped).sum(axis=(1, 2)),
            cells.reshape(n, -1),
            firsts,
            n_served > 0,
            np.ones(n),
            population.n_yes / np.maximum(n_served, 1),
            (population.verdict == YES) @ discounts,
            is_served @ discounts,
        ]
    )


def reciprocal_ranks(relevance: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Predict reciprocal ranks, with passages taken to be independent given the judge.

    Args:
        relevance: Shape (n, k), P(relevant) by rank.

    Returns:
        Shape (n,) each: P(the first is relevant), and the mean reciprocal rank if it is not.

    >>> [each.tolist() for each in reciprocal_ranks(np.array([[0.5, 1.0, 1.0]]))]
    [[0.5], [0.5]]
    """
    later = relevance[:, 1:]
    below = (later * none_above(later) / np.arange(2, relevance.shape[1] + 1)).sum(axis=1)
    return relevance[:, :1].sum(axis=1), below


def none_above(relevance: FloatArray) -> FloatArray:
    """Predict that no passage above each rank is relevant, by P(relevant); shape (n, k) each."""
    passed = np.column_stack([np.ones(len(relevance)), 1.0 - relevance])[:, :-1]
    return np.asarray(np.cumprod(passed, axis=1))


def joint_estimates(sums: Sums, grades: Grades, model: Model, min_n: int) -> dict[Metric, Estimate]:
    """Estimate the metrics of ``QUOTIENTS`` from predictions for all requests and people's grades.

    Args:
        sums: Sums of the columns of ``basis`` over the judged requests.
        grades: At least one.
        model: What was predicted.
        min_n: Least number of labels, counted as ``REQUESTS_COUNT`` says.
    """
    estimates: dict[Metric, Estimate] = {}
    is_first = grades.is_first
    opened = grades.request[is_first]
    coefficients, by_request = _of_passages(sums.totals, grades, model)
    n_opened = n_seen = 0.0
    if len(opened):
        by_request[:, RANK] += _of_runs(coefficients, sums.totals, grades, model)
        weight, first = grades.weight[is_first], grades.passages[is_first]
        n_opened = float(weight.sum() ** 2 / np.sum(weight**2))
        # Those of them whose reciprocal rank would have been seen.
        n_seen = n_opened * float(np.where(first["relevant"] > 0.0, 1.0, first["go_on"]).mean())
    residuals = np.zeros((grades.cluster.max() + 1, N_QUANTITIES))
    np.add.at(residuals, grades.cluster, by_request)
    n, n_runs = len(residuals), len(np.unique(grades.cluster[opened]))
    n_grades = len(grades.request)
    counts = {
        True: (n_runs, n_seen, min(n_runs, n_opened)),
        False: (n, n_grades / GRADES_COUNT, min(n * REQUESTS_COUNT, n_grades / GRADES_COUNT)),
    }
    most = np.array([model.gain, model.harm])
    most *= sums.totals[DISCOUNTED] / sums.totals[ONE]
    bounds = {
        Metric.GAIN: (0.0, float(most[0])),
        Metric.HARM: (0.0, float(most[1])),
        Metric.UDCG: (-float(most[1]), float(most[0])),
    }
    for metric, (numerator, denominator) in QUOTIENTS.items():
        is_ratio = denominator.shape == numerator.shape
        n, effective, counted = counts[metric is Metric.SERVED_MRR]
        if metric is Metric.POOLED_RECALL:
            n_dropped = float(np.count_nonzero(grades.passages["rank"] == 0))
            effective = counted = min(counted, n_dropped)
        effective = min(n, effective)
        if counted < min_n - 1e-9:
            estimates[metric] = lacks_grades(n, counted, min_n, n_grades)
            continue
        ratio = sums.combined(
            numerator @ coefficients, denominator @ coefficients if is_ratio else denominator
        )
        if not ratio.b > 0.0 or ratio.n < 2:
            estimates[metric] = Estimate(
                None, None, None, n, "none", grades=n_grades, n_effective=effective
            )
            continue
        errors = residuals @ numerator
        if is_ratio:
            errors = errors - ratio.a / ratio.b * (residuals @ denominator)
        found = linearised(
            metric,
            ratio,
            errors,
            squares=ratio.squares,
            n=n,
            effective=effective,
            n_observable=effective,
            method="joint",
            bounds=bounds.get(metric, (0.0, 1.0)),
        )
        estimates[metric] = replace(found, grades=n_grades)
    return estimates


def _of_passages(totals: FloatArray, grades: Grades, model: Model) -> tuple[FloatArray, FloatArray]:
    """Correct the totals of what is predicted by what people found in single passages.

    Returns:
        Shape (N_QUANTITIES, N_COLUMNS), coefficients of the columns of ``basis``; reciprocal rank
        is as predicted. Shape (l, N_QUANTITIES), the error that each request adds to the totals.
    """
    passages, weight = grades.passages, grades.weight
    cell = joined_cells(passages["verdict"], passages["group"])
    own = cell[passages["verdict"], passages["group"]]
    # Each frame counts as many equal grades as it is worth in the cell (Kish).
    frame = own * 2 + passages["frame"]
    worth = np.bincount(frame, weight) / np.bincount(frame, weight**2).clip(1e-300)
    means, power, residuals = regressed(
        own,
        _sizes(cell, totals[CELLS].reshape(N_VERDICTS, N_GROUPS)),
        weight * worth[frame],
        *_contributions(grades, model),
    )
    coefficients = np.eye(N_QUANTITIES, N_COLUMNS)
    coefficients[:, :N_QUANTITIES] *= power[:, None]
    means = np.vstack([means, np.zeros(N_QUANTITIES)])  # the cells of number -1
    coefficients[:, CELLS] = means[cell.ravel()].T
    by_request = np.zeros((len(grades.fold), N_QUANTITIES))
    np.add.at(by_request, grades.request, residuals)
    return coefficients, by_request


def _of_runs(
    coefficients: FloatArray, totals: FloatArray, grades: Grades, model: Model
) -> FloatArray:
    """Correct the total of reciprocal ranks by the requests graded from the top down.

    A run that was not to go on below an irrelevant first passage stands for those that did: 1 if
    the first is relevant, else h + went_on/go_on · (RR − h), with the predicted h.

    Args:
        coefficients: As of ``_of_passages``; its row of reciprocal rank is written.

    Returns:
        Shape (l,), the error that each labelled request adds to the total.
    """
    passages, is_first = grades.passages, grades.is_first
    opened = grades.request[is_first]
    hits = (passages["frame"] == RUN) & (passages["rank"] > 0) & (passages["relevant"] > 0.0)
    ranks = np.zeros(len(grades.fold))
    np.maximum.at(ranks, grades.request[hits], 1.0 / passages["rank"][hits])
    served, _ = predicted(grades.judged, model, grades.fold)
    top, below = reciprocal_ranks(served[opened])
    runs = passages[is_first]
    later = below + (runs["went_on"] > 0) / runs["go_on"] * (ranks[opened] - below)
    found = np.where(runs["relevant"] > 0.0, 1.0, later)
    verdict = grades.judged.verdict[opened, 0].astype(np.int64)
    cell = joined_cells(verdict, np.zeros_like(verdict))[:, 0]
    means, power, residuals = regressed(
        cell[verdict],
        _sizes(cell, totals[FIRSTS]),
        grades.weight[is_first],
        found[:, None],
        (top + (1.0 - top) * below)[:, None],
    )
    coefficients[RANK] = 0.0
    coefficients[RANK, RANK], coefficients[RANK, FIRSTS] = power[0], means[cell, 0]
    by_request = np.zeros(len(grades.fold))
    np.add.at(by_request, opened, residuals[:, 0])
    return by_request


def regressed(
    cell: IntArray,
    sizes: FloatArray,
    weight: FloatArray,
    found: FloatArray,
    expected: FloatArray,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Estimate the mean error of each cell, with the prediction counted as far as it helps.

    Args:
        cell: Shape (m,), the cell of each observation; each cell has one.
        sizes: Shape (c,), the size of each cell in the population.
        weight: Shape (m,), how many each stands for, up to a common factor by cell.
        found, expected: Shape (m, q), as observed and as predicted.

    Returns:
        Shape (c, q), the mean of found − power·expected. Shape (q,), the power, in [0, 1]: the
        slope of what was found on what was predicted, within cells. Shape (m, q), what each
        observation adds to the error of the totals.
    """
    count = np.bincount(cell)
    shares = weight * (sizes / np.bincount(cell, weight))[cell]

    def means(values: FloatArray) -> FloatArray:
        added = [np.bincount(cell, shares * column) for column in values.T]
        sizes_seen = np.bincount(cell, shares).clip(1e-300)
        return np.asarray(np.column_stack(added) / sizes_seen[:, None], np.float64)

    observed, predicted_part = found - means(found)[cell], expected - means(expected)[cell]
    both, squares = shares @ (observed * predicted_part), shares @ predicted_part**2
    power = np.divide(both, squares, out=np.zeros_like(both), where=squares > 1e-12 * shares.sum())
    power = power.clip(0.0, 1.0)
    scale = shares * np.sqrt(count / np.maximum(count - 1, 1))[cell]
    residuals = (observed - power * predicted_part) * scale[:, None]
    return means(found - power * expected), power, residuals


def joined_cells(verdict: IntArray, group: IntArray) -> IntArray:
    """Number the cells, one with few grades as its nearest neighbour.

    Served and dropped passages are never joined: they count in different quantities.

    Args:
        verdict, group: Shape (m,), of the grades.

    Returns:
        Shape (N_VERDICTS, N_GROUPS); every number from 0 has a grade, and −1 stands for the cells
        of served or dropped passages of which none is graded.
    """
    counts = np.zeros((N_VERDICTS, N_GROUPS), np.intp)
    np.add.at(counts, (verdict, group), 1)
    joined, n = np.full(counts.shape, -1), 0
    for part in (slice(NEAR), slice(NEAR, None)):
        own = counts[:, part]
        enough = np.argwhere(own >= np.clip(own.max(), 1, _FEWEST_IN_CELL))
        if len(enough):
            cells = np.argwhere(np.ones_like(own))
            apart = np.abs(cells[:, None, :] - enough[None, :, :]) @ np.array([2.5, 1.0])
            joined[:, part] = n + apart.argmin(axis=1).reshape(own.shape)
            n += len(enough)
    return joined


def _sizes(cell: IntArray, sizes: FloatArray) -> FloatArray:
    seen = cell >= 0
    return np.asarray(np.bincount(cell[seen], sizes[seen]), np.float64)


def _contributions(grades: Grades, model: Model) -> tuple[FloatArray, FloatArray]:
    """Compute what each graded passage adds to the quantities, as found and as predicted.

    Returns:
        Shape (m, N_QUANTITIES) each; 0 for reciprocal rank, to which no passage adds by itself.
    """
    described, passages = grades.described(), grades.passages
    is_served, n_served = described.group < NEAR, np.maximum(described.n_served, 1)
    p = model.of(described, grades.fold[grades.request])
    discount = np.where(is_served, 1.0 / np.log2(np.maximum(passages["rank"], 1) + 1.0), 0.0)

    def columns(relevant: FloatArray, gain: FloatArray, harm: FloatArray) -> FloatArray:
        kept = is_served * relevant
        none = np.zeros(len(kept))
        return np.column_stack(
            [kept / n_served, none, discount * gain, discount * harm, kept, relevant]
        )

    return (
        columns(passages["relevant"], passages["gain"], passages["harm"]),
        columns(p, p * model.gain, (1.0 - p) * model.harm),
    )


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
denominator, of these or of the columns of ``basis``."""
