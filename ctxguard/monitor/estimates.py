"""What live traffic is worth, with intervals: recall, MRR, UDCG, precision, distractor rate.

Every metric is a ratio of two weighted sums over independent clusters (a request, or a session
where one is given), so one set of additive sums and one linearised variance serve them all
(DESIGN.md §8). Pure: no I/O, no clock, no logging.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

from ctxguard.errors import ConfigurationError
from ctxguard.metrics import distractor_rate, precision_at_k, udcg

DEFAULT_CONFIDENCE = 0.95
DEFAULT_MIN_N = 30
"""Fewer clusters than this carry no interval that is worth its name."""


class Metric(StrEnum):
    """What is estimated. A closed set: it labels a metric."""

    RECALL = "recall"
    """Share of the pools' relevant passages that were served, all requests taken together."""
    RECALL_PER_REQUEST = "recall_per_request"
    """Mean over requests of their own recall; from wholly judged pools only."""
    MRR = "mrr"
    """Mean reciprocal rank of what was served, over requests whose pool holds a relevant one."""
    UDCG = "udcg"
    GAIN = "gain"
    HARM = "harm"
    PRECISION = "precision"
    DISTRACTOR_RATE = "distractor_rate"
    RECALL_LOSS = "recall_loss"
    """Mean share of the relevant among the retriever's first few that was not served: what a
    certificate bounds."""
    RETRIEVER_MISS = "retriever_miss"
    """Share of the relevant passages that lie beyond the retriever's pool, from audits. The other
    metrics are relative to the pool and know nothing of these."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its interval, or the statement that there is none yet.

    Attributes:
        value: The point estimate; None below what the interval needs: no data, never 0.
        lower: Lower end of the confidence interval; None with ``value``.
        upper: Upper end; None with ``value``.
        n: Clusters (requests, or sessions) that the metric is defined for.
        method: How the interval was made.
        n_needed: About how many clusters it would take, where ``value`` is None; None where that
            cannot be told yet.
    """

    value: float | None
    lower: float | None
    upper: float | None
    n: int
    method: str
    n_needed: int | None = None


@dataclass(frozen=True, slots=True)
class JudgedRequest:
    """What the judge found in one request, reduced to what the estimates need.

    Attributes:
        probability: π, the probability with which the request was sampled, in (0, 1].
        grades: Of the served passages, in the order of the decision.
        utilities: What each of them is worth, in the same order.
        dropped_relevant: Relevant passages among the dropped ones that were judged, divided by
            ``dropped_probability``: estimates how many were dropped. None where dropped passages
            were picked and none of them got a verdict.
        dropped_probability: The probability with which each dropped passage was judged, in
            [0, 1]; 1 where none was dropped.
        pool_relevant: Relevant passages in the whole pool, where all of it was judged by
            design; None elsewhere.
        pool_probability: The probability with which the whole pool was to be judged, in [0, 1].
        unanswered_probability: The same, had nothing relevant been served.
        session_id: Requests of one session are not independent and are counted as one cluster.
        recall_loss: Share of the relevant among the retriever's first few that was not served;
            None where they were not all judged by design, or none is relevant.
        missed_relevant: How many relevant passages an audit estimates beyond the pool; None for
            a request that was not audited.
        audit_probability: The probability with which it was to be audited.
        pool_found: ``pool_relevant`` of a pool in which verdicts are missing: those that were
            found. None where the pool was not to be judged, or nothing is missing in it.
    """

    probability: float
    grades: tuple[int, ...]
    utilities: tuple[float, ...]
    dropped_relevant: float | None
    dropped_probability: float
    pool_relevant: int | None
    pool_probability: float
    unanswered_probability: float
    session_id: str | None = None
    recall_loss: float | None = None
    missed_relevant: float | None = None
    audit_probability: float = 0.0
    pool_found: int | None = None

    @property
    def kept_relevant(self) -> int:
        return sum(grade > 0 for grade in self.grades)


