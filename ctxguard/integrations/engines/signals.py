"""One search whose legs a server answers, and the signals of an engine's candidates.

Signals are computed from the candidates' texts, and from the vectors that the engine keeps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ctxguard.core.corpus_sketch import SKETCH_SIZE, CorpusSketch
from ctxguard.core.types import FloatArray, Leg, Ranking, ScoreKind, StageFailure
from ctxguard.errors import CtxguardError, StageUnavailableError
from ctxguard.integrations.engines.engine import DENSE, LEXICAL, Engine
from ctxguard.integrations.engines.stored import SIGN
from ctxguard.resilience import Budget, StageFailed, attempt, failure_of
from ctxguard.retrieval.hybrid.candidates import Candidates, Pool, alone, united
from ctxguard.retrieval.hybrid.pipeline import SearchSettings
from ctxguard.retrieval.hybrid.search import vector_of
from ctxguard.retrieval.protocols import (
    Analyser,
    Embedder,
    Float32Array,
    QueryStates,
    TokenEncoder,
    token_encoder_of,
)
from ctxguard.retrieval.signals import likeness
from ctxguard.retrieval.text_signals import TextReader


@dataclass(slots=True)
class LegsOfRankings:
    """The search of a query whose legs are rankings that a server answers.

    Attributes:
        settings: The settings of the view that searches.
        query: The query's text, without lone surrogates.
        depth: Maximum number of candidates of each leg and of their fusion, ≥ 1.
        query_vector: The caller's vector of the query; None to encode it.
        ask: Asks for the legs of a unit vector; None for a vector that is not to be searched, or
            could not be encoded.
        signals: Computes the candidates' signals; None for none.
        passages: The candidates' passages, once the legs have answered.
        states: The query's word pieces; None if they are not known.
        vector: The query's unit vector; None if it was not encoded.
    """

    settings: SearchSettings
    query: str
    depth: int
    query_vector: Float32Array | QueryStates | None
    ask: Callable[[Float32Array | None], Mapping[str, Ranking | CtxguardError]]
    signals: "EngineSignals | None" = None
    passages: Pool = field(default_factory=lambda: Pool((), ()), init=False)
    states: QueryStates | None = field(default=None, init=False)
    vector: Float32Array | None = field(default=None, init=False)

    @property
    def with_signals(self) -> bool:
        """Whether the candidates' signals are computed."""
        return self.signals is not None

    def legs(self, budget: Budget | None) -> tuple[Candidates, list[StageFailure]]:  # noqa: ARG002
        """Encode the query, ask for the legs, and unite the candidates of those that answered.

        If the query cannot be encoded, the lexical leg answers alone.

        Raises:
            StageError: no leg answered.
        """
        failures: list[StageFailure] = []
        if DENSE in self.settings.stages:
            encoded = attempt(DENSE, self._encode)
            if isinstance(encoded, StageFailed):
                failures.append(encoded.failure)
                if LEXICAL not in self.settings.stages:
                    raise StageUnavailableError(DENSE, encoded.failure.cause)
        rankings: dict[str, Ranking] = {}
        errors = []
        answers = self.ask(self.vector)
        for leg in [each for each in self.settings.stages if each in answers]:
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

    def _encode(self) -> None:
        given = self.query_vector
        if given is None:
            encoder = None if self.signals is None else self.signals.encoder
            embedder = self.settings.embedder
            given = (
                embedder.encode_query(self.query) if encoder is None else encoder.query(self.query)
            )
        self.states = given if isinstance(given, QueryStates) else None
        vector = vector_of(given)
        # One without a direction stays as it is.
        length = float(np.linalg.norm(vector)) or 1.0
        self.vector = np.asarray(vector / length, np.float32)

    def signalled(self, candidates: Candidates) -> Candidates:
        """Add the candidates' signals; see `EngineSignals.signalled`."""
        return candidates if self.signals is None else self.signals.signalled(self, candidates)


class EngineSignals:
    """The signals of one index in an engine. Safe to use from several threads at once.

    Args:
        engine: The index; its settings say whether there are signals.
        analyser: Splits passages and queries.
        embedder: The model that made its vectors.
    """

    def __init__(self, engine: Engine, analyser: Analyser, embedder: Embedder) -> None:
        self._engine, self._analyser, self._embedder = engine, analyser, embedder
        self._reader = TextReader(analyser, lambda: self.encoder)

    @property
    def encoder(self) -> TokenEncoder | None:
        """Encodes word pieces too; None without signals. May load the model."""
        has_signals = self._engine.settings.signals != "none"
        return token_encoder_of(self._embedder) if has_signals else None

    def signalled(self, search: LegsOfRankings, candidates: Candidates) -> Candidates:
        """Add a search's candidates' signals, and order those of both legs by the ranker.

        Passages that were deleted since the legs were searched are left out. How rare words are is
        counted in the candidates.

        Raises:
            StageError: the engine does not answer.
            Exception: whatever the embedder raises.
        """
        passage_ids, _ = search.passages.select(candidates.rows)
        kept = {
            row["passage_id"]: row["vector"]
            for row in self._engine.rows(("passage_id", "vector"), passage_ids)
        }
        there = [at for at, each in enumerate(passage_ids) if each in kept]
        if len(there) < len(passage_ids):
            candidates = candidates.at(np.array(there, np.int64))
        if not there:
            return candidates
        vectors = np.stack([kept[passage_ids[at]] for at in there])
        passages = [search.passages[row] for row in candidates.rows.tolist()]
        read = self._reader.read(passages, vectors)
        if len(candidates.legs) > 1 and search.vector is not None and not self._engine.scores_both:
            cosines = np.einsum("nd,d->n", vectors, search.vector).astype(np.float64)
            bm25 = read.bm25(self._analyser.analyse(search.query))
            lexical = _completed(candidates.legs[LEXICAL], bm25)
            legs = {LEXICAL: lexical, DENSE: Leg(cosines, ScoreKind.COSINE)}
            candidates = replace(candidates, legs=legs)
        states = search.states
        if states is None and search.vector is not None and self.encoder is not None:
            states = self.encoder.query(search.query)
        return candidates.signalled(
            likeness.signals(
                read.candidates._replace(legs=candidates.legs),
                self._reader.query_pieces(states, read),
                search.settings.ranker,
            )
        )


def _completed(leg: Leg, bm25: FloatArray) -> Leg:
    """Score the candidates that the lexical leg did not return, on its own scale.

    Args:
        leg: Its scores, 0 for those; each shape (n,).
        bm25: The candidates' BM25 as it is computed here.
    """
    known = (leg.scores > 0.0) & (bm25 > 0.0)
    if leg.kind is not ScoreKind.RATIO or not known.any():
        return leg
    scale, lowest = np.median(leg.scores[known] / bm25[known]), leg.scores[known].min()
    missing = np.minimum(scale * bm25, lowest)
    return Leg(np.where(leg.scores > 0.0, leg.scores, missing), leg.kind)


def sketch_of(engine: Engine) -> CorpusSketch:
    """Read a sketch of all passages."""
    sketch = CorpusSketch.of([each + SIGN for each in engine.smallest_digests(SKETCH_SIZE)])
    if sketch.passages < SKETCH_SIZE:
        return sketch
    return replace(sketch, passages=max(engine.count(), sketch.passages))
