"""Objectives of a choice: keep the recall of the first k served today, or gain most utility.

Pure: a grid of policies over labelled queries in, the place of one policy out.
"""

from collections.abc import Sequence

import numpy as np

from calibration.grid import Grid, GridIndex
from calibration.settings import TOLERANCE
from calibration.weights import counted, with_lost_queries

_WIDER = (1.0, 1.2, 1.6, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 20.0)
"""Sizes of context that are tried, in multiples of the serving k, as far as the depth and the
budget go: a threshold drops from them."""

LOST_QUERIES = 0.5
"""Queries, added to those at hand, of which everything relevant is lost. With few labels most
policies lose nothing on any query, and a standard error of 0 would say that they never do."""

_TIE = 1e-12


def keep_recall(
    grid: Grid, plain: Grid, serving_k: int, tolerance: float = TOLERANCE, caution: float = 1.0
) -> GridIndex | None:
    """The policy of least harm whose recall is not below that of the first k served today.

    Thresholds are tried from the lowest up, for contexts of the serving k and larger ones, and for
    each size only until one loses recall. One is accepted if its mean recall is below that of the
    serving k by at most ``tolerance`` when half a lost query is added and ``caution`` standard
    errors are taken off. Of equal harm the one of highest strict UDCG is taken; one of
    less than the serving k never is.

    A wider margin (a quarter of a query, three tolerances) falls faster with the number of labels
    than the optimism of the choice: 30 of them promised +0.01 and lost 0.01
    (``python -m benchmarks.verdict``).

    Args:
        grid: The policies over the queries that choose, with probabilities out of fold.
        plain: The serving k alone over the same queries, as one policy.
        tolerance: How much mean recall may be lost, ≥ 0.
        caution: How many standard errors the mean must be clear of that, ≥ 0.

    Returns:
        None where no policy is accepted: serve the first k as today. That is so as well if no
        query has a relevant passage.
    """
    today_harm = float(plain.means.harm[0, 0])
    today_udcg = float(plain.means.udcg_strict[0, 0])
    harm, udcg = grid.means.harm, grid.means.udcg_strict
    best: GridIndex | None = None
    for index_k in _sizes(grid, serving_k):
        column = [(index_k, index_t) for index_t in range(grid.keep_table.thresholds.size)]
        for index in column[: _accepted(grid, column, tolerance, caution)]:
            if harm[index] > today_harm - _TIE or udcg[index] < today_udcg - _TIE:
                continue
            less = np.inf if best is None else harm[best] - harm[index]
            if less > _TIE or (less > -_TIE and best and udcg[index] > udcg[best] + _TIE):
                best = index
    return best


def _sizes(grid: Grid, serving_k: int) -> list[int]:
    """Indices of the sizes of context to try, ascending: the nearest that the grid has."""
    ks = grid.keep_table.ks
    wanted = [serving_k * factor for factor in _WIDER if round(serving_k * factor) <= ks[-1]]
    return sorted({int(np.abs(ks - k).argmin()) for k in wanted})


def _accepted(grid: Grid, indices: Sequence[GridIndex], tolerance: float, caution: float) -> int:
    """How many of these policies are accepted before the first that is not."""
    differences = grid.at(indices).recall_difference
    defined = ~np.isnan(differences[:, 0])
    if not defined.any():
        return 0
    weights = counted(grid.labels.weights[defined])
    mean, error = with_lost_queries(differences[defined], weights, LOST_QUERIES)
    return n_until_false(mean - caution * error >= -tolerance - _TIE)


def n_until_false(values: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """How many values are true before the first that is false.

    >>> n_until_false(np.array([True, True, False, True]))
    2
    """
    return int(values.size if values.all() else values.argmin())
