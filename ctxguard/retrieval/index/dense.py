"""Searches the dense leg: by cosine with faiss, over all vectors or those with the best codes.

Vectors are scaled to unit length here, so that inner products are cosines for every embedder. A
zero vector stays zero: its cosine with everything is 0.

A large index also keeps a code for every vector: product quantisation with 16 centroids for each
two dimensions, scanned in the processor's registers (André, Kermarrec and Le Scouarnec, VLDB 2015).
The best codes' vectors are then compared, as faiss's ``IndexRefineFlat`` does, without its copy of
them. Pure, but for the file of mapped vectors; `DenseIndex` and `build_codes` need the extra
`embedded`.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ctxguard._support.extras import require
from ctxguard.core.types import FloatArray
from ctxguard.errors import DataError
from ctxguard.retrieval.protocols import Float32Array, LegHits, RowArray

EXACT_LIMIT = 20_000
"""Up to this many passages every vector is compared; beyond it, codes are compared first."""

_DIMENSIONS_A_CODE = 2
RESCORE_FACTOR = 4
"""How many vectors are compared after the codes, for each result that is requested."""

_MIN_RESCORED = 400
_MIN_CODED = 1_000
_MOST_TRAINED = 2**17


def unit_rows(vectors: Float32Array, passage_ids: Sequence[str]) -> Float32Array:
    """Scale vectors to unit length, shape (n, dimension); zero vectors stay zero.

    Raises:
        DataError: the embedder returned NaN or an infinity; the message names the passage.
    """
    vectors = np.asarray(vectors, dtype=np.float32)
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if broken.size:
        raise DataError(
            f"the embedder returned NaN or an infinity for {broken.size} of {len(vectors)} "
            f"passages, first for passage {passage_ids[broken[0]]!r}; check that passage's text, "
            "or use another embedder"
        )
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.where(lengths > 0.0, lengths, 1.0), np.float32)


def build_codes(vectors: Float32Array) -> Any:
    """Build a faiss index of product-quantisation codes, for unit vectors of an even dimension."""
    faiss = require("faiss", "embedded")
    dimension = vectors.shape[1]
    n_codes = dimension // _DIMENSIONS_A_CODE
    codes = faiss.IndexPQFastScan(dimension, n_codes, 4, faiss.METRIC_INNER_PRODUCT)
    # Training takes a second in thousands of tiny steps: on a busy machine, threads that wait for
    # each other after every step take minutes. The setting holds for this thread alone.
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        # faiss takes 4,096 at random for each code.
        codes.train(vectors[:: math.ceil(len(vectors) / _MOST_TRAINED)])
    finally:
        faiss.omp_set_num_threads(threads)
    codes.add(vectors)
    return codes


class DenseIndex:
    """Unit vectors by row, shape (n, dimension), and codes for them if there are many.

    Up to ``exact_limit`` passages, or rows that a filter allows, every vector is compared. Fewer
    than 1,000 vectors, and vectors of an odd dimension, are always searched exactly.
    """

    def __init__(
        self, vectors: Float32Array, *, exact_limit: int = EXACT_LIMIT, codes: Any = None
    ) -> None:
        self._faiss = require("faiss", "embedded")
        is_exact = len(vectors) <= max(exact_limit, _MIN_CODED) or vectors.shape[1] % 2 == 1
        self.vectors, self.exact_limit, self.dimension = vectors, exact_limit, vectors.shape[1]
        self.codes = codes if is_exact or codes is not None else build_codes(vectors)

    def search(self, vector: Float32Array, k: int, allowed: RowArray | None = None) -> LegHits:
        """Find at most ``k`` ≥ 1 rows nearest to a unit vector, with their cosines.

        Only rows of ``allowed``, which ascend, are returned; None allows all.
        """
        k = min(k, len(self.vectors) if allowed is None else allowed.size)
        rows = self._compared(vector, k, allowed) if k else np.zeros(0, np.int64)
        cosines = self.cosines(vector, rows)
        best = np.lexsort((rows, -cosines))[:k]
        return LegHits(rows[best], cosines[best], partial(self.cosines, vector))

    def cosines(self, vector: Float32Array, rows: RowArray) -> FloatArray:
        """Compute the cosines of rows with a unit vector, shape (n_rows,)."""
        # Not a matrix product, in which equal vectors may have unequal cosines.
        found = np.einsum("nd,d->n", self.vectors[rows], vector)
        cosines: FloatArray = found.astype(np.float64)
        return cosines

    def _compared(self, vector: Float32Array, k: int, allowed: RowArray | None) -> RowArray:
        """Return the rows to compare for the ``k`` nearest.

        If a filter allows more than ``exact_limit`` rows, extra codes make up for the expected
        forbidden rows. If that finds fewer than ``k``, all allowed rows are compared.
        """
        n = len(self.vectors)
        if allowed is not None and (self.codes is None or allowed.size <= self.exact_limit):
            return allowed
        if self.codes is None:
            # Some more than k, of equal ones of which the order of rows then decides.
            more = min(k + _MIN_RESCORED // 8, n)
            _, (rows,) = self._faiss.knn(
                vector[np.newaxis], self.vectors, more, self._faiss.METRIC_INNER_PRODUCT
            )
        else:
            share = 1.0 if allowed is None else allowed.size / n
            wanted = math.ceil(max(RESCORE_FACTOR * k, _MIN_RESCORED) / share)
            _, (rows,) = self.codes.search(vector[np.newaxis], min(wanted, n))
        found: RowArray = rows[rows >= 0]  # faiss pads with row -1 where it finds fewer
        if allowed is None:
            return found
        is_allowed = np.zeros(n, np.bool_)
        is_allowed[allowed] = True
        found = found[is_allowed[found]]
        return found if found.size >= k else allowed
