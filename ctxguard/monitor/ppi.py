"""Prediction-powered estimates: a judge on every sample, corrected by human labels on some.

The judge's own mean is biased by its errors however many samples it grades; human labels alone
are few. Together they give an interval that is about as narrow as the judge's agreement with
people allows, and centred where people would put it. Pure: no I/O, no clock, no logging.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.estimates import (
    DEFAULT_CONFIDENCE,
    DEFAULT_MIN_N,
    IN_UNIT_INTERVAL,
    Estimate,
    JudgedRequest,
    Metric,
    sufficient,
    t_quantile,
    term,
)
from ctxguard.types import FloatArray


@dataclass(frozen=True, slots=True)
class LabelledRequest:
    """One request as people graded it and as the judge did, on the same passages."""

    human: JudgedRequest
    judge: JudgedRequest


def ppi_estimate(
    metric: Metric,
    labelled: Sequence[LabelledRequest],
    unlabelled: Sequence[JudgedRequest],
    *,
    confidence: float = DEFAULT_CONFIDENCE,
    min_n: int = DEFAULT_MIN_N,
    max_width: float | None = None,
) -> Estimate:
    """A metric as people would measure it, from the judge's grades and some human labels.

    The PPI++ estimator (Angelopoulos, Duchi and Zrnic, "PPI++: Efficient Prediction-Powered
    Inference", 2023, arXiv 2311.01453), for a ratio of means over independent clusters:
    numerator and denominator are each the labelled mean of the human terms plus λ times the
    difference between the judge's mean on the unlabelled and on the labelled clusters. With
    linearised residuals e of the human terms and f of the judge's, λ = cov(e, f) /
    ((1 + n/N)·var f), within [0, 1], makes the variance var(e − λf)/n + λ²·var f/N least. At
    λ = 0 it is the estimate from human labels alone.

    Args:
        metric: What is estimated.
        labelled: A random part of the sampled requests (whole sessions where there are any).
        unlabelled: The other sampled requests, judged but not labelled.
        confidence: In (0, 1).
        min_n: Fewer labelled clusters give no estimate.
        max_width: A wider interval gives no estimate; None for any width.

    Returns:
        The estimate, with the number of labelled clusters as n; without a value where that or
        the width does not suffice, or where all labelled clusters are alike.

    Raises:
        ConfigurationError: a session is both labelled and not, so neither part is a random one.
    """
    keys = _keys([pair.human for pair in labelled])
    human = _clusters(metric, [pair.human for pair in labelled], keys)
    judge = _clusters(metric, [pair.judge for pair in labelled], keys)
    rest = _clusters(metric, unlabelled, _keys(unlabelled))
    shared = {key for key in rest if isinstance(key, str)} & human.keys()
    if shared:
        raise ConfigurationError(
            f"session {min(map(str, shared))!r} has labelled and unlabelled requests: label whole "
            "sessions"
        )
    y = np.array([human[key] for key in human]).reshape(-1, 2)
    f = np.array([judge[key] for key in human]).reshape(-1, 2)
    others = np.array(list(rest.values())).reshape(-1, 2)
    n = int(np.count_nonzero(y[:, 1]))
    if n < min_n or len(y) < 2:
        return Estimate(None, None, None, n, "none", min_n)
    value, half = _ppi_ratio(y, f, others, confidence)
    if half == 0.0:
        return Estimate(None, None, None, n, "none")
    lower, upper = value - half, value + half
    if metric in IN_UNIT_INTERVAL:
        value, lower, upper = (min(max(end, 0.0), 1.0) for end in (value, lower, upper))
    return sufficient(Estimate(value, lower, upper, n, "ppi++"), min_n, max_width)


def _keys(requests: Sequence[JudgedRequest]) -> list[object]:
    """The cluster of each request: its session, or its own position where it has none."""
    return [
        position if request.session_id is None else request.session_id
        for position, request in enumerate(requests)
    ]


def _clusters(
    metric: Metric, requests: Sequence[JudgedRequest], keys: Sequence[object]
) -> dict[object, tuple[float, float]]:
    """Weighted numerator and denominator by cluster; zeros where the metric is undefined."""
    clusters: dict[object, tuple[float, float]] = {}
    for key, request in zip(keys, requests, strict=True):
        a, b = clusters.get(key, (0.0, 0.0))
        found = term(metric, request) or (0.0, 0.0)
        clusters[key] = a + found[0] / request.probability, b + found[1] / request.probability
    return clusters


def _ppi_ratio(
    y: FloatArray, f: FloatArray, others: FloatArray, confidence: float
) -> tuple[float, float]:
    """Value and half width; rows are clusters, columns numerator and denominator."""
    n, n_others = len(y), len(others)
    power = 0.0
    value = _ratio(y.mean(axis=0))
    if n_others > 1:
        # λ depends on the value through the residuals, and the value on λ: one pass settles it.
        for _ in range(2):
            e, g = y @ (1.0, -value), f @ (1.0, -value)
            spread = float(np.var(np.concatenate([g, others @ (1.0, -value)]), ddof=1))
            covariance = float(np.cov(e, g)[0, 1])
            power = 0.0 if spread == 0.0 else covariance / ((1.0 + n / n_others) * spread)
            power = min(max(power, 0.0), 1.0)
            corrected = y.mean(axis=0) + power * (others.mean(axis=0) - f.mean(axis=0))
            value = _ratio(corrected) if corrected[1] > 0.0 else value
    denominator = y.mean(axis=0)[1]
    variance = float(np.var((y - power * f) @ (1.0, -value), ddof=1)) / n
    if power > 0.0:
        denominator += power * (others.mean(axis=0) - f.mean(axis=0))[1]
        variance += power**2 * float(np.var(others @ (1.0, -value), ddof=1)) / n_others
    half = t_quantile((1.0 + confidence) / 2.0, n - 1) * math.sqrt(variance) / float(denominator)
    return value, half


def _ratio(sums: FloatArray) -> float:
    return float(sums[0] / sums[1])
