"""Wraps anything a guard accepts, or a recorded run, as a retriever that can be replayed.

Calls the retriever, an asynchronous one on the event loop of a thread of its own, which ends with
the process.
"""

import asyncio
import atexit
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

from calibration.data.dataset import Query
from ctxguard.core.fusion import Fusion
from ctxguard.core.scores import differ, direction_advice, is_contradicted, is_valid
from ctxguard.core.types import (
    DEFAULT_DEPTH,
    Hit,
    Passage,
    Ranking,
    Route,
    ScoreKind,
    ScoreKindName,
    id_text,
)
from ctxguard.errors import (
    ConfigurationError,
    CtxguardError,
    DataError,
    QueryError,
    StageUnavailableError,
)
from ctxguard.guard.wrapped_retriever import RetrieverAdapter
from ctxguard.resilience.bounded_caller import RETRIEVER

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import AnyRetriever


class MultiRoute(Protocol):
    """A retriever whose stages can be switched, so that every route can be calibrated."""

    @property
    def routes(self) -> Sequence[Route]: ...

    def on_route(self, route: Route) -> "AnyRetriever": ...

    def with_fusion(self, fusion: Fusion) -> "MultiRoute": ...

    def fingerprint(self) -> Mapping[str, str]: ...

    def encode_query(self, query: str) -> Any: ...


class RankingSource(RetrieverAdapter):
    """Anything that a guard accepts, as a plain retriever of rankings.

    Asynchronous calls are awaited on one event loop, which has a thread of its own: a client's
    connections belong to the loop that they were opened on, and a notebook's loop is running
    already. If there are two calls, the plain one is used.

    Args:
        retriever, score_kind, fingerprint: As for `RetrieverAdapter`.
        keep_passages: Keep every passage that was retrieved, so that ``passage`` finds it.

    Raises:
        ConfigurationError: it is not a retriever, or there is no such kind of score.
    """

    def __init__(
        self,
        retriever: "AnyRetriever",
        *,
        score_kind: ScoreKind | ScoreKindName | None = None,
        fingerprint: Mapping[str, str] | None = None,
        keep_passages: bool = False,
    ) -> None:
        super().__init__(retriever, score_kind=score_kind, fingerprint=fingerprint)
        self._in_loop = self.calls.acall is not None and self.calls.call == self.calls.acall
        self._keeps = keep_passages
        self._passages: dict[str, Passage] = {}
        self._compared = self._contradicted = 0
        self._lowest, self._highest = math.inf, -math.inf

    def with_fusion(self, fusion: Fusion) -> "RankingSource":
        """Return the retriever with a different fusion, or itself if that cannot be set."""
        inner = self.retriever
        if not hasattr(inner, "with_fusion"):
            return self
        return RankingSource(
            inner.with_fusion(fusion),
            score_kind=self.score_kind,
            fingerprint=self._fingerprint,
            keep_passages=self._keeps,
        )

    def add_passages(self, passages: Iterable[Passage]) -> None:
        """Add passages of the corpus for `passage`, as a retriever may return only ids."""
        self._passages |= {passage.passage_id: passage for passage in passages}

    def passage(self, passage_id: str) -> Passage:
        """Return a passage: looked up by the retriever, retrieved before, or added.

        Raises:
            KeyError: it is not known.
        """
        passage_id = id_text(passage_id)
        if passage_id in self._passages:
            return self._passages[passage_id]
        try:
            passage = self.retriever.passage(passage_id)
        except Exception as error:  # optional, and anyone's code
            raise KeyError(passage_id) from error
        if not isinstance(passage, Passage):
            raise KeyError(passage_id)
        return passage

    def retrieve(
        self, query: str, *, depth: int = DEFAULT_DEPTH, query_vector: object = None
    ) -> Ranking:
        """Retrieve the candidates for a query.

        Args:
            query_vector: For a retriever that takes one; None otherwise.

        Raises:
            StageUnavailableError: the retriever raised an error; its own message is quoted.
            ConfigurationError: it returned neither a ranking nor hits.
            CtxguardError: as the retriever raised it.
        """
        options: dict[str, Any] = {"depth": depth}
        if query_vector is not None:
            options["query_vector"] = query_vector
        try:
            if self._in_loop:
                retrieved = _in_loop(lambda: self.calls.call(query, **options))
            else:
                retrieved = self.calls.call(query, **options)
                if inspect.isawaitable(retrieved):
                    awaitable = retrieved
                    retrieved = _in_loop(lambda: awaitable)
            if not isinstance(retrieved, Ranking):
                retrieved = Ranking.from_hits(retrieved, self.score_kind)
            ranking = self._with_direction(retrieved)
        except CtxguardError:
            raise
        except Exception as error:
            raise StageUnavailableError(RETRIEVER, f"{type(error).__name__}: {error}") from error
        if self._keeps:
            for position, passage_id in enumerate(ranking.passage_ids):
                self._passages[passage_id] = ranking.passages[position]
        return ranking

    def _with_direction(self, ranking: Ranking) -> Ranking:
        """Mark and count a list whose order contradicts its scores."""
        contradicted = is_contradicted(ranking)
        scores = [float(score) for score in ranking.scores if is_valid(score)]  # type: ignore[arg-type]
        self._compared += differ(scores)
        if contradicted:
            self._contradicted += 1
            self._lowest = min(self._lowest, *scores)
            self._highest = max(self._highest, *scores)
            self._kind = ranking.kind
        return replace(ranking, contradicted=contradicted)

    def check_directions(self) -> None:
        """Refuse scores if the order of most lists so far contradicts them.

        A list without two different scores is not counted.

        Raises:
            ConfigurationError: the message says which kind of score fits.
        """
        if 2 * self._contradicted > self._compared:
            raise ConfigurationError(
                f"the order of {self._contradicted:,} of {self._compared:,} lists contradicts "
                f"their scores of kind {self._kind.value!r}: the best candidates have the lowest. "
                f"{direction_advice(self._kind, self._lowest, self._highest)}. If the scores are "
                "right, return the best candidate first"
            )


