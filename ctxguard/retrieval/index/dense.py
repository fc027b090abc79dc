"""The dense leg: cosine search over passage vectors, all of them or those with the best codes.

Vectors are brought to unit length here, so that an inner product is a cosine whatever the
embedder returns. A zero vector stays zero: its cosine with everything is 0.

A large index also keeps a code for every vector: product quantisation with 16 centroids for each
two dimensions, scanned by faiss in the processor's registers (André, Kermarrec and Le Scouarnec,
VLDB 2015). A search compares the query with all codes, a sixteenth of the vectors' size, and then
with the vectors of the best. Unlike graphs and inverted lists, this does not depend on how vectors
cluster. Codes that would not fit a processor's cache are of four dimensions each: the scan then
reads half as much, and four times as many vectors are compared after it.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctxguard._support.extras import require
from ctxguard.core.types import FloatArray
from ctxguard.errors import DataError
from ctxguard.retrieval.index.filters import AllowedRows
from ctxguard.retrieval.index.part_files import PartFiles
from ctxguard.retrieval.index.row_map import RowMap
from ctxguard.retrieval.protocols import Float32Array, RowArray

EXACT_LIMIT = 20_000
"""Up to this many passages every vector is compared; above, codes first."""

VECTORS = "vectors.npy"
CODES = "vectors.codes"

_FINE, _COARSE = 2, 4
_FINE_NUMBERS = 2**27
_RESCORE_FACTOR = {_FINE: 8, _COARSE: 32}
_MIN_RESCORED = 400
_MIN_CODED = 1_000


def unit_rows(vectors: Float32Array, passage_ids: Sequence[str]) -> Float32Array:
    """Vectors at unit length, shape as given; zero vectors stay zero.

    Args:
        vectors: Shape (n, dimension).
        passage_ids: Shape (n,), for the error.

    Raises:
        DataError: the embedder returned NaN or an infinity; names the passage.
    """
    vectors = np.asarray(vectors, dtype=np.float32)
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if broken.size:
        raise DataError(
            f"the embedder returned NaN or an infinity for {broken.size} of {len(vectors)} "
            f"passages, first for passage {passage_ids[broken[0]]!r}; look at its text, or use "
            "another embedder"
        )
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.where(lengths > 0.0, lengths, 1.0), np.float32)


def build_pq_codes(vectors: Float32Array) -> Any:
    """A faiss index of product-quantisation codes, for unit vectors of an even dimension."""
    faiss = require("faiss", "embedded")
    dimension = vectors.shape[1]
    width = _FINE if vectors.size <= _FINE_NUMBERS or dimension % _COARSE else _COARSE
    codes = faiss.IndexPQFastScan(dimension, dimension // width, 4, faiss.METRIC_INNER_PRODUCT)
    # Training takes a second in thousands of tiny steps: on a busy machine, threads that wait for
    # each other after every step take minutes. The setting holds for this thread alone.
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        codes.train(vectors)
    finally:
        faiss.omp_set_num_threads(threads)
    codes.add(vectors)
    return codes


def rescore_factor(codes: Any) -> int:
    """How many vectors are compared after the codes, for each of the ``k`` best."""
    return _RESCORE_FACTOR[codes.pq.dsub]


class DenseIndex:
    """Unit vectors by row, and codes for them where there are many.

    Args:
        vectors: Unit vectors, shape (n, dimension), float32.
        codes: From `build_pq_codes`; None to compare every vector.
        exact_limit: Up to this many allowed rows, a filtered search compares every vector.

    Attributes:
        vectors: As given, read-only.
        dimension: Length of a vector.
        exact_limit: As given.
        is_exact: Whether a search compares the query with every vector.
    """

    def __init__(
        self, vectors: Float32Array, codes: Any = None, *, exact_limit: int = EXACT_LIMIT
    ) -> None:
        self._kernels = require("ctxguard.retrieval.index.kernels", "embedded")
        # Read-only whether built or mapped, so that numba compiles one variant of each loop.
        self.vectors = np.asarray(vectors).view()
        self.vectors.flags.writeable = False
        self.dimension: int = self.vectors.shape[1]
        self.exact_limit = exact_limit
        self.is_exact = codes is None
        self._codes = codes
        self._rescore_factor = 1 if codes is None else rescore_factor(codes)

    @classmethod
    def build(cls, vectors: Float32Array, *, exact_limit: int = EXACT_LIMIT) -> "DenseIndex":
        """Index unit vectors, with codes for more than ``exact_limit`` of them.

        Fewer than 1,000 vectors, and vectors of an odd dimension, are always searched exactly.
        """
        is_exact = len(vectors) <= max(exact_limit, _MIN_CODED) or vectors.shape[1] % 2
        return cls(vectors, None if is_exact else build_pq_codes(vectors), exact_limit=exact_limit)

    def __len__(self) -> int:
        return len(self.vectors)

    def search(
        self, vector: Float32Array, k: int, allowed: AllowedRows | None = None
    ) -> tuple[RowArray, FloatArray]:
        """The at most ``k`` rows nearest to a unit vector, best first, with their cosines.

        Args:
            vector: Shape (dimension,).
            k: ≥ 1.
            allowed: The only rows to return; None for all.
        """
        if allowed is None:
            rows = None if self.is_exact else self.candidate_rows(vector, k)
        else:
            k = min(k, allowed.rows.size)
            rows = self._allowed_candidates(vector, k, allowed)
        nearest: tuple[RowArray, FloatArray] = self._kernels.nearest(self.vectors, vector, k, rows)
        return nearest

    def candidate_rows(self, vector: Float32Array, k: int) -> RowArray:
        """The rows with the best codes, whose vectors a search for the ``k`` nearest compares.

        Only for an index that has codes.
        """
        return self._nearest_codes(vector, self._n_rescored(k))

    def _allowed_candidates(self, vector: Float32Array, k: int, allowed: AllowedRows) -> RowArray:
        """The allowed rows whose vectors a search compares, at least ``k`` of them.

        Above the exact limit, those with the best codes: as many more codes are taken as forbidden
        rows are expected among them. All allowed rows where that finds too few.
        """
        if self.is_exact or allowed.rows.size <= self.exact_limit:
            return allowed.rows
        is_allowed = np.zeros(allowed.n_passages, np.bool_)
        is_allowed[allowed.rows] = True
        share = allowed.rows.size / allowed.n_passages
        rows = self._nearest_codes(vector, math.ceil(self._n_rescored(k) / share))
        rows = rows[is_allowed[rows]]
        return rows if rows.size >= k else allowed.rows

    def _n_rescored(self, k: int) -> int:
        return max(self._rescore_factor * k, _MIN_RESCORED)

    def _nearest_codes(self, vector: Float32Array, n: int) -> RowArray:
        rows: RowArray
        _, (rows,) = self._codes.search(vector[np.newaxis, :], min(n, len(self.vectors)))
        # faiss pads with row -1 where it finds fewer.
        return rows if rows[-1] >= 0 else rows[rows >= 0]

    def vectors_at(self, rows: RowArray) -> Float32Array:
        """The vectors of rows, in their order, shape (n_rows, dimension)."""
        return self.vectors[rows]

    def save(self, folder: Path) -> None:
        """Write the vectors as an array and the codes, if there are any, as faiss writes them."""
        np.save(folder / VECTORS, self.vectors)
        if self._codes is not None:
            require("faiss", "embedded").write_index(self._codes, str(folder / CODES))

    @classmethod
    def load(
        cls, files: PartFiles, *, with_codes: bool, exact_limit: int = EXACT_LIMIT
    ) -> "DenseIndex":
        """Read what ``save`` wrote.

        faiss trusts its files: read codes only after their digest was checked.

        Raises:
            ValueError: files that ``save`` did not write together.
        """
        vectors = files.large_array(VECTORS)
        if vectors.dtype != np.float32 or vectors.ndim != 2:
            raise ValueError(f"{VECTORS} holds {vectors.dtype} of shape {vectors.shape}")
        codes = None
        if with_codes:
            codes = require("faiss", "embedded").read_index(str(files.folder / CODES))
            if (codes.ntotal, codes.d) != vectors.shape:
                raise ValueError(f"{CODES} and {VECTORS} do not belong together")
        return cls(vectors, codes, exact_limit=exact_limit)


class EditedDenseIndex:
    """The vectors of an edited index: the base's are searched as before, the tail's one by one.

    Args:
        base: The base's vectors.
        tail: The tail's vectors, without codes.
        row_map: Which of them are there.

    Attributes:
        dimension: Length of a vector.
        exact_limit: The base's.
        is_exact: Whether a search compares the query with every vector.
    """

    def __init__(self, base: DenseIndex, tail: DenseIndex, row_map: RowMap) -> None:
        self._base, self._tail, self._row_map = base, tail, row_map
        self._n_deleted = int((row_map.base_rows < 0).sum())
        self.dimension = base.dimension
        self.exact_limit = base.exact_limit
        self.is_exact = base.is_exact

    def __len__(self) -> int:
        return self._row_map.stored.size

    def search(
        self, vector: Float32Array, k: int, allowed: AllowedRows | None = None
    ) -> tuple[RowArray, FloatArray]:
        """The at most ``k`` rows nearest to a unit vector; arguments as for `DenseIndex.search`."""
        in_base = in_tail = None
        if allowed is not None:
            base_rows, tail_rows = self._row_map.split(allowed.rows)
            in_base = AllowedRows(base_rows, len(self._base))
            in_tail = AllowedRows(tail_rows, len(self._tail))
        base = self._search_base(vector, k, in_base)
        tail = self._tail.search(vector, min(k, len(self._tail)), in_tail)
        rows = np.concatenate((base[0], self._row_map.tail_rows[tail[0]]))
        cosines = np.concatenate((base[1], tail[1]))
        best = np.lexsort((rows, -cosines))[:k]
        return rows[best], cosines[best]

    def _search_base(
        self, vector: Float32Array, k: int, allowed: AllowedRows | None
    ) -> tuple[RowArray, FloatArray]:
        """The base's best that are there: deleted ones take places, so more are looked for."""
        rows, cosines = np.zeros(0, np.int64), np.zeros(0)
        for more in (min(k, self._n_deleted), self._n_deleted):
            stored, cosines = self._base.search(vector, min(k + more, len(self._base)), allowed)
            rows = self._row_map.base_rows[stored]
            if allowed is not None or more == self._n_deleted or (rows >= 0).sum() >= k:
                break
        return rows[rows >= 0][:k], cosines[rows >= 0][:k]

    def vectors_at(self, rows: RowArray) -> Float32Array:
        """The vectors of rows, in their order, shape (n_rows, dimension)."""
        stored = self._row_map.stored[rows]
        in_tail = stored >= len(self._base)
        vectors = np.empty((rows.size, self.dimension), np.float32)
        vectors[~in_tail] = self._base.vectors[stored[~in_tail]]
        vectors[in_tail] = self._tail.vectors[stored[in_tail] - len(self._base)]
        # Compiled loops have one variant for vectors that cannot be written to.
        vectors.flags.writeable = False
        return vectors
