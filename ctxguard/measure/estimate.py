"""Sums over independent clusters, and estimates metrics with confidence intervals from the sums.

A cluster is a session, or a request that belongs to none. Every metric is a ratio of two weighted
sums over clusters, so one set of additive sums and one linearised variance serve them all; requests
may come in parts, such as the pages of a store. Pure.
"""

import math
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.scores import log_odds, logistic
from ctxguard.core.types import FloatArray
from ctxguard.measure.interval import CONFIDENCE, Interval, t_quantile
from ctxguard.measure.metrics import METRICS, Metric

DEFAULT_MIN_N = 30
"""With a smaller effective number of clusters, intervals do not reach their coverage."""
GRADES_COUNT = 2.0
"""This many grades of passages count as one cluster towards ``min_n``."""
IN_UNIT_INTERVAL = frozenset(Metric) - {Metric.UDCG, Metric.GAIN, Metric.HARM}
"""Metrics that are shares or means of shares."""
_LEAST_DF = 4.0
"""Below this the expansion of Student's t is wrong, and intervals are so wide that they cannot
mislead."""


@dataclass(eq=False, slots=True)
class Sums:
    """Sums of columns over clusters, part by part; memory grows only with the number of sessions.

    Attributes:
        totals: Shape (p,), the sum of each column.
        products: Shape (p, p), sums over clusters of the products of their own sums.
        n: Number of clusters; those in which it is defined, of the ratio of one metric.
        n_observable: The expected number of clusters in which a value unlike the others' would
            have been observed: below n if a part of each is judged with a probability only.
    """

    totals: FloatArray
    products: FloatArray
    n: int = 0
    n_observable: float = 0.0
    _of_metrics: FloatArray = field(default_factory=partial(np.zeros, (2, len(METRICS))))
    """The n and ``n_observable`` of each metric."""
    _sessions: list[tuple[NDArray[np.int64], FloatArray, FloatArray]] = field(default_factory=list)

    @classmethod
    def of(cls, n_columns: int) -> "Sums":
        """Return sums without any cluster."""
        return cls(np.zeros(n_columns), np.zeros((n_columns, n_columns)))

    def add(
        self,
        values: FloatArray,
        session: NDArray[np.int64],
        inclusion: FloatArray | None = None,
    ) -> None:
        """Add n requests; those of one session may come in several parts.

        Args:
            values: Shape (n, p), weighted by 1/π.
            session: Shape (n,), 0 for a request by itself.
            inclusion: As in ``metrics.weighted_terms``; None for other columns.
        """
        if inclusion is None:
            inclusion = np.zeros((len(values), len(METRICS)))
        alone = session == 0
        self._add_clusters(values[alone], inclusion[alone])
        if not alone.all():
            rest = session[~alone], values[~alone], inclusion[~alone]
            self._sessions.append(_by_session(*rest))

    def _add_clusters(self, values: FloatArray, inclusion: FloatArray) -> None:
        self.n += len(values)
        self.n_observable += len(values)
        self.totals += values.sum(axis=0)
        self.products += values.T @ values
        self._of_metrics += (inclusion > 0.0).sum(axis=0), inclusion.sum(axis=0)

    def ended(self) -> "Sums":
        """Return these sums with the sessions folded in, once all requests are added."""
        if self._sessions:
            session, values, inclusion = map(np.concatenate, zip(*self._sessions, strict=True))
            self._sessions.clear()
            self._add_clusters(*_by_session(session, values, inclusion)[1:])
        return self

    def ratio(self, metric: Metric) -> "Sums":
        """Return the two columns of one metric, out of those from ``metrics.weighted_terms``."""
        place = METRICS.index(metric)
        own, (n, n_observable) = (
            slice(2 * place, 2 * place + 2),
            self._of_metrics[:, place].tolist(),
        )
        return Sums(self.totals[own], self.products[own, own], int(n), n_observable)

    def combined(self, numerator: FloatArray, denominator: FloatArray) -> "Sums":
        """Return two linear combinations of the columns, shape (p,) each, as columns."""
        both = np.array([numerator, denominator])
        products = both @ self.products @ both.T
        return Sums(both @ self.totals, products, self.n, self.n_observable)

    @property
    def value(self) -> float:
        """The ratio R = Σ a / Σ b of two columns."""
        a, b = self.totals.tolist()
        return float(a / b)

    def squares(self, value: float) -> float:
        """Return Σ (a_c − R·b_c)² over clusters c, for the ratio R of two columns."""
        (aa, ab), (_, bb) = self.products.tolist()
        return float(aa - 2.0 * value * ab + value * value * bb)


