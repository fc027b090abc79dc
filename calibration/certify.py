"""Proves a promise on recall, or a sufficiency threshold, on queries not used to choose it.

Policies are ordered by one set of queries and tested on another (DESIGN.md §9): given the first,
the second is an independent sample, as the test requires. A context is rated by the highest
P(relevant) of its kept passages; below the threshold it probably holds nothing relevant. Pure.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from calibration.fit import significant
from calibration.grid import Grid, GridIndex
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.types import FloatArray
from ctxguard.measure import risk
from ctxguard.measure.metrics import pair_share
from ctxguard.measure.rows import BoolArray
from ctxguard.profile.schema import SufficiencyProfile

_TIE = 1e-12
"""Differences up to this are due to rounding: such policies keep the same passages."""

_DIGITS = 8
"""How many digits a threshold of sufficiency has."""


@dataclass(frozen=True)
class Certification:
    """The outcome of testing a grid's policies on queries that did not order them.

    Attributes:
        grid_index: The chosen policy; None for the baseline, if no policy of higher utility was
            certified.
        recall_loss: Its mean on the test queries; 0 for the baseline.
        n_recall: Test queries on which recall loss is defined, of all ``n_queries``.
        tested: Policies in the sequence, of which ``certified`` passed.
        labels_needed: If nothing is certified, how many test queries like these with a defined
            recall loss would certify the safest policy; None if no number would, or if something
            is certified.
    """

    grid_index: GridIndex | None
    recall_loss: float
    n_recall: int
    n_queries: int
    tested: int
    certified: int
    labels_needed: int | None


def certify(
    ordering: Grid, testing: Grid, *, alpha: float, delta: float, seed: int = 0
) -> Certification:
    """Order policies on one set of queries, test them on another, and choose among the passing.

    Today's context is the baseline of recall loss, so it loses nothing, and only policies of higher
    UDCG are worth a test.

    Fixed-sequence testing with betting p-values along the Pareto front of risk and UDCG,
    safest first. A policy whose plain mean on the test queries breaks the promise is not
    certified whatever its p-value: betting may stop at its luckiest moment, which is valid at
    level delta, but a promise must not contradict its own evidence. Of the certified policies
    the one with the highest UDCG over all these queries is chosen. The certificate allows
    this, since it holds for all of them at once.

    Args:
        ordering, testing: The same policies over the queries that fitted them, and over others.
        alpha: Limit on the mean recall loss, in (0, 1).
        delta: The probability that the promise may be false, in (0, 1).
        seed: Shuffles the test queries, since betting needs an order fixed beforehand.
    """
    order = np.random.default_rng(seed).permutation(len(testing.pools))
    defined = np.any(testing.pools.at_stake, axis=1)[order]
    indices = _sequence(ordering) if defined.any() else []
    nothing = Certification(
        grid_index=None,
        recall_loss=0.0,
        n_recall=int(defined.sum()),
        n_queries=defined.size,
        tested=len(indices),
        certified=0,
        labels_needed=None,
    )
    if not indices:
        return nothing
    udcg, recall_loss = testing.at(indices)
    recall_loss = recall_loss[order][defined]
    mean_loss, mean_udcg = recall_loss.mean(axis=0), udcg.mean(axis=0)
    p_values = risk.betting_p_value(recall_loss, alpha)
    p_values = np.where(mean_loss <= alpha + _TIE, p_values, 1.0)
    n_certified = risk.fixed_sequence(p_values, delta)

    # UDCG above the baseline's, over ordering and test queries together.
    n_ordering, n_testing = len(ordering.pools), len(testing.pools)
    ordered_udcg = ordering.means[0][tuple(np.array(indices).T)]
    gain = (ordered_udcg - ordering.today) * n_ordering + (mean_udcg - testing.today) * n_testing
    gain /= n_ordering + n_testing
    chosen = int(np.argmax(gain[:n_certified])) if n_certified else -1
    if chosen >= 0 and gain[chosen] <= _TIE:
        chosen = -1
    if chosen < 0:
        needed = None
        if not n_certified:
            needed = risk.labels_needed(recall_loss[:, 0], alpha, delta)
        return replace(nothing, certified=n_certified, labels_needed=needed)
    return replace(
        nothing,
        grid_index=indices[chosen],
        recall_loss=float(mean_loss[chosen]),
        certified=n_certified,
    )


def _sequence(grid: Grid) -> list[GridIndex]:
    """Return the policies worth testing, safest first, using only the ordering queries.

    Large contexts lose the least recall, but one that harms more than it gains is not worth a test,
    and failing that test would end the sequence.
    """
    if len(grid.pools) == 0:
        return []
    udcg, recall_loss = grid.means
    if np.isnan(recall_loss).any():
        return []
    better = np.argwhere(udcg > grid.today + _TIE)
    if better.size == 0:
        return []
    cells = tuple(better.T)
    order = risk.pareto_order(recall_loss[cells], udcg[cells])
    return [(int(better[row][0]), int(better[row][1])) for row in order.tolist()]


def calibrate_sufficiency(
    best: FloatArray,
    holds: BoolArray,
    *,
    model: RelevanceModel | None = None,
    shown_by: Literal["folds", "held_out"] = "folds",
    false_alarms: float = 0.05,
    delta: float = 0.1,
) -> SufficiencyProfile:
    """Certify a threshold on P(relevant) below which a context is called insufficient.

    There is none if the queries are too few.

    Args:
        best: Shape (n_q,), the highest P(relevant) in the context of each query that had no part
            in the choice; NaN where it is undefined.
        holds: Shape (n_q,), whether the context holds a relevant passage.
        model: P(relevant), for a policy without probabilities; None if the policy has its own.
        false_alarms: The largest share of contexts with a relevant passage that may be called
            insufficient, but with probability delta.
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
    classification algorithms, Science Advances 4(2), 2018, Proposition 1). None with fewer than
    ``fewest_for_threshold``.

    Args:
        probabilities: Shape (n,), P(relevant) of the best passage of contexts that hold a
            relevant passage, from queries that fitted nothing.

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
    """Return the fewest held-out contexts with a relevant passage that a threshold requires.

    >>> fewest_for_threshold(0.05, 0.1)
    45
    """
    return math.ceil(math.log(delta) / math.log1p(-alpha))


def _binomial(n: int, count: int, share: float) -> float:
    """Return P(Binomial(n, share) = count)."""
    ways = math.lgamma(n + 1) - math.lgamma(count + 1) - math.lgamma(n - count + 1)
    return math.exp(ways + count * math.log(share) + (n - count) * math.log1p(-share))
