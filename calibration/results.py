"""Holds the one table of results: policies × metrics, with intervals and paired differences.

The commands, the report and ``--json`` all show this table. Pure: no I/O, no clock, no logging.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

import numpy as np

from calibration.evaluate import IN_POOL, Measured, intervals
from ctxguard.measure.interval import Interval

LOWER_IS_BETTER = frozenset(
    {
        *("harm", "misleading", "distractor_rate", "harm_undiscounted", "recall_loss"),
        *("seconds", "cost_per_1000"),
    }
)
NEITHER_IS_BETTER = frozenset({"kept", "tokens", "judged", "recall_at_depth", "ndcg_at_10"})
"""Metrics without a better direction: context sizes, and metrics of candidates before any
policy."""

COMPARED = (
    *("recall", "precision", "precision_judged", "mrr", "ndcg", "udcg", "harm"),
    *("misleading", "distractor_rate", "harm_undiscounted", "kept", "tokens"),
)
"""The metrics by which policies are compared."""

Outcome = Literal["better", "worse", "higher", "lower", "within noise", "no data"]


@dataclass(frozen=True)
class Difference(Interval):
    """A metric of one policy minus that of another, paired by query.

    Attributes:
        outcome: ``within noise`` if the interval holds 0; ``higher`` or ``lower`` if neither way
            is better; ``no data`` without an interval.
    """

    outcome: Outcome

    def is_regression(self, tolerance: float = 0.0) -> bool:
        """Return whether the metric is worse by more than noise and ``tolerance``, in its unit."""
        if self.outcome != "worse" or self.bounds is None:
            return False
        return min(map(abs, self.bounds)) > tolerance


@dataclass(frozen=True)
class ResultRow:
    """The mean of one metric under one policy, over the queries that define the metric.

    Attributes:
        metric: A name in ``calibration.evaluate.DESCRIPTIONS``.
        difference: Less the same metric of the reference policy, paired by query; None for the
            reference itself.
    """

    policy: str
    metric: str
    mean: Interval
    difference: Difference | None = None


@dataclass(frozen=True)
class Results:
    """Policies × metrics on the same queries, one row each; differences are from the reference."""

    reference: str
    rows: tuple[ResultRow, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies, in order."""
        return tuple(dict.fromkeys(row.policy for row in self.rows))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics, in order."""
        return tuple(dict.fromkeys(row.metric for row in self.rows))

    @cached_property
    def _places(self) -> dict[tuple[str, str], ResultRow]:
        return {(row.policy, row.metric): row for row in self.rows}

    def of(self, policy: str, metric: str) -> ResultRow:
        """Return one row, or raise KeyError."""
        return self._places[policy, metric]

    def has_data(self, metric: str) -> bool:
        """Return whether a metric of the table is defined for any policy."""
        return any(row.metric == metric and row.mean.value is not None for row in self.rows)

    def only(
        self, policies: Iterable[str] | None = None, metrics: Iterable[str] | None = None
    ) -> "Results":
        """Return part of the table, in this order; names that it lacks are ignored."""
        wanted = product(
            self.policies if policies is None else policies,
            self.metrics if metrics is None else metrics,
        )
        rows = [self._places[place] for place in wanted if place in self._places]
        return Results(self.reference, tuple(rows))


def tabulate(
    measured: Mapping[str, Measured],
    metrics: Iterable[str] | None = None,
    *,
    reference: str | None = None,
    seed: int = 0,
) -> Results:
    """Put policies that were measured on the same queries side by side.

    Args:
        measured: Metrics by name of the policy.
        metrics: Those to show, if all policies have them; all unless given.
        reference: The first policy unless given.

    >>> today, chosen = {"recall": np.array([0.0, 0.5])}, {"recall": np.array([0.5, 1.0])}
    >>> table = tabulate({"today": today, "chosen": chosen})
    >>> table.of("chosen", "recall").difference.outcome
    'better'
    """
    reference = next(iter(measured)) if reference is None else reference
    every = set.intersection(*map(set, measured.values())).difference({IN_POOL})
    wanted = metrics if metrics is not None else measured[reference]
    names = tuple(name for name in wanted if name in every)
    rows = []
    for policy, own in measured.items():
        means = intervals({name: own[name] for name in names}, own, seed)
        less: Mapping[str, Difference | None] = dict.fromkeys(names)
        if policy != reference:
            less = differences(own, measured[reference], names, seed=seed)
        rows += [ResultRow(policy, name, means[name], less[name]) for name in names]
    return Results(reference, tuple(rows))


def differences(
    these: Measured, those: Measured, metrics: Iterable[str], *, seed: int = 0
) -> dict[str, Difference]:
    """Subtract the second from the first, by metric and paired by query, on the same queries.

    >>> harm = lambda *values: {"harm": np.array(values)}
    >>> differences(harm(2.0, 3.0), harm(1.0, 2.0), ["harm"])["harm"].outcome
    'worse'
    """
    # Rounded, so that another machine's last digit is not a difference.
    gaps = {name: np.round(these[name] - those[name], 12) for name in metrics}
    return {name: as_difference(name, gap) for name, gap in intervals(gaps, these, seed).items()}


def as_difference(metric: str, found: Interval) -> Difference:
    """Say what a difference in a metric means."""
    outcome: Outcome
    side = found.side
    if found.bounds is None:
        outcome = "no data"
    elif side is None:
        outcome = "within noise"
    elif metric in NEITHER_IS_BETTER:
        outcome = side
    else:
        outcome = "better" if (side == "lower") == (metric in LOWER_IS_BETTER) else "worse"
    return Difference(found.value, found.lower, found.upper, found.n, outcome)
