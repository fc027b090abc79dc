"""Searches a query in an engine, and computes the signals of its candidates.

Signals are computed from the candidates' texts, and from the vectors that the engine keeps. Asks
the engine over its client, and runs the embedder.
"""

from dataclasses import dataclass, replace

import numpy as np

from ctxguard.core.fusion import fuse
from ctxguard.core.types import FloatArray, Leg, Ranking, ScoreKind, StageFailure
from ctxguard.errors import StageUnavailableError
from ctxguard.integrations.engines.engine import Engine, LegQuery
from ctxguard.resilience.deadlines import Budget
from ctxguard.resilience.stage import attempt, failure_of
from ctxguard.retrieval.hybrid.search import (
    DENSE,
    LEG_KINDS,
    LEXICAL,
    Candidates,
    LegSearch,
    alone,
    united,
)
from ctxguard.retrieval.protocols import Analyser, Float32Array
from ctxguard.retrieval.signals import signals
from ctxguard.retrieval.text_signals import TextReader


@dataclass(eq=False, kw_only=True)
class EngineSearch(LegSearch):
    """A search of an index in an engine.

    ``any_of`` is as for `LegQuery`, but a set may be empty: nothing satisfies it. ``vector`` is the
    query's unit vector, None if it was not encoded.
    """

    engine: Engine
    analyser: Analyser
    reader: TextReader
    any_of: tuple[tuple[str, ...], ...]
    vector: Float32Array | None = None

    def legs(self, budget: Budget | None) -> tuple[Candidates, list[StageFailure]]:  # noqa: ARG002
        """Encode the query, search the legs, and unite the candidates of those that answered.

        If the query cannot be encoded, the lexical leg answers alone. See `LegSearch`.
        """
        failures: list[StageFailure] = []
        stages = self.settings.stages
        if DENSE in stages:
            encoded = attempt(DENSE, self.unit_vector)
            if not isinstance(encoded, StageFailure):
                self.vector = encoded
            elif LEXICAL in stages:
                failures.append(encoded)
            else:
                raise StageUnavailableError(DENSE, encoded.cause)
        terms = self.analyser.analyse(self.query) if LEXICAL in stages else None
        asked = LegQuery(terms, self.vector, self.depth, self.any_of)
        answers = (
            self.engine.search(asked)
            if all(self.any_of)
            else {leg: Ranking.from_hits([], LEG_KINDS[leg]) for leg in asked.legs}
        )
        rankings: dict[str, Ranking] = {}
        errors = []
        for leg in [each for each in stages if each in answers]:
            answer = answers[leg]
            if isinstance(answer, Ranking):
                rankings[leg] = answer
            else:
                errors.append(answer)
                failures.append(failure_of(leg, answer))
        if errors and not rankings:
            raise errors[0]
        if len(rankings) == 1:
            self.passages, candidates = alone(*rankings.popitem(), self.depth)
        else:
            self.passages, candidates = united(rankings, self.depth, self.settings.leg_fusion)
        return candidates, failures

    def signalled(self, candidates: Candidates) -> Candidates:
        """See `LegSearch`.

        Passages that were deleted since the legs were searched are left out. Document frequencies
        are counted over the candidates.
        """
        passage_ids, _ = self.passages.select(candidates.rows)
        kept = {
            row["passage_id"]: row["vector"]
            for row in self.engine.rows(("passage_id", "vector"), passage_ids)
        }
        there = [at for at, each in enumerate(passage_ids) if each in kept]
        if len(there) < len(passage_ids):
            candidates = candidates.at(np.array(there, np.int64))
        if not there:
            return candidates
        vectors = np.stack([kept[passage_ids[at]] for at in there])
        read = self.reader.read([self.passages[row] for row in candidates.rows.tolist()], vectors)
        if len(candidates.legs) > 1 and self.vector is not None and not self.engine.scores_both:
            cosines = np.einsum("nd,d->n", vectors, self.vector).astype(np.float64)
            bm25 = read.bm25(self.analyser.analyse(self.query))
            lexical = _completed(candidates.legs[LEXICAL], bm25)
            legs = {LEXICAL: lexical, DENSE: Leg(cosines, ScoreKind.COSINE)}
            candidates = replace(candidates, legs=legs)
        # Without the dense leg the query is not encoded.
        states = None if self.vector is None else self.states
        return candidates.signalled(
            signals(
                read.features,
                candidates.legs,
                fuse(candidates.legs, self.settings.leg_fusion),
                self.reader.query_pieces(states, read),
                self.settings.ranker,
            )
        )


def _completed(leg: Leg, bm25: FloatArray) -> Leg:
    """Give candidates that the lexical leg scored 0 their BM25, on the leg's own scale."""
    known = (leg.scores > 0.0) & (bm25 > 0.0)
    if leg.kind is not ScoreKind.RATIO or not known.any():
        return leg
    scale, lowest = np.median(leg.scores[known] / bm25[known]), leg.scores[known].min()
    missing = np.minimum(scale * bm25, lowest)
    return Leg(np.where(leg.scores > 0.0, leg.scores, missing), leg.kind)
