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
    vectors: list[dict[int, float]] = []
    for i, row in enumerate(rows.tolist()):
        _, stems, _, norm = passages.of(row)
        terms, counts = np.unique(stems, return_counts=True)
        parts = weights[terms] * (counts / (counts + norm))
        parts = np.rint(parts * (_GRID / np.sqrt(np.square(parts).sum() or 1.0)))
        vectors.append(dict(zip(terms.tolist(), parts.tolist(), strict=True)))
        for j, other in enumerate(vectors[:i]):
            product = sum(part * other.get(term, 0.0) for term, part in vectors[i].items())
            cosines[i, j] = cosines[j, i] = min(product / (_GRID * _GRID), 1.0)
        cosines[i, i] = 1.0 if terms.size else 0.0
    return cosines
