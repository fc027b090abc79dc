"""Test the policies of a grid, and choose among those that are certified.

Policies are ordered by one set of queries and tested on another (DESIGN.md §9): given the first,
the second is an independent sample, as the test requires.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from calibration import risk
from calibration.grid import Grid, GridIndex
from calibration.pool_labels import discounts
from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError

_TIE = 1e-12
"""Policies that keep the same passages differ by rounding only."""


@dataclass(frozen=True)
class Promise:
    """The limits that a certificate must state.

    Attributes:
        alpha: Limit on the mean recall loss, in (0, 1).
        beta: Limit on the mean harm, > 0; None for no promise on harm.
        delta: The probability that the promise may be false, in (0, 1).
    """

    alpha: float = 0.1
    beta: float | None = None
    delta: float = 0.1

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("delta", self.delta)):
            if not 0.0 < value < 1.0:
                raise ConfigurationError(f"{name} {value!r} must lie strictly between 0 and 1")
        if self.beta is not None and not self.beta > 0.0:
            raise ConfigurationError(f"beta {self.beta!r} must be > 0, or left out")


@dataclass(frozen=True)
class Certification:
    """The outcome of testing a grid's policies on queries that did not order them.

    Attributes:
        grid_index: The chosen policy; None for the baseline, where nothing that gains more
            utility than it was certified.
        p_value: Its p-value; None for the baseline.
        recall_loss: Its mean recall loss on the test queries; 0 for the baseline.
        harm: Its mean harm on the test queries.
        n_recall: Test queries on which recall loss is defined.
        n_harm: All test queries.
        tested: Policies in the sequence.
        certified: How many of them passed.
        labels_needed: If nothing is certified, how many test queries like these with a defined
            recall loss would certify the safest policy; None if no number would, or if something
            is certified.
    """

    grid_index: GridIndex | None
    p_value: float | None
    recall_loss: float
    harm: float
    n_recall: int
    n_harm: int
    tested: int
    certified: int
    labels_needed: int | None


def certify(ordering: Grid, testing: Grid, promise: Promise, *, seed: int = 0) -> Certification:
    """Order policies on one set of queries, test them on another, choose among those that pass.

    What is served today is the baseline of recall loss, so that it loses nothing, and only
    policies of more strict UDCG than it are worth a test.

    Fixed-sequence testing with betting p-values along the Pareto front of risk and strict UDCG,
    safest first. A policy whose plain mean on the test queries breaks the promise is not
    certified whatever its p-value: betting may stop at its luckiest moment, which is valid at
    level delta, but a promise must not contradict its own evidence. Of the certified policies
    the one with the highest strict UDCG over all these queries is chosen. The certificate allows
    this, since it holds for all of them at once.

    Args:
        ordering: The policies over the queries that fitted and order them.
        testing: The same over queries that were used for neither.
        promise: The limits to certify.
        seed: Shuffles the test queries, since betting needs an order fixed beforehand.
    """
    order = np.random.default_rng(seed).permutation(len(testing.labels))
    defined = testing.labels.recall_shares()[1][order]
    indices = _sequence(ordering, promise) if defined.any() else []
    nothing = Certification(
        grid_index=None,
        p_value=None,
        recall_loss=0.0,
        harm=testing.today[1],
        n_recall=int(defined.sum()),
        n_harm=defined.size,
        tested=len(indices),
        certified=0,
        labels_needed=None,
    )
    if not indices:
        return nothing
    tested = testing.at(indices)
    recall_loss, harm = tested.recall_loss[order][defined], tested.harm[order]
    largest = _largest_harm(testing, indices)

    p_values = risk.betting_p_value(recall_loss, promise.alpha)
    mean_loss, mean_harm = recall_loss.mean(axis=0), harm.mean(axis=0)
    mean_udcg = tested.udcg_strict.mean(axis=0)
    kept_promise = mean_loss <= promise.alpha
    if promise.beta is not None:
        kept_promise &= mean_harm <= promise.beta
        limit = promise.beta / largest
        # A harm that cannot exceed the limit keeps the promise without any evidence.
        if limit < 1.0:
            harm_p_values = risk.betting_p_value(harm / largest, limit)
            p_values = risk.joint_p_value(p_values, harm_p_values)
    p_values = np.where(kept_promise, p_values, 1.0)
    n_certified = risk.fixed_sequence(p_values, promise.delta)

    # Above that of the baseline, over ordering and test queries together.
    n_ordering, n_testing = len(ordering.labels), len(testing.labels)
    ordered_udcg = ordering.means.udcg_strict[tuple(np.array(indices).T)]
    gain = (ordered_udcg - ordering.today[0]) * n_ordering + (
        mean_udcg - testing.today[0]
    ) * n_testing
    gain /= n_ordering + n_testing
    chosen = int(np.argmax(gain[:n_certified])) if n_certified else -1
    if chosen >= 0 and gain[chosen] <= _TIE:
        chosen = -1
    if chosen < 0:
        needed = None
        if not n_certified:
            losses = (recall_loss[:, 0], harm[:, 0] / largest)
            needed = _needed(*losses, largest, promise)
        return replace(nothing, certified=n_certified, labels_needed=needed)
    return replace(
        nothing,
        grid_index=indices[chosen],
        p_value=float(p_values[chosen]),
        recall_loss=float(mean_loss[chosen]),
        harm=float(mean_harm[chosen]),
        certified=n_certified,
    )


def _sequence(grid: Grid, promise: Promise) -> list[GridIndex]:
    """Return the policies worth testing, safest first, by the ordering queries alone.

    Large contexts lose least recall, but one of more harm than gain is worth no test, and a test
    that failed on it would end the sequence.
    """
    if len(grid.labels) == 0 or np.isnan((means := grid.means).recall_loss).any():
        return []
    share_used = means.recall_loss / promise.alpha
    if promise.beta is not None:
        share_used = np.maximum(share_used, means.harm / promise.beta)
    better = np.argwhere(means.udcg_strict > grid.today[0] + _TIE)
    if better.size == 0:
        return []
    cells = tuple(better.T)
    order = risk.pareto_order(share_used[cells], means.udcg_strict[cells])
    return [(int(better[row][0]), int(better[row][1])) for row in order.tolist()]


def _largest_harm(grid: Grid, indices: list[GridIndex]) -> float:
    """Return the most harm that a context of these policies could do, whatever the labels say."""
    worst = max(-grid.labels.rules.worst, 1e-9)
    largest = max(grid.settings(index)[0] for index in indices)
    return worst * float(discounts(largest).sum())


def _needed(
    recall_loss: FloatArray,
    harm_share: FloatArray,
    largest: float,
    promise: Promise,
) -> int | None:
    """Test queries with a defined recall loss for every promise; None if one cannot be kept."""
    needed = risk.labels_needed(recall_loss, promise.alpha, promise.delta)
    if needed is None or promise.beta is None or promise.beta >= largest:
        return needed
    limit = promise.beta / largest
    for_harm = risk.labels_needed(harm_share, limit, promise.delta)
    if for_harm is None:
        return None
    # Harm is defined on every query: of those that it needs, so many define recall loss as well.
    defined: float = recall_loss.shape[0] / harm_share.shape[0]
    return max(needed, math.ceil(for_harm * defined))
