"""Estimates the worth of any contexts over judged requests, served or not.

The estimators are those of live traffic: a context is the same rows with other ranks. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ctxguard.core.types import FloatArray
from ctxguard.measure.corrected import (
    N_COLUMNS,
    NEVER,
    Graded,
    Model,
    corrected_differences,
    corrected_estimates,
    predicted,
)
from ctxguard.measure.estimate import DEFAULT_MIN_N, Estimate, Sums, lacks_grades
from ctxguard.measure.interval import Interval
from ctxguard.measure.metrics import (
    METRICS,
    N_TERMS,
    POOL,
    Metric,
    shown_metrics,
    weighted_terms,
)
from ctxguard.measure.rows import BoolArray, IntArray, Rows

COMPARED = (Metric.UDCG, Metric.POOLED_RECALL)
"""The metrics by which contexts are compared."""


@dataclass(frozen=True)
class JudgedRequests:
    """n judged requests in memory, with their m judged passages.

    Attributes:
        rows: In the contexts that were served; ``asked_probability`` is 0 where it does
            not stand for others.
        fold: Shape (n,), below ``FOLDS``, the same for all requests of a question; −1 for one that
            nothing is left out for.
        stands_for: Shape (n,), how many of these requests each stands for that people graded; 0
            for one that they did not, NaN where no draw could have asked them.
    """

    rows: Rows
    fold: IntArray
    stands_for: FloatArray

    @property
    def is_graded(self) -> BoolArray:
        """Whether people graded each passage, shape (m,)."""
        return np.asarray(self.rows.passages["asked_probability"] > 0.0)

    @property
    def n_graded(self) -> int:
        """Number of requests with a passage that people graded."""
        return len(np.unique(self.rows.request[self.is_graded]))

    @cached_property
    def model(self) -> Model:
        """The fit of people's grades on the judge's."""
        return Model.fitted(self.rows, self.fold)

    @cached_property
    def p(self) -> FloatArray:
        """P(relevant) of each passage, shape (m,), from the grades of other questions."""
        return self.model.of(self.rows, self.fold)

    @cached_property
    def is_corrected(self) -> bool:
        """Whether people graded enough to correct the judge."""
        return self.served[Metric.UDCG].value is not None

    @cached_property
    def lacking(self) -> int:
        """About how many more grades people must give to compare contexts, at least.

        Pooled recall needs grades of dropped passages too.
        """
        return max([self.served[metric].n_needed or 0 for metric in COMPARED])

    @cached_property
    def served(self) -> Mapping[Metric, Estimate]:
        """The metrics of the served contexts, corrected by people's grades where these suffice."""
        if not self.is_graded.any():
            return dict.fromkeys(COMPARED, lacks_grades(DEFAULT_MIN_N))
        return self._corrected(self.rows)

    def estimates(self, ranks: IntArray) -> Mapping[Metric, Interval]:
        """Estimate the metrics of contexts, corrected by people's grades where these suffice.

        Otherwise they are the judge's own view, without intervals. Reciprocal rank is undefined
        where passages of a context were judged, or graded, without those above.

        Args:
            ranks: As in ``Rows.served``.
        """
        rows = self.rows.served(ranks)
        found = dict(self._corrected(rows) if self.is_corrected else _by_judge(rows))
        if not rows.has_ranks:
            found[Metric.SERVED_MRR] = Interval.undefined()
        return found

    def differences(self, new: IntArray, old: IntArray) -> Mapping[Metric, Interval]:
        """Estimate the paired gain of contexts over others, in the metrics of ``COMPARED``."""
        rows, before = self.rows.served(new), self.rows.served(old)
        apart = predicted(rows, self.p, self.model)
        own = [*range(POOL), NEVER]
        apart[:, own] -= predicted(before, self.p, self.model)[:, own]
        graded = Graded.of(rows, self.p, self.stands_for, before)
        return corrected_differences(self._sums(apart), graded, self.model)

    def _corrected(self, rows: Rows) -> Mapping[Metric, Estimate]:
        sums = self._sums(predicted(rows, self.p, self.model))
        graded = Graded.of(rows, self.p, self.stands_for)
        return corrected_estimates(sums, graded, self.model, DEFAULT_MIN_N)

    def _sums(self, columns: FloatArray) -> Sums:
        """Sum columns over the requests that a draw could have asked about."""
        covered, requests = ~np.isnan(self.stands_for), self.rows.requests
        sums, weight = Sums(N_COLUMNS), 1.0 / requests["probability"]
        sums.add((columns * weight[:, None])[covered], requests["session"][covered])
        return sums.ended()


def _by_judge(rows: Rows) -> Mapping[Metric, Interval]:
    """Estimate every metric from the judge's own grades, if enough requests have them."""
    sums, (values, inclusion) = Sums(N_TERMS), weighted_terms(rows)
    sums.add(values, rows.requests["session"], inclusion)
    own, found = sums.ended(), dict[Metric, Interval]()
    shown = shown_metrics(own.totals)
    for metric in METRICS:
        ratio = own.ratio(metric)
        found[metric] = Interval.undefined(ratio.n)
        if ratio.totals[1] > 0.0 and metric in shown:
            found[metric] = Interval(ratio.value, None, None, ratio.n)
    return found
