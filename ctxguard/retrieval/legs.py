"""The stages of a hybrid search: each leg's search, the union, the rerank.

A stage that raises or gives garbage becomes a `StageFailure`; the others answer without it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ctxguard.errors import ConfigurationError, OverloadedError, StageError, StageUnavailableError
from ctxguard.fusion import Fusion
from ctxguard.hygiene import forget_frames
from ctxguard.retrieval.filters import AllowedRows, among, nearest_among
from ctxguard.retrieval.index import HybridIndex
from ctxguard.retrieval.passages import searchable_text
from ctxguard.retrieval.protocols import (
    Embedder,
    Float32Array,
    LexicalHits,
    Reranker,
    RowArray,
)
from ctxguard.stages import Budget, Pending, Stage, UnansweredError, failure_of
from ctxguard.types import FailureKind, FloatArray, Leg, Route, ScoreKind, StageFailure

if TYPE_CHECKING:
    from ctxguard.retrieval.kernels import United

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


class _Lost(NamedTuple):
    """A stage that did not answer, and the probe of it that this request began."""

    failure: StageFailure
    probe: Pending[Any] | None


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows with their scores and every stage's own, best first, ties by row and so by id."""

    rows: RowArray
    scores: FloatArray
    kind: ScoreKind
    legs: Mapping[str, Leg]

    def best(self, n: int) -> "Candidates":
        """The at most ``n`` best."""
        return self if n >= self.rows.size else self._at(slice(n))

    def sorted(self) -> "Candidates":
        """What came in any order, best first."""
        return self._at(np.lexsort((self.rows, -self.scores)))

    def _at(self, positions: RowArray | slice) -> "Candidates":
        legs = {name: Leg(leg.scores[positions], leg.kind) for name, leg in self.legs.items()}
        return Candidates(self.rows[positions], self.scores[positions], self.kind, legs)


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
    encode = partial(_unit_vector_of, index.dense.dimension, embedder, query, query_vector)
    compare = partial(search_dense, index, encode, depth, allowed=allowed)
    lexical: LexicalHits | _Lost | None = None
    dense: DenseHits | Candidates | _Lost | None = None
    if LEXICAL not in stages:
        dense = _attempt(DENSE, partial(legs.dense.call, compare, budget.dense_seconds))
    elif DENSE not in stages:
        lexical = _attempt(LEXICAL, partial(legs.lexical.call, search, budget.lexical_seconds))
    elif budget.lexical_seconds is not None or budget.dense_seconds is not None:
        lexical, dense = _side_by_side(legs, budget, search, compare)
    else:
        # On this thread: side by side, an eighth of the time is saved over a million passages, and
        # a third of the answers a second are lost once as many ask as there are cores.
        both = partial(search_both, index, encode, query, depth, fusion)
        whole = allowed is None and not legs.lexical.is_open
        dense = _attempt(DENSE, partial(legs.dense.call, both if whole else compare))
        if not isinstance(dense, Candidates):
            lexical = _attempt(LEXICAL, partial(legs.lexical.call, search))
    if not isinstance(lexical, LexicalHits) and not isinstance(dense, DenseHits | Candidates):
        # A circuit counts only while something else answers: load may have opened both.
        lexical = _insisted(lexical, legs.lexical, search, budget.lexical_seconds)
        if not isinstance(lexical, LexicalHits):
            dense = _insisted(dense, legs.dense, compare, budget.dense_seconds)
    if isinstance(dense, Candidates):
        # Also by a probe of the dense leg, which searches both.
        legs.lexical.succeeded(None)
        return dense, []
    failures = [leg.failure for leg in (lexical, dense) if isinstance(leg, _Lost)]
    if isinstance(lexical, LexicalHits):
        if isinstance(dense, DenseHits):
            united = index.unite(lexical, dense.rows, dense.vector, fusion)
            return _fused(united, fusion), failures
        return _alone(LEXICAL, Leg(lexical.scores, ScoreKind.RATIO), lexical.rows), failures
    if isinstance(dense, DenseHits):
        return _alone(DENSE, Leg(dense.scores, ScoreKind.COSINE), dense.rows), failures
    saturated = all(failure.kind is FailureKind.SATURATED for failure in failures)
    raise (OverloadedError if saturated else StageUnavailableError)(
        " and ".join([failure.stage for failure in failures]),
        "; ".join([failure.cause for failure in failures]),
    )


def _side_by_side(
    legs: LegStages,
    budget: Budget,
    search: Callable[[], LexicalHits],
    compare: Callable[[], DenseHits],
) -> tuple[LexicalHits | _Lost, DenseHits | _Lost]:
    """What each leg found, the dense one in its pool."""
    begun = _attempt(DENSE, partial(legs.dense.begin, compare, budget.dense_seconds))
    lexical = _attempt(LEXICAL, partial(legs.lexical.call, search, budget.lexical_seconds))
    return lexical, begun if isinstance(begun, _Lost) else _attempt(DENSE, begun.result)


