"""Measures evidence by betting: gamblers' wealth in bets against "the mean gain is at most 0".

A gambler stakes a share of its wealth on each gain, chosen from earlier ones. Where the mean gain
is at most 0 given the past, its wealth is a non-negative supermartingale, and by Ville's inequality
it ever reaches 1/p with probability p at most (Waudby-Smith and Ramdas, JRSS B 86(1), 2024).
Certificates, alarms and the search for a changed judge rest on it. Pure.
"""

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ctxguard.core.types import FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The wealth that gamblers have built from the gains so far.

    Attributes:
        log_wealth: Shape (...), one number for each gambler.
        path: Shape (n, ...), after each of the last step's n gains.

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
        """1 / each gambler's highest wealth in the last step, at most 1; shape (...)."""
        return np.asarray(np.exp(-self.path.max(axis=0, initial=0.0)))
