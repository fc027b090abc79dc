"""The judged candidates of requests: a policy fitted to them, and its metrics with intervals.

One row is one judged candidate. People graded some of the rows, each with a known probability; f,
a ridge logistic regression of their grades on what the judge said, predicts all of them.
P(relevant) is fitted to the grade where there is one and else to f. A metric is a ratio of sums
over the rows: of what f predicts, corrected by the mean error of the graded rows, of served and of
dropped candidates apart (Hájek), and counted as far as that narrows the result (Angelopoulos, Duchi
and Zrnic, 2023, arXiv 2311.01453). Without grades there is the judge's own view alone. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.asked_questions import JUDGED_DEPTH
from calibration.calibrate_route import Settings
from calibration.evaluate import contexts
from calibration.fit import fit_model, pool_features
from calibration.objectives import LOST_QUERIES
from calibration.pool_labels import IntArray
from calibration.replay import Pools
from ctxguard._support.words import count
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy
from ctxguard.core.scores import discounts
from ctxguard.core.types import FloatArray
from ctxguard.errors import CalibrationError
from ctxguard.measure.corrected import FOLDS, GradeCorrection, Model, corrected_ratio, ranks_found
from ctxguard.measure.estimate import Sums
from ctxguard.measure.interval import Interval
from ctxguard.measure.metrics import (
    FAILED,
    MISSING,
    MOST_FAILED,
    YES,
    Metric,
    Rows,
    reciprocal_ranks,
)
from ctxguard.measure.worth import Utilities

KS = (1, 3, 5, 10, 20)
METRICS = ("precision", "mrr", "udcg", "recall")
FEWEST_GRADES, FEWEST_GRADED = 60, 10
"""Grades of people, and requests that have some, below which theirs correct nothing."""
_FEWEST_IN_CELL = 5
"""Grades of served, and of dropped candidates, below which neither mean error is known."""


@dataclass(frozen=True)
class JudgedCandidates:
    """The m judged candidates of n requests.

    Attributes:
        pools: All candidates of the requests, in the order of the decision.
        rows: The requests, in the order of the pools, and the candidates; the chance of a grade is
            0 where it does not stand for others.
        column: Shape (m,), the place of each in its pool.
        weight: Shape (n,), how many requests each stands for.
        opened: Shape (n,), the probability of having been opened for people to grade; NaN where no
            draw could.
        cluster: Shape (n,), from 0: the session or question of each.
        fold: Shape (n,), below ``FOLDS``, the same for all requests of a question.
        can_be_judged: Shape (n, depth), whether each candidate had a chance of being judged.
        is_exact: Whether the judge knows people's labels, which stand for grades of everything.
    """

    pools: Pools
    rows: Rows
    column: IntArray
    weight: FloatArray
    opened: FloatArray
    cluster: IntArray
    fold: IntArray
    can_be_judged: NDArray[np.bool_]
    is_exact: bool = False

    @property
    def row(self) -> IntArray:
        """The request of each candidate, shape (m,)."""
        return self.rows.request

    @property
    def is_served(self) -> NDArray[np.bool_]:
        """Whether each candidate was served, shape (m,)."""
        return np.asarray(self.rows.passages["rank"] > 0)

    @property
    def is_graded(self) -> NDArray[np.bool_]:
        """Whether people graded each candidate, shape (m,)."""
        return np.asarray(self.rows.passages["chance"] > 0.0)

    @property
    def is_covered(self) -> NDArray[np.bool_]:
        """Whether a draw could have asked people about each request, shape (n,)."""
        return np.asarray(~np.isnan(self.opened))

    @cached_property
    def relevant(self) -> FloatArray:
        """Whether people call each candidate relevant, shape (m,); NaN where they did not grade."""
        return np.where(self.is_graded, self.rows.passages["grade"] > 0, np.nan)

    def of_passages(self, name: str) -> FloatArray:
        """Return a field of the candidates' rows, shape (m,)."""
        return self.rows.passages[name].astype(np.float64)

    @property
    def has_failed(self) -> NDArray[np.bool_]:
        """Whether a call of the judge about each candidate failed, shape (m,): it has no grade."""
        return np.asarray(self.rows.passages["verdict"] == FAILED)

    def weight_without_failed(self, used: NDArray[np.bool_]) -> FloatArray | None:
        """Return the weights of the requests, 0 of those that lack a grade; shape (n,).

        Args:
            used: Shape (m,), the candidates whose grades a figure needs.

        Returns:
            None where those that lack one are too many for the others to stand for them.
        """
        lacks = self.by_request((used & self.has_failed).astype(np.float64)) > 0.0
        if self.weight[lacks].sum() > MOST_FAILED * self.weight.sum():
            return None
        return np.where(lacks, 0.0, self.weight)

    @property
    def n_graded(self) -> int:
        """Number of requests of which people graded something."""
        return len(np.unique(self.row[self.is_graded]))

    @property
    def is_corrected(self) -> bool:
        """Whether people graded enough to correct the judge."""
        parts = np.bincount(self.is_served[self.is_graded], minlength=2)
        enough = self.is_graded.sum() >= FEWEST_GRADES and self.n_graded >= FEWEST_GRADED
        return bool(enough and parts.min() >= _FEWEST_IN_CELL)

    @property
    def in_words(self) -> str:
        """Whose figures its estimates are."""
        judged = f"{count(len(self.pools), 'request')} judged"
        n = int(self.is_graded.sum())
        if self.is_exact:
            return f"{judged} by known labels"
        if self.is_corrected:
            return f"{judged}, corrected by {count(n, 'grade')} of people on {self.n_graded}"
        return f"the judge's own view, uncorrected: {judged}, {count(n, 'grade')} of people"

    @cached_property
    def model(self) -> Model:
        """The fit of people's grades on what the judge said."""
        return Model.fitted(self.rows, self.fold)

    @cached_property
    def features(self) -> FloatArray:
        """What P(relevant) is made of, shape (m, n_features); NaN where a leg has no score."""
        starts = np.cumsum(self.pools.lengths) - self.pools.lengths
        return np.asarray(pool_features(self.pools)[starts[self.row] + self.column])

    def by_request(self, values: FloatArray) -> FloatArray:
        """Add up values of the candidates, shape (m,), by request, shape (n,)."""
        return np.bincount(self.row, values, len(self.pools)).astype(np.float64)


