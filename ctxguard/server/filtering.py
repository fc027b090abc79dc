"""``POST /v1/filter``: the decision on candidates that the caller has, with every reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired

import numpy as np
from pydantic import Field, TypeAdapter, with_config
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ctxguard.core.context import Context
from ctxguard.core.types import (
    DropReason,
    FloatArray,
    Leg,
    Passage,
    Ranking,
    ScoreKind,
    ScoreKindName,
    Verdict,
)
from ctxguard.errors import CtxguardError
from ctxguard.guard import ContextGuard
from ctxguard.server.problems import Problem, ProblemKind, problem_of
from ctxguard.server.wire import STRICT, answer, parse


@with_config(STRICT)
class Candidate(TypedDict):
    """One scored candidate."""

    id: str
    score: NotRequired[
        Annotated[float | None, Field(description="Higher is better; null if it has none.")]
    ]
    rank: NotRequired[
        Annotated[int | None, Field(ge=1, description="The engine's own, which breaks ties.")]
    ]
    text: NotRequired[Annotated[str, Field(description="Only samples and assembly read it.")]]
    title: NotRequired[str]
    metadata: NotRequired[dict[str, Any] | None]
    signals: NotRequired[
        Annotated[dict[str, float | None], Field(description="Named signals of the profile.")]
    ]
    legs: NotRequired[
        Annotated[
            dict[str, float | None],
            Field(description="Scores of each stage by its name; leg_kinds says what they mean."),
        ]
    ]


@with_config(STRICT)
class FilterRequest(TypedDict):
    """A query with its candidates, in the order of the engine that found them."""

    query: str
    candidates: list[Candidate]
    score_kind: NotRequired[
        Annotated[
            ScoreKindName | None,
            Field(description="What the scores mean; the service's setting if it is absent."),
        ]
    ]
    leg_kinds: NotRequired[dict[str, ScoreKindName]]
    segment: NotRequired[str | None]
    session_id: NotRequired[str | None]


class KeptIf(TypedDict):
    """A setting and the value of it that would have kept a candidate."""

    setting: str
    value: float | None


class VerdictAnswer(TypedDict):
    """Whether one candidate was kept, and why."""

    id: str
    rank: Annotated[int | None, Field(description="From 1; null if it was set aside.")]
    score: float | None
    relative_score: float | None
    probability: Annotated[float | None, Field(description="Calibrated P(relevant).")]
    kept: bool
    reason: Annotated[str | None, Field(description="Why it was dropped; null if it was kept.")]
    kept_if: list[KeptIf]


class FilterAnswer(TypedDict):
    """The decision on every candidate, best first, those without a usable score last."""

    request_id: str
    policy: Annotated[str | None, Field(description="Id of the profile; null without one.")]
    mode: str
    kept: Annotated[list[str], Field(description="Ids of what is kept, best first.")]
    dropped: Annotated[dict[str, int], Field(description="How many each reason dropped.")]
    flags: list[str]
    differences: list[str]
    sufficient: bool | None
    p_sufficient: float | None
    verdicts: list[VerdictAnswer]


REQUEST: TypeAdapter[FilterRequest] = TypeAdapter(FilterRequest)


@dataclass(frozen=True, slots=True)
class _Passages:
    """The candidates as passages, made when they are read."""

    candidates: Sequence[Candidate]

    def __getitem__(self, position: int, /) -> Passage:
        one = self.candidates[position]
        return Passage(one["id"], one.get("text", ""), one.get("title", ""), one.get("metadata"))


class FilterEndpoint:
    """Answers filter requests.

    Args:
        guard: Decides.
        kind: What scores mean where a request does not say.
        max_candidates: The most candidates of a request.
    """

    def __init__(self, guard: ContextGuard, kind: ScoreKind, max_candidates: int) -> None:
        self._guard = guard
        self._kind = kind
        self._max_candidates = max_candidates

    async def __call__(self, request: Request) -> Response:
        """Answer one request.

        Raises:
            Problem: it cannot be answered.
        """
        given = parse(REQUEST, await request.body())
        if len(given["candidates"]) > self._max_candidates:
            raise Problem(
                ProblemKind.INVALID_REQUEST,
                f"{len(given['candidates']):,} candidates, the limit is {self._max_candidates:,}: "
                "send fewer, or start the service with a larger --max-documents",
            )
        try:
            context = self._guard.filter(
                given["query"],
                ranking_of(given, self._kind),
                request_id=request.scope["state"]["request_id"],
                segment=given.get("segment"),
                session_id=given.get("session_id"),
            )
        except CtxguardError as error:
            raise problem_of(error) from error
        return answer(decision_of(context))


def ranking_of(given: FilterRequest, kind: ScoreKind) -> Ranking:
    """The candidates of a request as a ranking.

    Args:
        given: The request.
        kind: What the scores mean where the request does not say.

    Raises:
        Problem: a leg without a kind.
    """
    candidates = given["candidates"]
    ranks = [one.get("rank") for one in candidates]
    legs = _columns(candidates, "legs")
    kinds = given.get("leg_kinds", {})
    missing = sorted(legs.keys() - kinds.keys())
    if missing:
        raise Problem(
            ProblemKind.INVALID_REQUEST, f"leg_kinds does not say what {missing[0]!r} means"
        )
    return Ranking(
        [one["id"] for one in candidates],
        [one.get("score") for one in candidates],
        ScoreKind(given.get("score_kind") or kind),
        _Passages(candidates),
        ranks=None if ranks.count(None) == len(ranks) else ranks,
        legs={name: Leg(scores, ScoreKind(kinds[name])) for name, scores in legs.items()},
        signals=_columns(candidates, "signals"),
    )


def _columns(candidates: Sequence[Any], field: str) -> dict[str, FloatArray]:
    """The named numbers of all candidates, shape (n,) each; NaN where one has none."""
    rows: list[dict[str, float | None]] = [one.get(field) or {} for one in candidates]
    names = sorted(set().union(*rows))
    return {
        name: np.array([row.get(name) for row in rows], dtype=np.float64)  # None becomes NaN
        for name in names
    }


def decision_of(context: Context) -> dict[str, object]:
    """A `FilterAnswer`."""
    return {
        "request_id": context.request_id,
        "policy": context.profile_id,
        "mode": context.mode.value,
        "kept": context.kept_ids,
        "dropped": {_NAMES[reason]: n for reason, n in context.dropped_by_reason.items()},
        "flags": [flag.value for flag in context.flags],
        "differences": context.differences,
        "sufficient": context.sufficient,
        "p_sufficient": context.p_sufficient,
        "verdicts": [_as_dict(verdict) for verdict in context.verdicts],
    }


# A plain text is written five times as fast as the member of an enumeration.
_NAMES = {reason: reason.value for reason in DropReason}


def _as_dict(verdict: Verdict) -> dict[str, object]:
    passage_id, rank, score, relative_score, probability, reason, kept_if = verdict
    return {
        "id": passage_id,
        "rank": rank,
        "score": score,
        "relative_score": relative_score,
        "probability": probability,
        "kept": reason is None,
        "reason": None if reason is None else _NAMES[reason],
        "kept_if": [{"setting": setting, "value": value} for setting, value in kept_if],
    }