@dataclass(frozen=True, slots=True)
class RatioSums:
    """Additive statistics of a ratio Σ a / Σ b over independent clusters.

    Attributes:
        n: Clusters in which the metric is defined.
        a, b: Weighted sums of numerators and denominators.
        aa, ab, bb: Sums over clusters of the products of their own weighted sums.
        seen: In how many clusters a value unlike the others' would have been observed: below n
            where a part of each is judged with a probability only.
    """

    n: int = 0
    a: float = 0.0
    b: float = 0.0
    aa: float = 0.0
    ab: float = 0.0
    bb: float = 0.0
    seen: float = 0.0

    def __add__(self, other: "RatioSums") -> "RatioSums":
        return RatioSums(
            self.n + other.n,
            self.a + other.a,
            self.b + other.b,
            self.aa + other.aa,
            self.ab + other.ab,
            self.bb + other.bb,
            self.seen + other.seen,
        )


def term(metric: Metric, request: JudgedRequest) -> tuple[float, float] | None:
    """The numerator and denominator that one request adds to a metric, before weighting.

    Returns:
        None where the metric is not defined for this request, or was not observed.

    >>> request = JudgedRequest(0.1, (0, 1), (-0.5, 1.0), 5.0, 0.2, None, 0.0, 0.5)
    >>> term(Metric.RECALL, request), term(Metric.MRR, request)
    ((1, 6.0), (0.5, 1.0))
    """
    return _TERMS[metric](request)


def _recall_term(request: JudgedRequest) -> tuple[float, float] | None:
    if request.dropped_relevant is None:
        return None
    kept = request.kept_relevant
    return kept, kept + request.dropped_relevant


def _recall_per_request_term(request: JudgedRequest) -> tuple[float, float] | None:
    if not request.pool_relevant:
        return None
    weight = 1.0 / request.pool_probability
    return weight * request.kept_relevant / request.pool_relevant, weight


def _mean_term(value: float | None) -> tuple[float, float] | None:
    return None if value is None else (value, 1.0)


def _reciprocal_rank_term(request: JudgedRequest) -> tuple[float, float] | None:
    """RR where a relevant passage was served; 0, with the weight of a judged pool, where not.

    A context without a relevant passage has RR 0 if its pool holds one and none otherwise.
    Which of the two can be told only from a wholly judged pool: each stands for
    1/pool_probability requests like it. Counting those alone in which a dropped relevant
    passage happened to be seen would bias the mean upwards. Where verdicts are missing, a pool in
    which a relevant one was found holds one; one in which none was found counts as if it held
    none, which is wrong only where the sole relevant passage is among the missing.
    """
    for rank, grade in enumerate(request.grades, start=1):
        if grade > 0:
            return 1.0 / rank, 1.0
    if request.pool_probability == 0.0:
        return None
    found = request.pool_relevant or request.pool_found
    return (0.0, 1.0 / request.pool_probability) if found else (0.0, 0.0)


def _retriever_miss_term(request: JudgedRequest) -> tuple[float, float] | None:
    missed, dropped = request.missed_relevant, request.dropped_relevant
    if missed is None or dropped is None or request.audit_probability == 0.0:
        return None
    weight = 1.0 / request.audit_probability
    return weight * missed, weight * (missed + dropped + request.kept_relevant)


_TERMS: Mapping[Metric, Callable[[JudgedRequest], tuple[float, float] | None]] = {
    Metric.RECALL: _recall_term,
    Metric.RECALL_PER_REQUEST: _recall_per_request_term,
    Metric.MRR: _reciprocal_rank_term,
    Metric.UDCG: lambda request: _mean_term(udcg(request.utilities).value),
    Metric.GAIN: lambda request: _mean_term(udcg(request.utilities).gain),
    Metric.HARM: lambda request: _mean_term(udcg(request.utilities).harm),
    Metric.PRECISION: lambda request: _mean_term(precision_at_k(request.grades)),
    Metric.DISTRACTOR_RATE: lambda request: _mean_term(distractor_rate(request.utilities)),
    Metric.RECALL_LOSS: lambda request: _mean_term(request.recall_loss),
    Metric.RETRIEVER_MISS: _retriever_miss_term,
}


