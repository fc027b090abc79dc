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
from ctxguard.retrieval.index import kernels
from ctxguard.retrieval.index.filters import AllowedRows
from ctxguard.retrieval.index.growing import blocks, collected
from ctxguard.retrieval.index.part_files import PartFiles, read_only
from ctxguard.retrieval.index.rows import Rows
from ctxguard.retrieval.protocols import Float32Array, RowArray

EXACT_LIMIT = 20_000
"""Up to this many passages every vector is compared; above, codes first."""

VECTORS = "vectors.npy"
CODES = "vectors.codes"

_FINE, _COARSE = 2, 4
_FINE_NUMBERS = 2**27
_RESCORE_FACTOR = {_FINE: 8, _COARSE: 32}
_MOST_TRAINED, _TRAINED, _CODED = 2**17, 2**15, 2**16
_MIN_RESCORED = 400
_MIN_CODED = 1_000


def unit_rows(vectors: Float32Array, passage_ids: Sequence[str]) -> Float32Array:
    """Bring vectors to unit length, shape as given; zero vectors stay zero.

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
    """Build a faiss index of product-quantisation codes, for unit vectors of an even dimension."""
    faiss = require("faiss", "embedded")
    dimension = vectors.shape[1]
    width = _FINE if vectors.size <= _FINE_NUMBERS or dimension % _COARSE else _COARSE
    codes = faiss.IndexPQFastScan(dimension, dimension // width, 4, faiss.METRIC_INNER_PRODUCT)
    # Training takes a second in thousands of tiny steps: on a busy machine, threads that wait for
    # each other after every step take minutes. The setting holds for this thread alone.
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        # faiss takes 4,096 at random for each code; of many vectors, which may lie in a file,
        # these are as good.
        every = 1 if len(vectors) <= _MOST_TRAINED else len(vectors) // _TRAINED
        codes.train(vectors[::every])
    finally:
        faiss.omp_set_num_threads(threads)
    for first in range(0, len(vectors), _CODED):
        codes.add(vectors[first : first + _CODED])
    return codes


def rescore_factor(codes: Any) -> int:
    """Return how many vectors are compared after the codes, for each of the ``k`` best."""
    return _RESCORE_FACTOR[codes.pq.dsub]


class _Vectors:
    """The unit vectors of a segment, and codes for them if there are many.

    Attributes:
        vectors: Unit vectors, shape (n, dimension), float32, read-only.
        codes: From `build_pq_codes`; None to compare every vector.
        exact_limit: Up to this many allowed rows, a filtered search compares every vector.
    """

    def __init__(self, vectors: Float32Array, codes: Any, exact_limit: int) -> None:
        self.vectors: Float32Array = read_only(vectors)
        self.codes = codes
        self.exact_limit = exact_limit
        self._rescore_factor = 1 if codes is None else rescore_factor(codes)

    def rows_to_compare(
        self, vector: Float32Array, k: int, allowed: AllowedRows | None
    ) -> RowArray | None:
        """Return the rows whose vectors a search for the ``k`` nearest compares; None for all.

        With codes, those with the best ones. For a filter that allows more than ``exact_limit``
        rows, as many more codes are taken as forbidden rows are expected among them; all allowed
        rows if fewer than ``k`` are found.
        """
        if allowed is None:
            return None if self.codes is None else self._nearest_codes(vector, k, 1.0)
        if self.codes is None or allowed.rows.size <= self.exact_limit:
            return allowed.rows
        is_allowed = np.zeros(allowed.n_passages, np.bool_)
        is_allowed[allowed.rows] = True
        rows = self._nearest_codes(vector, k, allowed.rows.size / allowed.n_passages)
        rows = rows[is_allowed[rows]]
        return rows if rows.size >= k else allowed.rows

    def _nearest_codes(self, vector: Float32Array, k: int, share: float) -> RowArray:
        """Return the rows with the best codes, enough if a share of them may be returned."""
        n = math.ceil(max(self._rescore_factor * k, _MIN_RESCORED) / share)
        rows: RowArray
        _, (rows,) = self.codes.search(vector[np.newaxis, :], min(n, len(self.vectors)))
        # faiss pads with row -1 where it finds fewer.
        return rows if rows[-1] >= 0 else rows[rows >= 0]


class DenseIndex:
    """Unit vectors by row, and codes for segments that have many.

    Args:
        segments: The vectors of each segment.
        rows: Their rows.

    Attributes:
        vectors: The vector of every row, shape (n, dimension), read-only; None if they do not lie
            in one array.
        dimension: Length of a vector.
        exact_limit: Up to this many allowed rows, a filtered search compares every vector.
        is_exact: Whether a search compares the query with every vector.
    """

    def __init__(self, segments: Sequence[_Vectors], rows: Rows) -> None:
        self._segments, self._rows = segments, rows
        self.vectors = segments[0].vectors if rows.is_plain else None
        self.dimension: int = segments[0].vectors.shape[1]
        self.exact_limit = segments[0].exact_limit
        self.is_exact = all(each.codes is None for each in segments)
        self._n_deleted = [int((each < 0).sum()) for each in rows.of_segments]

    @classmethod
    def build(cls, vectors: Float32Array, *, exact_limit: int = EXACT_LIMIT) -> "DenseIndex":
        """Index unit vectors, with codes for more than ``exact_limit`` of them.

        Fewer than 1,000 vectors, and vectors of an odd dimension, are always searched exactly.

        Args:
            vectors: Unit vectors, shape (n, dimension), float32.
            exact_limit: As for the attribute.
        """
        is_exact = len(vectors) <= max(exact_limit, _MIN_CODED) or vectors.shape[1] % 2
        codes = None if is_exact else build_pq_codes(vectors)
        return cls([_Vectors(vectors, codes, exact_limit)], Rows.whole(len(vectors)))

    @classmethod
    def over(cls, indexes: Sequence["DenseIndex"], rows: Rows) -> "DenseIndex":
        """Search segments as one index; those without codes are compared one by one."""
        return cls([each for index in indexes for each in index._segments], rows)

    def merged(self, exact_limit: int) -> "DenseIndex":
        """Store the vectors as one segment."""
        rows = blocks(np.full(len(self), 4 * self.dimension))
        vectors = collected(np.float32, map(self.vectors_at, rows))
        return self.build(vectors, exact_limit=exact_limit)

    def __len__(self) -> int:
        return len(self._rows)

    def search(
        self, vector: Float32Array, k: int, allowed: AllowedRows | None = None
    ) -> tuple[RowArray, FloatArray]:
        """Find the at most ``k`` rows nearest to a unit vector, best first, with their cosines.

        Args:
            vector: Shape (dimension,).
            k: ≥ 1.
            allowed: The only rows to return; None for all.
        """
        if self.vectors is not None:
            return self._nearest(self._segments[0], vector, k, allowed)
        parts = [None] * len(self._segments) if allowed is None else self._allowed(allowed)
        found = [self._nearest_there(at, vector, k, part) for at, part in enumerate(parts)]
        rows, cosines = map(np.concatenate, zip(*found, strict=True))
        best = np.lexsort((rows, -cosines))[:k]
        return rows[best], cosines[best]

    def candidate_rows(self, vector: Float32Array, k: int) -> RowArray | None:
        """Return the rows whose vectors a search of one segment compares; None for all."""
        return self._segments[0].rows_to_compare(vector, k, None)

    def _nearest(
        self, segment: _Vectors, vector: Float32Array, k: int, allowed: AllowedRows | None
    ) -> tuple[RowArray, FloatArray]:
        k = min(k, len(segment.vectors) if allowed is None else allowed.rows.size)
        rows = segment.rows_to_compare(vector, k, allowed)
        return kernels.nearest(segment.vectors, vector, k, rows)

    def _allowed(self, allowed: AllowedRows) -> list[AllowedRows | None]:
        """Split allowed rows into those of each segment."""
        parts = zip(self._rows.split(allowed.rows), self._segments, strict=True)
        return [AllowedRows(rows, len(segment.vectors)) for (_, rows), segment in parts]

    def _nearest_there(
        self, at: int, vector: Float32Array, k: int, allowed: AllowedRows | None
    ) -> tuple[RowArray, FloatArray]:
        """Search one of several segments: deleted rows take places, so more are looked for."""
        n_deleted = 0 if allowed is not None else self._n_deleted[at]
        found, cosines = np.zeros(0, np.int64), np.zeros(0)
        for more in (min(k, n_deleted), n_deleted):
            stored, cosines = self._nearest(self._segments[at], vector, k + more, allowed)
            found = self._rows.of_segments[at][stored]
            if more == n_deleted or (found >= 0).sum() >= k:
                break
        return found[found >= 0][:k], cosines[found >= 0][:k]

    def vectors_at(self, rows: RowArray) -> Float32Array:
        """Return the vectors of rows, in their order, shape (n_rows, dimension)."""
        if self.vectors is not None:
            return self.vectors[rows]
        vectors = np.empty((rows.size, self.dimension), np.float32)
        for (at, stored), segment in zip(self._rows.split(rows), self._segments, strict=True):
            vectors[at] = segment.vectors[stored]
        return read_only(vectors)

    def save(self, folder: Path) -> None:
        """Write the vectors of one segment as an array, and its codes as faiss writes them."""
        (segment,) = self._segments
        np.save(folder / VECTORS, segment.vectors)
        if segment.codes is not None:
            require("faiss", "embedded").write_index(segment.codes, str(folder / CODES))

    @classmethod
    def load(cls, files: PartFiles, *, exact_limit: int = EXACT_LIMIT) -> "DenseIndex":
        """Read the files of ``save``.

        faiss trusts its files: check the digest of codes before.

        Raises:
            ValueError: files that ``save`` did not write together.
        """
        vectors, codes = files.large_array(VECTORS, "float32", ndim=2), None
        if CODES in files:
            codes = require("faiss", "embedded").read_index(str(files.folder / CODES))
            if (codes.ntotal, codes.d) != vectors.shape:
                raise ValueError(f"{CODES} and {VECTORS} do not belong together")
        return cls([_Vectors(vectors, codes, exact_limit)], Rows.whole(len(vectors)))
