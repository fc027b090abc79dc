"""The similarity of candidates' words: cosines of their BM25 term vectors."""

import numpy as np

from ctxguard._support import _compiled
from ctxguard.core.types import FloatArray
from ctxguard.retrieval.signals.text import NumberArray, PassageWords

_GRID = 2.0**24
"""Components are multiples of 1 / this. Their products are then added without any rounding, so that
no cosine depends on the order of the terms or the candidates; its error is about 1e-7 at most."""


def term_cosines(passages: PassageWords, weights: FloatArray, rows: NumberArray) -> FloatArray:
    """Compute the cosine of every two rows' term vectors.

    The component of a stem is its weight · count / (count + norm), as in BM25 (Robertson and
    Zaragoza, 2009).

    Args:
        passages: The passages' words.
        weights: The inverse document frequency of each stem, shape (n_stems,).
        rows: Shape (n,).

    Returns:
        Shape (n, n), in [0, 1], symmetric; 1 on the diagonal; 0 for a row without words.
    """
    cosines = np.zeros((rows.size, rows.size))
    if _compiled.kernels is not None:
        _compiled.kernels.term_cosines(rows, *passages, weights, cosines)
        return cosines
    read = [passages.of(row) for row in rows.tolist()]
    terms, numbers = np.unique(
        np.concatenate([np.zeros(0, np.int32), *[stems for _, stems, _, _ in read]]),
        return_inverse=True,
    )
    vectors, end = np.zeros((rows.size, terms.size)), 0
    for i, (_, stems, _, norm) in enumerate(read):
        counts = np.bincount(numbers[end : end + stems.size], minlength=terms.size)
        parts = weights[terms] * (counts / (counts + norm))
        vectors[i] = np.rint(parts * (_GRID / np.sqrt(np.square(parts).sum() or 1.0)))
        end += stems.size
    np.minimum(vectors @ vectors.T / (_GRID * _GRID), 1.0, out=cosines)
    np.fill_diagonal(cosines, [float(stems.size > 0) for _, stems, _, _ in read])
    return cosines
