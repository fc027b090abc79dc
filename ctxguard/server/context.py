"""``POST /v1/context``: searches the guarded index, and builds the context the model gets.

Calls the guard, and builds a large filter on a thread.
"""

from asyncio import to_thread
from typing import Annotated, NotRequired

from pydantic import BeforeValidator, Field, TypeAdapter, with_config
from starlette.types import Scope
from typing_extensions import TypedDict

from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import Passage, StageFailure
from ctxguard.errors import ConfigurationError
from ctxguard.server.filtering import CandidateFields, SessionId
from ctxguard.server.limits import FEW_VALUES, MOST_CONDITIONS, MOST_VALUES
from ctxguard.server.problems import invalid
from ctxguard.server.service import Service
from ctxguard.server.wire import DESCRIBED, STRICT, named

Scalar = str | int | bool
Allowed = Annotated[
    Scalar | Annotated[list[Scalar], Field(fail_fast=True)],
    # Makes it an object of Python first: a list of JSON would be copied for each error in it.
    BeforeValidator(lambda given: given),
]


@with_config(STRICT)
class ContextRequest(TypedDict):
    """A query with conditions on its passages."""

    query: str
    where: NotRequired[
        Annotated[
            Annotated[dict[str, Allowed], named(MOST_CONDITIONS)] | None,
            Field(
                description="Fields of metadata with the value, or the values, they must have: "
                f"at most {MOST_CONDITIONS} fields, and {MOST_VALUES:,} values in all."
            ),
        ]
    ]
    session_id: NotRequired[SessionId]


class ContextDecision(CandidateFields):
    """Whether one candidate was kept, and why."""

    passage_id: str


@with_config(DESCRIBED)
class ContextAnswer(TypedDict):
    """The context, and the decision on every candidate."""

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
    failures: list[StageFailure]
    text: str
    """The text for the model."""
    candidates: int
    kept_ids: list[str]
    """Ids of the served passages, best first."""
    would_keep_ids: list[str]
    """Ids that enforcing the policy would keep, best first."""
    dropped: dict[str, int]
    passages: list[Passage]
    decisions: list[ContextDecision]


CONTEXT_REQUEST = TypeAdapter(ContextRequest)


async def answer_context(
    service: Service, given: ContextRequest, scope: Scope
) -> tuple[dict[str, object], StageFailure | None]:
    """Answer a query with a context."""
    conditions = given.get("where")
    context = await service.guard.aretrieve(
        given["query"],
        where=None if conditions is None else await _where_of(conditions),
        request_id=scope["state"]["request_id"],
        session_id=given.get("session_id"),
    )
    return context.to_dict(), next(iter(context.decision.ranking.failures), None)


async def _where_of(conditions: dict[str, Allowed]) -> Where:
    """Build a filter; refuse it without conditions, or with too many conditions or values."""
    n = sum([len(each) if isinstance(each, list) else 1 for each in conditions.values()])
    if len(conditions) > MOST_CONDITIONS or n > MOST_VALUES:
        raise invalid(
            f"the filter has {len(conditions):,} conditions and {n:,} values, but the limits are "
            f"{MOST_CONDITIONS} and {MOST_VALUES:,}: filter by group, not by its members"
        )
    try:
        return Where(conditions) if n <= FEW_VALUES else await to_thread(Where, conditions)
    except ConfigurationError as error:
        raise invalid(str(error)) from error
