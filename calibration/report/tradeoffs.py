"""What policies give up: recall against harm. Pure."""

import numpy as np

from calibration.calibrate_route import RouteOutcome
from calibration.grid import Grid, GridIndex
from calibration.report.data import Frontier, ShownPolicy
from ctxguard.core.policies import Policy, RatioPolicy
from ctxguard.core.types import FloatArray
from ctxguard.profile.describe import describe_policy

SHOWN_ON_FRONT = 12
_DIGITS = 4


def shown_policy(policy: Policy, **means: float) -> ShownPolicy:
    """The settings of a policy that a person would change, with means of metrics."""
    threshold = policy.min_ratio if isinstance(policy, RatioPolicy) else policy.min_probability
    return ShownPolicy(describe_policy(policy), policy.kind, policy.k, threshold, means)


def frontier(outcome: RouteOutcome) -> Frontier:
    """All candidate policies by recall loss and harm on the choosing queries.

    The chosen one stands at its k and threshold; where a promise was asked for, its model was
    fitted on a part of these queries only.
    """
    grid, (own, (place,)), policy = outcome.chosen_grid, outcome.place, outcome.profile.policy
    loss, harm = np.nan_to_num(grid.means.recall_loss.ravel()), grid.means.harm.ravel()
    distinct = np.unique(np.round(np.column_stack([loss, harm]), _DIGITS), axis=0)
    front = _front(loss, harm)
    width = grid.thresholds.size
    shown = sorted({int(i) for i in np.linspace(0, len(front) - 1, SHOWN_ON_FRONT).round()})
    return Frontier(
        n_candidates=loss.size,
        candidates=tuple((float(x), float(y)) for x, y in distinct + 0.0),
        front_line=tuple((float(loss[i]), float(harm[i])) for i in front),
        front=tuple(_at(grid, divmod(front[i], width), policy) for i in shown),
        chosen=_at(own, place, policy),
    )


def _front(loss: FloatArray, harm: FloatArray) -> list[int]:
    """Policies that no other beats in both, least recall loss first."""
    order = np.lexsort((harm, loss))
    least = np.minimum.accumulate(harm[order])
    better = np.concatenate([[True], least[1:] < least[:-1]])
    return [int(index) for index in order[better]]


def _at(grid: Grid, index: GridIndex, policy: Policy) -> ShownPolicy:
    k, threshold = grid.settings(index)
    means = {
        name: float(np.nan_to_num(getattr(grid.means, name)[index]))
        for name in ("recall_loss", "harm", "udcg_strict")
    }
    return ShownPolicy("", policy.kind, k, threshold, means)
