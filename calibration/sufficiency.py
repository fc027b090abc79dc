"""Fit P(sufficient) for one route, and certify a threshold below which nothing relevant was kept.

The model is fitted on the queries that chose the policy, on contexts that it would keep had
P(relevant) not been fitted to them. The threshold comes from held-out queries.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from calibration import risk
from calibration.fit import FOLDS, fit_relevance, fold_of, pool_features
from calibration.pool_labels import PoolLabels
from calibration.replay import Pools
from calibration.weights import counted, n_equivalent
from ctxguard._support.extras import require
from ctxguard.core.decision import Decision, decide
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy
from ctxguard.core.sufficiency import SufficiencyModel, legs_of, list_signals
from ctxguard.core.types import FloatArray
from ctxguard.errors import CalibrationError, ConfigurationError
from ctxguard.profile.schema import SufficiencyProfile

DEFAULT_FALSE_ALARMS = 0.05

FEWEST_OF_EITHER = 5
"""With fewer contexts that hold a relevant passage, or fewer that hold none, nothing is fitted."""

_REGULARISATION = 0.3
"""C of the regression. In nested cross-validation on four collections 0.1 and 0.3 were equal, and
0.03 had a higher log loss by 0.02 to 0.03."""

_MAX_ITERATIONS = 1_000
_DIGITS = 8

Labelled = tuple[Pools, PoolLabels]


def calibrate_sufficiency(
    policy: Policy,
    chosen_on: Labelled,
    held_out: Labelled | None,
    *,
    false_alarms: float = DEFAULT_FALSE_ALARMS,
    delta: float = 0.1,
) -> SufficiencyProfile | None:
    """Fit P(sufficient) of what a policy keeps, and certify a threshold on it.

    Args:
        policy: The route's.
        chosen_on: The queries that chose the policy, with their labels: they fit the model.
        held_out: Queries that chose and fitted nothing: they set the threshold. None for none.
        false_alarms: The largest share of contexts with a relevant passage that may be called
            insufficient, in (0, 1).
        delta: The probability that this promise may be false, in (0, 1).

    Returns:
        None where nothing can be fitted: fewer than ``FEWEST_OF_EITHER`` contexts of either kind,
        or scores that carry rank only. Without a threshold where the held-out queries are too few.
    """
    pools, labels = chosen_on
    legs = legs_of(next(pools.rankings())) if len(pools) else ()
    if not legs:
        return None
    model = _fit(list(_unseen_decisions(policy, pools, labels)), labels, legs)
    if model is None:
        return None
    sufficient: list[float] = []
    insufficient: list[float] = []
    weights: list[float] = []
    if held_out is not None:
        pools, labels = held_out
        for row, ranking in enumerate(pools.rankings()):
            decision = decide(ranking, policy)
            probability = model.probability(decision)
            if probability is not None:
                holds = _holds_relevant(decision, labels, row)
                (sufficient if holds else insufficient).append(probability)
                if holds:
                    weights.append(float(labels.weights[row]))
    threshold = certified_threshold(sufficient, false_alarms, delta, weights)
    if threshold is not None:
        # Rounded down: a higher threshold would call more contexts insufficient.
        threshold = math.floor(threshold * 10**_DIGITS) / 10**_DIGITS
    return SufficiencyProfile(
        model=replace(model, threshold=threshold),
        alpha=false_alarms,
        delta=delta,
        n_sufficient=len(sufficient),
        n_insufficient=len(insufficient),
        false_alarms=_n_below(sufficient, threshold),
        detected=_n_below(insufficient, threshold),
        auroc=_auroc(sufficient, insufficient),
        needed=fewest_for_threshold(false_alarms, delta),
        n_equivalent=n_equivalent(np.array(weights)),
    )


def sufficiency_words(fitted: SufficiencyProfile | None) -> str:
    """Whether contexts can be called insufficient, and on what evidence, in words."""
    if fitted is None:
        return (
            f"Not fitted: it needs at least {FEWEST_OF_EITHER} queries to choose on whose context "
            f"holds a relevant passage, {FEWEST_OF_EITHER} whose context holds none, and scores "
            "that say more than an order."
        )
    if fitted.auroc is None:
        return fitted.statement
    return f"{fitted.statement} AUROC on held-out queries {fitted.auroc:.2f}."


def certified_threshold(
    probabilities: ArrayLike, alpha: float, delta: float, weights: ArrayLike | None = None
) -> float | None:
    """The highest threshold that calls at most a share ``alpha`` of such contexts insufficient.

    It is the r-th smallest of n independent probabilities. The share of the population strictly
    below it exceeds alpha with probability at most P(Binomial(n, alpha) < r), in any distribution;
    r is the largest with which that is at most delta (Tong, Feng and Li, Neyman-Pearson
    classification algorithms, Science Advances 4(2), 2018, Proposition 1). Where weights differ,
    it is the last before the first whose weighted share below is not shown to be at most alpha by
    ``risk.betting_p_value``; since shares rise with the threshold, no correction is needed (Bates
    et al., Distribution-free, risk-controlling prediction sets, JACM 68(6), 2021, Theorem 1).

    Args:
        probabilities: Shape (n,), P(sufficient) of contexts that hold a relevant passage, from
            queries that fitted nothing.
        alpha: In (0, 1).
        delta: The probability that the promise is false, in (0, 1).
        weights: Shape (n,), as for ``risk.betting_p_value``; None where all weigh the same.

    Returns:
        None with fewer than ``fewest_for_threshold``, or where their weights are too unequal.

    >>> certified_threshold([0.1] * 44, alpha=0.05, delta=0.1) is None
    True
    >>> certified_threshold([0.1, 0.2] + [0.9] * 98, alpha=0.05, delta=0.1)
    0.2
    """
    ascending = np.sort(np.asarray(probabilities, dtype=np.float64))
    n, rank, tail = ascending.size, 0, 0.0
    if n < fewest_for_threshold(alpha, delta):
        return None
    if weights is not None and n_equivalent(np.asarray(weights)) is not None:
        return _weighted_threshold(np.asarray(probabilities), alpha, delta, np.asarray(weights))
    while True:
        tail += _binomial(n, rank, alpha)
        if tail > delta:
            return float(ascending[rank - 1])
        rank += 1


def _weighted_threshold(
    probabilities: FloatArray, alpha: float, delta: float, weights: FloatArray
) -> float | None:
    order = np.random.default_rng(0).permutation(probabilities.size)  # betting needs a fixed one
    best = None
    for threshold in np.unique(probabilities).tolist():
        called = (probabilities < threshold)[order]
        if risk.betting_p_value(called, alpha, weights[order], target_delta=delta) > delta:
            break
        best = threshold
    return best


def fewest_for_threshold(alpha: float, delta: float) -> int:
    """How many held-out contexts with a relevant passage a threshold needs at least.

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
    """P(Binomial(n, share) = count)."""
    ways = math.lgamma(n + 1) - math.lgamma(count + 1) - math.lgamma(n - count + 1)
    return math.exp(ways + count * math.log(share) + (n - count) * math.log1p(-share))


