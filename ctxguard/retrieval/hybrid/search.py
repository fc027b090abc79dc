"""One search of a hybrid index: both legs, the union of their candidates, and their signals.

If one leg fails, the other's candidates are the answer. Reads the index's files, and may use the
legs' threads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ctxguard.core.fusion import fuse
from ctxguard.core.types import FailureKind, Leg, ScoreKind, StageFailure
from ctxguard.errors import (
    FilterViolationError,
    OverloadedError,
    StageError,
    StageUnavailableError,
)
from ctxguard.resilience import Budget, Stage, attempt
from ctxguard.resilience.breaker import FORCED
from ctxguard.retrieval.hybrid.candidates import (
    DENSE,
    LEG_KINDS,
    LEXICAL,
    SIGNALS,
    Candidates,
    check_finite,
)
from ctxguard.retrieval.hybrid.pipeline import LegSearch
from ctxguard.retrieval.index.hybrid_index import HybridIndex
from ctxguard.retrieval.protocols import LegHits, RowArray
from ctxguard.retrieval.signals import CandidateFeatures, QueryPieces, signals

_Answer = LegHits | StageFailure | None
"""A leg's hits or its failure; None if it was not asked."""


@dataclass(eq=False, kw_only=True)
class Search(LegSearch):
    """A search of one generation of an index.

    Attributes:
        index: The generation.
        stages: The threads and circuit breaker of each leg.
        allowed: The only rows that may be candidates, ascending; None for all.
    """

    index: HybridIndex
    stages: Mapping[str, Stage]
    allowed: RowArray | None = None

    def legs(self, budget: Budget | None) -> tuple[Candidates, list[StageFailure]]:
        """Search the legs under their time limits and circuit breakers; see `LegSearch`."""
        stages, asked = self.stages, self.settings.stages
        lexical: _Answer = None
        dense: _Answer = None
        limits: dict[str, float | None] = dict.fromkeys(LEG_KINDS)
        if budget is not None:
            limits = {leg: budget(leg) for leg in LEG_KINDS}
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
        if not isinstance(lexical, LegHits) and not isinstance(dense, LegHits):
            # An open circuit skips a leg only while the other answers: overload may have opened
            # both.
            lexical = self._retried(lexical, self.lexical, budget)
            if not isinstance(lexical, LegHits):
                dense = self._retried(dense, self.dense, budget)
        both: Candidates | StageFailure | None = None
        if isinstance(lexical, LegHits) and isinstance(dense, LegHits):
            both = attempt(DENSE, self._fused, lexical, dense)
            if isinstance(both, StageFailure):
                dense = both
        candidates, failures = (
            (both, []) if isinstance(both, Candidates) else _alone(lexical, dense)
        )
        allowed = self.allowed
        if allowed is not None and not np.isin(candidates.rows, allowed, assume_unique=True).all():
            raise FilterViolationError(
                "filter", "the search gave a passage that `where` excludes: a bug, please report it"
            )
        return candidates, failures

    def _retried(
        self, answer: _Answer, work: Callable[[], LegHits], budget: Budget | None
    ) -> _Answer:
        """Retry a leg that was skipped only because its circuit was open."""
        if not isinstance(answer, StageFailure) or answer.kind is not FailureKind.CIRCUIT_OPEN:
            return answer
        leg = answer.stage
        left = None if budget is None else budget(leg)
        return attempt(leg, self.stages[leg].call, work, left, probe=FORCED)

    def lexical(self) -> LegHits:
        """Search the lexical leg; raises a `StageError` if a score is NaN or infinite."""
        hits = self.index.lexical.search(self.query, self.depth, self.allowed)
        check_finite(LEXICAL, hits.scores)
        return hits

    def dense(self) -> LegHits:
        """Search the dense leg; errors as for `LegSearch.unit_vector` and `lexical`."""
        hits = self.index.dense.search(self.unit_vector(), self.depth, self.allowed)
        check_finite(DENSE, hits.scores)
        return hits

    def _fused(self, lexical: LegHits, dense: LegHits) -> Candidates:
        """Unite the rows of both legs, score each row in both, and keep the best fused ones."""
        rows = np.union1d(lexical.rows, dense.rows)
        cosines = dense.scores_of(rows)
        check_finite(DENSE, cosines)
        legs = {
            LEXICAL: Leg(lexical.scores_of(rows), ScoreKind.RATIO),
            DENSE: Leg(cosines, ScoreKind.COSINE),
        }
        fused, kind = fuse(legs, self.settings.leg_fusion), self.settings.leg_kind
        return Candidates(rows, fused, kind, (LEXICAL, DENSE), legs).ordered_by(
            fused, kind, self.depth
        )

    def signalled(self, candidates: Candidates) -> Candidates:
        """See `LegSearch`; raises a `StageError` if the index was built without signals."""
        index, rows, pieces = self.index, candidates.rows, self.index.pieces
        if index.signals == "none":
            raise StageError(SIGNALS, "the index was built without signals; build it again")
        query = None
        # Without the dense leg the query is not encoded.
        if pieces is not None and self.encoder is not None and DENSE in candidates.legs:
            states = self.states
            if states is not None:
                query = QueryPieces.of(states, pieces.weights, self.encoder.piece_table)
        fused = candidates.scores
        if candidates.kind is not ScoreKind.RANK:
            fused = fuse(candidates.legs, self.settings.leg_fusion)
        features = CandidateFeatures(
            index.lexical.terms.lengths[rows].astype(np.float64),
            *index.lexical.term_vectors(rows),
            index.dense.vectors[rows],
            None if pieces is None else pieces.rows.taken(rows)[0],
        )
        return candidates.signalled(
            signals(features, candidates.legs, fused, query, self.settings.ranker)
        )


def _alone(lexical: _Answer, dense: _Answer) -> tuple[Candidates, list[StageFailure]]:
    """Return the candidates of the only leg that answered; errors as for `Search.legs`."""
    failures = [leg for leg in (lexical, dense) if isinstance(leg, StageFailure)]
    for (name, kind), hits in zip(LEG_KINDS.items(), (lexical, dense), strict=True):
        if isinstance(hits, LegHits):
            legs = {name: Leg(hits.scores, kind)}
            return Candidates(hits.rows, hits.scores, kind, (name,), legs), failures
    is_overload = all(failure.kind is FailureKind.SATURATED for failure in failures)
    raise (OverloadedError if is_overload else StageUnavailableError)(
        " and ".join([failure.stage for failure in failures]),
        "; ".join([failure.cause for failure in failures]),
    )