def ratio_sums(metric: Metric, requests: Iterable[JudgedRequest]) -> RatioSums:
    """The sums of a metric over requests, weighted by 1/π and clustered by session.

    >>> request = JudgedRequest(0.5, (1,), (1.0,), 1.0, 1.0, None, 0.0, 0.5)
    >>> ratio_sums(Metric.RECALL, [request, request])
    RatioSums(n=2, a=4.0, b=8.0, aa=8.0, ab=16.0, bb=32.0, seen=2.0)
    """
    clusters: dict[object, tuple[float, float, float]] = {}
    for position, request in enumerate(requests):
        found = term(metric, request)
        if found is None:
            continue
        key = position if request.session_id is None else request.session_id
        a, b, seen = clusters.get(key, (0.0, 0.0, 0.0))
        clusters[key] = (
            a + found[0] / request.probability,
            b + found[1] / request.probability,
            max(seen, _observed(metric, request)),
        )
    # A cluster without weight is one in which the metric is not defined, such as a recall
    # without a relevant passage.
    defined = [cluster for cluster in clusters.values() if cluster[1] > 0.0]
    return RatioSums(
        n=len(defined),
        a=math.fsum([a for a, _, _ in defined]),
        b=math.fsum([b for _, b, _ in defined]),
        aa=math.fsum([a * a for a, _, _ in defined]),
        ab=math.fsum([a * b for a, b, _ in defined]),
        bb=math.fsum([b * b for _, b, _ in defined]),
        seen=math.fsum([seen for _, _, seen in defined]),
    )


def _observed(metric: Metric, request: JudgedRequest) -> float:
    """The probability with which what speaks against a metric is judged at all."""
    if metric is Metric.RECALL:
        return request.dropped_probability
    if metric is Metric.RECALL_PER_REQUEST:
        return request.pool_probability
    if metric is Metric.MRR:
        return request.unanswered_probability
    return 1.0


IN_UNIT_INTERVAL = frozenset(Metric) - {Metric.UDCG, Metric.GAIN, Metric.HARM}
"""Metrics that are a share or a mean of shares."""


def estimate(
    metric: Metric,
    sums: RatioSums,
    *,
    confidence: float = DEFAULT_CONFIDENCE,
    min_n: int = DEFAULT_MIN_N,
    max_width: float | None = None,
) -> Estimate:
    """A metric with a confidence interval, for a window that is looked at once.

    The variance of a ratio R = Σ a / Σ b is that of its linearisation,
    n/(n−1) · Σ (a_c − R·b_c)² / (Σ b)² over clusters c (Särndal, Swensson and Wretman, "Model
    Assisted Survey Sampling", 1992, §5.6); the interval takes Student's t with n − 1 degrees of
    freedom. Metrics in [0, 1] have it on the logit scale, which keeps it inside and follows its
    skew. It never excludes what a kind of request too rare to have been seen could still do: at
    the rates at which such requests would have been noticed, a share of up to
    1 − ((1 − confidence)/2)^(1/seen) of the traffic may be of that kind. Where all clusters are
    alike this is all there is to go by.

    Args:
        metric: What is estimated.
        sums: From ``ratio_sums``; of several windows or processes, added.
        confidence: In (0, 1).
        min_n: Fewer clusters give no estimate.
        max_width: A wider interval gives no estimate; None for any width.

    Returns:
        The estimate; without a value where n or the width does not suffice, or where UDCG, gain
        or harm is the same in every cluster, for they have no bound to reason from.

    Raises:
        ConfigurationError: a confidence outside (0, 1) or min_n < 2; a width ≤ 0.

    >>> request = JudgedRequest(1.0, (1, 0), (1.0, -0.5), 0.0, 1.0, 1, 1.0, 1.0)
    >>> estimate(Metric.PRECISION, ratio_sums(Metric.PRECISION, [request] * 10)).n_needed
    30
    """
    if not 0.0 < confidence < 1.0:
        raise ConfigurationError(f"confidence {confidence!r} must lie in (0, 1)")
    if min_n < 2:
        raise ConfigurationError(f"min_n {min_n!r} must be at least 2: one value has no spread")
    n = sums.n
    if n < min_n:
        return Estimate(None, None, None, n, "none", min_n)
    value = sums.a / sums.b
    interval = _interval(metric, sums, value, (1.0 - confidence) / 2.0)
    if interval is None:
        return Estimate(None, None, None, n, "none")
    lower, upper, method = interval
    return sufficient(Estimate(value, lower, upper, n, method), min_n, max_width)