def _unseen_decisions(policy: Policy, pools: Pools, labels: PoolLabels) -> Iterator[Decision]:
    """What the policy keeps of each query, by probabilities that were not fitted to it."""
    rankings = pools.rankings()
    if not isinstance(policy, ExpectedUtilityPolicy):
        yield from (decide(ranking, policy) for ranking in rankings)
        return
    table = pool_features(pools)
    folds = np.array([fold_of(query_id) for query_id in pools.query_ids])
    policies = []
    for number in range(FOLDS):
        try:
            model = fit_relevance(pools, labels, table, np.flatnonzero(folds != number))
        except CalibrationError:
            model = policy.model
        policies.append(replace(policy, model=model))
    for fold, ranking in zip(folds.tolist(), rankings, strict=True):
        yield decide(ranking, policies[fold])


def _holds_relevant(decision: Decision, labels: PoolLabels, row: int) -> bool:
    return bool(labels.relevant[row, list(decision.kept)].any())


def _fit(
    decisions: Sequence[Decision], labels: PoolLabels, legs: tuple[str, ...]
) -> SufficiencyModel | None:
    """L2 logistic regression on the list's signals; None where there is too little to learn from.

    Decisions that keep nothing or lack a signal are left out.
    """
    rows, holds, used = [], [], []
    for row, decision in enumerate(decisions):
        values = list_signals(decision, legs) if decision.n_kept else None
        if values is not None:
            rows.append(values)
            used.append(row)
            holds.append(_holds_relevant(decision, labels, row))
    if not FEWEST_OF_EITHER <= sum(holds) <= len(holds) - FEWEST_OF_EITHER:
        return None
    features = np.array(rows)
    means, scales = features.mean(axis=0), features.std(axis=0)
    scales[scales < 1e-12] = 1.0
    linear_model = require("sklearn.linear_model", "calibrate")
    regression = linear_model.LogisticRegression(C=_REGULARISATION, max_iter=_MAX_ITERATIONS)
    # The number of threads changes the order of sums, and so the last digits of a coefficient.
    with require("threadpoolctl", "calibrate").threadpool_limits(1):
        regression.fit(
            (features - means) / scales, holds, sample_weight=counted(labels.weights[used])
        )
    return SufficiencyModel(
        legs=legs,
        coefficients=_rounded(regression.coef_[0]),
        means=_rounded(means),
        scales=_rounded(scales),
        intercept=_rounded(regression.intercept_)[0],
    )


def _n_below(probabilities: Sequence[float], threshold: float | None) -> int | None:
    return None if threshold is None else sum(value < threshold for value in probabilities)


def _auroc(above: Sequence[float], below: Sequence[float]) -> float | None:
    """The share of pairs in which the first is higher, ties half; None without a pair."""
    if not above or not below:
        return None
    higher = np.subtract.outer(np.array(above), np.array(below))
    return float(f"{np.heaviside(higher, 0.5).mean():.6g}")


def _rounded(values: FloatArray) -> tuple[float, ...]:
    return tuple(float(f"{value:.{_DIGITS}g}") for value in values)
