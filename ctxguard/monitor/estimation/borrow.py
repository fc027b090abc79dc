"""Estimates for requests without labels, from the judge's errors in labelled requests.

This assumes that the judge is right as often on both sets of requests: that its sensitivity and
specificity are the same. The grades that people would give may differ. Pure: no I/O, no clock, no
logging.
"""

import numpy as np

from ctxguard.core.types import FloatArray
from ctxguard.monitor.estimation.ppi import LabelledClusters
from ctxguard.monitor.estimation.ratio import (
    BORROWED,
    Estimate,
    Precision,
    no_estimate,
    shown,
)
from ctxguard.monitor.estimation.sums import TermSums, numerator_column
from ctxguard.monitor.estimation.terms import Metric

_TARGETS: dict[Metric, tuple[Metric, tuple[float, float]]] = {
    Metric.PRECISION: (Metric.PRECISION, (1.0, 0.0)),
    Metric.GAIN: (Metric.GAIN, (1.0, 0.0)),
    Metric.HARM: (Metric.GAIN, (0.0, 1.0)),
    Metric.UDCG: (Metric.GAIN, (1.0, -1.0)),
}
"""The metrics that are linear in the relevance of single passages, each with its pair of means and
how it follows from them. The others' errors depend on the other served passages."""

_LEAST_LABELS = 10
"""With fewer, the map and its error cannot be estimated, whatever precision is asked for."""

_LEAST_POWER = 0.3
"""Share of a difference between requests that the judge must see; 1 for an exact judge."""


def borrowed_estimate(
    metric: Metric, labelled: LabelledClusters, judged: TermSums, precision: Precision
) -> Estimate:
    """Estimate a metric of some requests from the judge's verdicts and its errors in others.

    With sensitivity s and specificity c, the judge's expected finding is (1 − c) + (s + c − 1)·y
    if people's is y, so the judge's means are a linear map M of people's: of (precision, 1), or
    of (gain, harm). M is fitted to labelled requests, the judge's terms on those of people,
    and inverted (W. J. Rogan and B. Gladen, "Estimating prevalence from the results of a screening
    test", American Journal of Epidemiology, 1978). The variance adds that of the judge's means
    over these requests to that of M at the result, both linearised.

    Args:
        metric: The metric to estimate.
        labelled: The labelled requests, each with probability 1 of being sampled.
        judged: The sums over the requests that the estimate is about.
        precision: The precision that the estimate needs; its n counts labelled clusters.

    Returns:
        The estimate; without a value for a metric that is not linear, if there are too few
        labels or judged requests, or if the judge can hardly tell relevant passages from
        others.
    """
    n = len(labelled.weights)
    of_window = judged.ratio(metric)
    if metric not in _TARGETS or not n or of_window.n < precision.min_n:
        return Estimate(None, None, None, 0, "none", precision.min_n)
    weights = labelled.weights
    effective = float(weights.sum() ** 2 / np.sum(weights**2))
    if effective < max(precision.min_n, _LEAST_LABELS):
        return no_estimate(n, effective, precision)
    source, contrast = _TARGETS[metric]
    columns = _columns(source)
    human, judge = labelled.human[:, columns], labelled.judge[:, columns]
    second_moments = (human.T * weights) @ human
    if np.linalg.matrix_rank(second_moments) < 2:
        return Estimate(None, None, None, n, "none", n_effective=effective)
    inverse_moments = np.linalg.inv(second_moments)
    effect = (judge.T * weights) @ human @ inverse_moments
    if np.linalg.svd(effect, compute_uv=False)[-1] < _LEAST_POWER:
        return Estimate(None, None, None, n, "none", n_effective=effective)
    means, covariance = _means(judged, columns)
    back = np.linalg.inv(effect)
    result = back @ means
    residuals = judge - human @ effect.T
    scores = residuals * (weights * (human @ inverse_moments @ result))[:, None]
    covariance = covariance + scores.T @ scores * n / (n - 2)
    direction = np.array(contrast) @ back
    value = float(np.array(contrast) @ result)
    variance = max(float(direction @ covariance @ direction), 0.0)
    if variance <= 0.0:
        return Estimate(None, None, None, n, "none", n_effective=effective)
    return shown(
        metric,
        value,
        variance,
        df=effective - 2.0,
        n=n,
        effective=effective,
        method=BORROWED,
        precision=precision,
    )


def _columns(source: Metric) -> list[int]:
    """Columns of ``ClusterTerms.values``: precision and its request count, or gain and harm."""
    if source is Metric.PRECISION:
        return [numerator_column(source), numerator_column(source) + 1]
    return [numerator_column(Metric.GAIN), numerator_column(Metric.HARM)]


def _means(judged: TermSums, columns: list[int]) -> tuple[FloatArray, FloatArray]:
    """Compute the judge's means per request and their covariance, linearised over clusters.

    Precision is a mean over requests that were served anything, utility over all.
    """
    n, totals, products = judged.values.n, judged.values.totals, judged.values.products
    of_precision = columns[0] == numerator_column(Metric.PRECISION)
    requests = numerator_column(Metric.PRECISION if of_precision else Metric.UDCG) + 1
    count = totals[requests]
    means = totals[columns] / count
    with_requests = products[columns, requests]
    squares = (
        products[np.ix_(columns, columns)]
        - np.outer(means, with_requests)
        - np.outer(with_requests, means)
        + np.outer(means, means) * products[requests, requests]
    )
    return means, squares * n / (n - 1) / count**2
