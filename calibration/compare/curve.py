"""Utility of contexts by their size: one policy at every k.

Pure: recorded pools and their labels in, figures with intervals out.
"""

from dataclasses import dataclass, replace

import numpy as np

from calibration.evaluate import contexts
from calibration.pool_labels import PoolLabels
from calibration.replay import Pools
from ctxguard.core.policies import Policy
from ctxguard.measure.interval import (
    Interval,
    bootstrap_intervals,
    interval_bounds,
    resampled_means,
)
from ctxguard.measure.metrics import discounted

SHOWN_SIZES = 20
"""Contexts of up to so many passages are shown one by one."""


@dataclass(frozen=True)
class Curve:
    """A policy by the size of the context.

    Attributes:
        udcg: Of contexts of at most k passages, for k = 1, 2, …
        optimal_k: The k of highest mean UDCG; the smallest if several are equal.
        within_noise: Every k that is not worse than the optimal one by more than noise, paired
            by query.
    """

    udcg: tuple[Interval, ...]
    optimal_k: int
    within_noise: tuple[int, ...]


def curve(pools: Pools, labels: PoolLabels, policy: Policy, *, seed: int = 0) -> Curve:
    """Measure contexts of at most k passages under a policy, for k from 1 to 20 or its own k.

    The threshold of the policy applies, so the curve is flat if it, not k, ends the context.
    """
    most = min(max(SHOWN_SIZES, policy.k), pools.scores.shape[1])
    order, kept = contexts(pools, replace(policy, k=most, min_keep=min(policy.min_keep, most)))
    utility = np.where(kept, labels.reordered(order).utilities, 0.0)[:, :most]
    total = discounted(utility).cumsum(axis=1)
    # Rounded, so that another order of summation does not make a larger k better.
    best = int(np.argmax(np.round(total.mean(axis=0), 12)))
    samples = resampled_means(total, seed=seed)
    behind = interval_bounds(samples - samples[:, [best]])[1]
    return Curve(
        udcg=tuple(bootstrap_intervals(total.T, seed=seed)),
        optimal_k=best + 1,
        within_noise=tuple(k + 1 for k in range(most) if behind[k] >= 0.0),
    )
