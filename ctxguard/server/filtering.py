"""``POST /v1/filter``: decides on the caller's candidates, and gives every reason.

Calls the guard, and works on a long body on a thread.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NotRequired, cast

import numpy as np
from pydantic import Field, TypeAdapter, with_config
from starlette.types import Scope
from typing_extensions import TypedDict

from ctxguard.core.context import Context
from ctxguard.core.passages import copies_of
from ctxguard.core.types import (
    CheckedPassages,
    DropReason,
    FloatArray,
    Leg,
    Ranking,
    ScoreKind,
    ScoreKindName,
)
from ctxguard.server.limits import MOST_NAME_CHARS, MOST_NAMES
from ctxguard.server.problems import invalid
from ctxguard.server.service import Service
from ctxguard.server.wire import DESCRIBED, STRICT, named, off_the_loop

SessionId = Annotated[str, Field(max_length=MOST_NAME_CHARS)] | None


_Numbers = Annotated[
    dict[str, float | None],
    named(MOST_NAMES),
    Field(json_schema_extra={"maxProperties": MOST_NAMES}),
]


@with_config(STRICT)
class ScoredCandidate(TypedDict):
    """One scored candidate."""

    id: str | Annotated[int, Field(ge=-(2**63), lt=2**64, description="Counts as its text.")]
    score: NotRequired[float | None]
    """Higher is better; null if it has none."""
    rank: NotRequired[Annotated[int, Field(ge=1)] | None]
    """The engine's own rank, which breaks ties."""
    text: NotRequired[str]
    """The text, which only samples and assembly read."""
    title: NotRequired[str]
    metadata: NotRequired[dict[str, Any] | None]
    signals: NotRequired[_Numbers]
    """Named signals of the profile; the limit applies to all candidates together."""
    legs: NotRequired[_Numbers]
    """Scores of each stage by its name; leg_kinds says what they mean. Limited as signals are."""


@with_config(STRICT)
class FilterRequest(TypedDict):
    """A query with its candidates, in the order of the engine that found them."""

    query: str
    candidates: Annotated[list[ScoredCandidate], Field(fail_fast=True)]
    score_kind: NotRequired[ScoreKindName | None]
    """What the scores mean; the service's setting if it is absent."""
    leg_kinds: NotRequired[Annotated[dict[str, ScoreKindName], named(MOST_NAMES)]]
    session_id: NotRequired[SessionId]


class WouldKeep(TypedDict):
    """A setting, and the value at which a candidate would have been kept."""

    setting: str
    value: float | None


class CandidateFields(TypedDict):
    """Whether one candidate was kept, and why; the answers add the name of its id."""

    # Descriptions, because pydantic does not read the docstrings of inherited fields.
    rank: Annotated[int | None, Field(description="From 1; null if it was set aside.")]
    score: float | None
    relative_score: float | None
    probability: Annotated[float | None, Field(description="Calibrated P(relevant).")]
    kept: bool
    reason: Annotated[str | None, Field(description="Why it was dropped; null if it was kept.")]
    kept_if: list[WouldKeep]


class CandidateAnswer(CandidateFields):
    """Whether one candidate was kept, and why."""

    id: str


@with_config(DESCRIBED)
class FilterAnswer(TypedDict):
    """The decision on every candidate, best first, those without a usable score last."""

    request_id: str
    policy: str | None
    """Id of the profile; null if there is none."""
    mode: str
    kept_ids: list[str]
    """Ids of the kept candidates, best first; if no policy is enforced, all ids in their order."""
    would_keep_ids: list[str]
    """Ids that enforcing the policy would keep, best first."""
    dropped: dict[str, int]
    """How many candidates were dropped for each reason."""
    flags: list[str]
    differences: list[str]
    sufficient: bool | None
    p_sufficient: float | None
    decisions: list[CandidateAnswer]


REQUEST = TypeAdapter(FilterRequest)


async def decide(service: Service, given: FilterRequest, scope: Scope) -> tuple[Any, None]:
    """Answer a filter request."""
    n = len(given["candidates"])
    if n > service.settings.max_documents:
        raise service.too_many(n, "candidates")
    context = await service.guard.afilter(
        given["query"],
        await off_the_loop(scope, _ranking_of, given, service.kind),
        request_id=scope["state"]["request_id"],
        session_id=given.get("session_id"),
        k=service.settings.k or max(n, 1),
    )
    return await off_the_loop(scope, _decision_of, context), None


def _ranking_of(given: FilterRequest, kind: ScoreKind) -> Ranking:
    """Build the ranking of a request's candidates; ``kind`` applies if the request names none."""
    candidates = given["candidates"]
    ids, texts = [one["id"] for one in candidates], [one.get("text", "") for one in candidates]
    titles = [one.get("title", "") for one in candidates]
    metadata = [one.get("metadata") for one in candidates]
    ranks = [one.get("rank") for one in candidates]
    scores, kinds = _columns(candidates, "legs"), given.get("leg_kinds", {})
    missing = sorted(scores.keys() - kinds.keys())
    if missing:
        raise invalid(f"leg_kinds must give the kind of {missing[0]!r}")
    return Ranking(
        cast("Sequence[str]", ids),  # which a ranking writes as texts
        [one.get("score") for one in candidates],
        ScoreKind(given.get("score_kind") or kind),
        CheckedPassages((ids, texts, titles, metadata)),
        ranks=None if ranks.count(None) == len(ranks) else ranks,
        legs={name: Leg(column, ScoreKind(kinds[name])) for name, column in scores.items()},
        signals=_columns(candidates, "signals"),
        copies=copies_of(texts),
    )


def _columns(candidates: Sequence[Any], field: str) -> dict[str, FloatArray]:
    """Make columns of named numbers, shape (n,) each, by name, with NaN for a missing number."""
    columns: dict[str, FloatArray] = {}
    for at, one in enumerate(candidates):
        for name, value in (one.get(field) or {}).items():
            if name not in columns:
                columns[name] = np.full(len(candidates), np.nan)
            if value is not None:
                columns[name][at] = value
        if len(columns) > MOST_NAMES:
            raise invalid(
                f"the candidates use more than {MOST_NAMES} names of {field}: send only those that "
                "the profile uses"
            )
    return dict(sorted(columns.items()))


def _decision_of(context: Context) -> dict[str, object]:
    """Build a `FilterAnswer`."""
    is_enforced = context.enforced
    dropped = {_NAMES[reason]: n for reason, n in context.dropped_by_reason.items()}
    return {
        "request_id": context.request_id,
        "policy": context.profile_id,
        "mode": context.mode.value,
        "kept_ids": context.kept_ids if is_enforced else context.served_ids,
        "would_keep_ids": context.would_keep_ids,
        "dropped": dropped if is_enforced else {},
        "flags": [flag.value for flag in context.flags],
        "differences": context.differences,
        "sufficient": context.sufficient,
        "p_sufficient": context.p_sufficient,
        "decisions": _decisions(context),
    }


# A plain text is written five times as fast as the member of an enumeration.
_NAMES = {reason: reason.value for reason in DropReason}


def _decisions(context: Context) -> list[CandidateAnswer]:
    return [
        {
            "id": passage_id,
            "rank": rank,
            "score": score,
            "relative_score": relative_score,
            "probability": probability,
            "kept": reason is None,
            "reason": None if reason is None else _NAMES[reason],
            "kept_if": [{"setting": setting, "value": value} for setting, value in kept_if],
        }
        for passage_id, rank, score, relative_score, probability, reason, kept_if in (
            context.decisions
        )
    ]
