"""Retrieves from an index in an engine, which searches the legs.

Asks the engine over its client, and loads and runs the models.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any, Self

import numpy as np

from ctxguard.core.corpus_sketch import SKETCH_SIZE, CorpusSketch
from ctxguard.core.fusion import Fusion
from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import FloatArray, Passage, id_text
from ctxguard.errors import ConfigurationError
from ctxguard.integrations.engines.address import EngineAddress
from ctxguard.integrations.engines.engine import Engine, engine_class
from ctxguard.integrations.engines.search import EngineSearch
from ctxguard.integrations.engines.stored import (
    PASSAGE,
    SIGN,
    IndexedPassage,
    IndexSettings,
    passage_of,
    revision_of,
    where_tokens,
)
from ctxguard.retrieval.analysers import analyser_of_index, as_analyser
from ctxguard.retrieval.hybrid.pipeline import Hybrid
from ctxguard.retrieval.hybrid.search import DEFAULT_MAX_QUERY_CHARS, SearchSettings
from ctxguard.retrieval.index.hybrid_index import Changes, SignalLevel, check_embedder, encode
from ctxguard.retrieval.index.passages import PassageTable, chunk_id, read_passages, searchable_text
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.models.files import portable_name
from ctxguard.retrieval.protocols import (
    Analyser,
    BuildProgress,
    Embedder,
    Float32Array,
    QueryStates,
    token_encoder_of,
)
from ctxguard.retrieval.signals import Ranker
from ctxguard.retrieval.text_signals import TextReader

BATCH = 512
"""How many passages are written or deleted at a time."""


class EngineRetriever(Hybrid, AbstractContextManager["EngineRetriever"]):
    """BM25 and vector search in an engine, fused here, as a retriever for ``ContextGuard``.

    Has the routes of ``HybridRetriever``, so that ``calibrate`` fits the fusion and a policy for
    each of them. If the query cannot be encoded, or a leg fails in the engine, the other leg
    answers alone and the answer is flagged. Safe to use from several threads at once.

    Args:
        engine: The index.
        embedder: The model that made its vectors; None for the one that the index names.
        analyser: The one that split its texts, if it was your own; None for the one that the index
            names.
        fusion: Combines the legs' scores; None for the pooled ranker if the index has signals,
            else reciprocal ranks.
        max_query_chars: Longer queries are refused.
        ranker: The weights by which fusion ``ranker`` orders; None for those of the package.

    Raises:
        ConfigurationError: the embedder or analyser is not the index's, or a setting is invalid.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        embedder: Embedder | None = None,
        analyser: Analyser | str | None = None,
        fusion: Fusion | None = None,
        max_query_chars: int = DEFAULT_MAX_QUERY_CHARS,
        ranker: Ranker | None = None,
    ) -> None:
        settings = engine.settings
        self._engine = engine
        if embedder is None:
            embedder = SentenceTransformerEmbedder(settings.embedder)
        given = None if analyser is None else as_analyser(analyser)
        self.analyser = analyser_of_index(settings.analyser, given)
        check_embedder(settings.embedder, settings.embedder_weights, embedder)
        if self.analyser.fingerprint != settings.analyser_fingerprint:
            raise ConfigurationError(
                f"the index was built with the analyser {settings.analyser_fingerprint!r}, but "
                f"this release has {self.analyser.fingerprint!r}; build the index again"
            )
        encoder = token_encoder_of(embedder) if self.has_signals else None
        self._reader = TextReader(self.analyser, encoder)
        default = Fusion("ranker") if self.has_signals else Fusion()
        self._settings = SearchSettings(
            embedder=embedder,
            fusion=self._usable(default if fusion is None else fusion),
            max_query_chars=max_query_chars,
            ranker=Ranker.default() if ranker is None else ranker,
        )

    @classmethod
    def build(
        cls,
        passages: Iterable[Passage],
        url: str,
        *,
        key: str | None = None,
        embedder: Embedder | None = None,
        analyser: Analyser | str = "en",
        progress: BuildProgress | None = None,
        signals: SignalLevel = "full",
        **options: Any,
    ) -> Self:
        """Create an index in an engine.

        To finish an interrupted build, call ``open`` and ``update``.

        Args:
            passages: As for `HybridRetriever.build`, like the arguments that are not named here.
            url: Where; see `EngineAddress`.
            key: A key for the engine's API; None for that of CTXGUARD_ENGINE_KEY, if it is set.
            options: Further arguments of the class.

        Raises:
            DataError: an empty corpus, a repeated id, or metadata that is not JSON.
            ConfigurationError: an index with that name exists, or the URL is wrong.
            StageUnavailableError: the engine cannot be reached.
            MissingExtraError: its client is not installed.
        """
        given, _ = read_passages(passages)
        embedder = SentenceTransformerEmbedder() if embedder is None else embedder
        analyser = as_analyser(analyser)
        address = EngineAddress.parse(url, key=key)
        settings = IndexSettings(
            embedder=embedder.name,
            embedder_weights=embedder.fingerprint(),
            dimension=embedder.dimension,
            analyser=analyser.name,
            analyser_fingerprint=analyser.fingerprint,
            mean_length=fmean(max(len(_terms(analyser, each)), 1) for each in given),
            signals=signals,
        )
        engine = engine_class(address).open(address, settings)
        built = cls(engine, embedder=embedder, analyser=analyser, **options)
        built._bring_up(given, progress)
        return built

    @classmethod
    def open(cls, url: str, *, key: str | None = None, **options: Any) -> Self:
        """Open an index in an engine; arguments as for ``build``.

        Raises:
            ConfigurationError: the URL is wrong, or the index does not exist.
            DataError: another release wrote it.
            StageUnavailableError: the engine cannot be reached.
            MissingExtraError: its client is not installed.
        """
        address = EngineAddress.parse(url, key=key)
        return cls(engine_class(address).open(address), **options)

    def close(self) -> None:
        """Close the engine's connections."""
        self._engine.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def embedder(self) -> str:
        """The name of the model that made the index's vectors."""
        return self._engine.settings.embedder

    @property
    def signals(self) -> SignalLevel:
        """The level of the candidates' signals; see ``Ranking.signals``."""
        return self._engine.settings.signals

    def _usable(self, fusion: Fusion) -> Fusion:
        """Refuse fusion ``ranker`` if there are no signals, because it needs them."""
        if fusion.method == "ranker" and not self.has_signals:
            raise ConfigurationError(
                "fusion 'ranker' needs an index with signals: build it with ctxguard and "
                "signals 'full', or fuse by 'reciprocal_rank' or 'convex'"
            )
        return fusion

    def fingerprint(self) -> dict[str, str]:
        """Return the model, the analyser, the fusion, and the engine's relevant settings.

        The corpus is not part of it: its sketch tells how much of it changed.
        """
        settings, reranker = self._engine.settings, self._settings.reranker
        return {
            **self._engine.fingerprint(),
            "embedder": portable_name(settings.embedder),
            "embedder_weights": settings.embedder_weights,
            "analyser": settings.analyser_fingerprint,
            "fusion": self._fusion_in_words(),
            **({} if reranker is None else {"reranker": reranker.fingerprint}),
        }

    def similarities(self, query: str, texts: Sequence[str], /) -> FloatArray:
        """Compare a query with some texts, shape (n,), using the embedder."""
        embedder = self._settings.embedder
        vectors = embedder.encode_passages(texts) @ embedder.encode_query(query)
        return np.asarray(vectors, np.float64)

    def corpus_sketch(self) -> CorpusSketch:
        """Read a sketch of all passages from the engine."""
        digests = self._engine.smallest_digests(SKETCH_SIZE)
        sketch = CorpusSketch.of([each + SIGN for each in digests])
        if sketch.passages < SKETCH_SIZE:
            return sketch
        return replace(sketch, passages=max(len(self), sketch.passages))

    def __len__(self) -> int:
        return self._engine.count()

    def passage(self, passage_id: str) -> Passage:
        """Return the passage with this id.

        Raises:
            KeyError: no passage has it.
        """
        for row in self._engine.rows(PASSAGE, [id_text(passage_id)]):
            if (found := passage_of(row)) is not None:
                return found
        raise KeyError(passage_id)

    def stored_passages(self) -> Iterator[Passage]:
        """Read all passages from the engine, in no particular order."""
        for row in self._engine.rows(PASSAGE):
            if (found := passage_of(row)) is not None:
                yield found

    def known_ids(self, passage_ids: Iterable[str]) -> frozenset[str]:
        """Return those among these ids that belong to a passage."""
        return frozenset([each for each, _ in self._revisions(list(dict.fromkeys(passage_ids)))])

    def labelled_ids(self, passage_ids: Iterable[str]) -> frozenset[str]:
        """Return the ids that labels may name: of passages, and of documents in chunks."""
        asked = frozenset(passage_ids)
        known = self.known_ids(asked)
        chunks = {chunk_id(each, 1): each for each in asked - known}
        return known.union(chunks[each] for each in self.known_ids(chunks))

    def upsert(self, passages: Iterable[Passage], progress: BuildProgress | None = None) -> Changes:
        """Add passages, and replace those whose text, title or metadata changed.

        Unchanged passages are neither encoded nor written. An interrupted call can be repeated.
        Arguments as for ``build``.

        Raises:
            DataError: no passages, a repeated id, or metadata that is not JSON.
            StageUnavailableError: the engine cannot be reached.
        """
        given, _ = read_passages(passages)
        return self._bring_up(given, progress)

    def update(self, passages: Iterable[Passage], progress: BuildProgress | None = None) -> Changes:
        """Make the index hold exactly these passages; see ``upsert``."""
        given, _ = read_passages(passages)
        return self._bring_up(given, progress, delete_others=True)

    def _bring_up(
        self, given: PassageTable, progress: BuildProgress | None, *, delete_others: bool = False
    ) -> Changes:
        """Write the passages of a table that are new or changed."""
        stored = dict(self._revisions(None if delete_others else given.ids))
        gone = [each for each in stored if given.row_of(each) is None]
        to_write = [
            (row, revision)
            for row, revision in enumerate(map(revision_of, given))
            if stored.get(given.ids[row]) != revision
        ]
        changed = sum(given.ids[row] in stored for row, _ in to_write)
        for start in range(0, len(to_write), BATCH):
            if progress is not None:
                progress(start, len(to_write))
            batch = to_write[start : start + BATCH]
            indexed = self._indexed([(given[row], revision) for row, revision in batch])
            size = self._engine.rows_per_write
            for at in range(0, len(indexed), size):
                self._engine.insert(indexed[at : at + size])
        if progress is not None:
            progress(len(to_write), len(to_write))
        self._delete(gone)
        # Also without a change: an interrupted call may have written everything but this.
        self._engine.finish()
        return Changes(
            added=len(to_write) - changed,
            changed=changed,
            deleted=len(gone),
            unchanged=len(given) - len(to_write),
            encoded=len(to_write),
        )

    def delete(self, passage_ids: Iterable[str]) -> int:
        """Delete passages; unknown ids are ignored. Returns how many were deleted."""
        there = sorted(self.known_ids(map(id_text, passage_ids)))
        self._delete(there)
        if there:
            self._engine.finish()
        return len(there)

    def _indexed(self, batch: Sequence[tuple[Passage, int]]) -> list[IndexedPassage]:
        """Encode passages, given with their revisions, and split them into terms."""
        passages = [passage for passage, _ in batch]
        texts = list(map(searchable_text, passages))
        vectors = encode(self._settings.embedder, texts, [each.passage_id for each in passages])
        return [
            IndexedPassage(each, vector, _terms(self.analyser, each), revision)
            for (each, revision), vector in zip(batch, vectors, strict=True)
        ]

    def _delete(self, passage_ids: Sequence[str]) -> None:
        for start in range(0, len(passage_ids), BATCH):
            self._engine.delete(passage_ids[start : start + BATCH])

    def _revisions(self, passage_ids: Sequence[str] | None) -> Iterator[tuple[str, int]]:
        """Read the revisions of the passages with these ids that exist; None for all passages."""
        fields = ("passage_id", "revision")
        if passage_ids is None:
            found = [self._engine.rows(fields)]
        else:
            starts = range(0, len(passage_ids), BATCH)
            found = [self._engine.rows(fields, passage_ids[at : at + BATCH]) for at in starts]
        for row in chain.from_iterable(found):
            yield row["passage_id"], row["revision"]

    def warm_up(self) -> None:
        """Load the model, so that the first query does not wait."""
        self.encode_query("warm up")
        if (encoder := self._reader.encoder) is not None:
            encoder.piece_table  # noqa: B018  computed once

    def _search(
        self,
        query: str,
        depth: int,
        query_vector: Float32Array | QueryStates | None,
        where: Where | None,
    ) -> EngineSearch:
        return EngineSearch(
            settings=self._settings,
            query=query,
            depth=depth,
            given=query_vector,
            dimension=self._engine.settings.dimension,
            encoder=self._reader.encoder,
            engine=self._engine,
            analyser=self.analyser,
            reader=self._reader,
            any_of=where_tokens(where),
        )


def _terms(analyser: Analyser, passage: Passage) -> list[str]:
    return analyser.analyse(searchable_text(passage))
