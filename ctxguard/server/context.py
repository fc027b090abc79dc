"""The guarded index over HTTP: a context of our own, and OpenAI's search of a vector store."""

from asyncio import to_thread
from collections.abc import Collection, Sequence
from time import time
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, Field, TypeAdapter, with_config
from starlette.requests import Request
from starlette.types import Scope
from typing_extensions import TypedDict

from ctxguard.core.context import Context
from ctxguard.core.metadata_filter import Token, Where, values_of
from ctxguard.core.types import Passage
from ctxguard.errors import ConfigurationError
from ctxguard.guard import ContextGuard
from ctxguard.server.attribute_filters import MOST_SEARCHES, Filter, alternatives_of, holds
from ctxguard.server.filtering import CandidateVerdict, Name
from ctxguard.server.limits import FEW_VALUES, MOST_CONDITIONS, MOST_VALUES
from ctxguard.server.problems import HttpAnswer, Problem, ProblemKind
from ctxguard.server.wire import STRICT, answer, named, parse

Scalar = str | int | bool
Allowed = Annotated[
    Scalar | Annotated[list[Scalar], Field(fail_fast=True)],
    # Makes it an object of Python first: a list of JSON would be copied for each error in it.
    BeforeValidator(lambda given: given),
]
DEFAULT_RESULTS = 10


@with_config(STRICT)
class ContextRequest(TypedDict):
    """A query with conditions on its passages."""

    query: str
    where: NotRequired[
        Annotated[
            Annotated[dict[str, Allowed], *named(MOST_CONDITIONS)] | None,
            Field(
                description="Fields of metadata with the value, or the values, they must have: "
                f"at most {MOST_CONDITIONS} fields, and {MOST_VALUES:,} values in all."
            ),
        ]
    ]
    segment: NotRequired[Name | None]
    session_id: NotRequired[Name | None]


class ContextPassage(TypedDict):
    """A passage that is served."""

    passage_id: str
    title: str
    text: str
    metadata: Any


class ContextVerdict(CandidateVerdict):
    """Whether one candidate was kept, and why."""

    passage_id: str


class Failure(TypedDict):
    """A stage that was left out."""

    stage: str
    kind: str
    cause: str


class ContextConflict(TypedDict):
    """Two passages of the context that contradict each other, by their 1-based places."""

    first: int
    second: int
    differences: Annotated[
        list[list[dict[str, int | str]]],
        Field(description="What either says, with its first character and the one after its last."),
    ]


class ContextAnswer(TypedDict):
    """The context, and the verdict on every candidate."""

    request_id: str
    session_id: str | None
    segment: str | None
    query: str
    route: str
    mode: str
    profile_id: str | None
    sufficient: bool | None
    p_sufficient: float | None
    flags: list[str]
    differences: list[str]
    failures: list[Failure]
    text: Annotated[str, Field(description="What to give the model.")]
    candidates: int
    kept: int
    dropped: dict[str, int]
    passages: list[ContextPassage]
    conflicts: Annotated[
        list[ContextConflict] | None,
        Field(description="None unless the service flags conflicts."),
    ]
    verdicts: list[ContextVerdict]


@with_config(STRICT)
class RankingOptions(TypedDict):
    """The least score of a result; a ranker is accepted and not used."""

    ranker: NotRequired[str | None]
    score_threshold: NotRequired[float | None]


@with_config(STRICT)
class SearchRequest(TypedDict):
    """A search of a vector store, as OpenAI names its fields."""

    query: str | Annotated[list[str], Field(min_length=1, max_length=MOST_SEARCHES)]
    max_num_results: NotRequired[Annotated[int, Field(ge=1, le=50)]]
    filters: NotRequired[Filter | None]
    ranking_options: NotRequired[RankingOptions | None]
    rewrite_query: NotRequired[bool | None]


