"""Prediction-powered estimates: a judge on every sample, corrected by human labels on some.

The judge's own mean is biased by its errors however many samples it grades, and human labels alone
are few. Together they give an interval that is about as narrow as the judge's agreement with
people allows, and centred where people would put it. Pure: no I/O, no clock, no logging.
"""

import math
from dataclasses import dataclass

import numpy as np

from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError
from ctxguard.monitor.estimation.ratio import (
    DEFAULT_PRECISION,
    IN_UNIT_INTERVAL,
    Estimate,
    Precision,
    no_estimate,
    shown,
)
from ctxguard.monitor.estimation.sums import (
    NO_TERMS,
    ControlSums,
    TermSums,
    by_cluster,
    clusters,
    control_columns,
    request_terms,
)
from ctxguard.monitor.estimation.terms import Metric, Table

LABELS_PER_CONTROL = 25
"""Labelled clusters per fitted coefficient, so that fitting costs little."""

TOLD_LESS_WEIGHT = 2.0
"""Relative probability of labelling a request whose first verdict by the judge is a no."""

_HIGHEST_LEVERAGE = 0.5
"""A control that gives one cluster more leverage is left out: it would only fit that one."""


@dataclass(frozen=True, slots=True)
class LabelledClusters:
    """Requests as graded by people and by the judge, by cluster; see ``of``.

    Attributes:
        human: Shape (n, 19), as ``ClusterTerms.values``, by the grades of people.
        judge: The same by the grades of the judge.
        weights: Shape (n,), the inverse of the probability with which each was picked for
            labelling.
        inclusion: Shape (n, 8), as ``ClusterTerms.inclusion``, by the grades of people.
    """

    human: FloatArray
    judge: FloatArray
    weights: FloatArray
    inclusion: FloatArray

    @classmethod
    def of(
        cls, human: Table, judge: Table, probability: FloatArray | None = None
    ) -> "LabelledClusters":
        """Pair the rows of people with those of the judge.

        Args:
            human: Shape (n,). People's labels of dropped passages may differ from the judge's, as
                long as the probabilities are their own.
            judge: Shape (n,), the same requests; they define the sessions.
            probability: Shape (n,), the probability with which each was picked for labelling, > 0,
                up to a common factor; None if all were equal. It may depend on the judge's
                verdicts, never on people's. A session has its requests' mean weight.

        Raises:
            ConfigurationError: a probability is not > 0 and finite.
        """
        probability = np.ones(len(judge)) if probability is None else probability
        impossible = probability[~((probability > 0.0) & np.isfinite(probability))]
        if len(impossible):
            raise ConfigurationError(
                f"the labelling probability {float(impossible[0])!r} must be > 0 and finite: a "
                "request that could not be picked cannot have a label"
            )
        cluster = clusters(judge["session"])
        sizes = np.bincount(cluster)
        by_people = by_cluster(request_terms(human), cluster)
        return cls(
            by_people.values,
            by_cluster(request_terms(judge), cluster).values,
            np.bincount(cluster, 1.0 / probability) / sizes,
            by_people.inclusion,
        )


def label_weights(judge: Table) -> FloatArray:
    """Compute relative probabilities with which to pick requests for labelling.

    Labels tell most where the judge's verdicts leave most open (active statistical inference:
    Zrnic and Candès, ICML 2024, arXiv 2403.03208). If most first passages are relevant, a
    judge that calls the first one relevant leaves little of MRR open, and one that does not
    leaves much: picking the latter twice as often narrows MRR by nearly a tenth more and costs
    precision and UDCG up to a twentieth (benchmarks/README.md). It pays from an MRR of about
    0.75; at 0.56 random labels were better for every metric.

    Args:
        judge: Shape (n,), requests by the grades of the judge.

    Returns:
        Shape (n,): ``TOLD_LESS_WEIGHT`` if the first served passage is not relevant, else 1;
        usable as ``probability`` of ``LabelledClusters.of``.
    """
    return np.where(judge["reciprocal_rank"] == 1.0, 1.0, TOLD_LESS_WEIGHT)


def ppi_estimate(
    metric: Metric,
    labelled: LabelledClusters,
    unlabelled: TermSums = NO_TERMS,
    precision: Precision = DEFAULT_PRECISION,
) -> Estimate:
    """Estimate a metric as people would measure it, from the judge's grades and human labels.

    Selects the metric's columns and calls ``estimate_from_clusters``, which has the method.

    Args:
        metric: The metric to estimate.
        labelled: A random part of the sampled requests (whole sessions where there are any).
        unlabelled: The other sampled requests, judged but not labelled.
        precision: The precision that the estimate needs; its n counts labelled clusters.

    Returns:
        The estimate, with the number of labelled clusters as n; without a value if that or
        the width does not suffice, or if UDCG, gain or harm is alike in all labelled clusters.
        A share that is alike in all of them has the interval of kinds too rare to have been seen.
    """
    columns = control_columns(metric)
    return estimate_from_clusters(
        metric,
        labelled.human[:, columns[:2]],
        labelled.judge[:, columns],
        unlabelled.controls(metric),
        labelled.weights,
        inclusion=labelled.inclusion[:, list(Metric).index(metric)],
        precision=precision,
    )


