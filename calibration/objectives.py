"""What a choice is for: keep the recall of what is served today, or gain the most utility.

Pure: a grid of policies over labelled queries in, the place of one policy out.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from calibration.grid import Grid, GridIndex
from calibration.weights import counted, weighted_mean
from ctxguard.core.types import FloatArray

PolicyKind = Literal["ratio", "expected_utility"]

TOLERANCE = 0.01
"""How much mean recall the default objective may lose on the queries that choose."""

_WIDER = (1.0, 1.2, 1.6, 2.0)
"""Sizes of context that are tried, in multiples of the serving k: a threshold drops from them."""

LOST_QUERIES: Mapping[PolicyKind, float] = {"expected_utility": 0.25, "ratio": 1.0}
"""Queries, added to those at hand, of which everything relevant is lost. With few labels most
policies lose nothing on any query, and a standard error of 0 would say that they never do.
Probabilities are out of fold; a relative score is tuned on the queries themselves, so that 50 of
them lost 0.03 of recall with a quarter, and 0.01 with one."""

_CAUTION = 3.0
"""The cautious mean may lose this many tolerances. With 2 of them, on three collections, half as
many passages were dropped at about the same recall, and 20 labels changed almost nothing."""

_TIE = 1e-12


def keep_recall(
    grid: Grid,
    plain: Grid,
    serving_k: int,
    tolerance: float = TOLERANCE,
    *,
    lost_queries: float,
) -> GridIndex | None:
    """The policy of least harm whose recall is not below that of the first k served today.

    Thresholds are tried from the lowest up, for contexts of one to two times the serving k, and
    for each size only until one loses recall. One is accepted if its mean recall is below that of
    the serving k by at most ``tolerance``, and by at most three times that when a fraction of a
    lost query is added and one standard error is taken off. A policy of more harm or less strict
    UDCG than the serving k is never taken.

    On five collections, with 20, 50 or all queries of a half to choose on, this loses 0.01 of mean
    recall or less on the other half (``python -m benchmarks.policies --equal-recall``).

    Args:
        grid: The policies over the queries that choose, with probabilities out of fold.
        plain: The serving k alone over the same queries, as one policy.
        serving_k: How many passages are served today.
        tolerance: How much mean recall may be lost, ≥ 0.
        lost_queries: Queries that are added to those at hand, of which everything relevant is
            lost; from ``LOST_QUERIES``.

    Returns:
        None where no policy is accepted: serve the first k as today. That is so as well if no
        query has a relevant passage.
    """
    today_harm = float(plain.means.harm[0, 0])
    today_udcg = float(plain.means.udcg_strict[0, 0])
    harm, udcg = grid.means.harm, grid.means.udcg_strict
    best: GridIndex | None = None
    least = today_harm - _TIE
    for index_k in _sizes(grid, serving_k):
        column = [(index_k, index_t) for index_t in range(grid.keep_table.thresholds.size)]
        for index in column[: _accepted(grid, column, tolerance, lost_queries)]:
            if harm[index] < least and udcg[index] >= today_udcg - _TIE:
                best, least = index, float(harm[index]) - _TIE
    return best


def _sizes(grid: Grid, serving_k: int) -> list[int]:
    """Indices of the sizes of context to try, ascending, as far as the grid has them."""
    ks = grid.keep_table.ks
    wanted = {round(serving_k * factor) for factor in _WIDER}
    return [index for index, k in enumerate(ks.tolist()) if k in wanted]


def _accepted(
    grid: Grid, indices: Sequence[GridIndex], tolerance: float, lost_queries: float
) -> int:
    """How many of these policies are accepted before the first that is not."""
    differences = grid.at(indices).recall_difference
    defined = ~np.isnan(differences[:, 0])
    if not defined.any():
        return 0
    differences, weights = differences[defined], counted(grid.labels.weights[defined])
    kept_recall = (weighted_mean(differences, weights) >= -tolerance - _TIE) & (
        _cautious_mean(differences, weights, lost_queries) >= -_CAUTION * tolerance - _TIE
    )
    return n_until_false(kept_recall)


def _cautious_mean(differences: FloatArray, weights: FloatArray, lost_queries: float) -> FloatArray:
    """Mean less one standard error, with some lost queries of weight 1 added."""
    column = weights[:, None]
    n = weights.sum() + lost_queries
    mean = ((column * differences).sum(axis=0) - lost_queries) / n
    squares = ((column * (differences - mean)) ** 2).sum(axis=0) + lost_queries * (-1.0 - mean) ** 2
    cautious: FloatArray = mean - np.sqrt(squares) / n
    return cautious


def n_until_false(values: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """How many values are true before the first that is false.

    >>> n_until_false(np.array([True, True, False, True]))
    2
    """
    return int(values.size if values.all() else values.argmin())
