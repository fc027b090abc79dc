"""Confidence sequences: intervals that hold at every look, for what is watched continuously.

An ordinary interval that is looked at again and again excludes the truth sooner or later. Pure:
no I/O, no clock, no logging.
"""

import math

import numpy as np

from ctxguard.errors import ConfigurationError
from ctxguard.types import FloatArray

_GRID = 1_000
_TRUNCATION = 0.5


class BettingSequence:
    """A confidence sequence for the mean of values in [0, 1], by betting against each mean.

    The hedged capital process of Waudby-Smith and Ramdas, "Estimating means of bounded random
    variables by betting", JRSS B 2024, Theorem 3, with predictable plug-in bets: for every
    candidate mean two gamblers bet on the values lying above and below it; a candidate that
    makes one of them rich is excluded for good. The truth stays inside at all times together
    with probability ``confidence``, whatever the values' distribution, as long as the mean of
    each given the past is the same.

    Args:
        confidence: In (0, 1).

    Raises:
        ConfigurationError: a confidence outside (0, 1).

    >>> sequence = BettingSequence()
    >>> for value in [0.0, 1.0, 1.0, 0.0] * 200:
    ...     sequence.add(value)
    >>> lower, upper = sequence.interval
    >>> lower < 0.5 < upper, upper - lower < 0.16
    (True, True)
    """

    def __init__(self, confidence: float = 0.95) -> None:
        if not 0.0 < confidence < 1.0:
            raise ConfigurationError(f"confidence {confidence!r} must lie in (0, 1)")
        self._alpha = 1.0 - confidence
        self._means = np.linspace(0.0, 1.0, _GRID + 1)
        # Bets beyond these could lose more than everything.
        with np.errstate(divide="ignore"):
            self._most_up = _TRUNCATION / self._means
            self._most_down = _TRUNCATION / (1.0 - self._means)
        self._log_up: FloatArray = np.zeros(_GRID + 1)
        self._log_down: FloatArray = np.zeros(_GRID + 1)
        self._inside = np.ones(_GRID + 1, dtype=np.bool_)
        self.n = 0
        self._sum = 0.0
        self._squares = 0.0

    def add(self, value: float) -> None:
        """Take in one more value.

        Raises:
            ConfigurationError: a value outside [0, 1].
        """
        if not 0.0 <= value <= 1.0:
            raise ConfigurationError(f"value {value!r} must lie in [0, 1]: scale it by its bounds")
        n = self.n + 1
        variance = (0.25 + self._squares) / n
        bet = math.sqrt(2.0 * math.log(2.0 / self._alpha) / (variance * n * math.log1p(n)))
        gap = value - self._means
        self._log_up += np.log1p(np.minimum(bet, self._most_up) * gap)
        self._log_down += np.log1p(-np.minimum(bet, self._most_down) * gap)
        # Half of the stake on either gambler.
        rich = math.log(2.0 / self._alpha)
        self._inside &= np.maximum(self._log_up, self._log_down) < rich
        self.n = n
        self._sum += value
        self._squares += (value - (0.5 + self._sum) / (n + 1)) ** 2

    @property
    def interval(self) -> tuple[float, float] | None:
        """The means that are not excluded yet, widened to the grid of a thousandth.

        Returns:
            None where every mean is excluded: the values cannot all have had the same one.
        """
        (inside,) = np.nonzero(self._inside)
        if len(inside) == 0:
            return None
        return (
            float(self._means[max(inside[0] - 1, 0)]),
            float(self._means[min(inside[-1] + 1, _GRID)]),
        )