def fitted_policy(
    judged: JudgedCandidates, settings: Settings, without: int | None = None
) -> ExpectedUtilityPolicy:
    """Fit P(relevant), and keep candidates while they are worth it by the utilities.

    No threshold is tuned on verdicts: that would tune it to the judge's errors.

    Args:
        settings: ``utilities`` and ``min_keep`` are used.
        without: A fold whose requests have no part in it; None to use all.

    Raises:
        CalibrationError: no candidate has all features.
    """
    chosen = ~np.isnan(judged.features).any(axis=1)
    fold = None
    if without is not None:
        chosen &= judged.fold[judged.row] != without
        fold = np.full(len(judged.pools), without)
    if not chosen.any():
        raise CalibrationError("no judged candidate has the scores that P(relevant) is made of")
    predicted = judged.model.of(judged.rows, fold)
    relevance = np.where(judged.is_graded, judged.relevant, predicted)[chosen]
    weight = (judged.weight[judged.row] * judged.of_passages("size"))[chosen]
    # They sum to the number of equal ones that would tell as much (Kish, 1965, §8.2).
    weight *= weight.sum() / (weight**2).sum()
    inputs, n = judged.features[chosen], relevance.size
    # Each candidate counts as relevant and as not, by its probability.
    model = fit_model(
        judged.pools,
        np.concatenate([inputs, inputs]),
        np.arange(2 * n) < n,
        np.concatenate([weight * relevance, weight * (1.0 - relevance)]),
    )
    return ExpectedUtilityPolicy(
        model,
        k=min(JUDGED_DEPTH, int(judged.column.max()) + 1),
        cost=max(-settings.utilities.irrelevant, 0.0),
        gain=max(judged.model.gain, 1e-6),
        min_keep=settings.min_keep,
    )


