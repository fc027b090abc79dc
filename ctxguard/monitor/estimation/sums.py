"""Terms added up over independent clusters: sufficient for estimates from any number of requests.

A cluster is a session, or a request that belongs to none. Requests may come in parts, such as the
pages of a store. Pure: no I/O, no clock, no logging.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray
from ctxguard.monitor.estimation.terms import Metric, Table, term

_METRICS = tuple(Metric)
_DENOMINATORS = slice(1, 2 * len(_METRICS), 2)
_SERVED = tuple(range(2 * len(_METRICS), 2 * len(_METRICS) + 3))
_WIDTH = 2 * len(_METRICS) + len(_SERVED)


def control_columns(metric: Metric) -> list[int]:
    """Return the columns of ``ClusterTerms.values`` that may predict a metric.

    These are its numerator and denominator, whether the first served passage is relevant, whether
    any is, and how many are.
    """
    place = numerator_column(metric)
    return [place, place + 1, *_SERVED]


def numerator_column(metric: Metric) -> int:
    """Return the numerator's column in ``ClusterTerms.values``; the denominator's follows."""
    return 2 * _METRICS.index(metric)


class ClusterTerms(NamedTuple):
    """The terms of every metric, one row per cluster, weighted by 1/π.

    Attributes:
        values: Shape (n, 19): numerator and denominator of each metric in the order of
            ``Metric``, 0 if it is undefined; then whether the first served passage is
            relevant, whether any is, and the number of relevant ones.
        inclusion: Shape (n, 8): for each metric the probability with which a value unlike the
            others' would have been observed; 0 if it is undefined.
    """

    values: FloatArray
    inclusion: FloatArray


def request_terms(table: Table) -> ClusterTerms:
    """Return the terms of each request as its own cluster, whatever its session."""
    values = np.empty((len(table), _WIDTH))
    inclusion = np.empty((len(table), len(_METRICS)))
    for place, metric in enumerate(_METRICS):
        columns = term(metric, table)
        undefined = np.isnan(columns.numerator) | np.isnan(columns.denominator)
        values[:, 2 * place] = np.where(undefined, 0.0, columns.numerator)
        values[:, 2 * place + 1] = np.where(undefined, 0.0, columns.denominator)
        inclusion[:, place] = np.where(undefined, 0.0, columns.inclusion)
    kept = table["kept_relevant"]
    values[:, _SERVED] = np.column_stack([table["reciprocal_rank"] == 1.0, kept > 0, kept])
    return ClusterTerms(values / table["probability"][:, None], inclusion)


def clusters(session: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the clusters of requests from 0: a session, or a single request without one.

    >>> clusters(np.array([0, 7, 0, 7])).tolist()
    [0, 2, 1, 2]
    """
    alone = session == 0
    numbers = np.empty(len(session), np.int64)
    n_alone = int(np.count_nonzero(alone))
    numbers[alone] = np.arange(n_alone)
    _, of_session = np.unique(session[~alone], return_inverse=True)
    numbers[~alone] = n_alone + of_session
    return numbers


def by_cluster(terms: ClusterTerms, cluster: NDArray[np.int64]) -> ClusterTerms:
    """Add up rows by cluster, in the order of the clusters' numbers."""
    n = int(cluster.max(initial=-1)) + 1
    values = np.zeros((n, terms.values.shape[1]))
    inclusion = np.zeros((n, terms.inclusion.shape[1]))
    np.add.at(values, cluster, terms.values)
    np.maximum.at(inclusion, cluster, terms.inclusion)
    return ClusterTerms(values, inclusion)


@dataclass(frozen=True, slots=True)
class RatioSums:
    """Additive statistics of a ratio Σ a / Σ b over independent clusters.

    Attributes:
        n: Clusters in which the metric is defined.
        a, b: Weighted sums of numerators and denominators.
        aa, ab, bb: Sums over clusters of the products of their own weighted sums.
        n_observable: The expected number of clusters in which a value unlike the others' would
            have been observed: below n if a part of each is judged with a probability only.
    """

    n: int = 0
    a: float = 0.0
    b: float = 0.0
    aa: float = 0.0
    ab: float = 0.0
    bb: float = 0.0
    n_observable: float = 0.0