def estimate_from_clusters(
    metric: Metric,
    human: FloatArray,
    judged: FloatArray,
    unlabelled: ControlSums,
    weights: FloatArray,
    *,
    inclusion: FloatArray | None = None,
    precision: Precision = DEFAULT_PRECISION,
) -> Estimate:
    """Estimate a metric from the terms and controls of independent clusters.

    The PPI++ estimator (Angelopoulos, Duchi and Zrnic, "PPI++: Efficient Prediction-Powered
    Inference", 2023, arXiv 2311.01453) with a vector λ, for a ratio of means. Each of numerator
    and denominator is the labelled mean of the human terms plus λ·(mean of the controls over all
    clusters − their mean over the labelled ones). The λ that minimises the variance is that of
    a regression of the human terms on the controls, which makes this the regression estimator
    for two-phase samples (Särndal, Swensson and Wretman, "Model Assisted Survey Sampling", 1992,
    §9.7). Its centre is right whatever the judge's errors: λ only sets the width. Without
    controls it is the estimate from human labels alone.

    With residuals e of the linearised human terms, leverages h, labelling weights w and the
    covariance C of the controls over all N clusters, the variance is Σ w²e²/(1 − h) / (Σ w)² +
    λ'Cλ/N; 1 − h gives back what fitting λ took from e (HC2: MacKinnon and White, "Some
    heteroskedasticity-consistent covariance matrix estimators", Journal of Econometrics, 1985).
    Controls are taken in order, one for each ``LABELS_PER_CONTROL`` labelled clusters, and left
    out if they repeat the others. Metrics in [0, 1] have their interval on the logit scale.

    Args:
        metric: The metric to estimate.
        human: Shape (n, 2), numerator and denominator of each labelled cluster by its human
            grades; zeros where the metric is undefined.
        judged: Shape (n, p), p ≥ 2, the controls of the same clusters; the first two are the
            judge's own numerator and denominator.
        unlabelled: The sums of the same p columns over the clusters without labels.
        weights: Shape (n,), the inverse of the probability with which each was picked for
            labelling.
        inclusion: Shape (n,), the probability with which a value unlike the others' would have
            been observed; None if that is 1.
        precision: The precision that the estimate needs; its n counts labelled clusters.

    Returns:
        An estimate, as from ``ppi_estimate``.
    """
    counted = human[:, 1] != 0.0
    n = int(np.count_nonzero(counted))
    influence = weights * human[:, 1]
    effective = float(influence.sum() ** 2 / np.sum(influence**2)) if n else 0.0
    if effective < precision.min_n:
        return no_estimate(n, effective, precision)
    shares = weights / weights.sum()
    means = shares @ human
    # One control for both of the judge's terms, with the value that the labels alone give: if
    # there are labels for a single coefficient, this is the one.
    predictors = np.eye(judged.shape[1])[:, 1:]
    predictors[:2, 0] = 1.0, -means[0] / means[1]
    n_controls = len(human) // LABELS_PER_CONTROL if unlabelled.n else 0
    scale = np.sqrt(shares)
    chosen = _independent(judged @ predictors * scale[:, None], scale, n_controls)
    predictors = predictors[:, chosen]
    everyone = ControlSums.of(judged) + unlabelled
    predicted = judged @ predictors
    centred, deviations = human - means, predicted - shares @ predicted
    basis, triangle = np.linalg.qr(deviations * scale[:, None])
    power = np.linalg.solve(triangle, basis.T @ (centred * scale[:, None]))
    overall = everyone.totals / everyone.n
    corrected = means + (overall @ predictors - shares @ predicted) @ power
    if not corrected[1] > 0.0:
        return Estimate(None, None, None, n, "none", n_effective=effective)
    value = float(corrected[0] / corrected[1])
    linear = np.array([1.0, -value])
    residuals = (centred - deviations @ power) @ linear
    leverage = shares + np.sum(basis**2, axis=1)
    variance = np.sum((shares * residuals) ** 2 / (1.0 - leverage))
    if chosen:
        covariance = everyone.products / everyone.n - np.outer(overall, overall)
        combined = predictors @ power @ linear
        variance += max(combined @ covariance @ combined, 0.0) / (everyone.n - 1)
    alike = variance <= 1e-12 * np.sum(shares**2 * (human @ np.abs(linear)) ** 2)
    if alike and metric not in IN_UNIT_INTERVAL:
        return Estimate(None, None, None, n, "none", n_effective=effective)
    df = 1.0 if alike else degrees_of_freedom(shares * residuals)
    df = min(effective - 1.0, df) - len(chosen)
    n_observable = effective if alike else math.inf
    if inclusion is not None and inclusion[counted].min() < 1.0:
        # A few labels may have missed every value that is observed only by chance.
        n_observable = float(inclusion[counted].sum()) * effective / n
    return shown(
        metric,
        value,
        0.0 if alike else float(variance) / float(corrected[1]) ** 2,
        df=df,
        n=n,
        effective=effective,
        n_observable=n_observable,
        method="unseen" if alike else "ppi++",
        precision=precision,
    )


def degrees_of_freedom(residuals: FloatArray) -> float:
    """Return the number of normal residuals whose sum of squares would be as certain.

    A sum of squares that rests on a few large residuals is uncertain: with the fourth moment as
    seen, 2(Σe²)² / (Σe⁴ − (Σe²)²/n), after Satterthwaite ("An approximate distribution of
    estimates of variance components", Biometrics Bulletin, 1946).

    Args:
        residuals: Shape (n,), with mean about 0; not all 0.

    >>> round(degrees_of_freedom(np.random.default_rng(0).normal(size=100_000)) / 100_000, 1)
    1.0
    """
    squares = residuals**2
    total = float(squares.sum())
    spread = float(np.sum(squares**2)) - total**2 / len(squares)
    return 2.0 * total**2 / spread if spread > 1e-12 * total**2 else math.inf


def _independent(columns: FloatArray, constant: FloatArray, most: int) -> list[int]:
    """Choose the first columns, at most ``most``, independent and without a dominant row.

    Args:
        columns: Shape (n, p).
        constant: Shape (n,), of length 1: the column that is always included.
        most: Maximum number of columns.
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
