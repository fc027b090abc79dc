"""Terms added up over independent clusters: sufficient for estimates from any number of requests.

A cluster is a session, or a request that belongs to none. Requests may come in parts, such as the
pages of a store. Pure: no I/O, no clock, no logging.
"""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray
from ctxguard.monitor.estimation.terms import Metric, Table, term

_METRICS = tuple(Metric)


class ClusterTerms(NamedTuple):
    """Columns of numbers to be added up, one row per cluster, weighted by 1/π.

    Attributes:
        values: Shape (n, p). Of ``request_terms``: numerator and denominator of each metric in
            the order of ``Metric``, 0 if it is undefined.
        inclusion: Shape (n, q): for each metric the probability with which a value unlike the
            others' would have been observed; 0 if it is undefined.
    """

    values: FloatArray
    inclusion: FloatArray


def request_terms(table: Table) -> ClusterTerms:
    """Return the terms of each request as its own cluster, whatever its session."""
    values = np.zeros((len(table), 2 * len(_METRICS)))
    inclusion = np.zeros((len(table), len(_METRICS)))
    for place, metric in enumerate(_METRICS):
        numerator, denominator, chance = term(metric, table)
        # A denominator of 0 is a request in which the metric is not defined, such as recall
        # without a relevant passage.
        defined = ~np.isnan(numerator) & (denominator > 0.0)
        values[defined, 2 * place] = numerator[defined]
        values[defined, 2 * place + 1] = denominator[defined]
        inclusion[defined, place] = chance[defined]
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

    @property
    def squares(self) -> float:
        """Σ (a_c − R·b_c)² over clusters c, of the ratio R."""
        value = self.a / self.b
        return self.aa - 2.0 * value * self.ab + value * value * self.bb


@dataclass(frozen=True, slots=True)
class TermSums:
    """Sums of terms over clusters; those of two sets of clusters add up.

    Attributes:
        n: Number of clusters.
        totals: Shape (p,), the sum of each column of ``ClusterTerms.values``.
        products: Shape (p, p), the sums of the products of two columns.
        n_defined: Shape (q,), clusters in which each metric is defined.
        n_observable: Shape (q,), as ``RatioSums.n_observable``.
    """

    n: int
    totals: FloatArray
    products: FloatArray
    n_defined: NDArray[np.int64]
    n_observable: FloatArray

    @classmethod
    def of(cls, terms: ClusterTerms) -> "TermSums":
        """Sum the terms of some clusters."""
        values, inclusion = terms
        defined = (inclusion > 0.0).sum(axis=0)
        return cls(
            len(values), values.sum(axis=0), values.T @ values, defined, inclusion.sum(axis=0)
        )

    def __add__(self, other: "TermSums") -> "TermSums":
        pairs = ((getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        return TermSums(*[own + others for own, others in pairs])

    def ratio(self, metric: Metric) -> RatioSums:
        """Return the sums of one metric, of terms from ``request_terms``."""
        place = _METRICS.index(metric)
        a, b = np.eye(len(self.totals))[2 * place : 2 * place + 2]
        return replace(
            self.combined(a, b),
            n=int(self.n_defined[place]),
            n_observable=float(self.n_observable[place]),
        )

    def combined(self, numerator: FloatArray, denominator: FloatArray) -> RatioSums:
        """Return the sums of a ratio of two linear combinations of the columns, shape (p,) each."""
        return RatioSums(
            self.n,
            float(numerator @ self.totals),
            float(denominator @ self.totals),
            float(numerator @ self.products @ numerator),
            float(numerator @ self.products @ denominator),
            float(denominator @ self.products @ denominator),
            float(self.n),
        )


NO_TERMS = TermSums.of(ClusterTerms(np.empty((0, 2 * len(_METRICS))), np.empty((0, len(_METRICS)))))
"""The sums over zero clusters."""


class Accumulator:
    """Adds up requests part by part; its memory grows only with the number of sessions."""

    def __init__(self) -> None:
        self._alone: TermSums | None = None
        self._sessions: list[tuple[NDArray[np.int64], ClusterTerms]] = []

    def add(self, terms: ClusterTerms, session: NDArray[np.int64]) -> None:
        """Add n requests; those of one session may come in several parts.

        Args:
            terms: One row per request.
            session: Shape (n,), 0 for a request by itself.
        """
        alone = session == 0
        own = TermSums.of(ClusterTerms(*[column[alone] for column in terms]))
        self._alone = own if self._alone is None else self._alone + own
        if not alone.all():
            rest = ClusterTerms(*[column[~alone] for column in terms])
            ids, cluster = np.unique(session[~alone], return_inverse=True)
            self._sessions.append((ids, by_cluster(rest, cluster)))

    def sums(self) -> TermSums:
        """Return the sums over all clusters so far; ``NO_TERMS`` without any."""
        if self._alone is None or not self._sessions:
            return self._alone or NO_TERMS
        ids = np.concatenate([part for part, _ in self._sessions])
        terms = ClusterTerms(
            np.concatenate([part.values for _, part in self._sessions]),
            np.concatenate([part.inclusion for _, part in self._sessions]),
        )
        _, cluster = np.unique(ids, return_inverse=True)
        return self._alone + TermSums.of(by_cluster(terms, cluster))
