"""The stages of a hybrid search: each leg's search, both side by side, the union, the rerank.

A stage that raises or gives garbage becomes a `StageFailure`; the others answer without it.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from ctxguard.errors import StageError, StageUnavailableError
from ctxguard.fusion import Fusion, fuse
from ctxguard.retrieval.index import HybridIndex
from ctxguard.retrieval.kernels import kernels
from ctxguard.retrieval.passages import searchable_text
from ctxguard.retrieval.protocols import (
    Embedder,
    Float32Array,
    LexicalHits,
    Reranker,
    RowArray,
)
from ctxguard.types import FloatArray, Leg, Route, ScoreKind, StageFailure

LEXICAL = "lexical"
DENSE = "dense"
RERANK = "rerank"

STAGES: Mapping[Route, tuple[str, ...]] = {
    Route.HYBRID_RERANK: (LEXICAL, DENSE, RERANK),
    Route.HYBRID: (LEXICAL, DENSE),
    Route.LEXICAL_RERANK: (LEXICAL, RERANK),
    Route.LEXICAL: (LEXICAL,),
    Route.DENSE_RERANK: (DENSE, RERANK),
    Route.DENSE: (DENSE,),
}
ROUTES = {stages: route for route, stages in STAGES.items()}

_DENSE_WORKERS = 8
_HAND_OVER_NUMBERS = 8_000_000
"""Size of the vectors from which comparing them all outlasts waking another thread."""


class DenseHits(NamedTuple):
    """What a dense search found.

    Attributes:
        rows: The nearest rows, best first.
        scores: Their cosines, shape as ``rows``.
        vector: The query's, at unit length.
    """

    rows: RowArray
    scores: FloatArray
    vector: Float32Array


LexicalOutcome = LexicalHits | StageFailure
DenseOutcome = DenseHits | StageFailure


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows with their scores and every stage's own, all in one order."""

    rows: RowArray
    scores: FloatArray
    kind: ScoreKind
    legs: Mapping[str, Leg]

    def best(self, n: int) -> "Candidates":
        """The at most ``n`` best, best first, ties by row and so by passage id."""
        order = np.lexsort((self.rows, -self.scores))[:n]
        legs = {name: Leg(leg.scores[order], leg.kind) for name, leg in self.legs.items()}
        return Candidates(self.rows[order], self.scores[order], self.kind, legs)


