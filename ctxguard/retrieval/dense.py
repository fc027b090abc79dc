"""The dense leg: cosine search over passage vectors, exact or by an HNSW graph, with faiss.

Vectors are brought to unit length here, so that an inner product is a cosine whatever the
embedder returns. A zero vector stays zero: its cosine with everything is 0.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctxguard._extras import require
from ctxguard.errors import DataError
from ctxguard.retrieval.protocols import Float32Array, RowArray
from ctxguard.types import FloatArray

EXACT_LIMIT = 200_000
"""Passages up to which every vector is compared; above, an HNSW graph is searched."""

HNSW_NEIGHBOURS = 32
HNSW_EF_CONSTRUCTION = 200
HNSW_EF_SEARCH = 256

VECTORS = "vectors.npy"
GRAPH = "vectors.hnsw"


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


class DenseIndex:
    """Unit vectors, known by their row, and where there are many a graph over them.

    Attributes:
        vectors: Shape (n, dimension), float32; memory-mapped after ``load``.
    """

    def __init__(self, vectors: Float32Array, graph: Any = None) -> None:
        self._faiss = require("faiss", "embedded")
        # Read-only whether built or mapped, so that numba compiles one variant of each loop.
        self.vectors = np.asarray(vectors).view()
        self.vectors.flags.writeable = False
        self._graph = graph

    @classmethod
    def build(cls, vectors: Float32Array, *, exact_limit: int = EXACT_LIMIT) -> "DenseIndex":
        """Index unit vectors: a graph is made only for more than ``exact_limit`` of them."""
        if len(vectors) <= exact_limit:
            return cls(vectors)
        faiss = require("faiss", "embedded")
        graph = faiss.IndexHNSWFlat(vectors.shape[1], HNSW_NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
        graph.hnsw.efConstruction = HNSW_EF_CONSTRUCTION
        graph.add(vectors)
        return cls(vectors, graph)

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self.vectors.shape[1])

    @property
    def is_exact(self) -> bool:
        """Whether every vector is compared with the query."""
        return self._graph is None

    def search(self, vector: Float32Array, k: int) -> tuple[RowArray, FloatArray]:
        """The at most ``k`` rows nearest to a unit vector, best first, with their cosines."""
        faiss, queries = self._faiss, vector[np.newaxis, :]
        k = min(k, len(self.vectors))
        if self._graph is None:
            scores, rows = faiss.knn(queries, self.vectors, k, metric=faiss.METRIC_INNER_PRODUCT)
        else:
            effort = faiss.SearchParametersHNSW(efSearch=max(HNSW_EF_SEARCH, k))
            scores, rows = self._graph.search(queries, k, params=effort)
        rows, scores = rows[0], scores[0].astype(np.float64)
        if rows.size and rows[-1] < 0:
            # faiss pads with row -1 where it finds fewer than k.
            rows, scores = rows[rows >= 0], scores[rows >= 0]
        return rows, scores

    def save(self, folder: Path) -> None:
        """Write the vectors as an array and the graph, if there is one, as faiss writes it."""
        np.save(folder / VECTORS, self.vectors)
        if self._graph is not None:
            self._faiss.write_index(self._graph, str(folder / GRAPH))

    @classmethod
    def load(cls, folder: Path, *, with_graph: bool) -> "DenseIndex":
        """Read what ``save`` wrote, the vectors memory-mapped.

        faiss trusts its files: read a graph only where its digest was checked before.
        """
        vectors = np.load(folder / VECTORS, mmap_mode="r", allow_pickle=False)
        if vectors.dtype != np.float32 or vectors.ndim != 2:
            raise ValueError(f"{VECTORS} holds {vectors.dtype} of shape {vectors.shape}")
        graph = None
        if with_graph:
            graph = require("faiss", "embedded").read_index(str(folder / GRAPH))
            if (graph.ntotal, graph.d) != vectors.shape:
                raise ValueError(f"{GRAPH} and {VECTORS} do not belong together")
        return cls(vectors, graph)
