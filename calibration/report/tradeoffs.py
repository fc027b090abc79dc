"""What a policy gives up: recall against harm, utility against a guarantee.

Pure: recorded pools and their labels in, figures with intervals out.
"""

from dataclasses import replace

import numpy as np

from calibration import risk
from calibration.calibrate_route import RouteOutcome
from calibration.evaluate import QueryMetrics, bootstrap_interval, per_query
from calibration.grid import Grid, GridIndex
from calibration.pool_labels import PoolLabels
from calibration.replay import Pools
from calibration.report.data import Frontier, Price, ShownPolicy
from calibration.results import tabulate
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy, RatioPolicy
from ctxguard.core.types import FloatArray
from ctxguard.profile.describe import describe_policy

SHOWN_ON_FRONT = 12
_DIGITS = 4
_NO_PROMISE = "none"


def shown_policy(policy: Policy, **means: float) -> ShownPolicy:
    """The settings of a policy that a person would change, with means of metrics."""
    threshold = policy.min_ratio if isinstance(policy, RatioPolicy) else policy.min_probability
    return ShownPolicy(describe_policy(policy), policy.kind, policy.k, threshold, means)


def with_settings(policy: Policy, k: int, threshold: float) -> Policy:
    """The same model or temperature at another k and threshold."""
    min_keep = min(policy.min_keep, k)
    if isinstance(policy, ExpectedUtilityPolicy):
        cost = policy.gain * threshold / (1.0 - threshold)
        return replace(policy, k=k, cost=cost, min_keep=min_keep)
    return replace(policy, k=k, min_ratio=threshold, min_keep=min_keep)


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


def price(
    outcome: RouteOutcome,
    pools: Pools,
    labels: PoolLabels,
    *,
    delta: float,
    seed: int = 0,
) -> Price | None:
    """What the guarantee costs in strict UDCG, and what other methods would say.

    Args:
        outcome: The route's choice.
        pools: Of queries that took no part in it.
        delta: The probability that a bound may be false.
        seed: Of the bootstrap, and of the order that betting needs.

    Returns:
        None where recall loss is undefined on every query.
    """
    chosen, certification = outcome.profile.policy, outcome.certification

    def measured(policy: Policy) -> QueryMetrics:
        return per_query(pools, labels, policy)

    recall_loss = measured(chosen).values["recall_loss"]
    losses = recall_loss[~np.isnan(recall_loss)]
    if losses.size == 0:
        return None
    # The order that the certificate was computed in; the bound depends on it.
    shuffled = losses[np.random.default_rng(seed).permutation(losses.size)]
    rules: dict[str, ShownPolicy | None] = {}
    in_force, results = None, None
    if certification is not None:
        policies: dict[str, Policy] = {_NO_PROMISE: outcome.highest_utility.policy}
        rules[_NO_PROMISE] = shown_policy(policies[_NO_PROMISE])
        for rule, choice in certification.rule_choices.items():
            rules[rule] = None
            if choice is not None:
                policies[rule] = with_settings(chosen, *outcome.chosen_grid.settings(choice[0]))
                tested = choice[1]["recall_loss"]
                rules[rule] = shown_policy(policies[rule], recall_loss=tested)
        in_force = None if certification.grid_index is None else "betting"
        columns = {name: measured(policy) for name, policy in policies.items()}
        results = tabulate(columns, ("udcg_strict", "recall_loss", "harm"), seed=seed)
    return Price(
        rules=rules,
        in_force=in_force,
        results=results,
        delta=delta,
        observed=bootstrap_interval(losses, seed=seed),
        bound=risk.betting_upper_bound(shuffled, delta),
    )
