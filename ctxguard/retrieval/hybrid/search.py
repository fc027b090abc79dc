"""One search of a hybrid index: both legs, the union of their candidates, and their signals.

If one leg fails, the other's candidates are the answer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from ctxguard.core.fusion import fuse
from ctxguard.core.types import (
    FailureKind,
    FloatArray,
    Leg,
    ScoreKind,
    StageFailure,
)
from ctxguard.errors import (
    ConfigurationError,
    FilterViolationError,
    OverloadedError,
    StageError,
    StageUnavailableError,
)
from ctxguard.resilience import Budget, Stage, attempt
from ctxguard.retrieval.hybrid.candidates import (
    DENSE,
    LEXICAL,
    SIGNALS,
    Candidates,
    check_finite,
)
from ctxguard.retrieval.hybrid.pipeline import SearchSettings
from ctxguard.retrieval.index.filters import AllowedRows
from ctxguard.retrieval.index.hybrid_index import HybridIndex
from ctxguard.retrieval.index.passages import PassageTable
from ctxguard.retrieval.protocols import (
    Float32Array,
    LexicalHits,
    QueryStates,
    RowArray,
    TokenEncoder,
    token_encoder_of,
)
from ctxguard.retrieval.signals import likeness
from ctxguard.retrieval.signals.likeness import QueryPieces

_T = TypeVar("_T")

_BOTH = (LEXICAL, DENSE)


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


@dataclass(eq=False)
class Search:
    """One checked query over one generation of an index.

    Attributes:
        index: The generation.
        settings: The settings of the view that searches.
        stages: The threads and circuit breaker of each leg.
        query: The query's text, without lone surrogates.
        depth: Maximum number of candidates of each leg and of their fusion, ≥ 1.
        query_vector: The caller's vector of the query, shape (dimension,), of any norm, optionally
            with its word pieces; None to encode the query.
        allowed: The only rows that may be candidates; None for all.
        with_signals: Whether the candidates' signals are computed, which need the query's word
            pieces.
    """

    index: HybridIndex
    settings: SearchSettings
    stages: Mapping[str, Stage]
    query: str
    depth: int
    query_vector: Float32Array | QueryStates | None = None
    allowed: AllowedRows | None = None
    with_signals: bool = False

    @property
    def passages(self) -> PassageTable:
        """The generation's passages."""
        return self.index.passages

    def legs(self, budget: Budget | None) -> tuple[Candidates, list[StageFailure]]:
        """Search the legs under their time limits and circuit breakers.

        Returns:
            The candidates, and the legs that did not answer.

        Raises:
            StageUnavailableError: no leg answered.
            OverloadedError: no leg had a free thread.
        """
        stages, asked = self.stages, self.settings.stages
        lexical: LexicalHits | StageFailure | None = None
        dense: DenseHits | StageFailure | None = None
        limits: dict[str, float | None] = dict.fromkeys(_BOTH)
        if budget is not None:
            limits = {leg: budget(leg) for leg in _BOTH}
        is_limited = limits[LEXICAL] is not None or limits[DENSE] is not None
        if is_limited and LEXICAL in asked and DENSE in asked:
            # Side by side, the dense leg on its own threads.
            call = attempt(DENSE, stages[DENSE].submit, self.dense, limits[DENSE])
            lexical = attempt(LEXICAL, stages[LEXICAL].call, self.lexical, limits[LEXICAL])
            dense = call if isinstance(call, StageFailure) else attempt(DENSE, call.result)
        else:
            # On this thread: side by side would save an eighth of the time over a million passages,
            # and cost a third of the throughput with as many clients as cores.
            if DENSE in asked:
                dense = attempt(DENSE, stages[DENSE].call, self.dense, limits[DENSE])
            if LEXICAL in asked:
                lexical = attempt(LEXICAL, stages[LEXICAL].call, self.lexical, limits[LEXICAL])
        if not isinstance(lexical, LexicalHits) and not isinstance(dense, DenseHits):
            # An open circuit skips a leg only while the other answers: overload may have opened
            # both.
            lexical = _retried(lexical, stages[LEXICAL], self.lexical, budget)
            if not isinstance(lexical, LexicalHits):
                dense = _retried(dense, stages[DENSE], self.dense, budget)
        if isinstance(lexical, LexicalHits) and isinstance(dense, DenseHits):
            fused = attempt(DENSE, self._fused, lexical, dense)
            if isinstance(fused, Candidates):
                return self._permitted(fused), []
            dense = fused
        candidates, failures = _alone(lexical, dense)
        return self._permitted(candidates), failures

    def _permitted(self, candidates: Candidates) -> Candidates:
        if self.allowed is not None and not self.allowed.hold(candidates.rows):
            raise FilterViolationError(
                "filter", "the search gave a passage that `where` excludes: a bug, please report it"
            )
        return candidates

    def lexical(self) -> LexicalHits:
        """Search the lexical leg.

        Raises:
            StageError: a score is NaN or infinite.
        """
        hits = self.index.search_lexical(self.query, self.depth, self.allowed)
        check_finite(LEXICAL, hits.scores)
        return hits

    def dense(self) -> DenseHits:
        """Search the dense leg.

        Raises:
            StageError: the embedder gave no usable vector, or a cosine is NaN or infinite.
            ConfigurationError: ``query_vector`` has no direction.
            Exception: whatever the embedder raises.
        """
        vector = self.unit_vector()
        rows, scores = self.index.dense.search(vector, self.depth, self.allowed)
        check_finite(DENSE, scores)
        return DenseHits(rows, scores, vector)

    def _fused(self, lexical: LexicalHits, dense: DenseHits) -> Candidates:
        """Unite the rows of both legs, score each row in both, and keep the best fused ones."""
        rows = np.union1d(lexical.rows, dense.rows)
        known = rows.searchsorted(dense.rows)
        is_new = np.ones(rows.size, np.bool_)
        is_new[known] = False
        cosines = np.empty(rows.size)
        cosines[known] = dense.scores
        cosines[is_new] = self.index.dense.cosines(dense.vector, rows[is_new])
        check_finite(DENSE, cosines)
        legs = {
            LEXICAL: Leg(lexical.all_scores[rows].astype(np.float64), ScoreKind.RATIO),
            DENSE: Leg(cosines, ScoreKind.COSINE),
        }
        fused, kind = fuse(legs, self.settings.leg_fusion), self.settings.leg_kind
        return Candidates(rows, fused, kind, _BOTH, legs).ordered_by(fused, kind, self.depth)

    @cached_property
    def query_states(self) -> QueryStates | None:
        """The query's word pieces, the caller's or encoded once.

        None if the index has no word pieces, or the embedder gives them no states. Errors of the
        embedder are raised.
        """
        if isinstance(self.query_vector, QueryStates):
            return self.query_vector
        return None if self._encoder is None else self._encoder.query(self.query)

    @cached_property
    def _encoder(self) -> TokenEncoder | None:
        has_pieces = self.index.pieces is not None
        return token_encoder_of(self.settings.embedder) if has_pieces else None

    def unit_vector(self) -> Float32Array:
        """Return the query's vector at unit length, shape (dimension,); errors as for `dense`."""
        given = self.query_vector
        known = self.query_states if given is None and self.with_signals else given
        vector = (
            self.settings.embedder.encode_query(self.query) if known is None else vector_of(known)
        )
        vector = np.ascontiguousarray(vector, np.float32)
        dimension = self.index.dense.dimension
        if vector.shape != (dimension,):
            raise StageError(
                DENSE, f"the query's vector has shape {vector.shape}, the index has ({dimension},)"
            )
        length = float(np.linalg.norm(vector))
        if not 0.0 < length < np.inf:
            message = f"the query's vector has length {length}, so no direction"
            raise StageError(DENSE, message) if given is None else ConfigurationError(message)
        return vector / np.float32(length)

    def signalled(self, candidates: Candidates) -> Candidates:
        """Add the candidates' signals, and order those of both legs by the ranker.

        If only one leg answered, its order is kept.

        Raises:
            StageError: the index was built without signals.
            Exception: whatever the embedder raises.
        """
        index, rows = self.index, candidates.rows
        if index.signals == "none":
            raise StageError(SIGNALS, "the index was built without signals; build it again")
        terms, weights = index.lexical.term_vectors(rows)
        by_ranks = candidates.kind is ScoreKind.RANK
        return candidates.signalled(
            likeness.signals(
                likeness.CandidateFeatures(
                    candidates.legs,
                    candidates.scores
                    if by_ranks
                    else fuse(candidates.legs, self.settings.leg_fusion),
                    index.lexical.terms.lengths[rows].astype(np.float64),
                    terms,
                    weights,
                    index.dense.vectors[rows],
                    None if index.pieces is None else index.pieces.rows.taken(rows),
                ),
                # Without the dense leg the query is not encoded.
                self._query_pieces() if DENSE in candidates.legs else None,
                self.settings.ranker,
            )
        )

    def _query_pieces(self) -> QueryPieces | None:
        encoder, pieces, states = self._encoder, self.index.pieces, self.query_states
        if encoder is None or pieces is None or states is None:
            return None
        return QueryPieces.of(states, pieces.weights, encoder.piece_table)


