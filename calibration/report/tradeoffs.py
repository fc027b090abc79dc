"""What a policy gives up for what: utility against k, recall against harm, a guarantee.

Pure: recorded pools and their labels in, figures with intervals out.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from calibration import risk
from calibration.certify import RouteOutcome
from calibration.evaluate import CONFIDENCE, bootstrap_interval, per_query, resampled_means
from calibration.losses import Labels, discounts, losses_at
from calibration.replay import Pools
from calibration.report.data import (
    AtK,
    Bound,
    Frontier,
    FrontPolicy,
    PolicySettings,
    Price,
    RuleChoice,
)
from calibration.select import MAX_K, Cell, Grid, udcg_at
from ctxguard.metrics import Utilities
from ctxguard.policy import ExpectedUtilityPolicy, Policy, decide
from ctxguard.profile import Interval
from ctxguard.types import FloatArray

SHOWN_ON_FRONT = 12
_BISECTIONS = 30
_DIGITS = 4


def settings_of(policy: Policy) -> PolicySettings:
    """The settings that a person would change."""
    if isinstance(policy, ExpectedUtilityPolicy):
        return PolicySettings(
            kind=policy.kind,
            k=policy.k,
            threshold=policy.min_probability,
            min_keep=policy.min_keep,
            cost=policy.cost,
            gain=policy.gain,
        )
    return PolicySettings(
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


def by_k(pools: Pools, labels: Labels, policy: Policy, *, seed: int = 0) -> tuple[AtK, ...]:
    """Strict UDCG of the bare first k, and of the policy limited to k, for k from 1.

    Args:
        pools: The replay of one route.
        labels: Their labels.
        policy: Whose threshold stays as it is.
        seed: Of the bootstrap.
    """
    depth = pools.scores.shape[1]
    ks = range(1, max(min(MAX_K, depth), min(policy.k, depth)) + 1)
    bare = labels.utilities * discounts(depth)
    gains, harms = np.maximum(bare, 0.0).cumsum(axis=1), np.maximum(-bare, 0.0).cumsum(axis=1)
    widest = replace(policy, k=ks[-1], min_keep=min(policy.min_keep, ks[-1]))
    served = np.zeros((len(pools), ks[-1]))
    for row, ranking in enumerate(pools.rankings()):
        kept = list(decide(ranking, widest).kept)
        served[row, : len(kept)] = labels.utilities[row, kept] * discounts(len(kept))
    totals = served.cumsum(axis=1)

    kept = [k - 1 for k in ks]
    columns = (gains[:, kept], harms[:, kept], (gains - harms)[:, kept], totals)
    return tuple(
        AtK(k=k, gain=gain, harm=harm, first_k=first_k, chosen=chosen)
        for k, gain, harm, first_k, chosen in zip(
            ks, *(_intervals(values, seed) for values in columns), strict=True
        )
    )


def _intervals(values: FloatArray, seed: int) -> list[Interval]:
    """``bootstrap_interval`` of each column, resampled once where no figure is undefined."""
    n = values.shape[0]
    if n < 2 or np.isnan(values).any():
        return [bootstrap_interval(column, seed=seed) for column in values.T]
    tail = (1.0 - CONFIDENCE) / 2.0
    lower, upper = np.quantile(resampled_means(values, seed=seed), [tail, 1.0 - tail], axis=0)
    return [
        Interval(value=float(mean), lower=float(low), upper=float(high), n=n)
        for mean, low, high in zip(values.mean(axis=0), lower, upper, strict=True)
    ]


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
    width = grid.survival.thresholds.size
    shown = sorted({int(i) for i in np.linspace(0, len(front) - 1, SHOWN_ON_FRONT).round()})
    return Frontier(
        n_candidates=loss.size,
        candidates=tuple((float(x), float(y), float(u)) for x, y, u in distinct + 0.0),
        front_line=tuple((float(loss[i]), float(harm[i])) for i in front),
        front=_measured(grid, [divmod(front[i], width) for i in shown], seed),
        chosen=_measured(grid, [chosen_cell(outcome)], seed)[0],
    )


def _front(loss: FloatArray, harm: FloatArray) -> list[int]:
    """Policies that no other beats in both, least recall loss first."""
    order = np.lexsort((harm, loss))
    least = np.minimum.accumulate(harm[order])
    better = np.concatenate([[True], least[1:] < least[:-1]])
    return [int(index) for index in order[better]]


def chosen_cell(outcome: RouteOutcome) -> Cell:
    """Where the chosen policy stands on its family's grid."""
    test = outcome.certification
    if test is not None and test.cell is not None:
        return test.cell
    return outcome.chosen_grid.means.best()


