"""Runs the pipeline of every hybrid retriever: legs → union → fusion → signals → rerank.

Retrievers over an index of ctxguard or an engine differ only in how they search the legs
(`LegSearch`). Settings are immutable: a view with other settings is another object. Searches the
legs, calls the embedder and the reranker, and reads the clock.
"""

import copy
from abc import ABC, abstractmethod
from dataclasses import replace
from time import perf_counter, time
from typing import Any, Self

import numpy as np

from ctxguard.core.fusion import Fusion
from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import (
    DEFAULT_DEPTH,
    FloatArray,
    Ranking,
    Route,
    StageFailure,
    StageTiming,
)
from ctxguard.errors import ConfigurationError, QueryError, StageError
from ctxguard.resilience.breaker import Watcher
from ctxguard.resilience.deadlines import Budget
from ctxguard.resilience.stage import Stage, attempt
from ctxguard.retrieval.hybrid.search import (
    DEFAULT_RERANK_DEPTH,
    RERANK,
    RERANK_WORKERS,
    ROUTES,
    SEARCH,
    SIGNALS,
    STAGES,
    Candidates,
    LegSearch,
    SearchSettings,
    check_finite,
)
from ctxguard.retrieval.index.hybrid_index import SignalLevel
from ctxguard.retrieval.index.passages import searchable_text, without_surrogates
from ctxguard.retrieval.protocols import Float32Array, QueryStates, Reranker

SIGNAL_DEPTH = 60
"""How many candidates have signals at the default depth; in a deeper search it is six tenths."""


