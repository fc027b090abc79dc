"""One search of one generation of an index: what each leg computes, and how they are fused.

Nothing here knows of time limits, threads or circuits: see `ctxguard.retrieval.hybrid.stages`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ctxguard.core.fusion import Fusion
from ctxguard.core.types import FloatArray, Leg, Route, ScoreKind
from ctxguard.errors import ConfigurationError, StageError
from ctxguard.retrieval.index.filters import AllowedRows
from ctxguard.retrieval.index.hybrid_index import HybridIndex
from ctxguard.retrieval.index.passages import searchable_text
from ctxguard.retrieval.protocols import (
    Embedder,
    Float32Array,
    LexicalHits,
    QueryTokens,
    Reranker,
    RowArray,
    token_encoder_of,
)

if TYPE_CHECKING:
    from ctxguard.retrieval.index.kernels import FusedCandidates

LEXICAL = "lexical"
DENSE = "dense"
RERANK = "rerank"
SEARCH = "search"
"""Both legs as one stage of a trace: they run in one call, or side by side."""

STAGES: Mapping[Route, tuple[str, ...]] = {
    Route.HYBRID_RERANK: (LEXICAL, DENSE, RERANK),
    Route.HYBRID: (LEXICAL, DENSE),
    Route.LEXICAL_RERANK: (LEXICAL, RERANK),
    Route.LEXICAL: (LEXICAL,),
    Route.DENSE_RERANK: (DENSE, RERANK),
    Route.DENSE: (DENSE,),
}
ROUTES = {stages: route for route, stages in STAGES.items()}

_GARBAGE = "gave NaN or an infinity for a passage"


class DenseHits(NamedTuple):
    """The result of a dense search.

    Attributes:
        rows: The nearest rows, best first, ties by row.
        scores: Cosine of each row in ``rows``, same shape.
        vector: The query's unit vector, shape (dimension,).
    """

    rows: RowArray
    scores: FloatArray
    vector: Float32Array


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows with their scores, best first, ties by row and so by passage id.

    Attributes:
        rows: Shape (n,).
        scores: Shape (n,), higher is better.
        kind: What the scores mean.
        legs: Each stage's own scores of the same rows, by stage.
        signals: What else is known of the same rows, by the signal's name.
    """

    rows: RowArray
    scores: FloatArray
    kind: ScoreKind
    legs: Mapping[str, Leg]
    signals: Mapping[str, FloatArray] = field(default_factory=dict)

    def best(self, n: int) -> "Candidates":
        """The at most ``n`` best."""
        return self if n >= self.rows.size else self._at(slice(n))

    def reranked(self, logits: FloatArray) -> "Candidates":
        """These candidates ordered by a reranker's logits, shape (n,)."""
        legs = {**self.legs, RERANK: Leg(logits, ScoreKind.LOGIT)}
        return replace(self, legs=legs).ordered_by(logits, ScoreKind.LOGIT)

    def ordered_by(self, scores: FloatArray, kind: ScoreKind) -> "Candidates":
        """These candidates with other scores, shape (n,), best first, ties by row."""
        ordered = replace(self, scores=scores, kind=kind)
        return ordered._at(np.lexsort((self.rows, -scores)))

    def _at(self, positions: RowArray | slice) -> "Candidates":
        return Candidates(
            self.rows[positions],
            self.scores[positions],
            self.kind,
            {name: Leg(leg.scores[positions], leg.kind) for name, leg in self.legs.items()},
            {name: values[positions] for name, values in self.signals.items()},
        )


