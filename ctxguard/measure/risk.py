"""Tests bounded mean losses: betting p-values, and the order in which candidates are tested.

The certificate of DESIGN.md §9 is learn-then-test (Angelopoulos, Bates, Candès, Jordan and Lei,
2021). Each candidate policy has the null hypothesis "its mean loss exceeds alpha". Candidates
whose hypothesis is rejected, with family-wise error delta, are certified: with probability at
least 1 − delta all of them keep the promise, however one of them is chosen afterwards. Pure.

Losses lie in [0, 1], one row per query and one column per candidate; alpha and delta in (0, 1). No
losses, and an undefined one or one outside [0, 1], are a CalibrationError. The queries must be an
independent sample of those that the promise is about, in an order fixed without looking at the
losses: shuffle them by a seed, since a file may be sorted by topic.
"""

from bisect import bisect_left
from math import log, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from ctxguard.core.types import FloatArray
from ctxguard.errors import CalibrationError
from ctxguard.measure.betting import Evidence
from ctxguard.measure.rows import IntArray

DEFAULT_DELTA = 0.1
LARGEST_LOSS = 0.75
"""The largest share of its wealth that a stake may lose on one query."""

ROUNDING = 1e-9
"""How far outside [0, 1] a loss may lie and still count as a rounding error."""

_BISECTIONS = 30
_POWER = 0.8
_LEAST_MARGIN = 1e-6
"""No practical number of labels can certify a mean loss closer to alpha than this."""
_MOST_NEEDED = 2**60


def betting_p_value(
    losses: ArrayLike, alpha: float, *, target_delta: float = DEFAULT_DELTA
) -> FloatArray:
    """Test "the mean loss is at least alpha" by betting against it query by query.

    A gambler with wealth 1 stakes ν_s, chosen from the earlier queries alone, on the next loss
    being below alpha: W_t = Π_{s≤t} (1 − ν_s (L_s − alpha)). If the mean is at least alpha, each
    factor is positive and has expectation ≤ 1 given the past, since ν_s ≥ 0. W is then a
    non-negative supermartingale and, by Ville's inequality, ever exceeds 1/p with probability at
    most p. So p = 1 / max_t W_t is valid at every n, for any distribution.

    The stake is the predictable plug-in √(2 log(1/target_delta) / (n σ̂²_{s−1})), with the
    running variance started at 1/4, limited to ``LARGEST_LOSS`` / (1 − alpha): every factor is at
    least 1 − ``LARGEST_LOSS``, and the p-value never rises with alpha.

    Source: Waudby-Smith and Ramdas, JRSS B 86(1), 2024, §4.2 and Theorem 3, one-sided.

    Args:
        losses: Shape (n,) or (n, n_candidates).
        alpha: The limit on the mean loss.
        target_delta: The level that the stakes are tuned for, fixed beforehand. The p-value is
            valid at every level whatever its value.

    >>> betting_p_value([[0.0, 1.0]] * 50, alpha=0.1).round(4).tolist()
    [0.0188, 1.0]
    """
    checked = _checked(losses)
    n = len(checked)
    # As if one query with half the largest loss had been seen before.
    counts = np.arange(2.0, n + 2.0).reshape(n, *[1] * (checked.ndim - 1))
    mean = (0.5 + np.cumsum(checked, axis=0)) / counts
    variance = (0.25 + np.cumsum((checked - mean) ** 2, axis=0)) / counts
    # A stake depends on earlier queries only.
    before = np.concatenate([np.full_like(variance[:1], 0.25), variance[:-1]])
    stakes = _stakes(before, n, alpha, target_delta)
    return Evidence(np.zeros(checked.shape[1:])).after(alpha - checked, stakes=stakes).p_value


def _stakes(variance: FloatArray, n: int, alpha: float, delta: float) -> FloatArray:
    largest = LARGEST_LOSS / (1.0 - alpha)
    return np.minimum(np.sqrt(-2.0 * log(delta) / (n * variance)), largest)


def betting_upper_bound(losses: ArrayLike, delta: float = DEFAULT_DELTA) -> float:
    """Bound the mean loss from above; the bound holds with probability at least 1 − delta.

    The least alpha that ``betting_p_value`` rejects at level delta. The test is valid for every
    alpha and its p-value never rises with alpha, so the true mean is among the alphas that are
    not rejected with probability 1 − delta (Waudby-Smith and Ramdas, 2024, Theorem 3).

    It lies in [mean of the losses, 1], and is 1 where too few queries exclude nothing, and where
    every loss is 1.

    Args:
        losses: Shape (n,), of one policy, fixed without these queries.

    >>> round(betting_upper_bound([0.0] * 100), 3)
    0.03
    """
    checked = _checked(losses)
    low, high = float(checked.mean()), 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        if middle == high:
            break  # the mean is 1: alpha must be below 1, so there is nothing to test
        rejected = betting_p_value(checked, middle, target_delta=delta) <= delta
        low, high = (low, middle) if rejected else (middle, high)
    return high


