"""The dense leg: cosine search over passage vectors, all of them or, by faiss, codes of them first.

Vectors are brought to unit length here, so that an inner product is a cosine whatever the
embedder returns. A zero vector stays zero: its cosine with everything is 0.

Where there are many, every vector also has a code: product quantisation with 16 centroids for each
two dimensions, scanned in the processor's registers (André, Kermarrec and Le Scouarnec, VLDB 2015).
The query is compared with all codes, a sixteenth of the vectors, and then with the vectors of the
best. Nothing depends on how vectors cluster, as it does with graphs and inverted lists. Codes that
would not fit a processor's cache are of four dimensions each: the scan then reads half as much, and
four times as many vectors are compared after it.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctxguard._extras import require
from ctxguard.errors import DataError
from ctxguard.retrieval.filters import AllowedRows
from ctxguard.retrieval.protocols import Float32Array, RowArray
from ctxguard.types import FloatArray

EXACT_LIMIT = 20_000
"""Passages up to which every vector is compared; above, every code, and the best codes' vectors."""

VECTORS = "vectors.npy"
CODES = "vectors.codes"

_FINE, _COARSE = 2, 4
_FINE_NUMBERS = 2**27
_COMPARED_AGAIN = {_FINE: 8, _COARSE: 32}
_FEWEST_COMPARED_AGAIN = 400
_FEWEST_CODED = 1_000


def unit_rows(vectors: Float32Array, passage_ids: Sequence[str]) -> Float32Array:
    """Vectors at unit length; zero vectors stay zero.

    Raises:
        DataError: an embedder returned NaN or an infinity; names the passage.
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


def coded(vectors: Float32Array) -> Any:
    """The faiss index of codes for unit vectors of an even dimension."""
    faiss = require("faiss", "embedded")
    dimension = vectors.shape[1]
    width = _FINE if vectors.size <= _FINE_NUMBERS or dimension % _COARSE else _COARSE
    codes = faiss.IndexPQFastScan(dimension, dimension // width, 4, faiss.METRIC_INNER_PRODUCT)
    # Training is a second of thousands of tiny steps: on a busy machine, threads that wait for
    # each other after every step take minutes. The setting is this thread's own.
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        codes.train(vectors)
    finally:
        faiss.omp_set_num_threads(threads)
    codes.add(vectors)
    return codes


def times_compared_again(codes: Any) -> int:
    """How many times ``k`` vectors are compared after the codes were."""
    return _COMPARED_AGAIN[codes.pq.dsub]


class DenseIndex:
    """Unit vectors, known by their row, and where there are many a code for each.

    Attributes:
        vectors: Shape (n, dimension), float32; memory-mapped after ``load``.
    """

    def __init__(self, vectors: Float32Array, codes: Any = None) -> None:
        self._kernels = require("ctxguard.retrieval.kernels", "embedded")
        # Read-only whether built or mapped, so that numba compiles one variant of each loop.
        self.vectors = np.asarray(vectors).view()
        self.vectors.flags.writeable = False
        self._codes = codes
        self._times = 1 if codes is None else times_compared_again(codes)

    @classmethod
    def build(cls, vectors: Float32Array, *, exact_limit: int = EXACT_LIMIT) -> "DenseIndex":
        """Index unit vectors, with codes for more than ``exact_limit`` of them.

        Fewer than 1,000 vectors, and vectors of an odd dimension, are always searched exactly.
        """
        if len(vectors) <= max(exact_limit, _FEWEST_CODED) or vectors.shape[1] % 2:
            return cls(vectors)
        return cls(vectors, coded(vectors))

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self.vectors.shape[1])

    @property
    def is_exact(self) -> bool:
        """Whether every vector is compared with the query."""
        return self._codes is None

    def search(self, vector: Float32Array, k: int) -> tuple[RowArray, FloatArray]:
        """The at most ``k`` rows nearest to a unit vector, best first, with their cosines."""
        k = min(k, len(self.vectors))
        return self._nearest(vector, k, self.looked_at(vector, k))

    def looked_at(self, vector: Float32Array, k: int) -> RowArray | None:
        """The rows whose vectors a search compares; None for all."""
        return None if self._codes is None else self._nearest_codes(vector, self._again(k))

    def _nearest(
        self, vector: Float32Array, k: int, among: RowArray | None
    ) -> tuple[RowArray, FloatArray]:
        found: tuple[RowArray, FloatArray] = self._kernels.nearest(self.vectors, vector, k, among)
        return found

    def search_codes(
        self, vector: Float32Array, k: int, allowed: AllowedRows
    ) -> tuple[RowArray, FloatArray]:
        """The at most ``k`` allowed rows nearest to a unit vector, best first, by their codes.

        As many more codes are looked at as forbidden rows will be among them; there may still be
        fewer than ``k`` allowed ones.
        """
        is_allowed = np.zeros(allowed.n_passages, np.bool_)
        is_allowed[allowed.rows] = True
        share = allowed.rows.size / allowed.n_passages
        rows = self._nearest_codes(vector, math.ceil(self._again(k) / share))
        return self._nearest(vector, k, rows[is_allowed[rows]])

    def _again(self, k: int) -> int:
        return max(self._times * k, _FEWEST_COMPARED_AGAIN)

    def _nearest_codes(self, vector: Float32Array, n: int) -> RowArray:
        rows: RowArray
        _, (rows,) = self._codes.search(vector[np.newaxis, :], min(n, len(self.vectors)))
        # faiss pads with row -1 where it finds fewer.
        return rows if rows[-1] >= 0 else rows[rows >= 0]

    def save(self, folder: Path) -> None:
        """Write the vectors as an array and the codes, if there are any, as faiss writes them."""
        np.save(folder / VECTORS, self.vectors)
        if self._codes is not None:
            require("faiss", "embedded").write_index(self._codes, str(folder / CODES))

    @classmethod
    def load(cls, folder: Path, *, with_codes: bool) -> "DenseIndex":
        """Read what ``save`` wrote, the vectors memory-mapped.

        faiss trusts its files: read codes only where their digest was checked before.
        """
        vectors = np.load(folder / VECTORS, mmap_mode="r", allow_pickle=False)
        if vectors.dtype != np.float32 or vectors.ndim != 2:
            raise ValueError(f"{VECTORS} holds {vectors.dtype} of shape {vectors.shape}")
        codes = None
        if with_codes:
            codes = require("faiss", "embedded").read_index(str(folder / CODES))
            if (codes.ntotal, codes.d) != vectors.shape:
                raise ValueError(f"{CODES} and {VECTORS} do not belong together")
        return cls(vectors, codes)
