"""List signals: the resemblance of each candidate to the better ones of a list.

``redundancy`` is the highest cosine to a better candidate, ``similarity_3`` and ``similarity_10``
the mean cosine to the 3 and 10 best others, and ``term_similarity_3`` the mean cosine of term
vectors to the 3 best others. A passage that resembles the best candidates tends to be relevant too
(cluster hypothesis; van Rijsbergen, Information Retrieval, 1979, chapter 3), and one that resembles
a better one adds less (Carbonell and Goldstein, SIGIR 1998).

Import this module through `ctxguard._support.extras.require`: numba comes with an extra.
"""

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.compiled import SUMS_REORDERED, compiled
from ctxguard.core.types import FloatArray

Float32Array = NDArray[np.float32]
OrderArray = NDArray[np.int64]

NAMES = ("redundancy", "similarity_3", "similarity_10", "term_similarity_3")
"""The list signals."""


@compiled(SUMS_REORDERED)
def cosines_between(vectors: Float32Array) -> FloatArray:
    """Compute the cosine of every two vectors, with zeros on the diagonal.

    Args:
        vectors: Unit vectors, shape (n, dimension).

    Returns:
        Shape (n, n), symmetric. Equal vectors have equal cosines, wherever they stand.
    """
    n, dimension = vectors.shape
    last = n - 1
    cosines = np.zeros((n, n), np.float64)
    for row in range(n):
        # Four at a time, so no sum waits for the previous one. Those beyond the row get the same
        # values in their own turn: each sum runs in the same order.
        for a in range(0, row, 4):
            b, c, d = min(a + 1, last), min(a + 2, last), min(a + 3, last)
            first = second = third = fourth = np.float32(0.0)
            for i in range(dimension):
                number = vectors[row, i]
                first += vectors[a, i] * number
                second += vectors[b, i] * number
                third += vectors[c, i] * number
                fourth += vectors[d, i] * number
            cosines[row, a] = cosines[a, row] = first
            cosines[row, b] = cosines[b, row] = second
            cosines[row, c] = cosines[c, row] = third
            cosines[row, d] = cosines[d, row] = fourth
    for row in range(n):
        cosines[row, row] = 0.0
    return cosines


@compiled()
def best_first(scores: FloatArray) -> OrderArray:
    """Return the positions of all scores, best first, ties by position.

    Args:
        scores: Shape (n,), without NaN.
    """
    order = np.empty(scores.size, np.int64)
    for position in range(scores.size):
        # Counting the scores before it costs no more than the other loops over pairs.
        before = 0
        for other in range(scores.size):
            equal = scores[other] == scores[position]
            before += scores[other] > scores[position] or (equal and other < position)
        order[before] = position
    return order


@compiled()
def mean_of_best(cosines: FloatArray, order: OrderArray, k: int) -> FloatArray:
    """Compute each candidate's mean cosine to the k best others; 0 without others.

    Args:
        cosines: Shape (n, n).
        order: Positions, best first, shape (n,).
        k: ≥ 1.
    """
    n = order.size
    means = np.zeros(n, np.float64)
    for position in range(n):
        total, taken = 0.0, 0
        for at in range(min(k + 1, n)):
            if order[at] != position and taken < k:
                total += cosines[position, order[at]]
                taken += 1
        if taken > 0:
            means[position] = total / taken
    return means


@compiled()
def highest_to_better(cosines: FloatArray, order: OrderArray) -> FloatArray:
    """Compute each candidate's highest cosine to a better one; 0 if none is above 0.

    Args:
        cosines: Shape (n, n).
        order: Positions, best first, shape (n,).
    """
    highest = np.zeros(order.size, np.float64)
    for at in range(order.size):
        position = order[at]
        for before in range(at):
            highest[position] = max(highest[position], cosines[position, order[before]])
    return highest


@compiled()
def _list_signals(
    cosines: FloatArray, term_cosines: FloatArray, order: OrderArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    return (
        highest_to_better(cosines, order),
        mean_of_best(cosines, order, 3),
        mean_of_best(cosines, order, 10),
        mean_of_best(term_cosines, order, 3),
    )


def list_signals(
    cosines: FloatArray, term_cosines: FloatArray, order: OrderArray
) -> dict[str, FloatArray]:
    """Compute the list signals by name, shape (n,) each.

    Args:
        cosines: Cosines of the passages' vectors, shape (n, n); the diagonal is not read.
        term_cosines: Cosines of their term vectors, shape (n, n); the diagonal is not read.
        order: Positions, best first, shape (n,).
    """
    return dict(zip(NAMES, _list_signals(cosines, term_cosines, order), strict=True))