def _by_session(
    session: NDArray[np.int64], values: FloatArray, inclusion: FloatArray
) -> tuple[NDArray[np.int64], FloatArray, FloatArray]:
    """Sum rows by session: an unusual value is seen if any request of the session shows it."""
    ids, cluster = np.unique(session, return_inverse=True)
    total, seen = (np.zeros((len(ids), each.shape[1])) for each in (values, inclusion))
    np.add.at(total, cluster, values)
    np.maximum.at(seen, cluster, inclusion)
    return ids, total, seen


@dataclass(frozen=True)
class Estimate(Interval):
    """A point estimate with its confidence interval, or without a value.

    Attributes:
        value: The point estimate; None if the data do not suffice, never 0.
        lower, upper: The ends of the confidence interval; None with ``value``.
        n: Clusters (sessions, and requests without one) in which the metric is defined; with
            human labels, the labelled ones.
        n_needed: If ``value`` is None, where people correct the judge how many more grades it
            takes, as in ``lacks_grades``, else about how many clusters suffice in all; None if that
            cannot be predicted yet.
        grades: Passages that people graded for it; None where no judge is corrected.
        n_effective: Number of equally weighted clusters with as narrow an interval (Kish): at most
            ``n``, and far less if a few clusters stand for much of the traffic. None without
            clusters.
    """

    n_needed: int | None = None
    grades: int | None = None
    n_effective: float | None = None

    @property
    def grades_needed(self) -> int | None:
        """Return how many more of people's grades are needed; None if it lacks something else."""
        return None if self.grades is None else self.n_needed


def estimate(metric: Metric, sums: Sums, min_n: int = DEFAULT_MIN_N) -> Estimate:
    """Estimate a metric with a confidence interval, for a window that is looked at only once.

    The variance of a ratio R = Σ a / Σ b is that of its linearisation,
    n/(n−1) · Σ (a_c − R·b_c)² / (Σ b)² over clusters c (Särndal, Swensson and Wretman, "Model
    Assisted Survey Sampling", 1992, §5.6). If weights differ, n clusters tell no more than
    their effective number (Σ b)² / Σ b² of equal ones (Kish, "Survey Sampling", 1965, §11.7):
    the interval takes Student's t with that minus 1 degrees of freedom. Metrics in [0, 1] have it
    on the logit scale, which keeps it inside and follows its skew. It never excludes the effect of
    a kind of request too rare to have been seen: at the rates at which such requests would have
    been noticed, a share of up to 1 − ((1 − confidence)/2)^(1/n_observable) of the traffic may be
    of that kind. If all clusters are alike, the interval rests on this alone.

    Args:
        sums: Two columns, a and b.
        min_n: Effective number of clusters below which there is no estimate, ≥ 2.

    Returns:
        The estimate; without a value if n does not suffice, or if UDCG, gain
        or harm is the same in every cluster: they have no bounds to reason from.

    >>> sums = Sums.of(2)
    >>> estimate(Metric.PRECISION, sums).n_needed
    30
    >>> is_relevant = np.arange(100) < 60
    >>> sums.add(np.column_stack([is_relevant, np.ones(100)]), np.zeros(100, np.int64))
    >>> found = estimate(Metric.PRECISION, sums)
    >>> round(found.lower, 2), found.value, round(found.upper, 2)
    (0.5, 0.6, 0.69)
    """
    n, (a, b), (aa, bb) = sums.n, sums.totals.tolist(), sums.products.diagonal().tolist()
    effective = b**2 / bb if n else 0.0
    if effective < min_n:
        needed = math.ceil(min_n * n / effective - 1e-9) if effective else min_n
        return Estimate(None, None, None, n, needed, n_effective=effective if n else None)
    value = a / b
    squares = sums.squares(value)
    # Anything up to this is rounding: all clusters are alike.
    alike = squares <= 1e-12 * (aa + value * value * bb)
    bounded = metric in IN_UNIT_INTERVAL
    if sums.n_observable <= 0.0 if bounded else alike:
        return Estimate(None, None, None, n, n_effective=effective)
    return linearised(
        metric,
        sums,
        squares=0.0 if alike else squares,
        n=n,
        effective=effective,
        # Unequal weights miss rare requests as a smaller sample would.
        n_observable=sums.n_observable * effective / n if bounded else math.inf,
    )