class Contexts(NamedTuple):
    """The contexts of n requests.

    Attributes:
        kept: Shape (n, depth), 1 for each candidate that is kept, by its place in the pools.
        discount: The same with the discount of its rank in the context.
    """

    kept: FloatArray
    discount: FloatArray


def first_k(pools: Pools, k: int) -> Contexts:
    """Keep the first k of each pool."""
    inside = np.arange(pools.scores.shape[1]) < np.minimum(k, pools.lengths)[:, None]
    kept = inside.astype(np.float64)
    return Contexts(kept, kept * discounts(kept.shape[1]))


def decided(pools: Pools, policy: Policy) -> Contexts:
    """Decide on each pool as the guard does."""
    order, kept = contexts(pools, policy)
    found = Contexts(*np.zeros((2, *order.shape)))
    np.put_along_axis(found.kept, order, kept * 1.0, axis=1)
    np.put_along_axis(found.discount, order, kept * discounts(order.shape[1]), axis=1)
    return found


def decided_by_others(judged: JudgedCandidates, settings: Settings) -> Contexts:
    """Decide on each request by the policy that is fitted without its fold."""
    found = Contexts(*np.zeros((2, *judged.pools.scores.shape)))
    for fold in range(FOLDS):
        rows = np.flatnonzero(judged.fold == fold)
        if rows.size:
            policy = fitted_policy(judged, settings, fold)
            found.kept[rows], found.discount[rows] = decided(judged.pools.rows(rows), policy)
    return found


class JudgedDifference(NamedTuple):
    """What contexts gain over others.

    Attributes:
        udcg: Mean difference in UDCG.
        recall: Difference in pooled recall, of the relevant candidates among all that could be
            judged, with half a lost request added.
    """

    udcg: Interval
    recall: Interval


def difference(
    judged: JudgedCandidates, new: Contexts, old: Contexts, utilities: Utilities
) -> JudgedDifference:
    """Estimate what contexts gain over others, in pairs."""
    apart = Contexts(new.kept - old.kept, new.discount - old.discount)
    udcg, recall = _estimates(
        judged, [_udcg(judged, apart, utilities), _recall(judged, apart, bounded=False)]
    )
    if recall.value is None or recall.bounds is None:
        return JudgedDifference(udcg, recall)
    n = float(judged.n_graded)
    lower, value = (
        (each * n - LOST_QUERIES) / (n + LOST_QUERIES) for each in (recall.bounds[0], recall.value)
    )
    return JudgedDifference(udcg, Interval(value, lower, recall.bounds[1], recall.n))


@dataclass(frozen=True)
class JudgedAtK:
    """The first k candidates of each request.

    Attributes:
        precision: Share of the judged candidates that is relevant.
        mrr: Mean reciprocal rank of the first relevant one; undefined where candidates among the
            first k were judged, or graded, without those above.
        udcg: UDCG.
        recall: Share of all relevant candidates, among those that could be judged.
    """

    k: int
    precision: Interval
    mrr: Interval
    udcg: Interval
    recall: Interval


def table_by_k(judged: JudgedCandidates, utilities: Utilities) -> tuple[JudgedAtK, ...]:
    """Estimate the metrics of the first k, with intervals where people's grades correct the judge.

    Every k is a candidate for what to serve: the table is the least that judging gives.
    """
    rows = []
    for k in KS:
        first = first_k(judged.pools, k)
        precision, udcg, recall = _estimates(
            judged,
            [
                _precision(judged, first),
                _udcg(judged, first, utilities),
                _recall(judged, first, bounded=True),
            ],
        )
        rows.append(JudgedAtK(k, precision, _reciprocal_rank(judged, k), udcg, recall))
    return tuple(rows)


class _Ratio(NamedTuple):
    """A metric: Σ numerator / Σ denominator over candidates and requests.

    Attributes:
        numerator: Shape (m,), what each candidate counts, times its worth or its relevance.
        of_worth: Whether it is its worth.
        constant: Shape (n,), added to the numerator.
        denominator: Shape (m,), what each relevant candidate counts; None for requests.
        requests: Shape (n,), what each request counts where there is no denominator.
        metric: Decides the scale of the interval.
    """

    numerator: FloatArray
    of_worth: bool
    constant: FloatArray
    denominator: FloatArray | None
    requests: FloatArray
    metric: Metric