def wrapped(
    retriever: "AnyRetriever | RankingSource",
    *,
    score_kind: ScoreKind | ScoreKindName | None = None,
    fingerprint: Mapping[str, str] | None = None,
) -> RankingSource:
    """Wrap a retriever unless it is wrapped already."""
    if isinstance(retriever, RankingSource):
        return retriever
    return RankingSource(retriever, score_kind=score_kind, fingerprint=fingerprint)


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Start an event loop that runs on a thread until the process ends."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="ctxguard-replay", daemon=True)
    thread.start()

    def close() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    atexit.register(close)
    return loop


def _in_loop(start: Callable[[], Any]) -> Any:
    """Call ``start`` in the loop and return its result, after awaiting it if it is awaitable."""

    async def finished() -> Any:
        returned = start()
        return await returned if inspect.isawaitable(returned) else returned

    return asyncio.run_coroutine_threadsafe(finished(), _event_loop()).result()


class RecordedRankings:
    """Rankings recorded elsewhere, by query text, used in place of a retriever."""

    def __init__(self, rankings: Mapping[str, Ranking]) -> None:
        self._rankings = rankings

    @property
    def passage_ids(self) -> frozenset[str]:
        """The ids of all candidates."""
        return frozenset(chain.from_iterable(each.passage_ids for each in self._rankings.values()))

    @classmethod
    def of_run(
        cls,
        run: Mapping[str, Sequence[Hit]],
        queries: Sequence[Query],
        kind: ScoreKind | ScoreKindName = ScoreKind.RANK,
    ) -> "RecordedRankings":
        """Take the rankings from ``read_trec_run``; a query missing from the run gets an empty one.

        Raises:
            DataError: the run contains none of the queries, or two queries of one text have
                different rankings, which no retriever gives.
            ConfigurationError: a kind that does not exist.
        """
        rankings: dict[str, Ranking] = {}
        first_id: dict[str, str] = {}
        for query in queries:
            entries = run.get(query.query_id, ())
            other = first_id.setdefault(query.text, query.query_id)
            if entries != run.get(other, ()):
                raise DataError(
                    f"queries {other!r} and {query.query_id!r} have the same text but different "
                    "candidates in the run; remove one of them"
                )
            rankings[query.text] = Ranking.from_hits(entries, kind)
        if run and not any(len(ranking) for ranking in rankings.values()):
            raise DataError(
                f"the run contains none of the {len(rankings)} queries: its first query id is "
                f"{next(iter(run))!r}, while theirs is {queries[0].query_id!r}"
            )
        return cls(rankings)

    def retrieve(self, query: str, *, depth: int = DEFAULT_DEPTH) -> Ranking:
        """Return all recorded candidates of a query, whatever the depth.

        Raises:
            QueryError: there are none.
        """
        del depth
        try:
            return self._rankings[query]
        except KeyError:
            raise QueryError("this query is not among the recorded ones") from None
