"""Columns of numbers added up over independent clusters: sufficient for any number of requests.

A cluster is a session, or a request that belongs to none. Requests may come in parts, such as the
pages of a store. Pure: no I/O, no clock, no logging.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray
from ctxguard.monitor.estimation.metrics import METRICS, Metric


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


class Sums:
    """Adds up columns over clusters, part by part; memory grows only with the number of sessions.

    Args:
        n_columns: p, the number of columns.

    Attributes:
        n: Number of clusters.
        totals: Shape (p,), the sum of each column.
    """

    def __init__(self, n_columns: int) -> None:
        self.n = 0
        self.totals = np.zeros(n_columns)
        self._products = np.zeros((n_columns, n_columns))
        self._n_defined = np.zeros(len(METRICS), np.int64)
        self._n_observable = np.zeros(len(METRICS))
        self._sessions: list[tuple[NDArray[np.int64], FloatArray, FloatArray]] = []

    def add(
        self,
        values: FloatArray,
        session: NDArray[np.int64] | None = None,
        inclusion: FloatArray | None = None,
    ) -> None:
        """Add n requests; those of one session may come in several parts.

        Args:
            values: Shape (n, p), weighted by 1/π.
            session: Shape (n,), 0 for a request by itself; None where each is.
            inclusion: As of ``metrics.weighted_terms``; None for other columns.
        """
        alone = np.ones(len(values), np.bool_) if session is None else session == 0
        if inclusion is None:
            inclusion = np.zeros((len(values), len(METRICS)))
        self._add_clusters(values[alone], inclusion[alone])
        if session is not None and not alone.all():
            rest = session[~alone], values[~alone], inclusion[~alone]
            self._sessions.append(_by_session(*rest))

    def _add_clusters(self, values: FloatArray, inclusion: FloatArray) -> None:
        self.n += len(values)
        self.totals += values.sum(axis=0)
        self._products += values.T @ values
        self._n_defined += (inclusion > 0.0).sum(axis=0)
        self._n_observable += inclusion.sum(axis=0)

    def ended(self) -> "Sums":
        """Return itself with the sessions added up, once all requests were added."""
        if self._sessions:
            session, values, inclusion = map(np.concatenate, zip(*self._sessions, strict=True))
            self._sessions.clear()
            self._add_clusters(*_by_session(session, values, inclusion)[1:])
        return self

    def ratio(self, metric: Metric) -> RatioSums:
        """Return the sums of one metric, of columns from ``metrics.weighted_terms``."""
        place = METRICS.index(metric)
        own = slice(2 * place, 2 * place + 2)
        (a, b), ((aa, ab), (_, bb)) = self.totals[own].tolist(), self._products[own, own].tolist()
        n, n_observable = int(self._n_defined[place]), float(self._n_observable[place])
        return RatioSums(n, a, b, aa, ab, bb, n_observable)

    def combined(self, numerator: FloatArray, denominator: FloatArray) -> RatioSums:
        """Return the sums of a ratio of two linear combinations of the columns, shape (p,) each."""
        of_products = numerator @ self._products
        return RatioSums(
            self.n,
            float(numerator @ self.totals),
            float(denominator @ self.totals),
            float(of_products @ numerator),
            float(of_products @ denominator),
            float(denominator @ self._products @ denominator),
            float(self.n),
        )


def _by_session(
    session: NDArray[np.int64], values: FloatArray, inclusion: FloatArray
) -> tuple[NDArray[np.int64], FloatArray, FloatArray]:
    """Add up rows by session: a value unlike the others' is seen where any request shows it."""
    ids, cluster = np.unique(session, return_inverse=True)
    total, seen = (np.zeros((len(ids), each.shape[1])) for each in (values, inclusion))
    np.add.at(total, cluster, values)
    np.maximum.at(seen, cluster, inclusion)
    return ids, total, seen
