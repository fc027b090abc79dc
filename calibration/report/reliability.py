"""Reliability of P(relevant): shares by bin, expected calibration error, ratios over queries.

Candidates of one query are not independent, so every interval here is clustered by query. Pure.
"""

from itertools import pairwise
from math import sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from calibration.evaluate import CONFIDENCE, interval_bounds, resampled_means
from calibration.pool_labels import IntArray
from calibration.report.data import ReliabilityBin
from ctxguard.core.interval import Interval
from ctxguard.core.types import FloatArray

EDGES: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Edges of the bins of P, finer below 0.1, where most candidates lie."""


def reliability_bins(
    probabilities: FloatArray, relevant: NDArray[np.bool_]
) -> tuple[ReliabilityBin, ...]:
    """Compare predicted and labelled shares of relevant candidates, by bin of P.

    Args:
        probabilities: Shape (n_q, depth), NaN beyond each query's candidates.
        relevant: Shape (n_q, depth).

    Returns:
        One bin for each interval of ``EDGES``; the last includes 1.
    """
    inside, where = ~np.isnan(probabilities), _bin_of(probabilities)
    bins = []
    for number, (start, end) in enumerate(pairwise(EDGES)):
        members = inside & (where == number)
        counts = members.sum(axis=1)
        total = int(counts.sum())
        bins.append(
            ReliabilityBin(
                start=start,
                end=end,
                mean_probability=float(probabilities[members].mean()) if total else None,
                relevant=clustered_share((members & relevant).sum(axis=1), counts),
                queries=int((counts > 0).sum()),
            )
        )
    return tuple(bins)


def _bin_of(probabilities: FloatArray) -> IntArray:
    return np.clip(np.digitize(probabilities, EDGES) - 1, 0, len(EDGES) - 2)


def clustered_share(successes: IntArray, counts: IntArray) -> Interval:
    """Estimate a share over candidates, with each query as one cluster.

    Wilson's score interval at the effective sample size n / design effect, where the design
    effect is the variance of the ratio over clusters divided by that of independent candidates
    (Kish, Survey Sampling, 1965, §8.2; Korn and Graubard, Survey Methodology 24, 1998). If all
    candidates agree, the design effect cannot be estimated, and each query counts once.

    Args:
        successes: Relevant candidates of each query, shape (n_q,).
        counts: Candidates of each query, shape (n_q,).

    Returns:
        The share in [0, 1] with its interval; n counts candidates. All None without candidates.

    >>> share = clustered_share(np.array([1, 0, 1, 0]), np.array([1, 1, 1, 1]))
    >>> share.value, round(share.lower, 2), round(share.upper, 2)
    (0.5, 0.13, 0.87)
    """
    n, clusters = int(counts.sum()), int((counts > 0).sum())
    if n == 0:
        return Interval.undefined()
    share = float(successes.sum()) / n
    effective = float(clusters)
    if clusters > 1 and 0.0 < share < 1.0:
        residuals = successes - share * counts
        variance = clusters / (clusters - 1) * float((residuals**2).sum()) / n**2
        independent = share * (1.0 - share) / n
        # By chance, few clusters may seem to hold more information than independent candidates.
        effective = n / max(variance / independent, 1.0)
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2.0)
    shrunk = 1.0 + z * z / effective
    centre = (share + z * z / (2.0 * effective)) / shrunk
    half = z / shrunk * sqrt(share * (1.0 - share) / effective + z * z / (4.0 * effective**2))
    return Interval(
        value=share,
        lower=min(max(centre - half, 0.0), share),
        upper=max(min(centre + half, 1.0), share),
        n=n,
    )


def expected_calibration_error(
    probabilities: FloatArray, relevant: NDArray[np.bool_], *, seed: int = 0
) -> Interval:
    """Average the distance of P from the share relevant over bins, weighted by candidates.

    Noise makes it positive: a perfect model does not reach 0 on few queries. The interval is a
    percentile bootstrap over queries.

    Args:
        probabilities: Shape (n_q, depth), NaN beyond each query's candidates.
        relevant: Shape (n_q, depth).

    Returns:
        In [0, 1]; n counts queries that have a candidate.
    """
    inside, where = ~np.isnan(probabilities), _bin_of(probabilities)
    excess = np.where(inside, probabilities - relevant, 0.0)
    some = inside.any(axis=1)
    # |Σ P − Σ relevant| of a bin is its weight times the distance of its means.
    by_bin = np.stack(
        [np.where(where == b, excess, 0.0).sum(axis=1) for b in range(len(EDGES) - 1)], axis=1
    )[some]
    counts = inside.sum(axis=1)[some]
    if not some.any():
        return Interval.undefined()
    value = float(np.abs(by_bin.sum(axis=0)).sum() / counts.sum())
    if by_bin.shape[0] == 1:
        return Interval(value=value, lower=None, upper=None, n=1)
    means = resampled_means(np.column_stack([by_bin, counts]), seed=seed)
    errors = np.abs(means[:, :-1]).sum(axis=1) / means[:, -1]
    lower, upper = interval_bounds(errors).tolist()
    return Interval(value, lower, upper, by_bin.shape[0])
