"""Certify a threshold of P(relevant) below which a context probably holds nothing relevant.

A context is rated by the highest P(relevant) of its kept passages. The threshold comes from
queries that had no part in the choice: held out, or left out of it in turn.
"""

import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctxguard._support.words import significant
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError
from ctxguard.measure.metrics import pair_share
from ctxguard.profile.schema import SufficiencyProfile

DEFAULT_FALSE_ALARMS = 0.05

_DIGITS = 8


def calibrate_sufficiency(
    best: FloatArray,
    holds: NDArray[np.bool_],
    *,
    model: RelevanceModel | None = None,
    shown_by: Literal["folds", "held_out"] = "folds",
    false_alarms: float = DEFAULT_FALSE_ALARMS,
    delta: float = 0.1,
) -> SufficiencyProfile:
    """Certify a threshold of sufficiency for a policy.

    Args:
        best: Shape (n_q,), the highest P(relevant) in the context of each query that had no part
            in the choice; NaN where it is undefined.
        holds: Shape (n_q,), whether the context holds a relevant passage.
        model: P(relevant), for a policy without probabilities; None if the policy has its own.
        shown_by: How the queries were kept out of the choice.
        false_alarms: The largest share of contexts with a relevant passage that may be called
            insufficient, in (0, 1).
        delta: The probability that this promise may be false, in (0, 1).

    Returns:
        Without a threshold if the queries are too few.
    """
    defined = ~np.isnan(best)
    sufficient, insufficient = best[defined & holds], best[defined & ~holds]
    threshold = certified_threshold(sufficient, false_alarms, delta)
    if threshold is not None:
        # Rounded down: a higher threshold would call more contexts insufficient.
        threshold = math.floor(threshold * 10**_DIGITS) / 10**_DIGITS
    called: list[int | None] = [None, None]
    if threshold is not None:
        called = [int(np.less(part, threshold).sum()) for part in (sufficient, insufficient)]
    auroc = None
    if sufficient.size and insufficient.size:
        auroc = significant(pair_share(sufficient, insufficient))
    return SufficiencyProfile(
        threshold=threshold,
        model=model,
        alpha=false_alarms,
        delta=delta,
        n_sufficient=sufficient.size,
        n_insufficient=insufficient.size,
        false_alarms=called[0],
        detected=called[1],
        auroc=auroc,
        needed=fewest_for_threshold(false_alarms, delta),
        shown_by=shown_by,
    )


def sufficiency_words(certified: SufficiencyProfile | None) -> str:
    """Say whether contexts can be called insufficient, and on what evidence."""
    if certified is None:
        return "Not certified: no probabilities were fitted."
    if certified.auroc is None:
        return certified.statement
    return f"{certified.statement} AUROC on these queries {certified.auroc:.2f}."


def certified_threshold(probabilities: ArrayLike, alpha: float, delta: float) -> float | None:
    """Return the highest threshold that calls at most ``alpha`` of these contexts insufficient.

    It is the r-th smallest of n independent probabilities. The share of the population strictly
    below it exceeds alpha with probability at most P(Binomial(n, alpha) < r), in any distribution;
    r is the largest with which that is at most delta (Tong, Feng and Li, Neyman-Pearson
    classification algorithms, Science Advances 4(2), 2018, Proposition 1).

    Args:
        probabilities: Shape (n,), P(relevant) of the best passage of contexts that hold a
            relevant passage, from queries that fitted nothing.
        alpha: The share that may be called insufficient, in (0, 1).
        delta: The probability that the promise is false, in (0, 1).

    Returns:
        None with fewer than ``fewest_for_threshold``.

    >>> certified_threshold([0.1] * 44, alpha=0.05, delta=0.1) is None
    True
    >>> certified_threshold([0.1, 0.2] + [0.9] * 98, alpha=0.05, delta=0.1)
    0.2
    """
    ascending = np.sort(np.asarray(probabilities, dtype=np.float64))
    n, rank, tail = ascending.size, 0, 0.0
    if n < fewest_for_threshold(alpha, delta):
        return None
    while True:
        tail += _binomial(n, rank, alpha)
        if tail > delta:
            return float(ascending[rank - 1])
        rank += 1


def fewest_for_threshold(alpha: float, delta: float) -> int:
    """Count the held-out contexts with a relevant passage that a threshold needs at least.

    Raises:
        ConfigurationError: a share outside (0, 1).

    >>> fewest_for_threshold(0.05, 0.1)
    45
    """
    for name, value in (("false_alarms", alpha), ("delta", delta)):
        if not 0.0 < value < 1.0:
            raise ConfigurationError(f"{name} {value!r} must lie strictly between 0 and 1")
    return math.ceil(math.log(delta) / math.log1p(-alpha))


def _binomial(n: int, count: int, share: float) -> float:
    """Return P(Binomial(n, share) = count)."""
    ways = math.lgamma(n + 1) - math.lgamma(count + 1) - math.lgamma(n - count + 1)
    return math.exp(ways + count * math.log(share) + (n - count) * math.log1p(-share))