def _alone(
    lexical: LexicalHits | StageFailure | None, dense: DenseHits | StageFailure | None
) -> tuple[Candidates, list[StageFailure]]:
    """Return the candidates of the only leg that answered; errors as for `Search.legs`."""
    failures = [leg for leg in (lexical, dense) if isinstance(leg, StageFailure)]
    for name, kind, hits in (
        (LEXICAL, ScoreKind.RATIO, lexical),
        (DENSE, ScoreKind.COSINE, dense),
    ):
        if isinstance(hits, LexicalHits | DenseHits):
            leg = {name: Leg(hits.scores, kind)}
            return Candidates(hits.rows, hits.scores, kind, (name,), leg), failures
    is_overload = all(failure.kind is FailureKind.SATURATED for failure in failures)
    raise (OverloadedError if is_overload else StageUnavailableError)(
        " and ".join([failure.stage for failure in failures]),
        "; ".join([failure.cause for failure in failures]),
    )


def _retried(
    outcome: _T | StageFailure, stage: Stage, work: Callable[[], _T], budget: Budget | None
) -> _T | StageFailure:
    """Retry a stage that was skipped only because its circuit was open.

    Returns:
        The outcome of the retry; any other outcome unchanged.
    """
    if not isinstance(outcome, StageFailure) or outcome.kind is not FailureKind.CIRCUIT_OPEN:
        return outcome
    return attempt(stage.name, stage.call_ignoring_circuit, work, _left(budget, stage.name))


def _left(budget: Budget | None, stage: str) -> float | None:
    return None if budget is None else budget(stage)


def vector_of(query_vector: Float32Array | QueryStates) -> Float32Array:
    """Return a query's vector, without its word pieces."""
    return query_vector.vector if isinstance(query_vector, QueryStates) else query_vector
