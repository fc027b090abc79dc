"""The guarded index over HTTP: a context of our own, and OpenAI's search of a vector store."""

from asyncio import to_thread
from collections.abc import Collection, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, Field, with_config
from starlette.requests import Request
from starlette.types import Scope
from typing_extensions import TypedDict

from ctxguard.core.context import Context
from ctxguard.core.metadata_filter import Token, Where, values_of
from ctxguard.core.types import Passage, StageFailure
from ctxguard.errors import ConfigurationError
from ctxguard.server.attribute_filters import MOST_SEARCHES, Filter, alternatives_of, holds
from ctxguard.server.filtering import CandidateVerdict, Name
from ctxguard.server.limits import FEW_VALUES, MOST_CONDITIONS, MOST_VALUES
from ctxguard.server.problems import HttpAnswer, Problem, ProblemKind, answer, invalid
from ctxguard.server.service import Service
from ctxguard.server.wire import STRICT, Body, named

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


class ContextAnswer(TypedDict):
    """The context, and the verdict on every candidate."""

    request_id: str
    session_id: str | None
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


CONTEXT_REQUEST = Body(ContextRequest, is_quick=False)
SEARCH_REQUEST = Body(SearchRequest, is_quick=False)


async def answer_context(
    service: Service, given: ContextRequest, scope: Scope
) -> tuple[dict[str, object], StageFailure | None]:
    """Answer a query with a context.

    Raises:
        Problem: it cannot be answered.
    """
    context = await _retrieved(
        service,
        given["query"],
        given.get("where"),
        request_id=scope["state"]["request_id"],
        session_id=given.get("session_id"),
    )
    return context.to_dict(), _failure_of(context)


async def search_store(
    service: Service, given: SearchRequest, scope: Scope
) -> tuple[SearchAnswer, StageFailure | None]:
    """Answer OpenAI's search of a vector store.

    Raises:
        Problem: it cannot be answered.
    """
    queries = [given["query"]] if isinstance(given["query"], str) else given["query"]
    filters = given.get("filters")
    alternatives: Sequence[dict[str, Allowed] | None] = [None]
    if filters is not None:
        found = await to_thread(alternatives_of, filters, partial(_known, service))
        alternatives = [{key: values_of(values) for key, values in each.items()} for each in found]
    searches = [(query, conditions) for query in queries for conditions in alternatives]
    if len(searches) > MOST_SEARCHES:
        raise invalid(
            f"{len(queries)} queries times {len(alternatives)} alternatives of the filter are "
            f"more than {MOST_SEARCHES} searches"
        )
    best: dict[str, SearchResult] = {}
    failure = None
    request_id = scope["state"]["request_id"]
    for nth, (query, conditions) in enumerate(searches):
        own_id = request_id if nth == 0 else f"{request_id}-{nth}"
        context = await _retrieved(service, query, conditions, request_id=own_id)
        failure = failure or _failure_of(context)
        for passage, each in zip(context.passages, results_of(context), strict=True):
            former = best.get(each["file_id"])
            is_better = former is None or former["score"] < each["score"]
            if is_better and (filters is None or holds(filters, passage.metadata)):
                best[each["file_id"]] = each
    least = (given.get("ranking_options") or {}).get("score_threshold") or 0.0
    # Stable: results of one search stay in their order where scores are equal.
    results = sorted(best.values(), key=lambda each: -each["score"])
    shown = [each for each in results if each["score"] >= least]
    return {
        "object": "vector_store.search_results.page",
        "search_query": queries,
        "data": shown[: given.get("max_num_results", DEFAULT_RESULTS)],
        "has_more": False,
        "next_page": None,
    }, failure


def check_store(service: Service, scope: Scope) -> None:
    """Check that a request names the store there is.

    Raises:
        Problem: it names another.
    """
    known = service.settings.index_name
    if scope["path_params"]["vector_store_id"] != known:
        raise Problem(ProblemKind.NOT_FOUND, f"the only vector store here is {known!r}")


async def retrieve_store(service: Service, request: Request) -> HttpAnswer:
    """Describe the store.

    Raises:
        Problem: it is another.
    """
    check_store(service, request.scope)
    return answer(_store(service))


async def list_stores(service: Service, _: Request) -> HttpAnswer:
    """Describe all stores, that is this one."""
    name = service.settings.index_name
    ends = {"first_id": name, "last_id": name}
    return answer({"object": "list", "data": [_store(service)], **ends, "has_more": False})


def _store(service: Service) -> dict[str, object]:
    """The index, as OpenAI describes a vector store; its passages count as files."""
    retriever, name = service.guard.retriever, service.settings.index_name
    n = len(retriever) if hasattr(retriever, "__len__") else 0
    nothing = {"in_progress": 0, "failed": 0, "cancelled": 0}
    return {
        "id": name,
        "object": "vector_store",
        "created_at": service.opened,
        "name": name,
        "usage_bytes": 0,
        "file_counts": {**nothing, "completed": n, "total": n},
        "status": "completed",
        "last_active_at": service.opened,
        "metadata": {},
    }


def _known(service: Service, field: str) -> Collection[Token]:
    values = getattr(service.guard.retriever, "metadata_values", None)
    if values is None:
        raise invalid("this index filters for equality alone: use `eq`, `in`, `and` and `or`")
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
        raise invalid(
            f"the filter has {len(conditions):,} conditions and {n:,} values, the limits are "
            f"{MOST_CONDITIONS} and {MOST_VALUES:,}: filter by a group, not by its members"
        )
    try:
        return Where(conditions) if n <= FEW_VALUES else await to_thread(Where, conditions)
    except ConfigurationError as error:
        raise invalid(str(error)) from error


async def _retrieved(
    service: Service, query: str, conditions: dict[str, Allowed] | None, **named: Any
) -> Context:
    where = None if conditions is None else await where_of(conditions)
    return await service.guard.aretrieve(query, where=where, **named)


def _failure_of(context: Context) -> StageFailure | None:
    return next(iter(context.decision.ranking.failures), None)