class SearchResult(TypedDict):
    """A passage that was kept."""

    file_id: str
    filename: str
    score: float
    attributes: dict[str, str | float | bool] | None
    content: Annotated[list[dict[str, str]], Field(description="One part, of type text.")]


class SearchAnswer(TypedDict):
    """The kept passages, best first."""

    object: Literal["vector_store.search_results.page"]
    search_query: list[str]
    data: list[SearchResult]
    has_more: Literal[False]
    next_page: None


CONTEXT_REQUEST: TypeAdapter[ContextRequest] = TypeAdapter(ContextRequest)
SEARCH_REQUEST: TypeAdapter[SearchRequest] = TypeAdapter(SearchRequest)


class ContextEndpoint:
    """Answers queries with a context.

    Args:
        guard: Retrieves and decides.
    """

    def __init__(self, guard: ContextGuard) -> None:
        self._guard = guard

    async def __call__(self, scope: Scope) -> HttpAnswer:
        """Answer one request.

        Raises:
            Problem: it cannot be answered.
        """
        given = parse(CONTEXT_REQUEST, scope["state"]["body"])
        context = await _retrieved(
            self._guard,
            scope,
            given["query"],
            given.get("where"),
            segment=given.get("segment"),
            session_id=given.get("session_id"),
        )
        return answer(context.to_dict(), _degraded(context))


class SearchEndpoint:
    """Answers OpenAI's search of a vector store.

    Args:
        guard: Retrieves and decides.
        store_id: The only store there is.
    """

    def __init__(self, guard: ContextGuard, store_id: str) -> None:
        self._guard = guard
        self._store_id = store_id
        self._opened = int(time())

    async def __call__(self, scope: Scope) -> HttpAnswer:
        """Answer one request.

        Raises:
            Problem: it cannot be answered.
        """
        self._check_store(scope)
        given = parse(SEARCH_REQUEST, scope["state"]["body"])
        queries = [given["query"]] if isinstance(given["query"], str) else given["query"]
        filters = given.get("filters")
        alternatives: Sequence[dict[str, Allowed] | None] = [None]
        if filters is not None:
            found = await to_thread(alternatives_of, filters, self._known)
            alternatives = [
                {key: values_of(values) for key, values in each.items()} for each in found
            ]
        searches = [(query, conditions) for query in queries for conditions in alternatives]
        if len(searches) > MOST_SEARCHES:
            raise Problem(
                ProblemKind.INVALID_REQUEST,
                f"{len(queries)} queries times {len(alternatives)} alternatives of the filter are "
                f"more than {MOST_SEARCHES} searches",
            )
        best: dict[str, SearchResult] = {}
        headers = None
        for nth, (query, conditions) in enumerate(searches):
            context = await _retrieved(self._guard, scope, query, conditions, nth=nth)
            headers = headers or _degraded(context)
            for passage, each in zip(context.passages, results_of(context), strict=True):
                former = best.get(each["file_id"])
                is_better = former is None or former["score"] < each["score"]
                if is_better and (filters is None or holds(filters, passage.metadata)):
                    best[each["file_id"]] = each
        scope["state"]["degraded"] = headers is not None
        least = (given.get("ranking_options") or {}).get("score_threshold") or 0.0
        # Stable: results of one search stay in their order where scores are equal.
        results = sorted(best.values(), key=lambda each: -each["score"])
        page: SearchAnswer = {
            "object": "vector_store.search_results.page",
            "search_query": queries,
            "data": [each for each in results if each["score"] >= least][
                : given.get("max_num_results", DEFAULT_RESULTS)
            ],
            "has_more": False,
            "next_page": None,
        }
        return answer(page, headers)

    async def retrieve(self, request: Request) -> HttpAnswer:
        """Describe the store.

        Raises:
            Problem: it is another.
        """
        self._check_store(request.scope)
        return answer(self._store())

    async def list_all(self, _: Request) -> HttpAnswer:
        """Describe all stores, that is this one."""
        ends = {"first_id": self._store_id, "last_id": self._store_id}
        return answer({"object": "list", "data": [self._store()], **ends, "has_more": False})

    def _store(self) -> dict[str, object]:
        """The index, as OpenAI describes a vector store; its passages count as files."""
        retriever = self._guard.retriever
        n = len(retriever) if hasattr(retriever, "__len__") else 0
        nothing = {"in_progress": 0, "failed": 0, "cancelled": 0}
        return {
            "id": self._store_id,
            "object": "vector_store",
            "created_at": self._opened,
            "name": self._store_id,
            "usage_bytes": 0,
            "file_counts": {**nothing, "completed": n, "total": n},
            "status": "completed",
            "last_active_at": self._opened,
            "metadata": {},
        }

    def _check_store(self, scope: Scope) -> None:
        if scope["path_params"]["vector_store_id"] != self._store_id:
            raise Problem(
                ProblemKind.NOT_FOUND, f"the only vector store here is {self._store_id!r}"
            )

    def _known(self, field: str) -> Collection[Token]:
        values = getattr(self._guard.retriever, "metadata_values", None)
        if values is None:
            raise Problem(
                ProblemKind.INVALID_REQUEST,
                "this index filters for equality alone: use `eq`, `in`, `and` and `or`",
            )
        known: Collection[Token] = values(field)
        return known


