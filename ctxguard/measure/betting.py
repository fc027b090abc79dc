"""Evidence by betting: the wealth of gamblers who bet against "the mean gain is at most 0".

A gambler stakes a share of its wealth on each gain, chosen from earlier ones. Where the mean gain
is at most 0 given the past, its wealth is a non-negative supermartingale, and by Ville's inequality
it ever reaches 1/p with probability p at most (Waudby-Smith and Ramdas, JRSS B 86(1), 2024).
Certificates, alarms and the search for a changed judge rest on it. Pure.

No single stake serves every use. A test of n queries, looked at once, stakes enough to decide by
then; a test that runs for ever learns the stake that grows wealth fastest; a change is detected
soonest by several fixed stakes, each of which restarts.
"""

from dataclasses import dataclass, field
from functools import partial
from math import log

import numpy as np

from ctxguard.core.types import FloatArray

LARGEST_LOSS = 0.75
"""The largest share of its wealth that a learned stake may lose on one gain."""


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The wealth that gamblers have built from the gains so far.

    Attributes:
        log_wealth: Shape (...), one number for each gambler.
        path: Shape (n, ...), after each of the last step's n gains; empty before the first step.

    >>> found = Evidence(np.zeros(2))
    >>> for _ in range(3):
    ...     found = found.from_best().after(np.ones((1, 1)), stakes=np.array([0.5, 1.0]))
    >>> np.exp(found.log_wealth).round(3).tolist(), round(found.e_value, 4)
    ([3.375, 8.0], 5.6875)
    """

    log_wealth: FloatArray
    path: FloatArray = field(default_factory=partial(np.zeros, 0))

    def after(
        self,
        gains: FloatArray,
        weights: FloatArray | float = 1.0,
        *,
        stakes: FloatArray,
        toll: FloatArray | float = 0.0,
    ) -> "Evidence":
        """Bet on the gains of one step, such as a day, a session, or all queries of a test.

        Args:
            gains: Shape (n, ...), in an order fixed beforehand.
            weights: Weights of the gains, in (0, 1], fixed without looking at them; broadcast to
                them.
            stakes: Broadcast to the gains; no stake times weight and gain may be below −1.
            toll: Taken from each log wealth at this step, where the step's gains err together.
        """
        path = self.log_wealth + np.log1p(stakes * weights * gains).cumsum(axis=0) - toll
        return Evidence(path[-1] if len(path) else self.log_wealth, path)

    def from_best(self) -> "Evidence":
        """Restart wealth that is below 1, so that it shows a change since the best moment.

        The e-CUSUM of Shin, Ramdas and Rinaldo, "E-detectors", NEJSDS 2024.
        """
        return Evidence(np.maximum(self.log_wealth, 0.0), self.path)

    def from_all(self) -> "Evidence":
        """Let another gambler join with a wealth of 1, so that the sum shows a change at any
        moment.

        The e-detector of Shiryaev–Roberts form (Shin, Ramdas and Rinaldo, NEJSDS 2024).
        """
        return Evidence(np.logaddexp(self.log_wealth, 0.0), self.path)

    @property
    def e_value(self) -> float:
        """The gamblers' mean wealth, bounded far beyond any threshold in use."""
        return float(np.exp(np.minimum(self.log_wealth, 500.0)).mean())

    @property
    def p_value(self) -> FloatArray:
        """Shape (...): 1 / the highest wealth that each reached in the last step, at most 1."""
        return np.asarray(np.exp(-self.path.max(axis=0, initial=0.0)))


@dataclass(frozen=True, slots=True)
class Prior:
    """Gains that a learned stake treats as seen: their number, mean and variance."""

    n: float
    mean: float
    variance: float


def planned_stakes(variance: FloatArray, n: int, delta: float, largest: float) -> FloatArray:
    """Return √(2 log(1/delta) / (n · variance)), at most ``largest``."""
    return np.minimum(np.sqrt(-2.0 * log(delta) / (n * variance)), largest)


def learned_stakes(
    gains: FloatArray,
    weights: FloatArray | float = 1.0,
    *,
    prior: Prior,
    largest: float,
    delta: float | None = None,
) -> FloatArray:
    """Choose the stake on each gain from those before it.

    Args:
        gains: Shape (n, ...), as for ``Evidence.after``. weights: As there.
        prior: Gains treated as seen before the first.
        largest: The largest stake, > 0.
        delta: The level of a test that these n gains are to decide; the stake then depends on
            their variance alone. None where anyone may look at any time: the stake is the mean
            weighted gain over its mean square, which grows the wealth fastest where gains are
            small.

    Returns:
        Shape as ``gains``, ≥ 0.
    """
    n = gains.shape[0]
    share = np.broadcast_to(weights, gains.shape)
    counts = prior.n + np.arange(1.0, n + 1.0).reshape(n, *[1] * (gains.ndim - 1))
    total = prior.n * prior.mean + np.cumsum(share * gains, axis=0)
    mean = total / (prior.n + np.cumsum(share, axis=0))
    variance = prior.n * prior.variance + np.cumsum((share * (gains - mean)) ** 2, axis=0)
    known = _before(variance / counts, prior.variance)
    if delta is not None:
        return planned_stakes(known, n, delta, largest)
    per_gain = _before(total / counts, prior.mean)
    return np.clip(per_gain / (known + per_gain**2), 0.0, largest)


def _before(values: FloatArray, first: float) -> FloatArray:
    """Shift each row down by one, so that a stake depends on earlier rows only."""
    return np.concatenate([np.full_like(values[:1], first), values[:-1]])