class LegPool:
    """Threads that run the dense leg while the caller's own runs the lexical one."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._process = 0

    def side_by_side(
        self, lexical: Callable[[], LexicalOutcome], dense: Callable[[], DenseOutcome]
    ) -> tuple[LexicalOutcome, DenseOutcome]:
        """What each leg found."""
        waiting = self._executor().submit(dense)
        found = lexical()
        # Where every thread is busy the caller does the work rather than wait for one.
        return found, dense() if waiting.cancel() else waiting.result()

    def _executor(self) -> ThreadPoolExecutor:
        # Threads do not survive a fork, so a forked child makes its own.
        if self._threads is None or self._process != os.getpid():
            self._threads = ThreadPoolExecutor(_DENSE_WORKERS, thread_name_prefix="ctxguard-dense")
            self._process = os.getpid()
        return self._threads


def search_legs(
    index: HybridIndex,
    pool: LegPool,
    embedder: Embedder,
    query: str,
    *,
    query_vector: Float32Array | None,
    depth: int,
    stages: Sequence[str],
    fusion: Fusion,
) -> tuple[Candidates, list[StageFailure]]:
    """The candidates of the legs among ``stages``, and the legs that did not answer.

    Raises:
        StageUnavailableError: no leg answered.
    """
    search = partial(search_lexical, index, query, depth)
    compare = partial(search_dense, index, embedder, query, query_vector, depth)
    lexical: LexicalOutcome | None = None
    dense: DenseOutcome | None = None
    if LEXICAL not in stages:
        dense = compare()
    elif DENSE not in stages:
        lexical = search()
    elif query_vector is None or index.dense.vectors.size >= _HAND_OVER_NUMBERS:
        lexical, dense = pool.side_by_side(search, compare)
    else:
        lexical, dense = search(), compare()
    failures = [leg for leg in (lexical, dense) if isinstance(leg, StageFailure)]
    if isinstance(lexical, LexicalHits):
        if isinstance(dense, DenseHits):
            return _united(index, lexical, dense, fusion), failures
        return _alone(LEXICAL, Leg(lexical.scores, ScoreKind.RATIO), lexical.rows), failures
    if isinstance(dense, DenseHits):
        return _alone(DENSE, Leg(dense.scores, ScoreKind.COSINE), dense.rows), failures
    raise StageUnavailableError(
        " and ".join([failure.stage for failure in failures]),
        "; ".join([failure.cause for failure in failures]),
    )


def search_lexical(index: HybridIndex, query: str, depth: int) -> LexicalOutcome:
    """The lexical leg."""
    try:
        hits = index.lexical.search(query, depth)
        _check_finite(LEXICAL, hits.scores)
    except Exception as error:
        return _failure(LEXICAL, error)
    return hits


def search_dense(
    index: HybridIndex,
    embedder: Embedder,
    query: str,
    query_vector: Float32Array | None,
    depth: int,
) -> DenseOutcome:
    """The dense leg: encodes the query unless its vector is known."""
    try:
        vector = embedder.encode_query(query) if query_vector is None else query_vector
        vector = _unit_vector(vector, index.dense.dimension)
        rows, scores = index.dense.search(vector, depth)
        _check_finite(DENSE, scores)
    except Exception as error:
        return _failure(DENSE, error)
    return DenseHits(rows, scores, vector)


def _unit_vector(vector: Float32Array, dimension: int) -> Float32Array:
    vector = np.ascontiguousarray(vector, np.float32)
    if vector.shape != (dimension,):
        raise StageError(
            DENSE, f"the query's vector has shape {vector.shape}, the index has ({dimension},)"
        )
    length = math.sqrt(vector @ vector)
    if not 0.0 < length < math.inf:
        raise StageError(DENSE, f"the query's vector has length {length}, so no direction")
    return vector / np.float32(length)


def _check_finite(stage: str, scores: FloatArray) -> None:
    if not np.isfinite(scores).all():
        raise StageError(stage, "gave NaN or an infinity for a passage")


def _failure(stage: str, error: Exception) -> StageFailure:
    return StageFailure(stage, f"{type(error).__name__}: {error}")


def _alone(name: str, leg: Leg, rows: RowArray) -> Candidates:
    return Candidates(rows, leg.scores, leg.kind, {name: leg})


def _united(
    index: HybridIndex, lexical: LexicalHits, dense: DenseHits, fusion: Fusion
) -> Candidates:
    """The candidates of either leg, each scored in both, and fused."""
    rows, lexical_scores, cosines = kernels().unite(
        lexical.rows, dense.rows, lexical.every, index.dense.vectors, dense.vector
    )
    legs = {
        LEXICAL: Leg(lexical_scores, ScoreKind.RATIO),
        DENSE: Leg(cosines, ScoreKind.COSINE),
    }
    return Candidates(rows, fuse(legs, fusion), fusion.kind, legs)


def rerank(
    index: HybridIndex, reranker: Reranker, query: str, candidates: Candidates
) -> Candidates | StageFailure:
    """All the candidates with the reranker's logits, or why it did not answer."""
    texts = [searchable_text(index.passages[row]) for row in candidates.rows.tolist()]
    try:
        logits = np.asarray(reranker.score(query, texts), np.float64)
        if logits.shape != candidates.rows.shape:
            raise StageError(RERANK, f"gave shape {logits.shape} for {len(texts)} passages")
        _check_finite(RERANK, logits)
    except Exception as error:
        return _failure(RERANK, error)
    legs = {**candidates.legs, RERANK: Leg(logits, ScoreKind.LOGIT)}
    return Candidates(candidates.rows, logits, ScoreKind.LOGIT, legs)
