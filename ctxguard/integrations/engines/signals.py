"""One search whose legs a server answers, and the signals of an engine's candidates.

Signals are computed from the records that the engine keeps with passages.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from threading import Lock
from time import monotonic
from typing import NamedTuple

import numpy as np

from ctxguard._support.fork_safety import OfProcess
from ctxguard.core.corpus_sketch import SKETCH_SIZE, CorpusSketch
from ctxguard.core.types import FloatArray, Leg, Ranking, ScoreKind, StageFailure
from ctxguard.errors import CtxguardError, StageError, StageUnavailableError
from ctxguard.integrations.engines.engine import DENSE, LEXICAL, Engine
from ctxguard.integrations.engines.stored import SIGN
from ctxguard.resilience import Budget, StageFailed, attempt, failure_of
from ctxguard.retrieval.analysers.reading import Reading
from ctxguard.retrieval.hybrid.candidates import SIGNALS, Candidates, Pool, alone, united
from ctxguard.retrieval.hybrid.pipeline import SearchSettings
from ctxguard.retrieval.hybrid.search import vector_of
from ctxguard.retrieval.index.forward import named_signals
from ctxguard.retrieval.index.records import CorpusCounts, Records, weighed_words
from ctxguard.retrieval.index.sentences import sentence_inputs
from ctxguard.retrieval.protocols import (
    Analyser,
    Embedder,
    Float32Array,
    QueryTokens,
    TokenEncoder,
    token_encoder_of,
)
from ctxguard.retrieval.signals.pooled import ranked_signals

REFRESHED_SECONDS = 300.0
"""How often a retriever asks whether the corpus was counted anew."""

MOST_CHANGED = 0.02
"""Share of a corpus that may change before it is counted anew; sketches tell no less apart."""

_PAGE = 1_000


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
        tokens: The query's word pieces; None if they are not known.
        vector: The query's unit vector; None if it was not encoded.
    """

    settings: SearchSettings
    query: str
    depth: int
    query_vector: Float32Array | QueryTokens | None
    ask: Callable[[Float32Array | None], Mapping[str, Ranking | CtxguardError]]
    signals: "EngineSignals | None" = None
    passages: Pool = field(default_factory=lambda: Pool((), ()), init=False)
    tokens: QueryTokens | None = field(default=None, init=False)
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
            given = (encoder or self.settings.embedder).encode_query(self.query)
        self.tokens = given if isinstance(given, QueryTokens) else None
        vector = vector_of(given)
        # One without a direction stays as it is.
        length = float(np.linalg.norm(vector)) or 1.0
        self.vector = np.asarray(vector / length, np.float32)

    def signalled(self, candidates: Candidates) -> Candidates:
        """Add the candidates' signals; see `EngineSignals.signalled`."""
        return candidates if self.signals is None else self.signals.signalled(self, candidates)


class _Weights(NamedTuple):
    """The counts of a corpus, its sketch, and the inverse document frequency of each word piece."""

    version: str
    counts: CorpusCounts
    sketch: CorpusSketch
    of_pieces: FloatArray


