"""List signals: the resemblance of each candidate to the better ones of a list.

``redundancy`` is the highest cosine to a better candidate, ``similarity_3`` and ``similarity_10``
the mean cosine to the 3 and 10 best others, and ``term_similarity_3`` the mean cosine of term
vectors to the 3 best others. A passage that resembles the best candidates tends to be relevant too
(cluster hypothesis; van Rijsbergen, Information Retrieval, 1979, chapter 3), and one that resembles
a better one adds less (Carbonell and Goldstein, SIGIR 1998).
"""

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray

Float32Array = NDArray[np.float32]
OrderArray = NDArray[np.int64]

NAMES = ("redundancy", "similarity_3", "similarity_10", "term_similarity_3")
"""The list signals."""

MOST_COMPARED = 200
"""Candidates are compared with this many, so that time does not grow with their square."""


def best_first(scores: FloatArray) -> OrderArray:
    """Return the positions of all scores, best first, ties by position.

    Args:
        scores: Shape (n,), without NaN.
    """
    return np.argsort(-scores, kind="stable")


def mean_of_best(cosines: FloatArray, order: OrderArray, k: int) -> FloatArray:
    """Compute each candidate's mean cosine to the k best others; 0 without others.

    Args:
        cosines: Of each candidate with those that it is compared with, shape (n, m): the same, or
            the first of them.
        order: The positions of those, best first, shape (m,).
        k: ≥ 1.
    """
    means = np.zeros(len(cosines))
    for position, row in enumerate(cosines):
        others = order[: k + 1]
        others = others[others != position][:k]
        means[position] = row[others].sum() / max(others.size, 1)
    return means


def highest_to_better(cosines: FloatArray, ranks: OrderArray) -> FloatArray:
    """Compute each candidate's highest cosine to a better one; 0 if none is above 0.

    Args:
        cosines: As for `mean_of_best`.
        ranks: The rank of each candidate, shape (n,).
    """
    is_better = ranks[np.newaxis, : cosines.shape[1]] < ranks[:, np.newaxis]
    highest: FloatArray = np.where(is_better, cosines, 0.0).max(axis=1, initial=0.0)
    return highest


def list_signals(cosines: FloatArray, term_cosines: FloatArray) -> dict[str, FloatArray]:
    """Compute the list signals by name, shape (n,) each, of candidates that are given best first.

    Args:
        cosines: Cosines of the passages' vectors, as for `mean_of_best`; those of a candidate with
            itself are not read.
        term_cosines: Cosines of their term vectors, likewise.
    """
    first = np.arange(cosines.shape[1])
    signals = (
        highest_to_better(cosines, np.arange(len(cosines))),
        mean_of_best(cosines, first, 3),
        mean_of_best(cosines, first, 10),
        mean_of_best(term_cosines, first, 3),
    )
    return dict(zip(NAMES, signals, strict=True))
