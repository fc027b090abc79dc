"""Holds the immutable state that answers requests: profile, each route's policy, retriever.

A request reads the reference to it once. A new profile or index generation replaces that reference,
so each request sees one profile and one generation from retrieval to decision. Asks the retriever
for its fingerprint and the sketch of its corpus, and touches nothing else.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from ctxguard.core.columns import SignalColumn
from ctxguard.core.metadata_filter import Where
from ctxguard.core.policies import Policy, RatioPolicy
from ctxguard.core.types import DEFAULT_K, Flag, Mode, Route, ScoreKind
from ctxguard.errors import ConfigurationError
from ctxguard.guard.wrapped_retriever import Calls, call_if, calls_of
from ctxguard.profile.comparison import ProfileCheck, SystemComparison, compare_systems
from ctxguard.profile.schema import AssessorProfile, Profile, SufficiencyProfile

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import AnyRetriever

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """The policy for the rankings of one route, with everything that follows from it.

    Attributes:
        today: The bare retriever's top k, served while the policy is not enforced.
        flags: Flags of every answer under this policy.
        differences: Differences from the system that the profile was calibrated on; every answer
            reports them.
        mode: The mode to apply if the guard was given none.
        score_kind: The kind of score that it was calibrated for; None accepts any.
        is_own: Whether the policy was calibrated for the route or set by hand; otherwise the
            retriever's top k is served.
    """

    policy: Policy
    today: RatioPolicy
    flags: tuple[Flag, ...]
    differences: tuple[str, ...] = ()
    mode: Mode = Mode.ENFORCE
    score_kind: ScoreKind | None = None
    sufficiency: SufficiencyProfile | None = None
    assessor: AssessorProfile | None = None
    is_own: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class BoundProfile:
    """A profile bound to the index generation that a retriever searches now.

    Attributes:
        mode: The mode that the profile's verdict on the main route requires; ``enforce`` without a
            profile.
        retriever: The wrapped retriever, under the profile's fusion; None without one.
        swaps: Whether the retriever may replace its index.
        generation: The index generation that the calls search; None if it is never replaced.
        calls: Retrieve from that generation; raise without a retriever.
        signal_columns: The columns of metadata whose signals the policies need; none for another
            system.
    """

    profile: Profile | None
    profile_id: str | None
    mode: Mode
    comparison: SystemComparison
    retriever: Any
    swaps: bool
    generation: object
    calls: Calls
    policies: Mapping[Route, RoutePolicy]
    signal_columns: tuple[SignalColumn, ...] = ()


def bind_profile(
    wrapped: "AnyRetriever | None",
    profile: Profile | None,
    *,
    policy: Policy | None,
    k: int | None,
    check: ProfileCheck,
    probed: Mapping[str, str] = MappingProxyType({}),
    lenient: bool = False,
) -> BoundProfile:
    """Bind a profile to the index generation that a retriever searches now.

    Args:
        wrapped: The retriever as given to the guard.
        policy: The policy set by hand for every route.
        k: Number of passages that the bare retriever serves; None for as many as the profile was
            compared with.
        probed: A `ProbedRetriever`'s similarities of the probe texts, as an entry of a fingerprint.
        lenient: Treat a system with an unreadable fingerprint or sketch as a different one, instead
            of raising.

    Raises:
        ConfigurationError: ``wrapped`` is not a retriever.
    """
    retriever: Any = wrapped
    if profile is not None and hasattr(retriever, "with_fusion"):
        retriever = retriever.with_fusion(profile.fusion)
    swaps = _declares(retriever, "pinned") and _declares(retriever, "generation")
    pinned: Any = retriever.pinned() if swaps else retriever
    try:
        comparison = _compared(profile, pinned, check, probed)
    except Exception as error:
        if not lenient:
            raise
        line = f"the fingerprint cannot be read ({type(error).__name__})"
        comparison = SystemComparison((line,), (), (Flag.PROFILE_MISMATCH,))
    verdict = None if profile is None else profile.verdict
    return BoundProfile(
        profile=profile,
        profile_id=None if profile is None else profile.profile_id,
        mode=Mode.ENFORCE if verdict is None else verdict.mode,
        comparison=comparison,
        retriever=retriever,
        swaps=swaps,
        generation=pinned.generation if swaps else None,
        calls=calls_of(_no_retriever if pinned is None else pinned),
        policies=_policies(profile, comparison, k, policy),
        signal_columns=()
        if profile is None or policy is not None or comparison.mismatches
        else profile.signal_columns,
    )


def _no_retriever(query: str, *, depth: int, where: Where | None = None) -> NoReturn:  # noqa: ARG001
    raise ConfigurationError("this guard has no retriever: pass one, or use filter()")


def _policies(
    profile: Profile | None, comparison: SystemComparison, k: int | None, policy: Policy | None
) -> dict[Route, RoutePolicy]:
    """Choose each route's policy: the profile's if it covers route and system, else the top k."""
    bare = RatioPolicy(k=DEFAULT_K if k is None else k)
    if policy is not None or profile is None:
        chosen = bare if policy is None else policy
        own = RoutePolicy(chosen, bare, (Flag.UNCALIBRATED,), is_own=policy is not None)
        return dict.fromkeys(Route, own)
    policies: dict[Route, RoutePolicy] = {}
    for route in Route:
        flags, differences = comparison.flags, comparison.differences
        calibrated = profile.routes.get(route)
        if calibrated is None:
            if not comparison.mismatches:
                known = ", ".join(sorted(profile.routes)) or "none"
                line = f"the profile has no policy for the route {route.value}; it has {known}"
                flags, differences = (*flags, Flag.ROUTE_UNCALIBRATED), (*differences, line)
            policies[route] = RoutePolicy(bare, bare, flags, differences)
            continue
        safe, verdict = calibrated.safe_policy, calibrated.verdict
        # The bare retriever serves k, or what the policy was compared with.
        today = bare if k is not None or safe is None else RatioPolicy(k=safe.k)
        mode = Mode.ENFORCE if verdict is None else verdict.mode
        own = RoutePolicy(RatioPolicy(k=calibrated.policy.k), today, flags, differences, mode)
        if not comparison.mismatches:
            own = replace(
                own,
                policy=calibrated.policy,
                score_kind=calibrated.score_kind,
                sufficiency=calibrated.sufficiency,
                assessor=calibrated.assessor,
                is_own=verdict is None or verdict.decision != "keep",
            )
        policies[route] = own
    return policies


def _declares(retriever: object, name: str) -> bool:
    """Return whether a retriever itself declares an attribute, on its class or on the instance.

    Attributes that a wrapper passes through from an inner retriever do not count: its ``pinned``
    would be a view of the inner retriever, and searching that would bypass the wrapper.
    """
    return inspect.getattr_static(retriever, name, _ABSENT) is not _ABSENT


def _compared(
    profile: Profile | None, retriever: object, check: ProfileCheck, probed: Mapping[str, str]
) -> SystemComparison:
    if profile is None:
        return SystemComparison()
    fingerprint, corpus_sketch = check.fingerprint, check.corpus_sketch
    if fingerprint is None:
        fingerprint = call_if(retriever, "fingerprint") or {}
    if corpus_sketch is None and profile.corpus is not None:
        corpus_sketch = call_if(retriever, "corpus_sketch")
    return compare_systems(
        profile, {**fingerprint, **probed}, corpus_sketch, check.max_corpus_change
    )
