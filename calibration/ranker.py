"""Train the pooled ranker on labelled queries, and measure the order that it gives.

The weights a minimise the weighted mean over the queries of

    −Σ_i g_i · ln softmax(X a)_i    and    penalty · |a − a₀|²,

where X holds the inputs of a query's candidates
(`ctxguard.retrieval.signals.pooled.ranker_inputs`) and g_i is candidate i's share in the sum of
their grades (ListNet with the top probability; Cao et al., ICML 2007). A set of n queries weighs
√n: with equal weights for all sets a query of a set of 20 would count like 40 of one of 800, and
with equal weights for all queries the largest set would decide alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.fit import folds
from calibration.pool_labels import IntArray, PoolLabels
from calibration.replay import Pools
from calibration.weights import significant
from ctxguard._support.extras import require
from ctxguard.core.fusion import Fusion, fuse
from ctxguard.core.types import FloatArray
from ctxguard.errors import CalibrationError
from ctxguard.retrieval.signals.ranker import INPUTS, Ranker, RankerLevel

PENALTY = 3e-3
"""Pulls weights that are trained on whole collections towards 0."""

PRIOR = 20.0
"""Pulls weights that are fitted to few queries towards those that they start from, per query."""

_STEPS = 100
_TOLERANCE = 1e-10


@dataclass(frozen=True)
class Lists:
    """The candidates of queries as a ranker sees them, with their labels.

    Attributes:
        inputs: Shape (n_q, n_inputs, depth), 0 beyond the end of a query's candidates.
        shares: Shape (n_q, depth), each candidate's share in the grades of its query.
        retrieved: Shape (n_q, depth), False beyond the end.
        weights: Shape (n_q,), how much each query counts.
    """

    inputs: FloatArray
    shares: FloatArray
    retrieved: NDArray[np.bool_]
    weights: FloatArray

    def __len__(self) -> int:
        return len(self.weights)


def training_lists(
    pools: Pools, labels: PoolLabels, level: RankerLevel, rows: IntArray | None = None
) -> Lists:
    """The queries of which a relevant passage was retrieved: others do not tell which is better.

    Args:
        pools: A replay of the hybrid route with the signals of ``level``.
        labels: Their labels; a passage without one counts as not relevant.
        level: Which inputs.
        rows: The queries to take; None for all.
    """
    pooled = require("ctxguard.retrieval.signals.pooled", "embedded")
    gains = np.maximum(labels.grades, 0) * labels.retrieved
    taken = np.flatnonzero(gains.any(axis=1))
    if rows is not None:
        taken = np.intersect1d(taken, rows)
    inputs = np.zeros((taken.size, len(INPUTS[level]), pools.scores.shape[1]))
    own_pools = pools.rows(taken)
    for row, ranking in enumerate(own_pools.rankings()):
        own = pooled.ranker_inputs(ranking.legs, ranking.signals, level)
        inputs[row, :, : own.shape[1]] = own
    gains = gains[taken]
    return Lists(
        inputs,
        gains / gains.sum(axis=1, keepdims=True),
        labels.retrieved[taken],
        labels.weights[taken],
    )


def train(sets: Sequence[Lists], penalty: float, start: FloatArray | None = None) -> FloatArray:
    """The weights of the inputs, shape (n_inputs,).

    Newton's method with halved steps; the loss is convex, and the penalty makes it strictly so.

    Args:
        sets: The queries of each collection, at least one.
        penalty: > 0.
        start: a₀, shape (n_inputs,); None for 0.

    Raises:
        CalibrationError: a set has no query with a relevant passage among its candidates.
    """
    if not sets or not all(map(len, sets)):
        raise CalibrationError(
            "no labelled query has a relevant passage among its candidates, so no order can be "
            "learned: label more queries, or check that the labels belong to this index"
        )
    origin = np.zeros(sets[0].inputs.shape[1]) if start is None else start
    weights = origin.copy()
    loss, slope, curvature = _loss(sets, weights, origin, penalty)
    for _ in range(_STEPS):
        step = np.linalg.solve(curvature, slope)
        length = 1.0
        tried = _loss(sets, weights - step, origin, penalty)
        while tried[0] > loss and length > _TOLERANCE:
            length /= 2.0
            tried = _loss(sets, weights - length * step, origin, penalty)
        weights = weights - length * step
        loss, slope, curvature = tried
        if np.abs(length * step).max() < _TOLERANCE:
            break
    return weights


def _loss(
    sets: Sequence[Lists], weights: FloatArray, origin: FloatArray, penalty: float
) -> tuple[float, FloatArray, FloatArray]:
    """The loss, its gradient and its second derivatives."""
    away = weights - origin
    loss = penalty * float(away @ away)
    slope = 2.0 * penalty * away
    curvature = 2.0 * penalty * np.eye(away.size)
    of_all = sum(np.sqrt(len(each)) for each in sets)
    for each in sets:
        # Not matrix products, whose order of sums depends on the number of threads.
        scores = np.einsum("k,qkn->qn", weights, each.inputs)
        scores = np.where(each.retrieved, scores, -np.inf)
        scores -= scores.max(axis=1, keepdims=True)
        powers = np.exp(scores)
        totals = powers.sum(axis=1, keepdims=True)
        chances = powers / totals
        logs = np.where(each.retrieved, scores - np.log(totals), 0.0)
        share = each.weights * (np.sqrt(len(each)) / (each.weights.sum() * of_all))
        loss -= float((share * (each.shares * logs).sum(axis=1)).sum())
        slope += np.einsum("q,qn,qkn->k", share, chances - each.shares, each.inputs)
        means = np.einsum("qn,qkn->qk", chances, each.inputs)
        weighted = each.inputs * (share[:, None] * chances)[:, None, :]
        curvature += np.einsum("qkn,qln->kl", weighted, each.inputs)
        curvature -= np.einsum("q,qk,ql->kl", share, means, means)
    return loss, slope, curvature


def train_ranker(sets: Mapping[str, tuple[Pools, PoolLabels]]) -> Ranker:
    """A ranker from collections by name.

    Raises:
        CalibrationError: As for `train`.
    """

    def trained(level: RankerLevel) -> dict[str, float]:
        lists = [training_lists(pools, labels, level) for pools, labels in sets.values()]
        return _named(level, train(lists, PENALTY))

    return Ranker(trained("full"), trained("text"), tuple(sets))


def refit(
    ranker: Ranker, name: str, pools: Pools, labels: PoolLabels, rows: IntArray | None = None
) -> Ranker:
    """A ranker moved as far from where it was as some labelled queries say.

    Args:
        ranker: The weights to start from. They stay on a level whose signals the pools lack.
        name: The collection that the queries belong to.
        rows: The queries to fit on; None for all.

    Raises:
        CalibrationError: As for `train`.
    """

    def fitted(level: RankerLevel) -> Mapping[str, float]:
        if level not in levels(pools):
            return ranker.weights(level)
        lists = training_lists(pools, labels, level, rows)
        start = np.array([ranker.weights(level)[each] for each in INPUTS[level]])
        return _named(level, train([lists], PRIOR / max(len(lists), 1), start))

    return Ranker(fitted("full"), fitted("text"), (*ranker.trained_on, name))


def levels(pools: Pools) -> tuple[RankerLevel, ...]:
    """The levels of a ranker whose inputs these pools have."""
    pooled = require("ctxguard.retrieval.signals.pooled", "embedded")
    return ("full", "text") if pooled.level_of(pools.signals) == "full" else ("text",)


def _named(level: RankerLevel, weights: FloatArray) -> dict[str, float]:
    return dict(zip(INPUTS[level], map(significant, weights), strict=True))


def ndcg_by_query(pools: Pools, labels: PoolLabels, ranker: Ranker | None) -> FloatArray:
    """nDCG@10 of each query, shape (n_q,), NaN for one without a relevant passage.

    Args:
        ranker: Orders the candidates; None for reciprocal ranks.
    """
    pooled = require("ctxguard.retrieval.signals.pooled", "embedded")
    grades = np.zeros_like(labels.grades)
    for row, ranking in enumerate(pools.rankings()):
        if ranker is None:
            scores = fuse(ranking.legs, Fusion())
        else:
            scores = pooled.ranker_scores(ranking.legs, ranking.signals, ranker)
        # Ties go by passage id, as in a search.
        order = np.lexsort((np.array(ranking.passage_ids), -scores))
        grades[row, : len(order)] = labels.grades[row, order]
    return labels.ndcg(grades)


def fit(
    ranker: Ranker, name: str, pools: Pools, labels: PoolLabels
) -> tuple[Ranker, dict[str, FloatArray]]:
    """Refit a ranker on all labelled queries, and measure such fits on queries they do not know.

    Args:
        ranker: The ranker to start from.
        name: The collection that the queries belong to.

    Returns:
        The ranker; and nDCG@10 of each query, shape (n_q,), NaN for one without a relevant
        passage: by ``reciprocal_rank``, by the ``shipped`` ranker, and by a ``fitted`` one that was
        fitted to the queries of other folds.

    Raises:
        CalibrationError: As for `train`, also where a fold's queries are all that have labels.
    """
    held_out = np.full(len(pools), np.nan)
    for inside, outside in folds(pools.query_ids):
        others = refit(ranker, name, pools, labels, outside)
        own = pools.rows(inside)
        held_out[inside] = ndcg_by_query(own, labels.rows(inside), others)
    return refit(ranker, name, pools, labels), {
        "reciprocal_rank": ndcg_by_query(pools, labels, None),
        "shipped": ndcg_by_query(pools, labels, ranker),
        "fitted": held_out,
    }