class Hybrid(ABC):
    """A retriever with this pipeline, and its views; safe to use from several threads at once."""

    _settings: SearchSettings

    @property
    @abstractmethod
    def signals(self) -> SignalLevel:
        """The level of the candidates' signals; see ``Ranking.signals``."""

    @property
    def has_signals(self) -> bool:
        """Whether candidates have signals."""
        return self.signals != "none"

    @abstractmethod
    def _search(
        self,
        query: str,
        depth: int,
        query_vector: Float32Array | QueryStates | None,
        where: Where | None,
    ) -> LegSearch:
        """Begin the search for a checked query; ``depth`` is the depth of each leg."""

    def retrieve(
        self,
        query: str,
        *,
        depth: int = DEFAULT_DEPTH,
        query_vector: Float32Array | QueryStates | None = None,
        where: Where | None = None,
    ) -> Ranking:
        """Find the best candidates for a query, each with the scores of every stage that answered.

        Each leg gives its ``depth`` best; their union is scored, fused and cut to ``depth``. If the
        fusion is ``ranker``, the best 60 by reciprocal ranks are kept (0.6 · depth above 100), and
        if both legs answered their signals order them. Ties are broken by passage id. A passage
        without a word of the query is not a lexical hit; the dense leg answers a query of unknown
        words.

        Args:
            query: At most ``max_query_chars`` characters.
            depth: Maximum number of candidates returned, ≥ 1.
            query_vector: The query's vector if it is known, shape (dimension,), or the result of
                ``encode_query``; None to encode the query.
            where: A filter on the passages' metadata. The legs search only allowed passages, so
                they find ``depth`` if there are that many. BM25 counts document frequencies over
                all passages.

        Returns:
            The ranking. Its scores are ``ratio`` for BM25 alone, ``cosine`` for vectors alone, of
            the fusion's kind for both, and ``logit`` after reranking. Stages that failed are in
            ``failures`` and missing from ``route``.

        Raises:
            QueryError: the query is empty or longer than ``max_query_chars``.
            ConfigurationError: a depth below 1, a filter that is not a ``Where``, or a query
                vector of another shape.
            StageUnavailableError: no leg answered in time.
            OverloadedError: no leg had a free thread.
            IndexFolderError: the search found the index damaged.
        """
        settings = self._settings
        budget = None if settings.deadlines is None else settings.deadlines.start()
        text = self._checked(query)
        if depth < 1:
            raise ConfigurationError(f"depth {depth!r} must be at least 1")
        if where is not None and not isinstance(where, Where):
            raise ConfigurationError(
                f"where must be a ctxguard.Where or None, not a {type(where).__name__}"
            )
        is_reranked = RERANK in settings.stages and settings.reranker is not None
        fetched = max(depth, settings.rerank_depth) if is_reranked else depth
        search = self._search(text, fetched, query_vector, where)
        given = query_vector.vector if isinstance(query_vector, QueryStates) else query_vector
        if given is not None and np.shape(given) != (search.dimension,):
            raise ConfigurationError(
                f"query_vector has shape {np.shape(given)}, but the index's vectors have "
                f"({search.dimension},): encode the query with the index's embedder"
            )
        began_at, began = time(), perf_counter()
        candidates, failures = search.legs(budget)
        timings = [StageTiming(SEARCH, began_at, perf_counter() - began)]
        if settings.with_signals and candidates.rows.size:
            began_at, began = time(), perf_counter()
            most = max(SIGNAL_DEPTH, round(0.6 * depth), settings.rerank_depth * is_reranked)
            signalled = attempt(SIGNALS, search.signalled, candidates.best(most))
            timings.append(StageTiming(SIGNALS, began_at, perf_counter() - began))
            if isinstance(signalled, StageFailure):
                failures.append(signalled)
            else:
                candidates = signalled
        if is_reranked:
            began_at, began = time(), perf_counter()
            best = candidates.best(settings.rerank_depth)
            reranked = self._reranked(search, text, best, budget)
            timings.append(StageTiming(RERANK, began_at, perf_counter() - began))
            if isinstance(reranked, StageFailure):
                failures.append(reranked)
            else:
                candidates = best.reranked(reranked)
        if candidates.rows.size > depth:
            candidates = candidates.best(depth)
        passage_ids, passages = search.passages.select(candidates.rows)
        return Ranking(
            passage_ids=passage_ids,
            scores=tuple(candidates.scores.tolist()),
            kind=candidates.kind,
            passages=passages,
            route=ROUTES.get(candidates.answered, Route.EXTERNAL),
            legs=candidates.legs,
            failures=tuple(failures),
            signals=candidates.signals,
            timings=tuple(timings),
        )

    def _checked(self, query: str) -> str:
        """Return a query's text, or refuse the query."""
        most = self._settings.max_query_chars
        if not isinstance(query, str) or not query.strip():
            kind = type(query).__name__
            instead = "" if isinstance(query, str) else f" (of type {kind}, not a string)"
            raise QueryError(f"the query is empty{instead}: there is nothing to search for")
        if len(query) > most:
            raise QueryError(
                f"the query has {len(query):,} characters, but the limit is {most:,} "
                "(max_query_chars of the retriever)"
            )
        return query if query.isascii() else without_surrogates(query)

    def encode_query(self, query: str) -> Float32Array | QueryStates:
        """Encode a query, for callers that search for it more than once.

        Returns its vector, with its word pieces if there are signals of them; refuses a query as
        ``retrieve`` does.
        """
        search = self._search(self._checked(query), DEFAULT_DEPTH, None, None)
        states = search.states
        return self._settings.embedder.encode_query(search.query) if states is None else states

    def _reranked(
        self, search: LegSearch, query: str, candidates: Candidates, budget: Budget | None
    ) -> FloatArray | StageFailure:
        """Return the reranker's logit for each candidate, or its failure."""
        reranker, rows = self._settings.reranker, candidates.rows

        def logits() -> FloatArray:
            texts = [searchable_text(search.passages[row]) for row in rows.tolist()]
            given = np.asarray(reranker.score(query, texts), np.float64)  # type: ignore[union-attr]
            if given.shape != rows.shape:
                raise StageError(RERANK, f"returned shape {given.shape} for {len(texts)} passages")
            check_finite(RERANK, given)
            return given

        left = None if budget is None else budget(RERANK)
        return attempt(RERANK, self._settings.rerank_stage.call, logits, left)

    def _view(self, **changed: Any) -> Self:
        view = copy.copy(self)
        view._settings = replace(self._settings, **changed)
        return view

    def with_fusion(self, fusion: Fusion) -> Self:
        """Return a view with a different fusion; refuse one that cannot be used here."""
        return self._view(fusion=self._usable(fusion))

    def _usable(self, fusion: Fusion) -> Fusion:
        return fusion

    def with_reranker(
        self, reranker: Reranker, *, rerank_depth: int = DEFAULT_RERANK_DEPTH
    ) -> Self:
        """Return a view that reranks its best candidates, with a circuit breaker of its own."""
        return self._view(
            reranker=reranker,
            rerank_depth=rerank_depth,
            rerank_stage=Stage(RERANK, workers=RERANK_WORKERS),
            stages=STAGES[Route.HYBRID_RERANK],
        )

    def with_max_query_chars(self, max_query_chars: int) -> Self:
        """Return a view that refuses queries longer than this."""
        return self._view(max_query_chars=max_query_chars)

    def on_route(self, route: Route) -> Self:
        """Return a view that runs only the stages of a route, one of ``routes``."""
        if route not in self.routes:
            raise ConfigurationError(
                f"route {route.value!r} cannot be taken here: "
                + ("no reranker was given" if route in STAGES else "it names no stages")
            )
        return self._view(stages=STAGES[route])

    def watch_stages(self, watcher: Watcher) -> None:
        """Call ``watcher`` whenever a stage's circuit breaker opens or closes."""
        self._settings.rerank_stage.watch(watcher)

    @property
    def route(self) -> Route:
        """The route that is taken if no stage fails."""
        return ROUTES[self._settings.stages]

    @property
    def routes(self) -> tuple[Route, ...]:
        """Every route that this retriever can take, most stages first."""
        can_rerank = self._settings.reranker is not None
        return tuple(
            [route for route, stages in STAGES.items() if RERANK not in stages or can_rerank]
        )

    @property
    def fusion(self) -> Fusion:
        """The method that combines the legs' scores."""
        return self._settings.fusion

    def _fusion_in_words(self) -> str:
        """Describe the fusion, with the ranker and the level of signals that it uses."""
        words = self.fusion.fingerprint
        if self._settings.with_signals:
            words = f"ranker {self._settings.ranker.digest()}, signals {self.signals}, {words}"
        return words