def _udcg(judged: JudgedCandidates, own: Contexts, utilities: Utilities) -> _Ratio:
    n = len(judged.pools)
    never = np.where(judged.can_be_judged, 0.0, own.discount).sum(axis=1) * utilities.unjudged
    at = own.discount[judged.row, judged.column]
    return _Ratio(at, True, never, None, np.ones(n), Metric.UDCG)


def _recall(judged: JudgedCandidates, own: Contexts, *, bounded: bool) -> _Ratio:
    at = own.kept[judged.row, judged.column]
    n, metric = len(judged.pools), Metric.POOLED_RECALL if bounded else Metric.UDCG
    return _Ratio(at, False, np.zeros(n), np.ones(at.size), np.zeros(n), metric)


def _precision(judged: JudgedCandidates, own: Contexts) -> _Ratio:
    n_kept = (own.kept * judged.can_be_judged).sum(axis=1)
    at = own.kept[judged.row, judged.column] / np.maximum(n_kept, 1.0)[judged.row]
    return _Ratio(at, False, np.zeros(len(n_kept)), None, (n_kept > 0.0) * 1.0, Metric.PRECISION)


def _estimates(judged: JudgedCandidates, ratios: Sequence[_Ratio]) -> Sequence[Interval]:
    """Estimate each ratio; where people graded too little, by the judge's verdicts as they are."""
    columns, of_worth = [], []
    for each in ratios:
        columns += [each.numerator, np.zeros(judged.row.size)]
        of_worth += [each.of_worth, False]
        if each.denominator is not None:
            columns[-1] = each.denominator
    coefficients, is_worth = np.column_stack(columns), np.array(of_worth)
    constants = np.column_stack([c for each in ratios for c in (each.constant, each.requests)])
    verdict, size = judged.rows.passages["verdict"], judged.of_passages("size")
    if not judged.is_corrected:
        own_worth = judged.of_passages("worth")
        said = np.where(is_worth, own_worth[:, None], (verdict == YES)[:, None])
        own = coefficients * said * (size * (verdict != MISSING))[:, None]
        return [
            _as_judged(judged, own[:, pair], constants[:, pair], coefficients[:, pair])
            for pair in np.arange(2 * len(ratios)).reshape(-1, 2)
        ]
    p = judged.model.of(judged.rows, judged.fold)
    worth = p * judged.model.gain - (1.0 - p) * judged.model.harm
    expected = coefficients * np.where(is_worth, worth[:, None], p[:, None])
    graded = judged.is_graded
    found = coefficients[graded] * np.where(
        is_worth, judged.of_passages("people_worth")[graded, None], judged.relevant[graded, None]
    )
    return _corrected(
        judged,
        ratios,
        expected,
        found,
        constants,
        row=judged.row,
        size=size,
        graded=graded,
        chance=judged.of_passages("chance"),
        cell=(~judged.is_served).astype(np.intp),
    )


def _as_judged(
    judged: JudgedCandidates, own: FloatArray, constants: FloatArray, coefficients: FloatArray
) -> Interval:
    """Estimate a ratio by the judge's grades as they are.

    Args:
        own, coefficients: Shape (m, 2), what each candidate adds, and what a relevant one would.
        constants: Shape (n, 2), what each request adds besides.
    """
    weight = judged.weight_without_failed((coefficients != 0.0).any(axis=1))
    if weight is None:
        return Interval.undefined()
    x, y = [
        float(weight @ (judged.by_request(column) + constant))
        for column, constant in zip(own.T, constants.T, strict=True)
    ]
    return (
        Interval(x / y, None, None, int(np.count_nonzero(weight)))
        if y > 0.0
        else (Interval.undefined())
    )


