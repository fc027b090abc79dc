"""From shadow to enforce by traffic: evidence that is valid whenever somebody looks.

Pure. A policy in shadow is recorded beside what is served, so a judged request has a difference
in recall between the two. A gambler stakes a share of its wealth on each request that the mean
difference lies above −max_loss. Where it does not, the wealth is a non-negative supermartingale,
and by Ville's inequality it ever reaches 1/delta with probability delta at most: at any look, for
ever (Waudby-Smith and Ramdas, 2024). The bound of ``calibration.verdict`` holds at one look only.
"""

from dataclasses import dataclass
from math import ceil, exp, log

import numpy as np

from ctxguard._support.words import signed
from ctxguard.core.betting import LARGEST_LOSS, Evidence, Prior, learned_stakes
from ctxguard.core.types import FloatArray

FEWEST_REQUESTS = 20
FEWEST_LABELLED = 40
"""A judge that errs lets nothing rise before people have graded so many of the requests. With
fewer, one that misses a fifth of losses lets more than a tenth of years rise
(``benchmarks.verdict``)."""

DELTA = 0.1


@dataclass(frozen=True)
class Rise:
    """Whether judged traffic lets a policy rise from shadow to enforce, and what is missing.

    Attributes:
        n: Judged requests with a relevant passage.
        difference: Their mean difference in recall; None without any.
        wealth: The highest that the gambler reached, from 1; ``1 / delta`` is needed.
        risen: Whether it reached that, and the mean difference is not below −tolerance.
        missing: About how many more requests like these would do; 0 where there are enough, None
            where no number would, and of fewer than ``FEWEST_REQUESTS``, which forecast nothing.
        labels_missing: How many more of these requests people have to grade; 0 of an exact judge.
        days_missing: About how many days it takes until as many requests are judged; None where
            that is not known.
    """

    n: int
    difference: float | None
    wealth: float
    risen: bool
    missing: int | None
    labels_missing: int = 0
    days_missing: float | None = None

    @property
    def statement(self) -> str:
        """The evidence in words, and what follows or is missing.

        >>> rise(np.zeros(61), tolerance=0.01, max_loss=0.05).statement
        'recall +0.000 over 61 judged requests of the profile in force: it may be enforced'
        """
        if self.difference is None:
            return "no judged request was decided by the profile in force"
        recall = signed(self.difference)
        seen = f"recall {recall} over {self.n:,} judged requests of the profile in force"
        if self.risen:
            return f"{seen}: it may be enforced"
        if self.n < FEWEST_REQUESTS:
            return (
                f"{seen}: it stays in shadow; fewer than {FEWEST_REQUESTS} say nothing of how many "
                "it takes"
            )
        if self.missing is None:
            return f"{seen}: it stays in shadow, and more requests like these would not change that"
        parts = []
        if self.missing:
            days = self.days_missing
            when = "" if days is None else f", which takes about {max(days, 0.1):,.1f} days"
            parts.append(f"about {self.missing:,} more like these are judged{when}")
        if self.labels_missing:
            parts.append(f"people have graded {self.labels_missing:,} more of them")
        return f"{seen}: it stays in shadow until {' and '.join(parts)}"


def log_wealth(
    differences: FloatArray, max_loss: float, weights: FloatArray | None = None
) -> FloatArray:
    """Log of the gambler's wealth after each request, from 0.

    The stake on a request is learned from the earlier ones for a look at any time
    (``betting.learned_stakes``), and no request can cost more than three quarters of the wealth.

    Args:
        differences: Shape (n,) or (n, n_columns), each in [−1, 1]: recall of the policy less that
            of what is served, in the order in which the requests were judged.
        max_loss: In (0, 1).
        weights: Shape as ``differences``, in (0, 1]: requests that each stands for, in units of
            the largest number that any may stand for. None where all stand for the same.

    Returns:
        Shape as ``differences``.

    >>> np.exp(log_wealth(np.zeros(60), 0.05)[[0, 29, 59]]).round(2).tolist()
    [1.04, 3.19, 10.2]
    """
    gains = differences + max_loss
    share: FloatArray | float = 1.0 if weights is None else weights
    stakes = learned_stakes(
        gains,
        share,
        # As if requests without a difference had been seen, since most have none.
        prior=Prior(n=20.0, mean=max_loss, variance=0.05),
        largest=LARGEST_LOSS / (1.0 - max_loss),
    )
    return Evidence(np.zeros(gains.shape[1:])).after(gains, share, stakes=stakes).path


def rise(
    differences: FloatArray,
    weights: FloatArray | None = None,
    *,
    tolerance: float,
    max_loss: float,
    delta: float = DELTA,
    labelled: FloatArray | None = None,
    days: float | None = None,
) -> Rise:
    """Look at the judged requests of a policy in shadow; as often as one likes.

    Args:
        differences: Shape (n,), as for ``log_wealth``, of requests with a relevant passage: all
            since the policy is in shadow, and none that chose it.
        weights: As for ``log_wealth``.
        tolerance: How far their mean may lie below 0, ≥ 0.
        max_loss: The mean loss that is to be excluded, in (0, 1).
        delta: The probability of ever rising with such a loss, in (0, 1).
        labelled: Shape (m,): the differences of the requests that people graded, where the judge
            errs; None for an exact one. Without ``FEWEST_LABELLED``, or with a mean below
            −tolerance, nothing rises.
        days: In how many days the requests were answered; None where that is not known.

    >>> seen = rise(np.zeros(40), tolerance=0.01, max_loss=0.05)
    >>> seen.risen, seen.missing
    (False, 20)
    >>> rise(np.zeros(61), tolerance=0.01, max_loss=0.05).risen
    True
    """
    n = int(differences.size)
    labels_missing = 0 if labelled is None else max(FEWEST_LABELLED - labelled.size, 0)
    if n == 0:
        return Rise(0, None, 1.0, risen=False, missing=None, labels_missing=labels_missing)
    wealth = log_wealth(differences, max_loss, weights)
    reached, needed = max(float(wealth.max()), 0.0), -log(delta)
    mean = float(np.average(differences, weights=weights))
    refuted = mean < -tolerance
    if labelled is not None and not labels_missing:
        refuted = refuted or float(labelled.mean()) < -tolerance
    missing: int | None = None
    if not refuted and n >= FEWEST_REQUESTS:
        missing = 0
        if reached < needed:
            rate = float(wealth[-1] - wealth[n // 2]) / max(n - 1 - n // 2, 1)
            missing = ceil((needed - float(wealth[-1])) / rate) if rate > 0.0 else None
    return Rise(
        n,
        mean,
        exp(min(reached, 700.0)),
        risen=missing == 0 and not labels_missing,
        missing=missing,
        labels_missing=labels_missing,
        days_missing=missing * days / n if missing and days else None,
    )
