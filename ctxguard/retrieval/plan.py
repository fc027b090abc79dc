"""How one view of a retriever searches, and the ranking that one search gives.

DESIGN.md §5 and §7: both legs, every candidate scored in both, fused, and the best
reranked if asked. A plan never changes: another view of a retriever has another plan.
"""

from dataclasses import dataclass, replace

from ctxguard.errors import ConfigurationError, FilterViolationError, QueryError
from ctxguard.fusion import Fusion
from ctxguard.retrieval.index import HybridIndex
from ctxguard.retrieval.legs import (
    RERANK,
    ROUTES,
    STAGES,
    LegStages,
    rerank,
    rerank_stage,
    search_legs,
)
from ctxguard.retrieval.passages import PassageTable, without_surrogates
from ctxguard.retrieval.protocols import Embedder, Float32Array, Reranker, RowArray
from ctxguard.stages import Deadlines, Stage
from ctxguard.types import Passage, Ranking, Route, StageFailure
from ctxguard.where import Where


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """The settings of a search.

    Attributes:
        embedder: The model that made the index's vectors.
        fusion: How the legs' scores become one.
        reranker: Scores the best candidates once more; None for none.
        rerank_depth: How many candidates the reranker scores, ≥ 1.
        max_query_chars: Longer queries are refused, ≥ 1.
        deadlines: Limits of time on the search and its stages.
        stages: Those that are asked, a value of ``STAGES``.
        rerank_stage: The pool and the circuit of the reranker.

    Raises:
        ConfigurationError: a setting out of range.
    """

    embedder: Embedder
    fusion: Fusion
    reranker: Reranker | None
    rerank_depth: int
    max_query_chars: int
    deadlines: Deadlines
    stages: tuple[str, ...]
    rerank_stage: Stage

    def __post_init__(self) -> None:
        _check_positive("rerank_depth", self.rerank_depth)
        _check_positive("max_query_chars", self.max_query_chars)

    @property
    def route(self) -> Route:
        """The stages that answer while all is well."""
        return ROUTES[self.stages]

    @property
    def routes(self) -> tuple[Route, ...]:
        """Every route that can be taken, the fullest first."""
        return tuple(
            [
                route
                for route, stages in STAGES.items()
                if RERANK not in stages or self.reranker is not None
            ]
        )

    def on_route(self, route: Route) -> "SearchPlan":
        """This plan restricted to the stages of a route.

        Raises:
            ConfigurationError: a route that cannot be taken.
        """
        if route not in self.routes:
            raise ConfigurationError(
                f"route {route.value!r} cannot be taken here: "
                + ("no reranker was given" if route in STAGES else "it names no stages")
            )
        return replace(self, stages=STAGES[route])

    def reranked_by(self, reranker: Reranker, rerank_depth: int) -> "SearchPlan":
        """This plan with its best candidates reranked, on a pool and a circuit of their own.

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

    def searchable(self, query: str) -> str:
        """A query as it is searched for, lone surrogates replaced.

        Raises:
            QueryError: an empty or over-long query.
        """
        if not isinstance(query, str) or not query.strip():
            instead = "" if isinstance(query, str) else f" (a {type(query).__name__}, not a text)"
            raise QueryError(f"the query is empty{instead}: there is nothing to search for")
        if len(query) > self.max_query_chars:
            raise QueryError(
                f"the query has {len(query):,} characters, the limit is "
                f"{self.max_query_chars:,} (max_query_chars)"
            )
        return without_surrogates(query)

    def search(
        self,
        index: HybridIndex,
        legs: LegStages,
        query: str,
        *,
        depth: int,
        query_vector: Float32Array | None,
        where: Where | None,
    ) -> Ranking:
        """The best candidates for a query in one generation; see ``HybridRetriever.retrieve``."""
        budget = self.deadlines.start()
        query = self.searchable(query)
        _check_positive("depth", depth)
        if where is not None and not isinstance(where, Where):
            raise ConfigurationError(
                f"where must be a ctxguard.Where or None, not a {type(where).__name__}"
            )
        allowed = None if where is None else index.passages.metadata_rows.allowed(where)
        reranker = self.reranker if RERANK in self.stages else None
        candidates, failures = search_legs(
            index,
            legs,
            budget,
            self.embedder,
            query,
            query_vector=query_vector,
            depth=depth if reranker is None else max(depth, self.rerank_depth),
            stages=self.stages,
            fusion=self.fusion,
            allowed=allowed,
        )
        if allowed is not None and not allowed.hold(candidates.rows):
            raise FilterViolationError("filter", "a leg gave a passage that it forbids")
        if reranker is not None:
            few = candidates.best(self.rerank_depth)
            reranked = rerank(
                index,
                reranker,
                query,
                few,
                stage=self.rerank_stage,
                seconds=budget.rerank_seconds,
            )
            if isinstance(reranked, StageFailure):
                failures.append(reranked)
            else:
                candidates = reranked
        candidates = candidates.best(depth)
        return Ranking(
            passage_ids=index.passages.ids_of(candidates.rows),
            scores=tuple(candidates.scores.tolist()),
            kind=candidates.kind,
            passages=_Rows(index.passages, candidates.rows),
            route=ROUTES[tuple(candidates.legs)],
            legs=candidates.legs,
            failures=tuple(failures),
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """A ranking's passages, each read from the table when it is asked for."""

    table: PassageTable
    rows: RowArray

    def __getitem__(self, position: int, /) -> Passage:
        return self.table[int(self.rows[position])]


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigurationError(f"{name} {value!r} must be at least 1")
