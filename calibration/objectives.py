"""Objectives of a choice: keep the recall of the first k served today, or gain most utility.

Pure: a grid of policies over labelled queries in, the place of one policy out.
"""

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
    grid: Grid, serving_k: int, tolerance: float = TOLERANCE, caution: float = 1.0
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
        serving_k: The baseline of the grid's labels.
        tolerance: How much mean recall may be lost, ≥ 0.
        caution: How many standard errors the mean must be clear of that, ≥ 0.

    Returns:
        None where no policy is accepted: serve the first k as today. That is so as well if no
        query has a relevant passage.
    """
    today_udcg, today_harm = grid.today
    harm, udcg = grid.means.harm, grid.means.udcg_strict
    best: GridIndex | None = None
    ks, n = np.array(grid.ks), grid.thresholds.size
    wanted = serving_k * np.array(_WIDER)
    wanted = wanted[wanted.round() <= ks[-1]]
    # The nearest that the grid has, ascending.
    for index_k in np.unique(np.abs(ks[:, None] - wanted).argmin(axis=0)).tolist():
        column = list(zip([index_k] * n, range(n), strict=True))
        differences = grid.at(column).recall_difference
        defined = ~np.isnan(differences[:, 0])
        if not defined.any():
            return None
        weights = counted(grid.labels.weights[defined])
        mean, error = with_lost_queries(differences[defined], weights, LOST_QUERIES)
        accepted = mean - caution * error >= -tolerance - _TIE
        for index in column[: int(n if accepted.all() else accepted.argmin())]:
            if harm[index] > today_harm - _TIE or udcg[index] < today_udcg - _TIE:
                continue
            less = np.inf if best is None else harm[best] - harm[index]
            if less > _TIE or (less > -_TIE and best and udcg[index] > udcg[best] + _TIE):
                best = index
    return best