class EngineSignals:
    """The signals of one index in an engine. Safe to use from several threads at once.

    Counts of the corpus are read at the first query and then every `REFRESHED_SECONDS`, if they
    have changed.

    Args:
        engine: The index; its settings say what is kept.
        analyser: Splits passages and queries.
        embedder: The model that made its vectors.
    """

    _reading_lock = OfProcess(Lock)

    def __init__(self, engine: Engine, analyser: Analyser, embedder: Embedder) -> None:
        self._engine, self._analyser, self._embedder = engine, analyser, embedder
        self._reading = Reading.of(analyser)
        self._weights: _Weights | None = None
        self._asked_at = -REFRESHED_SECONDS

    @property
    def encoder(self) -> TokenEncoder | None:
        """Encodes word pieces too; None if no sentences are kept. May load the model."""
        is_full = self._engine.settings.signals == "full"
        return token_encoder_of(self._embedder) if is_full else None

    def warm_up(self) -> None:
        """Read the counts and the token table, so that the first query does not wait."""
        self._current()
        if (encoder := self.encoder) is not None:
            encoder.token_table()

    def signalled(self, search: LegsOfRankings, candidates: Candidates) -> Candidates:
        """Add a search's candidates' signals, and order those of both legs by the ranker.

        Passages that were deleted since the legs were searched are left out.

        Raises:
            StageError: the engine does not answer, or holds nothing to compute signals from.
            Exception: whatever the embedder raises.
        """
        query, vector, tokens = search.query, search.vector, search.tokens
        passage_ids, _ = search.passages.select(candidates.rows)
        weights = self._current()
        rows = self._engine.rows(("passage_id", "vector", "record"), passage_ids)
        kept = {row["passage_id"]: row for row in rows}
        there = [at for at, each in enumerate(passage_ids) if each in kept]
        if len(there) < len(passage_ids):
            candidates = candidates.at(np.array(there, np.int64))
        evidence = [kept[passage_ids[at]] for at in there]
        both = len(candidates.legs) > 1
        encoder = self.encoder if both else None
        try:
            records = Records.from_bytes(
                [each["record"] for each in evidence], with_sentences=encoder is not None
            )
        except ValueError as error:
            raise StageError(SIGNALS, f"a passage's record cannot be read: {error}") from error
        words = weighed_words(records, query, self._reading, weights.counts)
        places = np.arange(len(evidence))
        if not both:
            return replace(candidates, signals=named_signals(words.passages, words.query, places))
        vectors = np.stack([each["vector"] for each in evidence])
        if vector is not None and not self._engine.scores_both:
            cosines = np.einsum("nd,d->n", vectors, vector).astype(np.float64)
            terms, mean = self._analyser.analyse(query), self._engine.settings.mean_length
            bm25 = weights.counts.bm25(records, self._reading, terms, mean)
            lexical = _completed(candidates.legs[LEXICAL], bm25)
            legs = {LEXICAL: lexical, DENSE: Leg(cosines, ScoreKind.COSINE)}
            candidates = replace(candidates, legs=legs)
        inputs = None
        if encoder is not None and records.sentences is not None:
            tokens = encoder.encode_query(query) if tokens is None else tokens
            table = encoder.token_table()
            inputs = sentence_inputs(tokens, records.sentences, table, weights.of_pieces)
        return candidates.ranked(
            *ranked_signals(
                candidates.rows,
                candidates.legs,
                words.passages,
                words.query,
                weights.counts.stem_weights(words.stems),
                vectors,
                inputs,
                search.settings.ranker,
                places,
            )
        )

    def _current(self) -> _Weights:
        """Return the counts of the corpus, read again now and then by one thread at a time.

        If they cannot be read again, those that are known serve on.
        """
        weights = self._weights
        is_recent = monotonic() - self._asked_at < REFRESHED_SECONDS
        if weights is not None and is_recent:
            return weights
        if self._reading_lock.acquire(blocking=weights is None):
            try:
                if self._weights is weights:
                    self._refresh()
            except StageError:
                if weights is None:
                    raise
            finally:
                self._reading_lock.release()
        if self._weights is None:
            raise StageError(
                SIGNALS, "the engine holds no counts of words; run `ctxguard index --update`"
            )
        return self._weights

    def _refresh(self) -> None:
        """Read the counts that the engine holds, if they are others than those known."""
        self._asked_at = monotonic()
        found = self._engine.statistics(None if self._weights is None else self._weights.version)
        if found is not None:
            try:
                version, content = found
                counts, sketch = CorpusCounts.from_bytes(content)
            except ValueError as error:
                raise StageError(SIGNALS, f"{error}; run `ctxguard index --update`") from error
            self._weights = _Weights(version, counts, sketch, counts.piece_weights())

    def recount(self) -> None:
        """Count the corpus anew if more than `MOST_CHANGED` of it has changed since it was counted.

        Reads the records of all passages then.
        """
        now = sketch_of(self._engine)
        try:
            self._refresh()
        except StageError as error:
            # Unreadable counts are replaced; an engine that does not answer is no reason to.
            if error.stage != SIGNALS:
                raise
            self._weights = None
        before = None if self._weights is None else self._weights.sketch
        if before is not None and before.passages and now.changed_share(before) <= MOST_CHANGED:
            return
        n_pieces = 0 if (encoder := self.encoder) is None else len(encoder.token_table())
        records = (row["record"] for row in self._engine.rows(("record",)))
        pages = iter(lambda: list(islice(records, _PAGE)), [])
        read = (Records.from_bytes(page, with_sentences=n_pieces > 0) for page in pages)
        content = CorpusCounts.of(read, n_pieces).to_bytes(now)
        self._engine.keep_statistics(blake2b(content, digest_size=8).hexdigest(), content)
        self._refresh()


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