def _corrected(
    judged: JudgedCandidates,
    ratios: Sequence[_Ratio],
    expected: FloatArray,
    found: FloatArray,
    constants: FloatArray,
    *,
    row: IntArray,
    size: FloatArray,
    graded: NDArray[np.bool_],
    chance: FloatArray,
    cell: IntArray,
) -> Sequence[Interval]:
    """Estimate ratios over the covered requests, corrected by the graded candidates, by cell.

    Args:
        expected: Shape (m, q), numerator and denominator of each ratio, as predicted.
        found: Shape (g, q), of the graded.
        constants: Shape (n, q), what each request adds besides.
        row: Shape (m,), the request of each.
        size: Shape (m,), how many candidates of its request each stands for.
        graded: Shape (m,), which they are.
        chance: Shape (m,), the probability of its grade, given that its request was opened.
        cell: Shape (m,), from 0; each has graded ones.
    """
    q, covered = expected.shape[1], judged.is_covered
    sizes = 2 * q + np.arange(cell.max() + 1)
    columns = np.zeros((len(judged.pools), sizes[-1] + 1))
    np.add.at(columns[:, :q], row, expected * size[:, None])
    columns[:, q : 2 * q] = constants
    np.add.at(columns, (row, sizes[cell]), size)
    sums = Sums(columns.shape[1])
    sums.add(columns[covered] * judged.weight[covered, None], judged.cluster[covered] + 1)
    correction = GradeCorrection.of(
        sums.ended().totals,
        sizes,
        cell=cell[graded],
        weight=(judged.weight / judged.opened)[row[graded]] * size[graded] / chance[graded],
        found=found,
        expected=expected[graded],
        cluster=judged.cluster[row[graded]],
        n_clusters=int(judged.cluster.max()) + 1,
    )
    correction.coefficients[:, q : 2 * q] = np.eye(q)
    n = len(np.unique(judged.cluster[judged.row[judged.is_graded]]))
    return [
        corrected_ratio(
            ratio.metric,
            sums,
            correction,
            quotient,
            n=n,
            effective=float(n),
            n_observable=math.inf if ratio.metric is Metric.UDCG else float(n),
        )
        for ratio, quotient in zip(ratios, np.eye(q).reshape(-1, 2, q), strict=True)
    ]


def _reciprocal_rank(judged: JudgedCandidates, k: int) -> Interval:
    """Estimate the mean reciprocal rank among the first k, from runs of grades from the top."""
    n, width = len(judged.pools), np.minimum(k, judged.pools.lengths)
    first = judged.column < k
    row, column = judged.row[first], judged.column[first]
    if (np.bincount(row, judged.of_passages("size")[first] == 1.0, n) < width).any():
        return Interval.undefined()

    def spread(values: FloatArray) -> FloatArray:
        table = np.zeros((n, k))
        table[row, column] = values[first]
        return table

    if not judged.is_corrected:
        weight = judged.weight_without_failed(first)
        if weight is None or not weight.any():
            return Interval.undefined()
        said = reciprocal_ranks(spread((judged.rows.passages["verdict"] == YES) * 1.0))
        return Interval(
            float(weight @ said / weight.sum()), None, None, int(np.count_nonzero(weight))
        )
    seen = (judged.rows.requests["draw"] > 0) & judged.is_covered
    is_first = np.asarray(judged.rows.passages["rank"] == judged.column + 1)
    # Runs go down what was served, which has to be the first k of the pool.
    if (np.bincount(row, is_first[first], n) < width).any() or seen.sum() < FEWEST_GRADED:
        return Interval.undefined(int(seen.sum()))
    found, expected = ranks_found(
        judged.rows.requests,
        spread(np.nan_to_num(judged.relevant)),
        spread(judged.model.of(judged.rows, judged.fold)),
    )
    ones, none = np.ones((n, 1)), np.zeros((n, 1))
    ratio = _Ratio(none, False, none, None, ones, Metric.SERVED_MRR)
    [estimate] = _corrected(
        judged,
        [ratio],
        np.hstack([expected[:, None], none]),
        np.hstack([found[:, None], none])[seen],
        np.hstack([none, ones]),
        row=np.arange(n),
        size=np.ones(n),
        graded=seen,
        chance=np.ones(n),
        cell=np.zeros(n, np.intp),
    )
    return estimate
