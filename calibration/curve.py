"""Utility and recall of contexts by their size: one policy at every k.

Pure: recorded pools and their labels in, figures with intervals out.
"""

from dataclasses import dataclass, replace

import numpy as np

from calibration.evaluate import bootstrap_intervals, contexts, interval_bounds, resampled_means
from calibration.pool_labels import PoolLabels, discounts
from calibration.replay import Pools
from ctxguard.core.interval import Interval
from ctxguard.core.policies import Policy

SHOWN_SIZES = 20
"""Contexts of up to so many passages are shown one by one."""


@dataclass(frozen=True)
class AtK:
    """Contexts of at most k passages.

    Attributes:
        udcg_strict: gain − harm.
        gain: Gain of the relevant passages.
        harm: Harm of the others, as a positive number.
        recall: Share of the query's relevant passages that the context holds.
    """

    k: int
    udcg_strict: Interval
    gain: Interval
    harm: Interval
    recall: Interval


@dataclass(frozen=True)
class Curve:
    """A policy by the size of the context.

    Attributes:
        points: For k = 1, 2, …
        optimal_k: The k of highest mean strict UDCG; the smallest if several are equal.
        within_noise: Every k that is not worse than the optimal one by more than noise, paired
            by query.
    """

    points: tuple[AtK, ...]
    optimal_k: int
    within_noise: tuple[int, ...]


def curve(pools: Pools, labels: PoolLabels, policy: Policy, *, seed: int = 0) -> Curve:
    """Measure contexts of at most k passages under a policy, for k from 1 to 20 or its own k.

    The threshold of the policy applies, so the curve is flat if it, not k, ends the context.
    """
    most = min(max(SHOWN_SIZES, policy.k), pools.scores.shape[1])
    widest = replace(policy, k=most, min_keep=min(policy.min_keep, most))
    order, kept = contexts(pools, widest)
    context, kept = labels.reordered(order[:, :most]), kept[:, :most]
    utility = np.where(kept, context.utilities, 0.0) * discounts(most)
    n_relevant = np.where(labels.n_relevant > 0, labels.n_relevant, np.nan)
    recall = (context.relevant & kept).cumsum(axis=1) / n_relevant[:, None]
    gain, harm = np.maximum(utility, 0.0).cumsum(axis=1), np.maximum(-utility, 0.0).cumsum(axis=1)
    total = gain - harm
    # Rounded, so that another order of summation does not make a larger k better.
    best = int(np.argmax(np.round(total.mean(axis=0), 12)))
    samples = resampled_means(total, seed=seed)
    behind = interval_bounds(samples - samples[:, [best]])[1]
    columns = [bootstrap_intervals(each.T, seed=seed) for each in (total, gain, harm, recall)]
    return Curve(
        points=tuple(AtK(k, *at) for k, at in enumerate(zip(*columns, strict=True), 1)),
        optimal_k=best + 1,
        within_noise=tuple(k + 1 for k in range(most) if behind[k] >= 0.0),
    )