@dataclass(frozen=True, slots=True)
class Search:
    """One query over one generation of an index, checked and ready to run.

    Attributes:
        index: The generation.
        query: The query's text, without lone surrogates.
        depth: The most candidates that each leg and their fusion give, ≥ 1.
        stages: The stages to run, a value of ``STAGES``.
        fusion: How the legs' scores become one.
        embedder: Encodes the query where ``query_vector`` is None.
        query_vector: The caller's vector of the query, shape (dimension,), of any length, perhaps
            with its word pieces; or None.
        allowed: The only rows that may be candidates; None for all.
        with_signals: Whether the candidates' signals are computed, which need the query's word
            pieces.
    """

    index: HybridIndex
    query: str
    depth: int
    stages: tuple[str, ...]
    fusion: Fusion
    embedder: Embedder
    query_vector: Float32Array | QueryTokens | None
    allowed: AllowedRows | None
    with_signals: bool = False
    _tokens: list[QueryTokens | None] = field(default_factory=list, init=False)

    def lexical(self) -> LexicalHits:
        """Search the lexical leg.

        Raises:
            StageError: a score is NaN or infinite.
        """
        hits = self.index.search_lexical(self.query, self.depth, self.allowed)
        _check_finite(LEXICAL, hits.scores)
        return hits

    def dense(self) -> DenseHits:
        """Search the dense leg.

        Raises:
            StageError: the embedder gave no usable vector, or a cosine is NaN or infinite.
            ConfigurationError: ``query_vector`` has no direction.
            Exception: whatever the embedder raises.
        """
        return self._nearest(self.unit_vector())

    def both(self) -> Candidates | DenseHits:
        """Search both legs in one compiled call, without a filter; errors as for `dense`.

        Returns:
            The fused candidates. The dense leg's alone where the call failed, or the lexical
            engine has none: searching the lexical leg by itself shows which.
        """
        vector = self.unit_vector()
        try:
            fused = self.index.search_both(self.query, vector, self.depth, self.fusion)
        except Exception:
            fused = None
        return self._nearest(vector) if fused is None else self._candidates(fused)

    def fuse(self, lexical: LexicalHits, dense: DenseHits) -> Candidates:
        """The candidates of both legs, each searched by itself."""
        return self._candidates(
            self.index.fuse(lexical, dense.rows, dense.vector, self.depth, self.fusion)
        )

    def logits(self, reranker: Reranker, rows: RowArray) -> FloatArray:
        """A reranker's logit for the passage of each row, shape as ``rows``.

        Raises:
            StageError: the reranker gave another shape, NaN or an infinity.
            Exception: whatever the reranker raises.
        """
        texts = [searchable_text(self.index.passages[row]) for row in rows.tolist()]
        logits = np.asarray(reranker.score(self.query, texts), np.float64)
        if logits.shape != rows.shape:
            raise StageError(RERANK, f"gave shape {logits.shape} for {len(texts)} passages")
        _check_finite(RERANK, logits)
        return logits

    def query_tokens(self) -> QueryTokens | None:
        """The query's word pieces, encoded once where the caller did not give them.

        Returns:
            None where the index has no sentences, or the embedder gives no states of word pieces.

        Raises:
            Exception: whatever the embedder raises.
        """
        if isinstance(self.query_vector, QueryTokens):
            return self.query_vector
        if not self._tokens:
            encoder = None if self.index.sentences is None else token_encoder_of(self.embedder)
            self._tokens.append(None if encoder is None else encoder.encode_query(self.query))
        return self._tokens[0]

    def unit_vector(self) -> Float32Array:
        """The query's vector at unit length, shape (dimension,); errors as for `dense`."""
        given = self.query_vector
        known = self.query_tokens() if given is None and self.with_signals else given
        vector = self.embedder.encode_query(self.query) if known is None else vector_of(known)
        vector = np.ascontiguousarray(vector, np.float32)
        dimension = self.index.dense.dimension
        if vector.shape != (dimension,):
            raise StageError(
                DENSE, f"the query's vector has shape {vector.shape}, the index has ({dimension},)"
            )
        # A dot product would release the interpreter lock, for a microsecond's work.
        length = math.sqrt(np.square(vector).sum())
        if not 0.0 < length < math.inf:
            message = f"the query's vector has length {length}, so no direction"
            raise StageError(DENSE, message) if given is None else ConfigurationError(message)
        return vector / np.float32(length)

    def _nearest(self, vector: Float32Array) -> DenseHits:
        rows, scores = self.index.dense.search(vector, self.depth, self.allowed)
        _check_finite(DENSE, scores)
        return DenseHits(rows, scores, vector)

    def _candidates(self, fused: "FusedCandidates") -> Candidates:
        rows, scores, lexical_scores, cosines = fused
        if not np.isfinite(cosines).all():
            raise StageError(DENSE, _GARBAGE)
        legs = {
            LEXICAL: Leg(lexical_scores, ScoreKind.RATIO),
            DENSE: Leg(cosines, ScoreKind.COSINE),
        }
        return Candidates(rows, scores, self.fusion.kind, legs)


def vector_of(query_vector: Float32Array | QueryTokens) -> Float32Array:
    """A query's vector, without its word pieces."""
    return query_vector.vector if isinstance(query_vector, QueryTokens) else query_vector


def _check_finite(stage: str, scores: FloatArray) -> None:
    if not np.isfinite(scores).all():
        raise StageError(stage, _GARBAGE)
