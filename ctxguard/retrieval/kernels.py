"""The inner loops of a search, compiled by numba and free of the interpreter lock.

bm25s leaves its scores as one column of passages per word: ``data`` and ``indices`` between
``indptr[word]`` and ``indptr[word + 1]``. Its own search returns passages that score zero, breaks
ties by chance and compiles anew in each process; this one does not. On a small corpus a search
takes a fifth of a millisecond, so that uniting the legs in a dozen numpy calls would show.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ctxguard._extras import require
from ctxguard.retrieval.protocols import Float32Array, RowArray
from ctxguard.types import FloatArray

WordArray = NDArray[np.int64]
Postings = tuple[Float32Array, NDArray[np.int32], NDArray[np.int64]]

_BUFFER = 4


class Kernels(NamedTuple):
    """The compiled loops; each is described where it is defined."""

    search_postings: Callable[[WordArray, Postings, int, int], tuple[RowArray, Float32Array]]
    unite: Callable[
        [RowArray, RowArray, Float32Array, Float32Array, Float32Array],
        tuple[RowArray, FloatArray, FloatArray],
    ]


@cache
def kernels() -> Kernels:
    """Compile the loops, or read them from numba's cache on disk where one can be written."""
    numba = require("numba", "embedded")
    # Sums may be reordered, and so vectorised; NaN and infinities keep their meaning.
    return Kernels(
        _compiled(numba.njit, _search_postings),
        _compiled(numba.njit, _unite, fastmath={"reassoc", "nsz", "contract"}),
    )


def _compiled(
    njit: Callable[..., Any], loop: Callable[..., Any], fastmath: bool | set[str] = False
) -> Callable[..., Any]:
    try:
        return cast(Callable[..., Any], njit(nogil=True, fastmath=fastmath, cache=True)(loop))
    except RuntimeError:
        # Neither the package nor the user's cache folder is writable: compile in each process.
        return cast(Callable[..., Any], njit(nogil=True, fastmath=fastmath)(loop))


def _search_postings(
    words: WordArray, postings: Postings, n_passages: int, k: int
) -> tuple[RowArray, Float32Array]:
    """The at most k best rows that score above zero, ascending, and every row's score.

    Of equal scores the lower rows stay. Sorting by score is left to numpy: it would multiply the
    time to compile by ten.
    """
    data, indices, indptr = postings
    scores = np.zeros(n_passages, np.float32)
    for word in words:
        for at in range(indptr[word], indptr[word + 1]):
            scores[indices[at]] += data[at]
    # Rows above the k-th best so far wait in a buffer, which is cut back to its best k whenever
    # it is full and once at the end.
    buffer = np.empty(_BUFFER * k, np.int64)
    size = 0
    least = np.float32(0.0)
    for row in range(n_passages + 1):
        if row < n_passages:
            if scores[row] <= least:
                continue
            buffer[size] = row
            size += 1
        if size == buffer.size or (row == n_passages and size > k):
            waiting = scores[buffer[:size]]
            least = np.partition(waiting, size - k)[size - k]
            spare = k - np.sum(waiting > least)
            kept = 0
            for at in range(size):
                tied = waiting[at] == least and spare > 0
                if waiting[at] > least or tied:
                    spare -= tied
                    buffer[kept] = buffer[at]
                    kept += 1
            size = kept
    return buffer[:size], scores


def _unite(
    lexical_rows: RowArray,
    dense_rows: RowArray,
    lexical_scores: Float32Array,
    vectors: Float32Array,
    vector: Float32Array,
) -> tuple[RowArray, FloatArray, FloatArray]:
    """The rows of either leg, ascending, with their lexical scores and cosines.

    ``lexical_scores`` has a score for every row, ``vectors`` a unit vector.
    """
    both = np.sort(np.concatenate((lexical_rows, dense_rows)))
    n = 0
    for at in range(both.size):
        if at == 0 or both[at] != both[n - 1]:
            both[n] = both[at]
            n += 1
    rows = both[:n]
    lexical = np.empty(n, np.float64)
    cosines = np.empty(n, np.float64)
    for at in range(n):
        row = rows[at]
        lexical[at] = lexical_scores[row]
        total = np.float32(0.0)
        for i in range(vector.size):
            total += vectors[row, i] * vector[i]
        cosines[at] = total
    return rows, lexical, cosines
