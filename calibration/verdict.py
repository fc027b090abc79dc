"""Say by queries that had no part in a choice whether it may be served: enforce, shadow or keep.

Pure. The bound is Student's t with half a lost query added. Losses of recall are rare and large: on
five collections it held in 94 to 100% of held-out parts of 20 to 50 queries, where a bootstrap and
the plain t held in 65 to 83%. It is approximate; a certificate is not.
"""

from bisect import bisect_left
from math import ceil, floor, sqrt
from typing import Literal

import numpy as np

from calibration.figures import significant
from calibration.objectives import LOST_QUERIES
from calibration.settings import MAX_LOSS
from ctxguard.core.interval import Interval
from ctxguard.core.types import FloatArray
from ctxguard.monitor.estimation.ratio import t_quantile
from ctxguard.profile.schema import RouteVerdict

FEWEST_MEASURED = 20
"""Fewer queries with a relevant passage prove nothing."""

CONFIDENCE = 0.9

_MOST_NEEDED = 5_000
"""More labels than this are never asked for."""


def verdict(
    differences: FloatArray,
    *,
    serving_k: int,
    tolerance: float,
    max_loss: float = MAX_LOSS,
    gain: float | None = None,
    shown_by: Literal["folds", "held_out"] = "folds",
    refutable: bool = True,
) -> RouteVerdict:
    """Judge a policy by queries that did not choose it.

    Args:
        differences: Shape (n,): recall of the policy less that of the first ``serving_k``, of the
            queries that have a relevant passage.
        tolerance: How far the mean may lie below 0, ≥ 0.
        max_loss: How far its lower bound may lie below 0, > 0.
        gain: Mean strict UDCG less today's, to be told beside it.
        shown_by: How the queries were kept out of the choice.
        refutable: Whether a policy whose upper bound lies below −tolerance gives way to today's;
            otherwise it stays in shadow, since its loss was accepted.

    >>> verdict(np.zeros(40), serving_k=5, tolerance=0.01).decision
    'enforce'
    >>> few = verdict(np.zeros(20), serving_k=5, tolerance=0.01)
    >>> few.decision, few.n_needed
    ('shadow', 28)
    >>> verdict(np.full(40, -0.2), serving_k=5, tolerance=0.01).decision
    'keep'
    """
    n = differences.size
    unproven = RouteVerdict(
        decision="shadow",
        n=n,
        serving_k=serving_k,
        tolerance=tolerance,
        max_loss=max_loss,
        shown_by=shown_by,
    )
    if n < FEWEST_MEASURED:
        needed = fewest_to_enforce(tolerance, max_loss)
        return unproven.model_copy(update={"n_needed": needed})
    quantile = t_quantile(CONFIDENCE, n - 1.0)
    mean = float(differences.mean())
    upper = mean + quantile * float(differences.std(ddof=1)) / sqrt(n)
    lower = lower_bound(differences)
    decision = "keep" if refutable and upper < -tolerance else "shadow"
    if mean >= -tolerance and lower >= -max_loss:
        decision = "enforce"
    figures = {
        "value": significant(mean),
        # Away from the mean, so that the words claim no more than the bounds.
        "lower": floor(lower * 1e4) / 1e4,
        "upper": ceil(upper * 1e4) / 1e4,
        "gain": None if gain is None else significant(gain),
    }
    if decision == "shadow":
        figures["n_needed"] = _needed(differences, tolerance, max_loss)
    return unproven.model_copy(update={"decision": decision, **figures})


def mean_interval(values: FloatArray) -> Interval:
    """Return the mean with its two bounds by Student's t, 90% each; none of under two values.

    >>> found = mean_interval(np.array([0.0, 1.0, 2.0]))
    >>> found.value, round(found.lower, 2), found.n
    (1.0, -0.09, 3)
    """
    n = values.size
    if n < 1:
        return Interval.undefined()
    mean = float(values.mean())
    if n < 2:
        return Interval(significant(mean), None, None, n)
    half = t_quantile(CONFIDENCE, n - 1.0) * float(values.std(ddof=1)) / sqrt(n)
    return Interval(significant(mean), significant(mean - half), significant(mean + half), n)


def fewest_to_enforce(tolerance: float, max_loss: float) -> int | None:
    """How many queries would enforce a policy that loses nothing in any; None if over 5,000.

    >>> fewest_to_enforce(0.01, 0.05)
    28
    """
    return _needed(np.zeros(1), tolerance, max_loss)


def lower_bound(differences: FloatArray, n: int | None = None) -> float:
    """Return the lower bound on a mean difference, with half a lost query added.

    Where nothing was lost on any query, a plain standard error of 0 would say that nothing ever is.

    Args:
        n: As of so many queries like these, over 1; of as many as there are unless given.
    """
    n = differences.size if n is None else n
    total = n + LOST_QUERIES
    mean = (n * differences.mean() - LOST_QUERIES) / total
    squares = n * ((differences - mean) ** 2).mean() + LOST_QUERIES * (-1.0 - mean) ** 2
    return float(mean - t_quantile(CONFIDENCE, n - 1.0) * sqrt(squares) / total)


def _needed(differences: FloatArray, tolerance: float, max_loss: float) -> int | None:
    """Count the queries like these that would enforce the policy; None if over 5,000."""
    if float(differences.mean()) < -tolerance:
        return None
    sizes = range(FEWEST_MEASURED, _MOST_NEEDED + 1)
    # The bound rises with the number of queries.
    place = bisect_left(sizes, True, key=lambda n: lower_bound(differences, n) >= -max_loss)
    return sizes[place] if place < len(sizes) else None
