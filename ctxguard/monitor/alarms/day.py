"""Weights of one day's judged losses: what each stands for, and no question for too much.

Pure: no I/O, no clock, no logging.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError


class Day(NamedTuple):
    """The losses of one day, question by question.

    Attributes:
        losses: Shape (m,), the mean loss of each question.
        weights: Shape (m,), in (0, 1].
        raise_by: ≥ 1; a promise times this is what the mean of the weighted losses must exceed
            before the mean over all traffic exceeds the promise.
        n: Judged requests.
    """

    losses: FloatArray
    weights: FloatArray
    raise_by: float
    n: int

    @classmethod
    def of(cls, losses: FloatArray, probability: FloatArray, question: NDArray[np.int64]) -> "Day":
        """Weigh the losses of one day.

        A request counts 1/π, and the requests of one question together at most 1/c:
        ``weight = min(c · Σ 1/π, 1)``. What is cut off counts as traffic without any loss, hence
        ``raise_by``: a question that is asked a thousand times cannot break a promise by itself,
        nor can the few samples of a burst that stand for thousands of requests. The c is chosen by
        the weights alone, for the quickest alarm if losses double.

        Args:
            losses: Shape (n,), ≥ 0.
            probability: Shape (n,), π of each request, in (0, 1].
            question: Shape (n,), a number for each different question.

        Raises:
            ConfigurationError: a loss that is negative or not finite, or no probability.

        >>> viral = [7] * 40
        >>> day = Day.of(np.ones(100), np.ones(100), np.array([*viral, *range(100, 160)]))
        >>> len(day.losses), float(day.weights.max()), round(day.raise_by, 2)
        (61, 1.0, 1.64)
        """
        if not np.all((losses >= 0.0) & np.isfinite(losses)):
            raise ConfigurationError("losses must be ≥ 0 and finite; leave out undefined ones")
        if not np.all((probability > 0.0) & (probability <= 1.0)):
            raise ConfigurationError("probabilities of judging must lie in (0, 1]")
        if not len(losses):
            return cls(losses, losses, 1.0, 0)
        _, place = np.unique(question, return_inverse=True)
        stands_for: FloatArray = np.bincount(place, 1.0 / probability).astype(np.float64)
        means = np.bincount(place, losses / probability) / stands_for
        most = _most(stands_for)
        weights = np.minimum(stands_for / most, 1.0)
        raise_by = float(stands_for.sum() / most / weights.sum())
        return cls(means, weights, max(raise_by, 1.0), len(losses))


def _most(stands_for: FloatArray) -> float:
    """How many requests one question may stand for."""
    caps = np.sort(stands_for)
    total = caps.sum()
    # With each as the cap: the sum of the weights, and by how much a promise is raised.
    weight = np.cumsum(caps) / caps + np.arange(len(caps) - 1, -1, -1)
    left = 2.0 - total / caps / weight
    return float(caps[np.argmax(weight * np.maximum(left, 0.0) ** 2)])
