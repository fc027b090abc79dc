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

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray
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
    Relevance,
    rank_group,
)
from ctxguard.monitor.estimation.terms import Table, scores_of

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

_DROPPED = ("near_no", "near_yes", "far_no", "far_yes")

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
            np.stack([table[name] for name in _DROPPED], axis=1).reshape(-1, 2, 2),
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
        request: Shape (m,), the labelled request, below l.
        frame: Shape (m,), ``RUN`` or ``SINGLE``.
        rank: Shape (m,), 1-based among those served; 0 for a dropped passage.
        group: Shape (m,), its rank group, as in ``relevance``.
        verdict: Shape (m,), the judge's.
        relevant: Shape (m,), 0 or 1.
        gain, harm: Shape (m,), its utility by people's grade, and the same below 0.
        weight: Shape (m,), how many judged passages it stands for in its own frame, each divided
            by its probability of being judged; up to a common factor by frame.
    """

    request: IntArray
    frame: IntArray
    rank: IntArray
    group: IntArray
    verdict: IntArray
    relevant: FloatArray
    gain: FloatArray
    harm: FloatArray
    weight: FloatArray


class Opened(NamedTuple):
    """Requests that were graded from the top down, o of them.

    Attributes:
        request: Shape (o,), the labelled request.
        weight: Shape (o,), how many judged requests each stands for, up to a common factor.
        go_on: Shape (o,), the probability of going on below an irrelevant first passage.
        went_on: Shape (o,), whether it was.
        first_relevant: Shape (o,), whether the first passage is relevant.
        reciprocal_rank: Shape (o,), if the first is relevant or the run went on.
    """

    request: IntArray
    weight: FloatArray
    go_on: FloatArray
    went_on: NDArray[np.bool_]
    first_relevant: NDArray[np.bool_]
    reciprocal_rank: FloatArray


class Model(NamedTuple):
    """What is predicted of a passage.

    Attributes:
        relevance: P(relevant).
        gain: Mean gain of a passage that people call relevant.
        harm: Mean harm of one that they do not.
    """

    relevance: Relevance
    gain: float = 1.0
    harm: float = 0.5


class CorrectedQuantities(NamedTuple):
    """The quantities of requests as people would find them, and how certain that is.

    Attributes:
        coefficients: Shape (N_QUANTITIES, N_COLUMNS), of the columns of ``basis``.
        residuals: Shape (l, N_QUANTITIES), the error that each labelled request adds to the totals.
        n_opened: Effective number of opened requests.
        n_seen: Those of them whose reciprocal rank would have been seen.
    """

    coefficients: FloatArray
    residuals: FloatArray
    n_opened: float
    n_seen: float


def fitted_model(grades: Grades, labelled: Population, fold: IntArray) -> Model:
    """Fit what is predicted of passages to people's grades.

    Args:
        grades: The graded passages.
        labelled: Their requests, l of them.
        fold: Shape (l,), below ``FOLDS``.
    """
    relevance = Relevance.fitted(
        judged_passages(grades, labelled), fold[grades.request], grades.relevant
    )
    is_relevant = grades.relevant > 0.0
    gains, harms = grades.gain[is_relevant], grades.harm[~is_relevant]
    worths = gains.mean() if len(gains) else 1.0, harms.mean() if len(harms) else 0.5
    return Model(relevance, *map(float, worths))


def judged_passages(grades: Grades, labelled: Population) -> JudgedPassages:
    """What the judge said of the graded passages and of what else their requests served."""
    row = grades.request
    if not len(row):
        return JudgedPassages(grades.verdict, grades.group, row, row, np.zeros(0))
    place = np.maximum(grades.rank - 1, 0)
    score = np.where(grades.rank > 0, labelled.score[row, place], 0.0)
    return JudgedPassages(
        grades.verdict, grades.group, labelled.n_served[row], labelled.n_yes[row], score
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
    served = model.relevance.of(
        JudgedPassages(verdict, group, *wide[1:], population.score), wide[0]
    )
    # Dropped passages have no scores: one prediction for all requests with as many verdicts.
    folds = np.zeros(n, np.intp) if fold is None else fold
    codes, of_request = np.unique((n_served * (k + 1) + n_yes) * FOLDS + folds, return_inverse=True)
    counts, own_fold = np.divmod(codes[:, None], FOLDS)
    shape = len(codes), 4
    of_kind = model.relevance.of(
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
    none_above = np.cumprod(np.column_stack([np.ones(len(later)), 1.0 - later]), axis=1)[:, :-1]
    below = (later * none_above / np.arange(2, relevance.shape[1] + 1)).sum(axis=1)
    return relevance[:, :1].sum(axis=1), below


def corrected(
    totals: FloatArray,
    found: tuple[Grades, Opened],
    labelled: Population,
    fold: IntArray,
    model: Model,
) -> CorrectedQuantities:
    """Correct what is predicted of all judged requests by what people found in some.

    Args:
        totals: Shape (N_COLUMNS,), the columns of ``basis`` added up over all judged requests,
            weighted by 1/π.
        found: The graded passages, at least one; and the requests graded from the top down.
        labelled: The requests of both, l of them.
        fold: Shape (l,), their folds.
    """
    grades, opened = found
    coefficients = np.eye(N_QUANTITIES, N_COLUMNS)
    sizes = totals[CELLS].reshape(N_VERDICTS, N_GROUPS)
    cell = joined_cells(grades.verdict, grades.group)
    own = cell[grades.verdict, grades.group]
    # Each frame counts as many equal grades as it is worth in the cell (Kish).
    frame = own * 2 + grades.frame
    worth = np.bincount(frame, grades.weight) / np.bincount(frame, grades.weight**2).clip(1e-300)
    means, power, residuals = regressed(
        own,
        _sizes(cell, sizes),
        grades.weight * worth[frame],
        *_contributions(grades, labelled, fold, model),
    )
    coefficients[:, :N_QUANTITIES] *= power[:, None]
    means = np.vstack([means, np.zeros(N_QUANTITIES)])  # the cells of number -1
    coefficients[:, CELLS] = means[cell.ravel()].T
    by_request = np.zeros((len(fold), N_QUANTITIES))
    np.add.at(by_request, grades.request, residuals)
    n_opened = n_seen = 0.0
    if len(opened.request):
        served, _ = predicted(labelled, model, fold)
        verdict = labelled.verdict[opened.request, 0].astype(np.int64)
        cell = joined_cells(verdict, np.zeros_like(verdict))[:, 0]
        means, power, residuals = regressed(
            cell[verdict],
            _sizes(cell, totals[FIRSTS]),
            opened.weight,
            *_ranks(opened, served[opened.request]),
        )
        coefficients[RANK] = 0.0
        coefficients[RANK, RANK], coefficients[RANK, FIRSTS] = power[0], means[cell, 0]
        np.add.at(by_request[:, RANK], opened.request, residuals[:, 0])
        chance = np.where(opened.first_relevant, 1.0, opened.go_on).mean()
        n_opened = float(opened.weight.sum() ** 2 / np.sum(opened.weight**2))
        n_seen = n_opened * float(chance)
    return CorrectedQuantities(coefficients, by_request, n_opened, n_seen)


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


def _contributions(
    grades: Grades, labelled: Population, fold: IntArray, model: Model
) -> tuple[FloatArray, FloatArray]:
    """Compute what each graded passage adds to the quantities, as found and as predicted.

    Returns:
        Shape (m, N_QUANTITIES) each; 0 for reciprocal rank, to which no passage adds by itself.
    """
    row, is_served = grades.request, grades.group < NEAR
    passages = judged_passages(grades, labelled)
    n_served = passages.n_served
    p = model.relevance.of(passages, fold[row])
    discount = np.where(is_served, 1.0 / np.log2(np.maximum(grades.rank, 1) + 1.0), 0.0)

    def columns(relevant: FloatArray, gain: FloatArray, harm: FloatArray) -> FloatArray:
        kept = is_served * relevant
        share = kept / np.maximum(n_served, 1)
        none = np.zeros(len(row))
        return np.column_stack([share, none, discount * gain, discount * harm, kept, relevant])

    return (
        columns(grades.relevant, grades.gain, grades.harm),
        columns(p, p * model.gain, (1.0 - p) * model.harm),
    )


def _ranks(opened: Opened, served: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Compute each opened request's reciprocal rank, as found and as predicted; shape (o, 1).

    A run that was not to go on below an irrelevant first passage stands for those that did: 1 if
    the first is relevant, else h + went_on/go_on · (RR − h), with the predicted h.
    """
    first, below = reciprocal_ranks(served)
    later = below + opened.went_on / opened.go_on * (opened.reciprocal_rank - below)
    found = np.where(opened.first_relevant, 1.0, later)
    return found[:, None], (first + (1.0 - first) * below)[:, None]