def betting_lower_bound(differences: ArrayLike, delta: float = DEFAULT_DELTA) -> float:
    """Bound a mean difference from below; the bound holds with probability at least 1 − delta.

    A difference D in [−1, 1] is a loss of (1 − D) / 2, whose mean ``betting_upper_bound`` bounds
    from above; gains on some queries then count against losses on others.

    >>> round(betting_lower_bound([0.0] * 100), 3), round(betting_lower_bound([0.1] * 100), 3)
    (-0.031, 0.066)
    """
    losses = (1.0 - np.asarray(differences, dtype=np.float64)) / 2.0
    return 1.0 - 2.0 * betting_upper_bound(losses, delta)


def pareto_order(risk: ArrayLike, benefit: ArrayLike) -> IntArray:
    """Return the candidates worth testing, safest first.

    A candidate is left out if another has less risk and no less benefit. The others are sorted
    by risk, and so by benefit as well. Fixed-sequence testing then spends no step on a candidate
    that nobody would choose, and the last one that it certifies is the most beneficial. Of equal
    risks the least beneficial comes first: on a few queries many candidates show no loss at all,
    and of those the modest ones are the likeliest to be safe.

    The figures must come from queries that take no part in the test: given them, the order is a
    constant, as fixed-sequence testing requires. A poor order costs power, never validity.

    >>> pareto_order(risk=[0.02, 0.10, 0.05, 0.02], benefit=[0.1, 0.4, 0.0, 0.3]).tolist()
    [0, 3, 1]
    """
    benefits = np.asarray(benefit, dtype=np.float64)
    order = np.lexsort((benefits, np.asarray(risk, dtype=np.float64)))
    best = np.maximum.accumulate(benefits[order])
    better = np.concatenate([[True], best[1:] > best[:-1]])
    worth_testing: IntArray = order[better]
    return worth_testing


def fixed_sequence(p_values_in_order: ArrayLike, delta: float) -> int:
    """Count the candidates certified when they are tested in order, each at level delta.

    Testing stops at the first that fails. The family-wise error is delta without any correction,
    because a false certificate requires the first true null hypothesis of the sequence to pass
    (Angelopoulos et al., Learn then Test, 2021, §3). The order must be chosen without the tested
    queries.

    >>> fixed_sequence([0.01, 0.08, 0.30, 0.02], delta=0.1)
    2
    """
    # Not "above delta", which is false of NaN.
    failed = ~(np.asarray(p_values_in_order, dtype=np.float64) <= delta)
    return int(failed.argmax()) if failed.any() else failed.size


def labels_needed(losses: ArrayLike, alpha: float, delta: float = DEFAULT_DELTA) -> int | None:
    """Count the labelled queries that would certify one candidate by betting, if they are typical.

    An approximation, not a guarantee: the log wealth after n queries is taken as normal, with
    the growth and spread that the stakes would have on losses like those given; the answer is
    the least n at which it reaches log(1/delta) with probability 0.8. A sample whose mean
    is low by luck gives a number that is too low.

    It does not include the queries that order the candidates. None where the mean loss is not below
    alpha: no number would do.

    >>> labels_needed([0.0] * 9 + [0.5], alpha=0.1)
    115
    >>> labels_needed([0.0] * 8 + [0.5] * 2, alpha=0.1) is None
    True
    """
    checked = _checked(losses)
    if float(checked.mean()) > alpha - _LEAST_MARGIN:
        return None
    z = NormalDist().inv_cdf(_POWER)
    sample_variance = checked.var()

    def suffices(n: int) -> bool:
        variance = (0.25 + n * sample_variance) / (n + 1)  # started at 1/4, as in the test
        stake = _stakes(np.asarray(variance), n, alpha, delta)
        growth = np.log1p(-stake * (checked - alpha))
        return bool(n * growth.mean() - z * sqrt(n) * growth.std() >= -log(delta))

    numbers = range(1, _MOST_NEEDED)
    return numbers[bisect_left(numbers, True, key=suffices)]


def _checked(losses: ArrayLike) -> FloatArray:
    values = np.asarray(losses, dtype=np.float64)
    if not values.size:
        raise CalibrationError("no losses: a risk needs at least one labelled query")
    # NaN fails both comparisons, so one pass finds every fault.
    faults = ~((values >= -ROUNDING) & (values <= 1.0 + ROUNDING))
    if faults.any():
        row, value = int(np.argwhere(faults)[0][0]), float(values[faults][0])
        raise CalibrationError(
            f"the loss {value!r} of query {row} is undefined or lies outside [0, 1]: leave out "
            "queries whose loss is undefined, and divide losses by the largest one possible"
        )
    return np.clip(values, 0.0, 1.0)