def linearised(
    metric: Metric,
    sums: Sums,
    errors: FloatArray | None = None,
    *,
    squares: float,
    n: int,
    effective: float,
    n_observable: float = math.inf,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Estimate:
    """Estimate a ratio R with its interval, corrected by people's grades or not.

    The variance is that of the terms over all judged clusters, as in ``estimate``, and Σ z² over
    labelled clusters, whose degrees of freedom Student's t has then, less 4 for what was fitted.

    Args:
        metric: The estimated metric; one in [0, 1] has its interval on the logit scale.
        sums: Two columns, a and b > 0, of n > 1; a correction may carry a share beyond its
            range.
        errors: Shape (l,), z: each labelled cluster's contribution to the error of a − R·b; None if
            nothing is corrected.
        squares: ``sums.squares`` of R, or 0 where that is rounding.
        n: Clusters in which the metric is observed; the labelled ones of a correction.
        effective: Their effective number.
        n_observable: As in ``Sums``; infinite if nothing can have been missed.
        bounds: The bounds of a request's metric.
    """
    a, b = sums.totals.tolist()
    value, squares = a / b, sums.n / (sums.n - 1) * max(squares, 0.0)
    df = effective - 1.0
    if errors is not None:
        errors = errors[np.abs(errors) > 1e-9 * np.abs(errors).max(initial=0.0)]
        squares += float(errors @ errors)
        df = (degrees_of_freedom(errors) if len(errors) > 1 else 0.0) - 4.0
    half = t_quantile((1.0 + CONFIDENCE) / 2.0, max(df, _LEAST_DF)) * math.sqrt(squares) / b
    lower, upper = value - half, value + half
    if metric in IN_UNIT_INTERVAL:
        if 0.0 < value < 1.0:
            spread = half / (value * (1.0 - value)) * np.array([-1.0, 1.0])
            lower, upper = logistic(log_odds(value) + spread).tolist()
        value, lower, upper = np.clip((value, lower, upper), 0.0, 1.0).tolist()
    if n_observable < math.inf:
        # The share of the traffic that may be of a kind of which nothing was seen.
        unseen = 1.0
        if n_observable > 0.0:
            unseen -= ((1.0 - CONFIDENCE) / 2.0) ** (1.0 / n_observable)
        lower = min(lower, value - max(value - bounds[0], 0.0) * unseen)
        upper = max(upper, value + max(bounds[1] - value, 0.0) * unseen)
    return Estimate(value, lower, upper, n, n_effective=effective)


def degrees_of_freedom(residuals: FloatArray) -> float:
    """Return the number of normal residuals whose sum of squares would be equally uncertain.

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


def lacks_grades(min_n: int, n: int = 0, counted: float = 0.0, grades: int = 0) -> Estimate:
    """Say that people have graded too few passages, and how many more are needed at least.

    A grade never raises that number, which is two grades for each that lacks towards ``min_n``.
    More are needed if people grade passages that the metric does not use.

    Args:
        n: Labelled clusters.
        counted: How much their grades count towards ``min_n``; a further grade must not lower it.
        grades: Graded passages.
    """
    needed = max(math.ceil(GRADES_COUNT * (min_n - counted) - 1e-9), 1)
    return Estimate(None, None, None, n, needed, grades, counted if n else None)
