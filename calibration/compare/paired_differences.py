"""Differences between two evaluations on the same queries, and whether they exceed noise.

Pure: no I/O, no clock, no logging.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from calibration.evaluate import QueryMetrics, bootstrap_interval
from ctxguard.core.types import FloatArray

BETTER_WHEN: Mapping[str, Literal["higher", "lower"] | None] = {
    "recall": "higher",
    "precision": "higher",
    "precision_judged": "higher",
    "mrr": "higher",
    "ndcg": "higher",
    "udcg": "higher",
    "udcg_strict": "higher",
    "harm": "lower",
    "distractor_rate": "lower",
    "harm_undiscounted": "lower",
    "kept": None,
    "tokens": None,
}
"""The compared metrics, with the better direction; None for the size of a context."""

Outcome = Literal["better", "worse", "higher", "lower", "within noise", "no data"]


@dataclass(frozen=True)
class Difference:
    """A metric of one candidate minus that of another, paired by query.

    Attributes:
        value: Mean difference; None if no query defines the metric for both.
        lower: Lower end of its interval; None with fewer than two pairs.
        upper: Upper end, as ``lower``.
        n: Queries on which the metric is defined for both.
        outcome: ``within noise`` if the interval holds 0; ``higher`` or ``lower`` if neither way
            is better; ``no data`` without an interval.
    """

    metric: str
    value: float | None
    lower: float | None
    upper: float | None
    n: int
    outcome: Outcome

    def is_regression(self, tolerance: float = 0.0) -> bool:
        """Tell whether it is worse by more than noise and ``tolerance``, in the metric's unit."""
        if self.outcome != "worse" or self.lower is None or self.upper is None:
            return False
        least = -self.upper if BETTER_WHEN[self.metric] == "higher" else self.lower
        return least > tolerance


def differences(
    these: QueryMetrics, those: QueryMetrics, *, seed: int = 0
) -> dict[str, Difference]:
    """Subtract the second from the first by metric, over the queries that both have."""
    rows_these, rows_those = _paired_rows(these.query_ids, those.query_ids)
    return {
        metric: paired_difference(
            metric,
            these.values[metric][rows_these],
            those.values[metric][rows_those],
            None if these.weights is None else these.weights[rows_these],
            seed=seed,
        )
        for metric in BETTER_WHEN
        if metric in these.values and metric in those.values
    }


def _paired_rows(these: Sequence[str], those: Sequence[str]) -> tuple[list[int], list[int]]:
    where = {query_id: row for row, query_id in enumerate(those)}
    pairs = [(row, where[query_id]) for row, query_id in enumerate(these) if query_id in where]
    return [first for first, _ in pairs], [second for _, second in pairs]


def paired_difference(
    metric: str,
    these: FloatArray,
    those: FloatArray,
    weights: FloatArray | None = None,
    *,
    seed: int = 0,
) -> Difference:
    """Compute a metric's mean difference with its bootstrap interval, resampled by query.

    Args:
        metric: A name in ``BETTER_WHEN``.
        these: Shape (n_q,), NaN where undefined.
        those: Shape (n_q,), of the same queries.
        weights: Shape (n_q,), weight of each query; None weighs them equally.
        seed: Random seed of the bootstrap.

    >>> paired_difference("harm", np.array([2.0, 3.0]), np.array([1.0, 2.0])).outcome
    'worse'
    """
    # Rounded, so that another machine's last digit is no difference.
    interval = bootstrap_interval(np.round(these - those, 12), weights, seed=seed)
    outcome: Outcome
    if interval.lower is None or interval.upper is None:
        outcome = "no data"
    elif interval.lower <= 0.0 <= interval.upper:
        outcome = "within noise"
    else:
        direction: Literal["higher", "lower"] = "higher" if interval.lower > 0.0 else "lower"
        better = BETTER_WHEN[metric]
        outcome = direction if better is None else "better" if direction == better else "worse"
    return Difference(metric, interval.value, interval.lower, interval.upper, interval.n, outcome)
