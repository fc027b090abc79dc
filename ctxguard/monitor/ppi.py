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
    logistic,
    sufficient,
    t_quantile,
    term,
)
from ctxguard.types import FloatArray

LABELS_PER_CONTROL = 25
"""Labelled clusters that each fitted coefficient takes, so that fitting costs little."""

TOLD_LESS_WEIGHT = 2.0
"""How much likelier a request is to be labelled where the judge's first verdict is a no."""

_HIGHEST_LEVERAGE = 0.5
"""A control that would give one cluster more than this is left out: it would only fit that one."""


@dataclass(frozen=True, slots=True)
class LabelledRequest:
    """One request as people graded it and as the judge did.

    Attributes:
        human: By the grades of people; what people labelled of the dropped passages may differ
            from what the judge saw, as long as its probabilities are its own.
        judge: By the grades of the judge, as for a request that nobody labelled.
        probability: The chance with which it was picked for labelling, > 0, up to a factor that
            all share. It may depend on what the judge found, never on what people did.
    """

    human: JudgedRequest
    judge: JudgedRequest
    probability: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.probability < math.inf:
            raise ConfigurationError(
                f"the labelling probability {self.probability!r} must be > 0 and finite: what had "
                "no chance of a label cannot have one"
            )


def label_weight(judge: JudgedRequest) -> float:
    """How likely a request should be to be picked for labelling, beside others.

    Labels tell most where the judge's verdicts leave most open (active statistical inference:
    Zrnic and Candès, ICML 2024, arXiv 2403.03208). Where most first passages are relevant, a
    judge that calls the first one relevant leaves little of MRR open, and one that does not
    leaves much: picking the latter twice as often narrows MRR by nearly a tenth more and costs
    precision and UDCG up to a twentieth (benchmarks/README.md). It pays from an MRR of about
    0.75; at 0.56 random labels were better for every metric. The weight goes into
    ``LabelledRequest.probability``.

    >>> label_weight(JudgedRequest(1.0, (0, 1), (-0.5, 1.0), 0.0, 1.0, None, 1.0, 1.0))
    2.0
    """
    return 1.0 if judge.grades and judge.grades[0] > 0 else TOLD_LESS_WEIGHT


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

    Builds the clusters' terms and controls and hands them to ``estimate_from_clusters``, which
    says how.

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
        ConfigurationError: a session is both labelled and not, so neither part is a random one;
            or its requests were picked for labelling with different probabilities.
    """
    keys = _keys([pair.human for pair in labelled])
    rest = _keys(unlabelled)
    if shared := {key for key in rest if isinstance(key, str)} & set(keys):
        raise ConfigurationError(
            f"session {min(map(str, shared))!r} has labelled and unlabelled requests: label whole "
            "sessions"
        )
    weights: dict[object, float] = {}
    for key, pair in zip(keys, labelled, strict=True):
        if weights.setdefault(key, 1.0 / pair.probability) != 1.0 / pair.probability:
            raise ConfigurationError(
                f"session {key!r} has requests that were picked for labelling with different "
                "probabilities: pick whole sessions"
            )
    return estimate_from_clusters(
        metric,
        _by_cluster(keys, [_term(metric, pair.human) for pair in labelled]),
        _by_cluster(keys, [controls(metric, pair.judge) for pair in labelled]),
        _by_cluster(rest, [controls(metric, request) for request in unlabelled]),
        np.array(list(weights.values())),
        confidence=confidence,
        min_n=min_n,
        max_width=max_width,
    )


def controls(metric: Metric, request: JudgedRequest) -> tuple[float, ...]:
    """What the judge's grades say of one request, as far as it may tell of a metric.

    Returns:
        The judge's own numerator and denominator of the metric, whether its first served passage
        is relevant, whether any is, and how many are; all divided by π.

    >>> request = JudgedRequest(0.5, (0, 1), (-0.5, 1.0), 5.0, 0.2, None, 0.0, 0.5)
    >>> controls(Metric.MRR, request)
    (1.0, 2.0, 0.0, 2.0, 2.0)
    """
    found = request.kept_relevant
    first = found > 0 and request.grades[0] > 0
    seen = (float(first), float(found > 0), float(found))
    return *_term(metric, request), *[value / request.probability for value in seen]


def estimate_from_clusters(
    metric: Metric,
    human: FloatArray,
    judged: FloatArray,
    unlabelled: FloatArray,
    weights: FloatArray,
    *,
    confidence: float = DEFAULT_CONFIDENCE,
    min_n: int = DEFAULT_MIN_N,
    max_width: float | None = None,
) -> Estimate:
    """A metric from the terms and controls of independent clusters.

    The PPI++ estimator (Angelopoulos, Duchi and Zrnic, "PPI++: Efficient Prediction-Powered
    Inference", 2023, arXiv 2311.01453) with a vector λ, for a ratio of means. Each of numerator
    and denominator is the labelled mean of the human terms plus λ·(mean of the controls over all
    clusters − their mean over the labelled ones). The λ that makes the variance least is that of
    a regression of the human terms on the controls, which makes this the regression estimator
    for two-phase samples (Särndal, Swensson and Wretman, "Model Assisted Survey Sampling", 1992,
    §9.7). It is centred right whatever the judge's errors: λ only sets the width. Without
    controls it is the estimate from human labels alone.

    With residuals e of the linearised human terms, leverages h, labelling weights w and the
    covariance C of the controls over all N clusters, the variance is Σ w²e²/(1 − h) / (Σ w)² +
    λ'Cλ/N; 1 − h gives back what fitting λ took from e (HC2: MacKinnon and White, "Some
    heteroskedasticity-consistent covariance matrix estimators", Journal of Econometrics, 1985).
    Controls are taken in order, one for each ``LABELS_PER_CONTROL`` labelled clusters, and left
    out where they repeat the others. Metrics in [0, 1] have their interval on the logit scale.

    Args:
        metric: What is estimated.
        human: Shape (n, 2), numerator and denominator of each labelled cluster by its human
            grades; zeros where the metric is undefined.
        judged: Shape (n, p), p ≥ 2, the controls of the same clusters; the first two are the
            judge's own numerator and denominator.
        unlabelled: Shape (m, p), those of the clusters without labels.
        weights: Shape (n,), the inverse of the chance with which each was picked for labelling.
        confidence: In (0, 1).
        min_n: Fewer labelled clusters give no estimate.
        max_width: A wider interval gives no estimate; None for any width.

    Returns:
        As ``ppi_estimate``.
    """
    n = int(np.count_nonzero(human[:, 1])) if human.size else 0
    if n < max(min_n, 2):
        return Estimate(None, None, None, n, "none", max(min_n, 2))
    shares = weights / weights.sum()
    means = shares @ human
    # One control for both of the judge's terms, with the value that the labels alone give: where
    # there are labels for a single coefficient, this is the one.
    own = (1.0, float(-means[0] / means[1]))
    judged = _predictors(judged, own)
    n_controls = len(human) // LABELS_PER_CONTROL if len(unlabelled) > 0 else 0
    scale = np.sqrt(shares)
    chosen = _independent(judged * scale[:, None], scale, n_controls)
    judged = judged[:, chosen]
    everyone = judged
    if chosen:
        rest = _predictors(unlabelled, own)[:, chosen]
        everyone = np.concatenate([judged, rest])
    centred, deviations = human - means, judged - shares @ judged
    basis, triangle = np.linalg.qr(deviations * scale[:, None])
    power = np.linalg.solve(triangle, basis.T @ (centred * scale[:, None]))
    corrected = means + (everyone.mean(axis=0) - shares @ judged) @ power
    if not corrected[1] > 0.0:
        return Estimate(None, None, None, n, "none")
    value = float(corrected[0] / corrected[1])
    linear = np.array([1.0, -value])
    residuals = (centred - deviations @ power) @ linear
    leverage = shares + np.sum(basis**2, axis=1)
    variance = np.sum((shares * residuals) ** 2 / (1.0 - leverage))
    if chosen:
        variance += np.var(everyone @ power @ linear, ddof=1) / len(everyone)
    if variance <= 1e-12 * np.sum(shares**2 * (human @ np.abs(linear)) ** 2):
        return Estimate(None, None, None, n, "none")
    t = t_quantile((1.0 + confidence) / 2.0, len(human) - 1 - len(chosen))
    found = _interval(metric, value, t * math.sqrt(variance) / float(corrected[1]), n)
    return sufficient(found, min_n, max_width)


def _predictors(controls: FloatArray, own: tuple[float, float]) -> FloatArray:
    """The controls in the order in which they are taken, the judge's two terms as one."""
    return np.column_stack([controls[:, :2] @ own, controls[:, 2:]])


def _independent(columns: FloatArray, constant: FloatArray, most: int) -> list[int]:
    """The first columns, at most ``most``, that no others explain and no single row decides.

    Args:
        columns: Shape (n, p).
        constant: Shape (n,), of length 1: the column that is always there.
        most: How many to choose.
    """
    chosen: list[int] = []
    basis = constant[:, None]
    for index, column in enumerate(columns.T):
        if len(chosen) >= most:
            break
        rest = column - basis @ (basis.T @ column)
        length = float(np.linalg.norm(rest))
        if length <= 1e-6 * float(np.linalg.norm(column)):
            continue
        wider = np.column_stack([basis, rest / length])
        if float(np.max(np.sum(wider**2, axis=1))) <= _HIGHEST_LEVERAGE:
            chosen.append(index)
            basis = wider
    return chosen


def _interval(metric: Metric, value: float, half: float, n: int) -> Estimate:
    if metric not in IN_UNIT_INTERVAL:
        return Estimate(value, value - half, value + half, n, "ppi++")
    if not 0.0 < value < 1.0:
        # The correction may carry a share near an end of its range beyond it.
        lower, upper = (min(max(end, 0.0), 1.0) for end in (value - half, value + half))
        return Estimate(min(max(value, 0.0), 1.0), lower, upper, n, "ppi++")
    logit, spread = math.log(value / (1.0 - value)), half / (value * (1.0 - value))
    return Estimate(value, logistic(logit - spread), logistic(logit + spread), n, "ppi++")


def _term(metric: Metric, request: JudgedRequest) -> tuple[float, float]:
    a, b = term(metric, request) or (0.0, 0.0)
    return a / request.probability, b / request.probability


def _keys(requests: Sequence[JudgedRequest]) -> list[object]:
    """The cluster of each request: its session, or its own position where it has none."""
    return [
        position if request.session_id is None else request.session_id
        for position, request in enumerate(requests)
    ]


def _by_cluster(keys: Sequence[object], rows: Sequence[tuple[float, ...]]) -> FloatArray:
    """Rows summed by cluster, in the order in which the clusters first appear."""
    clusters = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    sums = np.zeros((len(clusters), len(rows[0]) if rows else 0))
    np.add.at(sums, [clusters[key] for key in keys], rows)
    return sums
