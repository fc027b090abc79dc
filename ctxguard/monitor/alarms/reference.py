"""Finds references for judged losses: the promise, its value on the judge's scale, or a baseline.

A judge that errs finds losses where there are none, so its mean is above the true one even while
a promise holds. Losses here are divided by their bound and lie in [0, 1]. Pure.
"""

import math
from enum import StrEnum

import numpy as np

from ctxguard.core.types import FloatArray
from ctxguard.measure.interval import t_quantile
from ctxguard.monitor.alarms.ecusum import Days

FIRST_BASELINE = 400
"""Judged requests of a route after which its baseline is first set, once a week has passed."""

LONGEST_BASELINE, LONGEST_WEEKS = 3200, 8
"""Judged requests and weeks after which a baseline is no longer extended."""


LEAST_GRADED = 50
"""Effective number of graded requests below which no promise is translated."""

_LEAST_LOSSES = 5
"""With fewer graded requests that have a loss, nothing shows how the judge grades a loss."""
_CONFIDENCE = 0.95
"""Confidence of the one-sided upper limit. The margin counts as if one more request had been seen,
with the largest loss: otherwise a rare error of the judge that no request has shown would be left
out."""


class ReferenceKind(StrEnum):
    """The reference that a loss is compared with. A closed set: it labels a metric."""

    PROMISE = "promise"
    """The profile's own promise; for a judge that makes no errors."""
    CORRECTED = "corrected"
    """The promise on the judge's scale, found from requests that people graded too."""
    BASELINE = "baseline"
    """The judge's own mean over the first requests; it says nothing about the promise."""

    @property
    def is_of_promise(self) -> bool:
        """Whether an alarm against this reference means that a promise is broken."""
        return self is not ReferenceKind.BASELINE


def upper_limit(days: Days) -> float:
    """Return the upper 95% limit of a judge's mean loss, from grades of at least two days.

    By Student's t; the days' means may differ by more than their few losses explain, and then there
    are few degrees of freedom (Satterthwaite).

    >>> from ctxguard.monitor.alarms.ecusum import Day
    >>> one = Days.of(Day.of(np.full(100, 0.25), np.ones(100), np.arange(100)))
    >>> week = Days()
    >>> for _ in range(7):
    ...     week = week.plus(one)
    >>> round(upper_limit(week), 2)
    0.26
    """
    n = days.freedom + days.days
    mean = (n * days.mean + 1.0) / (n + 1.0)
    between = days.between(mean) / days.days
    squares = days.variance(mean) / n + between
    df = n - 1.0 if not between else (days.days - 1) * (squares / between) ** 2
    return min(mean + t_quantile(_CONFIDENCE, min(df, n - 1.0)) * math.sqrt(squares), 1.0)


def corrected(
    human: FloatArray, judge: FloatArray, weights: FloatArray, promise: float
) -> tuple[float, int] | None:
    """Translate a promised mean loss to the judge's scale, using requests that people also graded.

    The regression of the judge's loss on people's, weighted, moves each request to the promised
    loss; the mean of the moved losses is the estimate. A request in which people found no loss
    defined (nothing is relevant) and the judge did keeps the judge's. The variance is the
    linearised (sandwich) one of mean and slope.

    Args:
        human: Losses by the grades of people, shape (n,), in [0, 1]; NaN where undefined.
        judge: Losses of the same requests by the judge's grades; NaN where undefined.
        weights: 1 / the probability with which each was labelled, > 0 and finite, shape (n,).
        promise: The promised mean loss, in [0, 1].

    Returns:
        The upper confidence limit of the judge's mean loss if the true one equals the promise, and
        the number of requests it was estimated from. None where there are too few requests or too
        few losses among them, where the judge's losses do not rise with people's, or where the
        margin of the limit is more than half of what a promised loss that doubles would add: an
        alarm would then come late, if ever.
    """
    seen = ~np.isnan(judge)
    human, judge, weights = human[seen], judge[seen], weights[seen]
    defined = ~np.isnan(human)
    paired = weights * defined
    human = np.where(defined, human, 0.0)
    if np.count_nonzero(human) < _LEAST_LOSSES:
        return None
    n = float(paired.sum() ** 2 / (paired**2).sum())
    if n < LEAST_GRADED:
        return None
    centred = np.where(defined, human - (paired @ human) / paired.sum(), 0.0)
    spread = float(paired @ centred**2)
    if spread <= 0.0:
        return None
    slope = float(paired @ (centred * judge)) / spread
    share = weights / weights.sum()
    away = np.where(defined, human - promise, 0.0)
    moved = judge - slope * away
    mean = float(share @ moved)
    residuals = np.where(defined, judge - (paired @ judge) / paired.sum() - slope * centred, 0.0)
    of_slope = paired * centred * residuals / spread
    errors = share * (moved - mean) - float(share @ away) * of_slope
    margin = t_quantile(_CONFIDENCE, int(n) - 2) * math.sqrt(errors @ errors) + 1.0 / n
    most = 0.5 * promise * slope * float(share @ defined)
    if margin > most:
        return None
    return min(mean + margin, 1.0), int(defined.sum())