def results_of(context: Context) -> list[SearchResult]:
    """The served passages with a score in (0, 1]: P, else r, else one made of their rank."""
    n = len(context.passages)
    scores = {
        verdict.passage_id: verdict.probability or verdict.relative_score
        for verdict in context.verdicts
    }
    return [
        {
            "file_id": passage.passage_id,
            "filename": passage.title or passage.passage_id,
            "score": scores.get(passage.passage_id) or (n - at) / (n + 1),
            "attributes": _attributes(passage),
            "content": [{"type": "text", "text": passage.text}],
        }
        for at, passage in enumerate(context.passages)
    ]


def _attributes(passage: Passage) -> dict[str, str | float | bool] | None:
    """The part of a passage's metadata that OpenAI's attributes can hold."""
    if passage.metadata is None:
        return None
    return {
        str(name): value
        for name, value in passage.metadata.items()
        if isinstance(value, str | int | float | bool)
    }


async def where_of(conditions: dict[str, Allowed]) -> Where:
    """The filter of these conditions.

    Raises:
        Problem: it has more conditions or values than a filter may, or none.
    """
    n = sum([len(each) if isinstance(each, list) else 1 for each in conditions.values()])
    if len(conditions) > MOST_CONDITIONS or n > MOST_VALUES:
        raise Problem(
            ProblemKind.INVALID_REQUEST,
            f"the filter has {len(conditions):,} conditions and {n:,} values, the limits are "
            f"{MOST_CONDITIONS} and {MOST_VALUES:,}: filter by a group, not by its members",
        )
    try:
        return Where(conditions) if n <= FEW_VALUES else await to_thread(Where, conditions)
    except ConfigurationError as error:
        raise Problem(ProblemKind.INVALID_REQUEST, str(error)) from error


async def _retrieved(
    guard: ContextGuard,
    scope: Scope,
    query: str,
    conditions: dict[str, Allowed] | None,
    *,
    segment: str | None = None,
    session_id: str | None = None,
    nth: int = 0,
) -> Context:
    state = scope["state"]
    request_id = state["request_id"] if nth == 0 else f"{state['request_id']}-{nth}"
    where = None if conditions is None else await where_of(conditions)
    context = await guard.aretrieve(
        query,
        request_id=request_id,
        segment=segment,
        session_id=session_id,
        where=where,
    )
    state["degraded"] = bool(context.decision.ranking.failures)
    return context


def _degraded(context: Context) -> dict[str, str] | None:
    failures: Sequence[Any] = context.decision.ranking.failures
    return {"x-ctxguard-degraded": failures[0].kind.value} if failures else None