@dataclass(frozen=True, slots=True)
class ControlSums:
    """Sums over n clusters of columns that a judge gives.

    Attributes:
        n: Number of clusters.
        totals: Shape (p,), the sum of each column.
        products: Shape (p, p), the sums of the products of two columns.
    """

    n: int
    totals: FloatArray
    products: FloatArray

    @classmethod
    def of(cls, columns: FloatArray) -> "ControlSums":
        """Sum columns of shape (n, p)."""
        return cls(len(columns), columns.sum(axis=0), columns.T @ columns)

    def __add__(self, other: "ControlSums") -> "ControlSums":
        return ControlSums(
            self.n + other.n, self.totals + other.totals, self.products + other.products
        )


@dataclass(frozen=True, slots=True)
class TermSums:
    """The sums of every metric's terms over clusters; those of two sets of clusters add up.

    Attributes:
        values: Sums of the columns of ``ClusterTerms.values`` and of their products.
        n_defined: Shape (8,), clusters in which each metric is defined.
        n_observable: Shape (8,), as ``RatioSums.n_observable``.
    """

    values: ControlSums
    n_defined: NDArray[np.int64]
    n_observable: FloatArray

    @classmethod
    def of(cls, terms: ClusterTerms) -> "TermSums":
        """Sum the terms of some clusters."""
        # A denominator of 0 is a cluster in which the metric is not defined, such as recall
        # without a relevant passage.
        defined = terms.values[:, _DENOMINATORS] > 0.0
        return cls(
            ControlSums.of(terms.values),
            defined.sum(axis=0),
            np.where(defined, terms.inclusion, 0.0).sum(axis=0),
        )

    def __add__(self, other: "TermSums") -> "TermSums":
        return TermSums(
            self.values + other.values,
            self.n_defined + other.n_defined,
            self.n_observable + other.n_observable,
        )

    def ratio(self, metric: Metric) -> RatioSums:
        """Return the sums of one metric."""
        place = _METRICS.index(metric)
        a, b = 2 * place, 2 * place + 1
        totals, products = self.values.totals, self.values.products
        return RatioSums(
            n=int(self.n_defined[place]),
            a=float(totals[a]),
            b=float(totals[b]),
            aa=float(products[a, a]),
            ab=float(products[a, b]),
            bb=float(products[b, b]),
            n_observable=float(self.n_observable[place]),
        )

    def controls(self, metric: Metric) -> ControlSums:
        """Return the sums of the columns that may predict a metric, as ``control_columns``."""
        chosen = control_columns(metric)
        return ControlSums(
            self.values.n, self.values.totals[chosen], self.values.products[np.ix_(chosen, chosen)]
        )


NO_TERMS = TermSums.of(ClusterTerms(np.empty((0, _WIDTH)), np.empty((0, len(_METRICS)))))
"""The sums over zero clusters."""


class Accumulator:
    """Adds up requests part by part; its memory grows only with the number of sessions."""

    def __init__(self) -> None:
        self._alone = NO_TERMS
        self._sessions: list[tuple[NDArray[np.int64], ClusterTerms]] = []

    def add(self, table: Table) -> None:
        """Add some requests; those of one session may come in several parts."""
        terms, session = request_terms(table), table["session"]
        alone = session == 0
        self._alone += TermSums.of(ClusterTerms(*[column[alone] for column in terms]))
        if not alone.all():
            rest = ClusterTerms(*[column[~alone] for column in terms])
            ids, cluster = np.unique(session[~alone], return_inverse=True)
            self._sessions.append((ids, by_cluster(rest, cluster)))

    def sums(self) -> TermSums:
        """Return the sums over all clusters so far."""
        if not self._sessions:
            return self._alone
        ids = np.concatenate([part for part, _ in self._sessions])
        terms = ClusterTerms(
            np.concatenate([part.values for _, part in self._sessions]),
            np.concatenate([part.inclusion for _, part in self._sessions]),
        )
        _, cluster = np.unique(ids, return_inverse=True)
        return self._alone + TermSums.of(by_cluster(terms, cluster))


def sums_of(table: Table) -> TermSums:
    """Sum the terms of some requests, clustered by session.

    >>> from ctxguard.monitor.estimation.terms import JudgedRequest, table_of
    >>> request = JudgedRequest(0.5, (1,), (1.0,), 1.0, 1.0, None, 0.0, 0.5)
    >>> sums_of(table_of([request.to_row()] * 2)).ratio(Metric.RECALL)
    RatioSums(n=2, a=4.0, b=8.0, aa=8.0, ab=16.0, bb=32.0, n_observable=2.0)
    """
    whole = Accumulator()
    whole.add(table)
    return whole.sums()
