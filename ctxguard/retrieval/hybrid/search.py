"""The legs and signals of the embedded index: one search of one generation of it.

A leg that raises, hangs or gives garbage becomes a `StageFailure`; the other answers without it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import NamedTuple, TypeVar

import numpy as np

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
from ctxguard.resilience import Budget, Stage, StageFailed, attempt
from ctxguard.retrieval.hybrid.candidates import (
    DENSE,
    LEXICAL,
    SIGNALS,
    Candidates,
    check_finite,
)
from ctxguard.retrieval.hybrid.pipeline import SearchSettings
from ctxguard.retrieval.index import kernels
from ctxguard.retrieval.index.filters import AllowedRows
from ctxguard.retrieval.index.hybrid_index import HybridIndex
from ctxguard.retrieval.index.kernels import FusedCandidates
from ctxguard.retrieval.index.passages import PassageTable
from ctxguard.retrieval.protocols import (
    Float32Array,
    LexicalHits,
    QueryTokens,
    RowArray,
    TokenEncoder,
    token_encoder_of,
)
from ctxguard.retrieval.signals.pooled import ranked_signals

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


@dataclass(frozen=True, slots=True)
class Search:
    """One checked query over one generation of an index.

    Attributes:
        index: The generation.
        passages: Its passages.
        settings: The settings of the view that searches.
        stages: The thread pool and circuit breaker of each leg.
        query: The query's text, without lone surrogates.
        depth: Maximum number of candidates of each leg and of their fusion, ≥ 1.
        query_vector: The caller's vector of the query, shape (dimension,), of any length, perhaps
            with its word pieces; None to encode the query.
        allowed: The only rows that may be candidates; None for all.
        with_signals: Whether the candidates' signals are computed, which need the query's word
            pieces.
    """

    index: HybridIndex
    passages: PassageTable
    settings: SearchSettings
    stages: Mapping[str, Stage]
    query: str
    depth: int
    query_vector: Float32Array | QueryTokens | None = None
    allowed: AllowedRows | None = None
    with_signals: bool = False
    _tokens: list[QueryTokens | None] = field(default_factory=list, init=False)
    _encoders: list[TokenEncoder | None] = field(default_factory=list, init=False)

    def legs(self, budget: Budget | None) -> tuple[Candidates, list[StageFailure]]:
        """Search the legs under their time limits and circuit breakers.

        Returns:
            The candidates, and the legs that did not answer.

        Raises:
            StageUnavailableError: no leg answered.
            OverloadedError: no leg had a thread free.
        """
        stages, asked = self.stages, self.settings.stages
        lexical: LexicalHits | StageFailed | None = None
        dense: DenseHits | Candidates | StageFailed | None = None
        if LEXICAL not in asked:
            dense = attempt(DENSE, stages[DENSE].call, self.dense, _left(budget, DENSE))
        elif DENSE not in asked:
            lexical = attempt(LEXICAL, stages[LEXICAL].call, self.lexical, _left(budget, LEXICAL))
        elif budget is not None and (budget(LEXICAL), budget(DENSE)) != (None, None):
            # Side by side, the dense leg in its pool.
            call = attempt(DENSE, stages[DENSE].submit, self.dense, budget(DENSE))
            lexical = attempt(LEXICAL, stages[LEXICAL].call, self.lexical, budget(LEXICAL))
            dense = call if isinstance(call, StageFailed) else attempt(DENSE, call.result)
        else:
            # On this thread: side by side would save an eighth of the time over a million passages,
            # and cost a third of the throughput with as many clients as cores.
            is_plain = self.allowed is None and stages[LEXICAL].breaker.is_closed
            dense = attempt(DENSE, stages[DENSE].call, self.both if is_plain else self.dense)
            if not isinstance(dense, Candidates):
                lexical = attempt(LEXICAL, stages[LEXICAL].call, self.lexical)
        if not isinstance(lexical, LexicalHits) and not isinstance(dense, DenseHits | Candidates):
            # An open circuit skips a leg only while the other answers: overload may have opened
            # both.
            lexical = _retried(lexical, stages[LEXICAL], self.lexical, budget)
            if not isinstance(lexical, LexicalHits):
                dense = _retried(dense, stages[DENSE], self.dense, budget)
        if isinstance(dense, Candidates):
            # One call of the dense stage searched both legs.
            if stages[LEXICAL].breaker.failures:
                stages[LEXICAL].breaker.succeeded(None)
            return dense, []
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
        return self._nearest(self.unit_vector())

    def both(self) -> Candidates | DenseHits:
        """Search both legs in one compiled call, without a filter; errors as for `dense`.

        Returns:
            The fused candidates. The dense leg's alone if the call failed, or the lexical engine
            has none: searching the lexical leg by itself shows which.
        """
        vector = self.unit_vector()
        try:
            fused = self.index.search_both(self.query, vector, self.depth, self.settings.leg_fusion)
        except Exception:
            fused = None
        return self._nearest(vector) if fused is None else self._candidates(fused)

    def _fused(self, lexical: LexicalHits, dense: DenseHits) -> Candidates:
        """Fuse the legs, each searched by itself."""
        fusion = self.settings.leg_fusion
        return self._candidates(
            self.index.fuse(lexical, dense.rows, dense.vector, self.depth, fusion)
        )

    def query_tokens(self) -> QueryTokens | None:
        """Return the query's word pieces, encoded once unless the caller gave them.

        Returns:
            None if the index has no sentences, or the embedder gives no states of word pieces.

        Raises:
            Exception: whatever the embedder raises.
        """
        if isinstance(self.query_vector, QueryTokens):
            return self.query_vector
        if not self._tokens:
            encoder = None if self.index.sentences is None else self._token_encoder()
            self._tokens.append(None if encoder is None else encoder.encode_query(self.query))
        return self._tokens[0]

    def _token_encoder(self) -> TokenEncoder | None:
        """Return what encodes word pieces, asked for once."""
        if not self._encoders:
            self._encoders.append(token_encoder_of(self.settings.embedder))
        return self._encoders[0]

    def unit_vector(self) -> Float32Array:
        """Return the query's vector at unit length, shape (dimension,); errors as for `dense`."""
        given = self.query_vector
        known = self.query_tokens() if given is None and self.with_signals else given
        vector = (
            self.settings.embedder.encode_query(self.query) if known is None else vector_of(known)
        )
        vector = np.ascontiguousarray(vector, np.float32)
        dimension = self.index.dense.dimension
        if vector.shape != (dimension,):
            raise StageError(
                DENSE, f"the query's vector has shape {vector.shape}, the index has ({dimension},)"
            )
        unit = kernels.unit_vector(vector)
        if unit is None:
            message = f"the query's vector has length {np.linalg.norm(vector)}, so no direction"
            raise StageError(DENSE, message) if given is None else ConfigurationError(message)
        return unit

    def _nearest(self, vector: Float32Array) -> DenseHits:
        rows, scores = self.index.dense.search(vector, self.depth, self.allowed)
        check_finite(DENSE, scores)
        return DenseHits(rows, scores, vector)

    def _candidates(self, fused: FusedCandidates) -> Candidates:
        rows, scores, lexical_scores, cosines = fused
        if not np.isfinite(cosines).all():
            raise StageError(DENSE, "gave NaN or an infinity for a passage")
        legs = {
            LEXICAL: Leg(lexical_scores, ScoreKind.RATIO),
            DENSE: Leg(cosines, ScoreKind.COSINE),
        }
        return Candidates(rows, scores, self.settings.leg_kind, _BOTH, legs)

    def signalled(self, candidates: Candidates) -> Candidates:
        """Add the candidates' signals, and order those of both legs by the ranker.

        Those of one leg keep its order and have the signals of the text family alone: the others
        need both legs.

        Raises:
            StageError: the index holds nothing to compute signals from.
            Exception: whatever the embedder raises.
        """
        index, rows, legs = self.index, candidates.rows, candidates.legs
        forward, sentences, vectors = index.forward, index.sentences, index.dense.vectors
        if forward is None:
            raise StageError(
                SIGNALS, "the index holds nothing to compute signals from; build it again"
            )
        if len(legs) < 2:
            return replace(candidates, signals=forward.text_signals(self.query, rows))
        encoder = None if sentences is None else self._token_encoder()
        tokens = None if encoder is None else self.query_tokens()
        # Where rows do not lie in one segment, those of the candidates are gathered.
        return candidates.ranked(
            *ranked_signals(
                rows,
                legs,
                forward.passage_words(rows),
                forward.query_words(self.query),
                forward.stem_weights,
                index.dense.vectors_at(rows) if vectors is None else vectors,
                None
                if sentences is None or tokens is None or encoder is None
                else sentences.inputs(tokens, rows, encoder.token_table()),
                self.settings.ranker,
                None if index.rows.is_plain else np.arange(rows.size),
            )
        )

    def signal_milliseconds(self, candidates: Candidates) -> dict[str, float]:
        """Time the steps of `signalled`, by the first family that each computes.

        Coverage and position are computed with stems, the second pass with the ranker, whose time
        is the rest of the whole. The query's word pieces are encoded before: they come from the
        pass that gives its vector.
        """
        forward, sentences, tokens = self.index.forward, self.index.sentences, self.query_tokens()
        taken, encoder = {}, None if tokens is None else self._token_encoder()
        if forward is not None:
            taken["stems"] = _milliseconds(
                lambda: forward.text_signals(self.query, candidates.rows)
            )
        if len(candidates.legs) == len(_BOTH):
            if sentences is not None and tokens is not None and encoder is not None:
                table = encoder.token_table()
                taken["sentences"] = _milliseconds(
                    lambda: sentences.signals(tokens, candidates.rows, table)
                )
            whole = _milliseconds(lambda: self.signalled(candidates))
            taken["ranker"] = max(whole - sum(taken.values()), 0.0)
        return taken