def sufficient(found: Estimate, min_n: int, max_width: float | None) -> Estimate:
    """The estimate if its interval is narrow enough, and otherwise the n that it would take.

    Raises:
        ConfigurationError: a width ≤ 0.

    >>> sufficient(Estimate(0.5, 0.3, 0.7, 100, "normal"), 30, 0.2)
    Estimate(value=None, lower=None, upper=None, n=100, method='normal', n_needed=400)
    """
    if max_width is None or found.lower is None or found.upper is None:
        return found
    if not max_width > 0.0:
        raise ConfigurationError(f"max_width {max_width!r} must be > 0")
    width = found.upper - found.lower
    if width <= max_width:
        return found
    # Widths shrink with the square root of n.
    needed = math.ceil(found.n * (width / max_width) ** 2 - 1e-9)
    return Estimate(None, None, None, found.n, found.method, max(min_n, needed))


def _interval(
    metric: Metric, sums: RatioSums, value: float, tail: float
) -> tuple[float, float, str] | None:
    n, bounded = sums.n, metric in IN_UNIT_INTERVAL
    squares = sums.aa - 2.0 * value * sums.ab + value * value * sums.bb
    # Up to this it is rounding: all clusters are alike.
    alike = squares <= 1e-12 * (sums.aa + value * value * sums.bb)
    if not bounded:
        if alike:
            return None
        half = t_quantile(1.0 - tail, n - 1) * math.sqrt(n / (n - 1) * squares) / sums.b
        return value - half, value + half, "normal"
    if sums.seen <= 0.0:
        return None
    unseen = 1.0 - tail ** (1.0 / sums.seen)
    lower, upper = value * (1.0 - unseen), value + (1.0 - value) * unseen
    if alike:
        return lower, upper, "unseen"
    half = t_quantile(1.0 - tail, n - 1) * math.sqrt(n / (n - 1) * squares) / sums.b
    logit, half = math.log(value / (1.0 - value)), half / (value * (1.0 - value))
    return min(lower, logistic(logit - half)), max(upper, logistic(logit + half)), "normal-logit"


def logistic(x: float) -> float:
    """The inverse of the logit; 1/(1 + e^−x) without overflow.

    >>> logistic(0.0), logistic(-1000.0)
    (0.5, 0.0)
    """
    if x < 0.0:
        return math.exp(x) / (1.0 + math.exp(x))
    return 1.0 / (1.0 + math.exp(-x))


def t_quantile(p: float, df: int) -> float:
    """Quantile of Student's t, by the expansion in 1/df around the normal one.

    Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.5. Within 0.1% for
    df ≥ 6 at p = 0.975, for df ≥ 9 at 0.995; scipy would be a large dependency for one number.

    >>> round(t_quantile(0.975, 29), 3)
    2.045
    """
    z = NormalDist().inv_cdf(p)
    return (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
    )
