"""The stages of a hybrid search: each leg's search, both side by side, the union, the rerank.

A stage that raises or gives garbage becomes a `StageFailure`; the others answer without it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from ctxguard.errors import ConfigurationError, OverloadedError, StageError, StageUnavailableError
from ctxguard.fusion import Fusion, fuse
from ctxguard.retrieval.filters import AllowedRows, among, nearest_among
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
from ctxguard.stages import Budget, Stage, UnansweredError, failure_of
from ctxguard.types import FailureKind, FloatArray, Leg, Route, ScoreKind, StageFailure

_T = TypeVar("_T")

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

_RERANK_WORKERS = 4
_HAND_OVER_NUMBERS = 8_000_000
"""Size of the vectors from which the quicker of the legs, the lexical one, outlasts waking another
thread; below, encoding the query is no reason either: there would be too little to do meanwhile."""


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


@dataclass(frozen=True, slots=True)
class LegStages:
    """The stages of one retriever, each with a pool and a circuit breaker of its own."""

    lexical: Stage = field(default_factory=partial(Stage, LEXICAL))
    dense: Stage = field(default_factory=partial(Stage, DENSE))


def rerank_stage() -> Stage:
    """The stage of one reranker; models are slow and keep a lock, so few calls run at once."""
    return Stage(RERANK, workers=_RERANK_WORKERS)


def search_legs(
    index: HybridIndex,
    legs: LegStages,
    budget: Budget,
    embedder: Embedder,
    query: str,
    *,
    query_vector: Float32Array | None,
    depth: int,
    stages: Sequence[str],
    fusion: Fusion,
    allowed: AllowedRows | None,
) -> tuple[Candidates, list[StageFailure]]:
    """The candidates of the legs among ``stages``, and the legs that did not answer.

    ``allowed`` are the only rows that either leg may give; None for all.

    Raises:
        StageUnavailableError: no leg answered.
        OverloadedError: no leg had a thread free.
    """
    search = partial(search_lexical, index, query, depth, allowed=allowed)
    compare = partial(search_dense, index, embedder, query, query_vector, depth, allowed=allowed)
    lexical: LexicalHits | Exception | None = None
    dense: DenseHits | Exception | None = None
    if LEXICAL not in stages:
        dense = _attempt(partial(legs.dense.call, compare, budget.dense_seconds))
    elif DENSE not in stages:
        lexical = _attempt(partial(legs.lexical.call, search, budget.lexical_seconds))
    else:
        # rank-bm25 takes milliseconds at any size.
        slow = index.dense.numbers_compared >= _HAND_OVER_NUMBERS or index.engine != "bm25s"
        lexical, dense = _both(legs, budget, search, compare, side_by_side=slow)
    if not (isinstance(lexical, LexicalHits) or isinstance(dense, DenseHits)):
        # A circuit counts only while something else answers: load may have opened both.
        lexical = _insisted(lexical, legs.lexical, search, budget.lexical_seconds)
        if not isinstance(lexical, LexicalHits):
            dense = _insisted(dense, legs.dense, compare, budget.dense_seconds)
    failures = [
        failure_of(name, outcome)
        for name, outcome in ((LEXICAL, lexical), (DENSE, dense))
        if isinstance(outcome, Exception)
    ]
    if isinstance(lexical, LexicalHits):
        if isinstance(dense, DenseHits):
            return _united(index, lexical, dense, fusion), failures
        return _alone(LEXICAL, Leg(lexical.scores, ScoreKind.RATIO), lexical.rows), failures
    if isinstance(dense, DenseHits):
        return _alone(DENSE, Leg(dense.scores, ScoreKind.COSINE), dense.rows), failures
    saturated = all(failure.kind is FailureKind.SATURATED for failure in failures)
    raise (OverloadedError if saturated else StageUnavailableError)(
        " and ".join([failure.stage for failure in failures]),
        "; ".join([failure.cause for failure in failures]),
    )


def _both(
    legs: LegStages,
    budget: Budget,
    search: Callable[[], LexicalHits],
    compare: Callable[[], DenseHits],
    *,
    side_by_side: bool,
) -> tuple[LexicalHits | Exception, DenseHits | Exception]:
    """What each leg found, the dense one in its pool where that pays or a limit asks for it."""
    lexical_seconds, dense_seconds = budget.lexical_seconds, budget.dense_seconds
    if not side_by_side and lexical_seconds is None and dense_seconds is None:
        return (
            _attempt(partial(legs.lexical.call, search)),
            _attempt(partial(legs.dense.call, compare)),
        )
    begun = _attempt(partial(legs.dense.begin, compare, dense_seconds))
    lexical = _attempt(partial(legs.lexical.call, search, lexical_seconds))
    return lexical, begun if isinstance(begun, Exception) else _attempt(begun.result)


def _attempt(call: Callable[[], _T]) -> _T | Exception:
    try:
        return call()
    except Exception as error:
        return error


def _insisted(
    outcome: _T | Exception, stage: Stage, work: Callable[[], _T], seconds: float | None
) -> _T | Exception:
    """What a stage gives that was not asked because its circuit is open; else what it came to."""
    if not isinstance(outcome, UnansweredError) or outcome.kind is not FailureKind.CIRCUIT_OPEN:
        return outcome
    if outcome.probe is not None:
        return _attempt(outcome.probe.result)
    return _attempt(partial(stage.insist, work, seconds))


def search_lexical(
    index: HybridIndex, query: str, depth: int, *, allowed: AllowedRows | None
) -> LexicalHits:
    """The lexical leg.

    Raises:
        StageError: NaN or an infinity for a passage.
    """
    hits = index.lexical.search(query, depth)
    if allowed is not None:
        hits = among(hits, allowed, depth)
    _check_finite(LEXICAL, hits.scores)
    return hits


def search_dense(
    index: HybridIndex,
    embedder: Embedder,
    query: str,
    query_vector: Float32Array | None,
    depth: int,
    *,
    allowed: AllowedRows | None,
) -> DenseHits:
    """The dense leg: encodes the query unless its vector is known.

    Raises:
        StageError: the embedder gave no usable vector, or NaN or an infinity for a passage.
        ConfigurationError: ``query_vector`` is no usable vector.
    """
    dimension = index.dense.dimension
    if query_vector is None:
        vector = _unit_vector(embedder.encode_query(query), dimension)
    else:
        try:
            vector = _unit_vector(query_vector, dimension)
        except StageError as error:
            # Whoever gave it is at fault, which says nothing against the stage.
            raise ConfigurationError(str(error)) from None
    if allowed is None:
        rows, scores = index.dense.search(vector, depth)
    else:
        rows, scores = nearest_among(
            index.dense, vector, depth, allowed, exact_limit=index.exact_limit
        )
    _check_finite(DENSE, scores)
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
    index: HybridIndex,
    reranker: Reranker,
    query: str,
    candidates: Candidates,
    *,
    stage: Stage,
    seconds: float | None,
) -> Candidates | StageFailure:
    """All the candidates with the reranker's logits, or why it did not answer."""
    score = partial(_logits, index, reranker, query, candidates.rows)
    try:
        logits = stage.call(score, seconds)
    except Exception as error:
        return failure_of(RERANK, error)
    legs = {**candidates.legs, RERANK: Leg(logits, ScoreKind.LOGIT)}
    return Candidates(candidates.rows, logits, ScoreKind.LOGIT, legs)


def _logits(index: HybridIndex, reranker: Reranker, query: str, rows: RowArray) -> FloatArray:
    texts = [searchable_text(index.passages[row]) for row in rows.tolist()]
    logits = np.asarray(reranker.score(query, texts), np.float64)
    if logits.shape != rows.shape:
        raise StageError(RERANK, f"gave shape {logits.shape} for {len(texts)} passages")
    _check_finite(RERANK, logits)
    return logits