def _milliseconds(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return 1e3 * (perf_counter() - start)


def _alone(
    lexical: LexicalHits | StageFailed | None, dense: DenseHits | StageFailed | None
) -> tuple[Candidates, list[StageFailure]]:
    """Return the candidates of the leg that answered; errors as for `Search.legs`."""
    failures = [leg.failure for leg in (lexical, dense) if isinstance(leg, StageFailed)]
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
    outcome: _T | StageFailed, stage: Stage, work: Callable[[], _T], budget: Budget | None
) -> _T | StageFailed:
    """Retry a stage that was skipped only because its circuit was open.

    Returns:
        The outcome of the retry; any other outcome unchanged.
    """
    if not isinstance(outcome, StageFailed) or outcome.failure.kind is not FailureKind.CIRCUIT_OPEN:
        return outcome
    if outcome.probe is not None:
        return attempt(stage.name, outcome.probe.result)
    return attempt(stage.name, stage.call_ignoring_circuit, work, _left(budget, stage.name))


def _left(budget: Budget | None, stage: str) -> float | None:
    return None if budget is None else budget(stage)


def vector_of(query_vector: Float32Array | QueryTokens) -> Float32Array:
    """Return a query's vector, without its word pieces."""
    return query_vector.vector if isinstance(query_vector, QueryTokens) else query_vector
