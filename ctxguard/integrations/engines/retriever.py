"""A hybrid retriever over an index in an engine: the legs are the engine's, the fusion is ours."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from ctxguard.core.corpus_sketch import SKETCH_SIZE, CorpusSketch
from ctxguard.core.fusion import Fusion
from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import (
    DEFAULT_DEPTH,
    Leg,
    Passage,
    Ranking,
    Route,
    ScoreKind,
    StageFailure,
)
from ctxguard.errors import ConfigurationError, QueryError, StageUnavailableError
from ctxguard.integrations.engines.address import EngineAddress, engine_class
from ctxguard.integrations.engines.engine import DENSE, LEXICAL, Engine, LegQuery
from ctxguard.integrations.engines.stored import (
    IndexedPassage,
    IndexSettings,
    filter_tokens,
    revision_of,
    signed_digest,
    unsigned_digest,
    where_tokens,
)
from ctxguard.integrations.separate_legs import united
from ctxguard.resilience import failure_of
from ctxguard.retrieval.analysers import analyser_of_index, as_analyser
from ctxguard.retrieval.chunks import first_chunk_id
from ctxguard.retrieval.hybrid.retriever import DEFAULT_MAX_QUERY_CHARS
from ctxguard.retrieval.hybrid.signals import SIGNALS
from ctxguard.retrieval.index.hybrid_index import Changes
from ctxguard.retrieval.index.passages import (
    searchable_text,
    validate_passages,
    without_surrogates,
)
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder, named_embedder
from ctxguard.retrieval.models.files import portable_name
from ctxguard.retrieval.protocols import Analyser, Embedder, Float32Array, Progress
from ctxguard.retrieval.text_signals import TextSignals

BATCH = 512
"""Passages that are written or deleted at a time."""

_LEGS: Mapping[Route, tuple[str, ...]] = {
    Route.HYBRID: (LEXICAL, DENSE),
    Route.LEXICAL: (LEXICAL,),
    Route.DENSE: (DENSE,),
}


class EngineRetriever:
    """BM25 and vector search in an engine, fused here, as a retriever for ``ContextGuard``.

    Has the routes of ``HybridRetriever`` without reranking, so that ``calibrate`` fits the fusion
    and a policy for each of them. Safe to use from several threads at once.

    Args:
        engine: The index.
        embedder: The model that made its vectors; None for the one that the index names.
        analyser: What split its texts, if that was an analyser of your own; None for the one that
            the index names.
        fusion: How the legs' scores become one: ``reciprocal_rank`` or ``convex``.
        max_query_chars: Longer queries are refused.
        signals: ``text`` for the text family of the candidates' signals, computed from the texts
            that the engine returns (see `TextSignals`); ``none`` for none.

    Raises:
        ConfigurationError: another embedder or analyser than the index's, or a setting that cannot
            work.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        embedder: Embedder | None = None,
        analyser: Analyser | str | None = None,
        fusion: Fusion | None = None,
        max_query_chars: int = DEFAULT_MAX_QUERY_CHARS,
        signals: Literal["text", "none"] = "text",
    ) -> None:
        settings = engine.settings
        self._engine = engine
        self._embedder = named_embedder(settings.embedder) if embedder is None else embedder
        given = None if analyser is None else as_analyser(analyser)
        self.analyser = analyser_of_index(settings.analyser, given)
        _check_models(settings, self._embedder, self.analyser)
        self._fusion = _checked(Fusion() if fusion is None else fusion)
        self._max_query_chars = _positive("max_query_chars", max_query_chars)
        self._text_signals = TextSignals(self.analyser) if signals == "text" else None
        self._route = Route.HYBRID

    @classmethod
    def build(
        cls,
        passages: Iterable[Passage],
        url: str,
        *,
        key: str | None = None,
        embedder: Embedder | None = None,
        analyser: Analyser | str = "en",
        progress: Progress | None = None,
        **options: Any,
    ) -> Self:
        """Make an index in an engine.

        A build that was interrupted is finished by ``open`` and ``upsert``.

        Args:
            passages: In any order, each with an id of its own; those without title and text are
                left out.
            url: Where; see `EngineAddress`.
            key: A key for the engine's API; None for that of CTXGUARD_ENGINE_KEY, if it is set.
            embedder: None for all-MiniLM-L6-v2.
            analyser: A language code, or an analyser.
            progress: Called with the number of passages encoded so far.
            options: Further arguments of the class.

        Raises:
            DataError: an empty corpus, a repeated id, or metadata that is no JSON.
            ConfigurationError: an index of that name is there already, or the URL is wrong.
            StageUnavailableError: the engine cannot be reached.
            MissingExtraError: its client is not installed.
        """
        valid, _ = validate_passages(passages)
        embedder = SentenceTransformerEmbedder() if embedder is None else embedder
        analyser = as_analyser(analyser)
        address = EngineAddress.parse(url, key=key)
        settings = IndexSettings(
            embedder=embedder.name,
            embedder_weights=embedder.fingerprint(),
            dimension=embedder.dimension,
            analyser=analyser.name,
            analyser_fingerprint=analyser.fingerprint,
            mean_length=fmean(max(len(_terms(analyser, each)), 1) for each in valid),
        )
        engine = engine_class(address).create(address, settings)
        built = cls(engine, embedder=embedder, analyser=analyser, **options)
        built.upsert(valid, progress)
        return built

    @classmethod
    def open(cls, url: str, *, key: str | None = None, **options: Any) -> Self:
        """Open an index in an engine.

        Args:
            url: Where; see `EngineAddress`.
            key: As for ``build``.
            options: Further arguments of the class.

        Raises:
            ConfigurationError: the URL is wrong, or there is no such index.
            DataError: another release wrote it.
            StageUnavailableError: the engine cannot be reached.
            MissingExtraError: its client is not installed.
        """
        address = EngineAddress.parse(url, key=key)
        return cls(engine_class(address).open(address), **options)

    def close(self) -> None:
        """Close the engine's connections."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def embedder(self) -> str:
        """The name of the model that made the index's vectors."""
        return self._engine.settings.embedder

    @property
    def route(self) -> Route:
        """The stages that answer when none fails."""
        return self._route

    @property
    def routes(self) -> tuple[Route, ...]:
        """Every route that this retriever can take, most stages first."""
        return tuple(_LEGS)

    def on_route(self, route: Route) -> Self:
        """A view that asks only for the legs of a route.

        Raises:
            ConfigurationError: a route with other stages.
        """
        if route not in _LEGS:
            raise ConfigurationError(
                f"route {route.value!r} cannot be taken here: an engine answers "
                + ", ".join(each.value for each in _LEGS)
            )
        return self._view(_route=route)

    @property
    def fusion(self) -> Fusion:
        """How the legs' scores become one."""
        return self._fusion

    def with_fusion(self, fusion: Fusion) -> Self:
        """A view with another fusion.

        Raises:
            ConfigurationError: fusion ``ranker``, which needs the passages' vectors.
        """
        return self._view(_fusion=_checked(fusion))

    def with_max_query_chars(self, max_query_chars: int) -> Self:
        """A view that refuses queries longer than this.

        Raises:
            ConfigurationError: a limit below 1.
        """
        return self._view(_max_query_chars=_positive("max_query_chars", max_query_chars))

    def _view(self, **changed: object) -> Self:
        view = copy.copy(self)
        for name, value in changed.items():
            setattr(view, name, value)
        return view

    def fingerprint(self) -> dict[str, str]:
        """The model, the analyser, the fusion, and what of the engine decides what it finds.

        Without the corpus, which changes while the index is kept up: its sketch tells how much.
        """
        settings, signals = self._engine.settings, self._text_signals
        return {
            **self._engine.fingerprint(),
            "embedder": portable_name(settings.embedder),
            "embedder_weights": settings.embedder_weights,
            "analyser": settings.analyser_fingerprint,
            "fusion": self._fusion.fingerprint,
            "text_signals": "none" if signals is None else signals.fingerprint,
        }

    def corpus_sketch(self) -> CorpusSketch:
        """A sketch of all passages, read from the engine."""
        stored = self._engine.smallest_digests(SKETCH_SIZE)
        sketch = CorpusSketch.of(map(unsigned_digest, stored))
        if sketch.passages < SKETCH_SIZE:
            return sketch
        return replace(sketch, passages=max(self._engine.count(), sketch.passages))

    def __len__(self) -> int:
        return self._engine.count()

    def passage(self, passage_id: str) -> Passage:
        """The passage with an id.

        Raises:
            KeyError: no passage has it.
        """
        return self._engine.read([passage_id])[passage_id]

    def known_ids(self, passage_ids: Iterable[str]) -> frozenset[str]:
        """Those of some ids that passages have."""
        return frozenset(self._revisions(list(dict.fromkeys(passage_ids))))

    def labelled_ids(self, passage_ids: Iterable[str]) -> frozenset[str]:
        """Those of some ids that labels may name: of passages, and of documents in chunks."""
        asked = frozenset(passage_ids)
        known = self.known_ids(asked)
        chunks = {first_chunk_id(each): each for each in asked - known}
        return known.union(chunks[each] for each in self.known_ids(chunks))

    def upsert(
        self,
        passages: Iterable[Passage],
        progress: Progress | None = None,
        *,
        delete_others: bool = False,
    ) -> Changes:
        """Add passages, and replace those that are there with another text, title or metadata.

        What is there unchanged is neither encoded nor written. Every 512 passages are written
        together; one that is interrupted can be called again.

        Args:
            passages: Each with an id of its own; those without title and text are left out.
            progress: Called with the number of passages encoded so far.
            delete_others: Delete every passage that is not given.

        Raises:
            DataError: no passages, a repeated id, or metadata that is no JSON.
            StageUnavailableError: the engine cannot be reached.
        """
        valid, _ = validate_passages(passages)
        revisions = {each.passage_id: revision_of(each) for each in valid}
        before = self._engine.revisions() if delete_others else self._revisions(list(revisions))
        to_write = [
            each for each in valid if before.get(each.passage_id) != revisions[each.passage_id]
        ]
        for start in range(0, len(to_write), BATCH):
            batch = to_write[start : start + BATCH]
            vectors = self._embedder.encode_passages([searchable_text(each) for each in batch])
            self._engine.write(
                [
                    IndexedPassage(
                        each,
                        _unit(vector),
                        _terms(self.analyser, each),
                        filter_tokens(each.metadata),
                        signed_digest(each),
                        revisions[each.passage_id],
                    )
                    for each, vector in zip(batch, vectors, strict=True)
                ]
            )
            if progress is not None:
                progress(start + len(batch))
        gone = [each for each in before if each not in revisions] if delete_others else []
        self._delete(gone)
        # Even of no change: one that was interrupted may have written everything and not this.
        self._engine.finish()
        added = sum(each.passage_id not in before for each in to_write)
        return Changes(
            added=added,
            changed=len(to_write) - added,
            deleted=len(gone),
            unchanged=len(valid) - len(to_write),
            encoded=len(to_write),
        )

    def delete(self, passage_ids: Iterable[str]) -> int:
        """Delete passages; an id that no passage has is no error.

        Returns:
            How many were deleted.
        """
        there = sorted(self.known_ids(passage_ids))
        self._delete(there)
        if there:
            self._engine.finish()
        return len(there)

    def _delete(self, passage_ids: Sequence[str]) -> None:
        for start in range(0, len(passage_ids), BATCH):
            self._engine.delete(passage_ids[start : start + BATCH])

    def _revisions(self, passage_ids: Sequence[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for start in range(0, len(passage_ids), BATCH):
            found.update(self._engine.revisions(passage_ids[start : start + BATCH]))
        return found

    def warm_up(self) -> None:
        """Load the model and compile the loops, so that the first query does not wait."""
        self._embedder.encode_query("warm up")
        if self._text_signals is not None:
            self._text_signals.text_signals("warm up", [Passage("warm", "up")])

    def encode_query(self, query: str) -> Float32Array:
        """A query's vector, for callers that retrieve it more than once.

        Raises:
            QueryError: As for ``retrieve``.
        """
        return self._embedder.encode_query(self._checked_query(query))

    def retrieve(
        self,
        query: str,
        *,
        depth: int = DEFAULT_DEPTH,
        where: Where | None = None,
        query_vector: Float32Array | None = None,
    ) -> Ranking:
        """The best candidates for a query, each with the scores of the legs.

        Each leg gives its ``depth`` best; what one leg did not return has there the lowest score
        that it did return, or 0 in BM25, unless the engine scores the candidates of both. Where
        the query cannot be encoded, the lexical leg answers alone and the answer is flagged.

        Args:
            query: At most ``max_query_chars`` characters.
            depth: The most candidates returned, ≥ 1.
            where: A filter on the passages' metadata, which the engine applies; None for all.
            query_vector: The query's vector if it is known; None to encode the query.

        Raises:
            QueryError: an empty query, or one over ``max_query_chars``.
            ConfigurationError: a depth below 1, or a filter that is not a ``Where``.
            StageUnavailableError: the engine failed, or no leg could be asked.
        """
        text = self._checked_query(query)
        if depth < 1:
            raise ConfigurationError(f"depth {depth!r} must be at least 1")
        if where is not None and not isinstance(where, Where):
            raise ConfigurationError(
                f"where must be a ctxguard.Where or None, not a {type(where).__name__}"
            )
        legs = _LEGS[self._route]
        failures: list[StageFailure] = []
        terms = self.analyser.analyse(text) if LEXICAL in legs else None
        vector = query_vector
        if DENSE in legs and vector is None:
            try:
                vector = self._embedder.encode_query(text)
            except Exception as error:
                failures.append(failure_of(DENSE, error))
        if DENSE not in legs:
            vector = None
        if terms is None and vector is None:
            raise StageUnavailableError(DENSE, failures[0].cause)
        any_of = where_tokens(where)
        found: dict[str, Ranking] = {}
        if all(any_of):
            asked = LegQuery(terms, None if vector is None else _unit(vector), depth, any_of)
            errors = []
            for leg, answer in self._engine.search(asked).items():
                if isinstance(answer, Ranking):
                    found[leg] = answer
                else:
                    errors.append(answer)
                    failures.append(failure_of(leg, answer))
            if errors and not found:
                raise errors[0]
        ranking = self._fused(found, tuple(failures), depth)
        return self._signalled(text, ranking)

    def _fused(
        self, found: Mapping[str, Ranking], failures: tuple[StageFailure, ...], depth: int
    ) -> Ranking:
        if len(found) == 2:
            fused = united(found, failures, depth, self._fusion)
            return replace(fused, route=Route.HYBRID)
        for name, ranking in found.items():
            n = min(len(ranking), depth)
            scores = np.array(ranking.scores[:n], np.float64)
            return replace(
                ranking,
                passage_ids=ranking.passage_ids[:n],
                scores=tuple(scores.tolist()),
                route=Route.LEXICAL if name == LEXICAL else Route.DENSE,
                legs={name: Leg(scores, ranking.kind)},
                failures=failures,
            )
        return replace(Ranking.from_hits([], self._kind()), route=self._route, failures=failures)

    def _kind(self) -> ScoreKind:
        kinds = {Route.LEXICAL: ScoreKind.RATIO, Route.DENSE: ScoreKind.COSINE}
        return kinds.get(self._route, self._fusion.kind)

    def _signalled(self, query: str, ranking: Ranking) -> Ranking:
        if self._text_signals is None or not len(ranking):
            return ranking
        try:
            passages = [ranking.passages[position] for position in range(len(ranking))]
            signals = self._text_signals.text_signals(query, passages)
        except Exception as error:
            return replace(ranking, failures=(*ranking.failures, failure_of(SIGNALS, error)))
        return replace(ranking, signals=signals)

    def _checked_query(self, query: str) -> str:
        if not isinstance(query, str) or not query.strip():
            raise QueryError("the query is empty: there is nothing to search for")
        if len(query) > self._max_query_chars:
            raise QueryError(
                f"the query has {len(query):,} characters, the limit is "
                f"{self._max_query_chars:,} (max_query_chars of the retriever)"
            )
        return without_surrogates(query)


def _terms(analyser: Analyser, passage: Passage) -> list[str]:
    return analyser.analyse(searchable_text(passage))


def _unit(vector: Float32Array) -> Float32Array:
    """A vector at length 1; one without a direction as it is."""
    length = float(np.linalg.norm(vector))
    return np.asarray(vector / length if length else vector, np.float32)


def _checked(fusion: Fusion) -> Fusion:
    if fusion.method == "ranker":
        raise ConfigurationError(
            "fusion 'ranker' needs an index of ctxguard; an engine's legs are fused by "
            "'reciprocal_rank' or 'convex'"
        )
    return fusion


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ConfigurationError(f"{name} {value!r} must be at least 1")
    return value


def _check_models(settings: IndexSettings, embedder: Embedder, analyser: Analyser) -> None:
    if embedder.fingerprint() != settings.embedder_weights:
        raise ConfigurationError(
            f"the index was built with the embedder {settings.embedder!r} (weights "
            f"{settings.embedder_weights[:12]}…), not with {embedder.name!r} (weights "
            f"{embedder.fingerprint()[:12]}…); give that embedder, or build the index again"
        )
    if analyser.fingerprint != settings.analyser_fingerprint:
        raise ConfigurationError(
            f"the index was built with the analyser {settings.analyser_fingerprint!r}, and this "
            f"release has {analyser.fingerprint!r}; build the index again"
        )
