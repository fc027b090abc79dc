"""The signals of an engine's candidates, computed from the records that it keeps with passages."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from threading import Lock
from time import monotonic
from typing import NamedTuple

import numpy as np

from ctxguard._support.fork_safety import OfProcess
from ctxguard.core.corpus_sketch import SKETCH_SIZE, CorpusSketch
from ctxguard.core.types import FloatArray, Leg, ScoreKind
from ctxguard.errors import StageError
from ctxguard.integrations.engines.engine import DENSE, LEXICAL, Engine
from ctxguard.integrations.engines.stored import unsigned_digest
from ctxguard.retrieval.analysers.reading import Reading
from ctxguard.retrieval.hybrid.candidates import SIGNALS, Candidates
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
from ctxguard.retrieval.signals.ranker import Ranker

REFRESHED_SECONDS = 300.0
"""How often a retriever asks whether the corpus was counted anew."""

MOST_CHANGED = 0.02
"""Share of a corpus that may change before it is counted anew; sketches tell no less apart."""

_PAGE = 1_000


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

    def signalled(
        self,
        query: str,
        candidates: Candidates,
        passage_ids: Sequence[str],
        *,
        tokens: QueryTokens | None,
        vector: Float32Array | None,
        ranker: Ranker,
    ) -> Candidates:
        """Add the candidates' signals, and order those of both legs by the ranker.

        Passages that were deleted since the legs were searched are left out.

        Args:
            query: The query's text.
            candidates: Best first.
            passage_ids: Their ids.
            tokens: The query's word pieces; None if they are not known.
            vector: The query's unit vector.
            ranker: The weights.

        Raises:
            StageError: the engine does not answer, or holds nothing to compute signals from.
            Exception: whatever the embedder raises.
        """
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
                ranker,
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
    sketch = CorpusSketch.of(map(unsigned_digest, engine.smallest_digests(SKETCH_SIZE)))
    if sketch.passages < SKETCH_SIZE:
        return sketch
    return replace(sketch, passages=max(engine.count(), sketch.passages))
