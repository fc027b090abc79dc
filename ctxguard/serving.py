"""What a guard serves by: a profile, its plans, and the retriever bound to both.

One frozen object, read once at the start of a request and swapped as a whole, so that a request
sees one profile and one generation of the index from its retrieval to its decision.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from ctxguard.errors import ConfigurationError
from ctxguard.policy import Policy, RatioPolicy
from ctxguard.profile import Profile, fingerprint_differences
from ctxguard.types import Flag, Hit, Ranking, Route, ScoreKind

Retrieval = Ranking | Iterable[Hit]
RetrieverCallable = Callable[..., Retrieval | Awaitable[Retrieval]]
AsyncRetrieverCallable = Callable[..., Awaitable[Retrieval]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do when one route answers."""

    policy: Policy
    kind: ScoreKind | None
    flags: tuple[Flag, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    """Everything that one request is served by.

    Attributes:
        profile: The calibration in force; None for none.
        profile_id: Of the profile, worked out once; None for none.
        differences: What differs between the profile's system and this one.
        retriever: As its owner sees it, under the profile's fusion; None for none.
        generation: What the calls below search, for a retriever that swaps it; None otherwise.
        call: Retrieves, over that generation alone; None where there is no retriever.
        acall: The same, awaited; None where the retriever has but a plain call.
        can_filter: Whether the retriever takes a filter.
        plans: What to do, by route.
        segment_plans: What to do instead for certified segments, by route and segment.
    """

    profile: Profile | None
    profile_id: str | None
    differences: tuple[str, ...]
    retriever: Any
    generation: object
    call: RetrieverCallable | None
    acall: AsyncRetrieverCallable | None
    can_filter: bool
    plans: Mapping[Route, Plan]
    segment_plans: Mapping[tuple[Route, str | None], Plan]

    @property
    def is_current(self) -> bool:
        """Whether the retriever still searches the generation that this was bound to."""
        return self.generation is None or self.generation is self.retriever.generation

    def plan(self, route: Route, segment: str | None) -> Plan:
        """What to do when this route answers a request of this segment."""
        return self.segment_plans.get((route, segment)) or self.plans[route]


def plans_by_route(
    profile: Profile | None, differences: tuple[str, ...], bare: RatioPolicy, policy: Policy | None
) -> dict[Route, Plan]:
    """A plan for every route: the profile's own where it knows route and system, else top k.

    Args:
        profile: The calibration; None for none.
        differences: What differs between its system and the one at hand.
        bare: The policy while nothing is calibrated.
        policy: One set by hand for every route; None for none.
    """
    if policy is not None:
        return dict.fromkeys(Route, Plan(policy, None, (Flag.UNCALIBRATED,)))
    if profile is None:
        return dict.fromkeys(Route, Plan(bare, None, (Flag.UNCALIBRATED,)))
    unknown = Flag.PROFILE_MISMATCH if differences else Flag.ROUTE_UNCALIBRATED
    plans = dict.fromkeys(Route, Plan(bare, None, (unknown,)))
    for route, calibrated in profile.routes.items():
        if differences:
            top = RatioPolicy(k=calibrated.policy.k)
            plans[route] = Plan(top, None, (Flag.PROFILE_MISMATCH,))
        else:
            plans[route] = Plan(calibrated.policy, calibrated.score_kind, ())
    return plans


def plans_by_segment(
    profile: Profile | None, differences: tuple[str, ...]
) -> dict[tuple[Route, str | None], Plan]:
    """The plans of the segments that the profile certifies; none for another system."""
    if profile is None or differences:
        return {}
    return {
        (route, segment): Plan(own.policy, calibrated.score_kind, ())
        for route, calibrated in profile.routes.items()
        for segment, own in calibrated.segments.items()
    }


def bind(
    wrapped: object,
    profile: Profile | None,
    *,
    policy: Policy | None,
    bare: RatioPolicy,
    fingerprint: Mapping[str, str] | None,
    lenient: bool = False,
) -> Serving:
    """A profile bound to what a retriever searches now.

    Args:
        wrapped: The retriever as it was given; None for none.
        profile: The calibration; None for none.
        policy: One set by hand for every route; None for none.
        bare: The policy while nothing is calibrated.
        fingerprint: Identifies a system that has no ``fingerprint()`` of its own.
        lenient: Take a fingerprint that cannot be read for another system's, not an error.

    Raises:
        ConfigurationError: what was given is no retriever.
    """
    retriever: Any = wrapped
    if profile is not None and hasattr(retriever, "with_fusion"):
        retriever = retriever.with_fusion(profile.fusion)
    swaps = hasattr(type(retriever), "pinned") and hasattr(type(retriever), "generation")
    pinned: Any = retriever.pinned() if swaps else retriever
    try:
        differences = _differences(profile, pinned, fingerprint)
    except Exception as error:
        if not lenient:
            raise
        differences = (f"the fingerprint cannot be read ({type(error).__name__})",)
    call = None if pinned is None else _callable_of(pinned)
    acall = None if pinned is None else _async_callable_of(pinned)
    return Serving(
        profile=profile,
        profile_id=None if profile is None else profile.profile_id,
        differences=differences,
        retriever=retriever,
        generation=pinned.generation if swaps else None,
        call=call,
        acall=acall,
        can_filter=_takes_where(call) and (acall is None or _takes_where(acall)),
        plans=plans_by_route(profile, differences, bare, policy),
        segment_plans=plans_by_segment(profile, differences),
    )


def _differences(
    profile: Profile | None, retriever: object, fingerprint: Mapping[str, str] | None
) -> tuple[str, ...]:
    if profile is None:
        return ()
    if fingerprint is None:
        own = getattr(retriever, "fingerprint", None)
        fingerprint = own() if callable(own) else {}
    return fingerprint_differences(profile.fingerprint, cast("dict[str, str]", fingerprint))


def _callable_of(retriever: object) -> RetrieverCallable:
    found = getattr(retriever, "retrieve", None)
    if found is None and callable(retriever):
        found = retriever
    if not callable(found):
        raise ConfigurationError(
            f"{describe(retriever)} is no retriever: it needs retrieve(query, *, depth), or to "
            "be callable with (query, depth=…)"
        )
    return cast(RetrieverCallable, found)


def _async_callable_of(retriever: object) -> AsyncRetrieverCallable | None:
    """The retriever's asynchronous call; None where it has but a plain one."""
    found = getattr(retriever, "aretrieve", None)
    if found is None:
        found = _callable_of(retriever)
    if inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(
        getattr(found, "__call__", None)  # noqa: B004 - an object whose call is a coroutine
    ):
        return cast(AsyncRetrieverCallable, found)
    return None


def _takes_where(call: object) -> bool:
    """Whether a call names ``where`` itself: one that takes any keyword may well ignore it."""
    try:
        parameter = inspect.signature(cast(RetrieverCallable, call)).parameters.get("where")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )


def describe(value: object) -> str:
    """What something is, for a message that says what was wrong with it."""
    return f"a {type(value).__name__}"