def _measured(grid: Grid, cells: list[Cell], seed: int) -> tuple[FrontPolicy, ...]:
    losses, harms = losses_at(grid.labels, grid.survival, cells)
    defined = losses[~np.isnan(losses[:, 0])]
    figures = (defined, harms, udcg_at(grid, cells))
    return tuple(
        FrontPolicy(
            k=int(grid.survival.ks[row_k]),
            threshold=float(grid.survival.thresholds[row_t]),
            recall_loss=recall_loss,
            harm=harm,
            udcg_strict=udcg,
        )
        for (row_k, row_t), recall_loss, harm, udcg in zip(
            cells, *(_intervals(values, seed) for values in figures), strict=True
        )
    )


def price(
    outcome: RouteOutcome,
    pools: Pools,
    labels: Labels,
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
    free = measured(outcome.uncertified)
    survival = outcome.chosen_grid.survival
    rules = (
        [] if outcome.certification is None else [_rule("none", outcome.uncertified, free, free)]
    )
    for other in () if outcome.certification is None else outcome.certification.alternatives:
        if other.cell is None or other.tested is None:
            rules.append(_rule(other.rule, None, None, free))
            continue
        policy = with_settings(
            chosen, int(survival.ks[other.cell[0]]), float(survival.thresholds[other.cell[1]])
        )
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
    taken = "betting" if outcome.profile.certificate is not None else "none"
    return Price(
        rules=tuple(rule.model_copy(update={"chosen": rule.rule == taken}) for rule in rules),
        delta=delta,
        observed=bootstrap_interval(losses, seed=seed),
        bounds=_bounds(losses, delta, seed),
    )


def _rule(
    rule: str,
    policy: Policy | None,
    values: Mapping[str, FloatArray] | None,
    free: Mapping[str, FloatArray],
    *,
    tested: float | None = None,
    seed: int = 0,
) -> RuleChoice:
    def mean(name: str) -> Interval | None:
        return None if values is None else bootstrap_interval(values[name], seed=seed)

    return RuleChoice(
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


def _bounds(losses: FloatArray, delta: float, seed: int) -> tuple[Bound, ...]:
    n = losses.size
    # The order that the certificate was computed in; betting's bound depends on it.
    shuffled = losses[np.random.default_rng(seed).permutation(n)]
    bounds = [
        Bound(method="betting", bound=risk.betting_upper_bound(shuffled, delta), guaranteed=True),
        Bound(
            method="hoeffding_bentkus",
            bound=_least_rejected(risk.hoeffding_bentkus_p_value, losses, delta),
            guaranteed=True,
        ),
    ]
    if n > 1:
        bound = _least_rejected(risk.clt_p_value, losses, delta)
        bounds.append(Bound(method="clt", bound=bound, guaranteed=False))
    in_expectation = (float(losses.sum()) + 1.0) / (n + 1)
    bounds.append(Bound(method="conformal_risk_control", bound=in_expectation, guaranteed=False))
    return tuple(bounds)


def _least_rejected(
    p_value: Callable[[FloatArray, float], FloatArray], losses: FloatArray, delta: float
) -> float:
    """The least alpha that a test rejects at level delta: an upper bound of the mean."""
    low, high = float(losses.mean()), 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        if 0.0 < middle < 1.0 and float(p_value(losses, middle)) <= delta:
            high = middle
        else:
            low = middle
    return high
