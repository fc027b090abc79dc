"""What a policy gives up for what: utility against k, recall against harm, a guarantee.

Pure: recorded pools and their labels in, figures with intervals out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from calibration import risk
from calibration.calibrate_route import RouteOutcome
from calibration.evaluate import (
    SHOWN_SIZES,
    bootstrap_interval,
    bootstrap_intervals,
    per_query,
    utilities_by_rank,
)
from calibration.grid import Grid, GridIndex
from calibration.pool_labels import PoolLabels, discounts
from calibration.replay import Pools
from calibration.report.data import (
    AtK,
    Frontier,
    FrontPolicy,
    MeasuredRule,
    PolicySettings,
    Price,
)
from ctxguard.core.metrics import Utilities
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy
from ctxguard.core.types import FloatArray
from ctxguard.profile.describe import describe_policy
from ctxguard.profile.schema import Interval

SHOWN_ON_FRONT = 12
_DIGITS = 4


def settings_of(policy: Policy) -> PolicySettings:
    """The settings of a policy that a person would change."""
    if isinstance(policy, ExpectedUtilityPolicy):
        return PolicySettings(
            words=describe_policy(policy),
            kind=policy.kind,
            k=policy.k,
            threshold=policy.min_probability,
            min_keep=policy.min_keep,
            cost=policy.cost,
            gain=policy.gain,
        )
    return PolicySettings(
        words=describe_policy(policy),
        kind=policy.kind,
        k=policy.k,
        threshold=policy.min_ratio,
        min_keep=policy.min_keep,
        temperature=policy.temperature,
    )


def with_settings(policy: Policy, k: int, threshold: float) -> Policy:
    """The same model or temperature at another k and threshold."""
    min_keep = min(policy.min_keep, k)
    if isinstance(policy, ExpectedUtilityPolicy):
        cost = policy.gain * threshold / (1.0 - threshold)
        return replace(policy, k=k, cost=cost, min_keep=min_keep)
    return replace(policy, k=k, min_ratio=threshold, min_keep=min_keep)


def by_k(pools: Pools, labels: PoolLabels, policy: Policy, *, seed: int = 0) -> tuple[AtK, ...]:
    """Strict UDCG of the bare first k, and of the policy limited to k, for k from 1.

    Args:
        pools: The replay of one route.
        labels: Their labels.
        policy: Whose threshold stays as it is.
        seed: Of the bootstrap.
    """
    depth = pools.scores.shape[1]
    ks = range(1, max(min(SHOWN_SIZES, depth), min(policy.k, depth)) + 1)
    bare = labels.utilities * discounts(depth)
    gains, harms = np.maximum(bare, 0.0).cumsum(axis=1), np.maximum(-bare, 0.0).cumsum(axis=1)
    totals = utilities_by_rank(pools, labels, policy, ks[-1]).cumsum(axis=1)
    kept = [k - 1 for k in ks]
    columns = (gains[:, kept], harms[:, kept], (gains - harms)[:, kept], totals)
    return tuple(
        AtK(k=k, gain=gain, harm=harm, first_k=first_k, chosen=chosen)
        for k, gain, harm, first_k, chosen in zip(
            ks, *(bootstrap_intervals(values, seed=seed) for values in columns), strict=True
        )
    )


def frontier(outcome: RouteOutcome, *, seed: int = 0) -> Frontier:
    """All candidate policies by recall loss and harm on the choosing queries.

    The chosen one stands at its k and threshold; where a promise was asked for, its model was
    fitted on a part of these queries only.
    """
    grid = outcome.chosen_grid
    loss, harm = grid.means.recall_loss.ravel(), grid.means.harm.ravel()
    udcg = grid.means.udcg_strict.ravel()
    loss = np.nan_to_num(loss)
    distinct = np.unique(np.round(np.column_stack([loss, harm, udcg]), _DIGITS), axis=0)
    front = _front(loss, harm)
    width = grid.keep_table.thresholds.size
    shown = sorted({int(i) for i in np.linspace(0, len(front) - 1, SHOWN_ON_FRONT).round()})
    return Frontier(
        n_candidates=loss.size,
        candidates=tuple((float(x), float(y), float(u)) for x, y, u in distinct + 0.0),
        front_line=tuple((float(loss[i]), float(harm[i])) for i in front),
        front=_measured(grid, [divmod(front[i], width) for i in shown], seed),
        chosen=_measured(*outcome.place, seed)[0],
    )


def _front(loss: FloatArray, harm: FloatArray) -> list[int]:
    """Policies that no other beats in both, least recall loss first."""
    order = np.lexsort((harm, loss))
    least = np.minimum.accumulate(harm[order])
    better = np.concatenate([[True], least[1:] < least[:-1]])
    return [int(index) for index in order[better]]


def _measured(grid: Grid, indices: Sequence[GridIndex], seed: int) -> tuple[FrontPolicy, ...]:
    values = grid.at(indices)
    defined = values.recall_loss[~np.isnan(values.recall_loss[:, 0])]
    figures = [
        bootstrap_intervals(own, seed=seed) for own in (defined, values.harm, values.udcg_strict)
    ]
    return tuple(
        FrontPolicy(k=k, threshold=threshold, recall_loss=recall_loss, harm=harm, udcg_strict=udcg)
        for (k, threshold), recall_loss, harm, udcg in zip(
            map(grid.settings, indices), *figures, strict=True
        )
    )


def price(
    outcome: RouteOutcome,
    pools: Pools,
    labels: PoolLabels,
    utilities: Utilities,
    *,
    delta: float,
    seed: int = 0,
) -> Price | None:
    """What the guarantee costs in strict UDCG, and what other methods would say.

    Args:
        outcome: The route's choice.
        pools: Of queries that took no part in it.
        labels: Their labels.
        utilities: What a passage is worth.
        delta: The probability that a bound may be false.
        seed: Of the bootstrap, and of the order that betting needs.

    Returns:
        None where recall loss is undefined on every query.
    """
    chosen = outcome.profile.policy

    def measured(policy: Policy) -> Mapping[str, FloatArray]:
        return per_query(pools, labels, policy, utilities).values

    recall_loss = measured(chosen)["recall_loss"]
    losses = recall_loss[~np.isnan(recall_loss)]
    if losses.size == 0:
        return None
    without = outcome.highest_utility.policy
    free = measured(without)
    rules = [] if outcome.certification is None else [_rule("none", without, free, free)]
    for other in () if outcome.certification is None else outcome.certification.rule_choices:
        if other.grid_index is None or other.tested is None:
            rules.append(_rule(other.rule, None, None, free))
            continue
        policy = with_settings(chosen, *outcome.chosen_grid.settings(other.grid_index))
        rules.append(
            _rule(
                other.rule,
                policy,
                measured(policy),
                free,
                tested=other.tested["recall_loss"],
                seed=seed,
            )
        )
    # The order that the certificate was computed in; the bound depends on it.
    shuffled = losses[np.random.default_rng(seed).permutation(losses.size)]
    certified = outcome.certification is not None and outcome.certification.grid_index is not None
    return Price(
        rules=tuple(
            rule.model_copy(update={"chosen": certified and rule.rule == "betting"})
            for rule in rules
        ),
        delta=delta,
        observed=bootstrap_interval(losses, seed=seed),
        bound=risk.betting_upper_bound(shuffled, delta),
    )


def _rule(
    rule: str,
    policy: Policy | None,
    values: Mapping[str, FloatArray] | None,
    free: Mapping[str, FloatArray],
    *,
    tested: float | None = None,
    seed: int = 0,
) -> MeasuredRule:
    def mean(name: str) -> Interval | None:
        return None if values is None else bootstrap_interval(values[name], seed=seed)

    return MeasuredRule(
        rule=rule,
        chosen=False,
        policy=None if policy is None else settings_of(policy),
        tested_recall_loss=tested,
        udcg_strict=mean("udcg_strict"),
        recall_loss=mean("recall_loss"),
        harm=mean("harm"),
        price=None
        if values is None
        else bootstrap_interval(free["udcg_strict"] - values["udcg_strict"], seed=seed),
    )
