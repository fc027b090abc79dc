"""The settings of one view of a hybrid retriever, and the check of each query against them.

Settings never change: another view of a retriever has other settings.
"""

from dataclasses import dataclass, replace

import numpy as np

from ctxguard.core.fusion import Fusion
from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import DEFAULT_DEPTH, Route
from ctxguard.errors import ConfigurationError, QueryError
from ctxguard.resilience import Deadlines, Stage
from ctxguard.retrieval.hybrid.search import RERANK, ROUTES, STAGES, Search, vector_of
from ctxguard.retrieval.hybrid.stages import rerank_stage
from ctxguard.retrieval.index.hybrid_index import HybridIndex
from ctxguard.retrieval.index.passages import without_surrogates
from ctxguard.retrieval.protocols import Embedder, Float32Array, QueryTokens, Reranker
from ctxguard.retrieval.signals.ranker import Ranker


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How a retriever searches.

    Attributes:
        embedder: The model that made the index's vectors.
        fusion: How the legs' scores become one.
        reranker: Scores the best candidates again; None for no reranking.
        rerank_depth: How many candidates the reranker scores, ≥ 1.
        rerank_stage: The reranker's thread pool and circuit breaker.
        max_query_chars: The longest query that is searched, ≥ 1.
        deadlines: Time limits on the search and its stages; None for no limits.
        stages: The stages to run, a value of ``STAGES``.
        ranker: Orders the candidates where the fusion is ``ranker``.

    Raises:
        ConfigurationError: a setting out of range.
    """

    embedder: Embedder
    fusion: Fusion
    reranker: Reranker | None
    rerank_depth: int
    rerank_stage: Stage
    max_query_chars: int
    deadlines: Deadlines | None
    stages: tuple[str, ...]
    ranker: Ranker

    def __post_init__(self) -> None:
        for name in ("rerank_depth", "max_query_chars"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} {getattr(self, name)!r} must be at least 1")

    @property
    def route(self) -> Route:
        """The stages that answer when none fails."""
        return ROUTES[self.stages]

    @property
    def routes(self) -> tuple[Route, ...]:
        """Every route that a retriever with these settings can take, most stages first."""
        return tuple(
            [
                route
                for route, stages in STAGES.items()
                if RERANK not in stages or self.reranker is not None
            ]
        )

    def on_route(self, route: Route) -> "SearchSettings":
        """These settings with only the stages of a route.

        Raises:
            ConfigurationError: a route that cannot be taken.
        """
        if route not in self.routes:
            raise ConfigurationError(
                f"route {route.value!r} cannot be taken here: "
                + ("no reranker was given" if route in STAGES else "it names no stages")
            )
        return replace(self, stages=STAGES[route])

    def with_reranker(self, reranker: Reranker, rerank_depth: int) -> "SearchSettings":
        """These settings with a reranker, which gets a pool and a circuit breaker of its own.

        Raises:
            ConfigurationError: a depth below 1.
        """
        return replace(
            self,
            reranker=reranker,
            rerank_depth=rerank_depth,
            rerank_stage=rerank_stage(),
            stages=STAGES[Route.HYBRID_RERANK],
        )

    def search(
        self,
        index: HybridIndex,
        query: str,
        *,
        depth: int = DEFAULT_DEPTH,
        query_vector: Float32Array | QueryTokens | None = None,
        where: Where | None = None,
    ) -> Search:
        """Check one query; arguments and errors as for ``HybridRetriever.retrieve``."""
        if not isinstance(query, str) or not query.strip():
            instead = "" if isinstance(query, str) else f" (a {type(query).__name__}, not a text)"
            raise QueryError(f"the query is empty{instead}: there is nothing to search for")
        if len(query) > self.max_query_chars:
            raise QueryError(
                f"the query has {len(query):,} characters, the limit is "
                f"{self.max_query_chars:,} (max_query_chars of the retriever)"
            )
        if depth < 1:
            raise ConfigurationError(f"depth {depth!r} must be at least 1")
        if where is not None and not isinstance(where, Where):
            raise ConfigurationError(
                f"where must be a ctxguard.Where or None, not a {type(where).__name__}"
            )
        n_passages, dimension = len(index.dense), index.dense.dimension
        shape = (dimension,) if query_vector is None else np.shape(vector_of(query_vector))
        if shape != (dimension,):
            raise ConfigurationError(
                f"query_vector has shape {shape}, the index's vectors have ({dimension},): encode "
                "the query with the index's embedder"
            )
        by_ranker = self.fusion.method == "ranker"
        if RERANK in self.stages:
            depth = max(depth, self.rerank_depth)
        return Search(
            index=index,
            query=without_surrogates(query),
            depth=min(depth, n_passages),
            stages=self.stages,
            fusion=replace(self.fusion, method="reciprocal_rank") if by_ranker else self.fusion,
            embedder=self.embedder,
            query_vector=query_vector,
            allowed=None if where is None else index.passages.metadata_rows.allowed(where),
            with_signals=by_ranker,
        )
