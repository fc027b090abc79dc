"""Test the policies of a grid, and choose among those that are certified.

Policies are ordered by one set of queries and tested on another (DESIGN.md §9): given the first,
the second is an independent sample, as the test requires.
"""

from dataclasses import dataclass, replace

import numpy as np

from calibration.grid import Grid, GridIndex
from ctxguard.errors import ConfigurationError
from ctxguard.measure import risk

_TIE = 1e-12
"""Policies that keep the same passages differ only by rounding."""


@dataclass(frozen=True)
class Promise:
    """The promise that a certificate states.

    Attributes:
        alpha: Limit on the mean recall loss, in (0, 1).
        delta: The probability that the promise may be false, in (0, 1).
    """

    alpha: float = 0.1
    delta: float = 0.1

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("delta", self.delta)):
            if not 0.0 < value < 1.0:
                raise ConfigurationError(f"{name} {value!r} must lie strictly between 0 and 1")


@dataclass(frozen=True)
class Certification:
    """The outcome of testing a grid's policies on queries that did not order them.

    Attributes:
        grid_index: The chosen policy; None for the baseline, if no policy of higher utility was
            certified.
        recall_loss: Its mean recall loss on the test queries; 0 for the baseline.
        n_recall: Test queries on which recall loss is defined.
        n_queries: All test queries.
        tested: Policies in the sequence.
        certified: How many of them passed.
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


def certify(ordering: Grid, testing: Grid, promise: Promise, *, seed: int = 0) -> Certification:
    """Order policies on one set of queries, test them on another, choose among those that pass.

    Today's context is the baseline of recall loss, so it loses nothing, and only policies of higher
    UDCG are worth a test.

    Fixed-sequence testing with betting p-values along the Pareto front of risk and UDCG,
    safest first. A policy whose plain mean on the test queries breaks the promise is not
    certified whatever its p-value: betting may stop at its luckiest moment, which is valid at
    level delta, but a promise must not contradict its own evidence. Of the certified policies
    the one with the highest UDCG over all these queries is chosen. The certificate allows
    this, since it holds for all of them at once.

    Args:
        ordering: The policies over the queries that fitted and order them.
        testing: The same policies over queries that neither fitted nor ordered them.
        promise: The limit to certify.
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
    p_values = risk.betting_p_value(recall_loss, promise.alpha)
    p_values = np.where(mean_loss <= promise.alpha + _TIE, p_values, 1.0)
    n_certified = risk.fixed_sequence(p_values, promise.delta)

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
            needed = risk.labels_needed(recall_loss[:, 0], promise.alpha, promise.delta)
        return replace(nothing, certified=n_certified, labels_needed=needed)
    return replace(
        nothing,
        grid_index=indices[chosen],
        recall_loss=float(mean_loss[chosen]),
        certified=n_certified,
    )


def _sequence(grid: Grid) -> list[GridIndex]:
    """Return the policies worth testing, safest first, by the ordering queries alone.

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