def _attempt(stage: str, call: Callable[[], _T]) -> _T | _Lost:
    try:
        return call()
    except Exception as error:
        probe = error.probe if isinstance(error, UnansweredError) else None
        lost = _Lost(failure_of(stage, error), probe)
        forget_frames(error)
        return lost


def _insisted(
    outcome: _T | _Lost, stage: Stage, work: Callable[[], _T], seconds: float | None
) -> _T | _Lost:
    """What a stage gives that was not asked because its circuit is open; else what it came to."""
    if not isinstance(outcome, _Lost) or outcome.failure.kind is not FailureKind.CIRCUIT_OPEN:
        return outcome
    if outcome.probe is not None:
        return _attempt(stage.name, outcome.probe.result)
    return _attempt(stage.name, partial(stage.insist, work, seconds))


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
    encode: Callable[[], Float32Array],
    depth: int,
    *,
    allowed: AllowedRows | None,
) -> DenseHits:
    """The dense leg, for the unit vector that ``encode`` gives.

    Raises:
        StageError: NaN or an infinity for a passage.
        Exception: what ``encode`` raises.
    """
    vector = encode()
    if allowed is None:
        rows, scores = index.dense.search(vector, depth)
    else:
        rows, scores = nearest_among(
            index.dense, vector, depth, allowed, exact_limit=index.exact_limit
        )
    _check_finite(DENSE, scores)
    return DenseHits(rows, scores, vector)


def search_both(
    index: HybridIndex,
    encode: Callable[[], Float32Array],
    query: str,
    depth: int,
    fusion: Fusion,
) -> Candidates | DenseHits:
    """The dense leg, and the lexical one with it where all is well; errors as `search_dense`."""
    vector = encode()
    try:
        united = index.search_both(query, vector, depth, fusion)
    except Exception:
        # Each leg will say by itself what ails it.
        united = None
    if united is None:
        return search_dense(index, lambda: vector, depth, allowed=None)
    candidates = _fused(united, fusion)
    _check_finite(DENSE, candidates.legs[DENSE].scores)
    return candidates


def _unit_vector_of(
    dimension: int, embedder: Embedder, query: str, query_vector: Float32Array | None
) -> Float32Array:
    """A query's vector at unit length, encoded unless it is known.

    Raises:
        StageError: the embedder gave no usable vector.
        ConfigurationError: ``query_vector`` is no usable vector.
    """
    if query_vector is None:
        return _unit_vector(embedder.encode_query(query), dimension)
    try:
        return _unit_vector(query_vector, dimension)
    except StageError as error:
        # Whoever gave it is at fault, which says nothing against the stage.
        raise ConfigurationError(str(error)) from None


def _unit_vector(vector: Float32Array, dimension: int) -> Float32Array:
    vector = np.ascontiguousarray(vector, np.float32)
    if vector.shape != (dimension,):
        raise StageError(
            DENSE, f"the query's vector has shape {vector.shape}, the index has ({dimension},)"
        )
    # A dot product would give up the interpreter lock, for a microsecond's work.
    length = math.sqrt(np.square(vector).sum())
    if not 0.0 < length < math.inf:
        raise StageError(DENSE, f"the query's vector has length {length}, so no direction")
    return vector / np.float32(length)


def _check_finite(stage: str, scores: FloatArray) -> None:
    if not np.isfinite(scores).all():
        raise StageError(stage, "gave NaN or an infinity for a passage")


def _alone(name: str, leg: Leg, rows: RowArray) -> Candidates:
    return Candidates(rows, leg.scores, leg.kind, {name: leg})


def _fused(united: "United", fusion: Fusion) -> Candidates:
    rows, fused, lexical_scores, cosines = united
    legs = {
        LEXICAL: Leg(lexical_scores, ScoreKind.RATIO),
        DENSE: Leg(cosines, ScoreKind.COSINE),
    }
    return Candidates(rows, fused, fusion.kind, legs)


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
    logits = _attempt(RERANK, partial(stage.call, score, seconds))
    if isinstance(logits, _Lost):
        return logits.failure
    legs = {**candidates.legs, RERANK: Leg(logits, ScoreKind.LOGIT)}
    return Candidates(candidates.rows, logits, ScoreKind.LOGIT, legs).sorted()


def _logits(index: HybridIndex, reranker: Reranker, query: str, rows: RowArray) -> FloatArray:
    texts = [searchable_text(index.passages[row]) for row in rows.tolist()]
    logits = np.asarray(reranker.score(query, texts), np.float64)
    if logits.shape != rows.shape:
        raise StageError(RERANK, f"gave shape {logits.shape} for {len(texts)} passages")
    _check_finite(RERANK, logits)
    return logits
