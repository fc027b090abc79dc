"""ContextGuard: the request path. Retrieve, decide, assemble, count, sample.

``retrieve`` and ``aretrieve`` share one core; only the call of the retriever differs. Quality
decisions fail open, towards the upstream order at the route's k; a retriever that fails is a
typed error, never an empty context (DESIGN.md §7).
"""

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, time
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from ctxguard.context import Assembled, Assembly, Context, assemble, bare_passages
from ctxguard.errors import (
    ConfigurationError,
    CtxguardError,
    ProfileMismatchError,
    StageUnavailableError,
)
from ctxguard.policy import Decision, Policy, RatioPolicy, decide
from ctxguard.profile import Profile, fingerprint_differences
from ctxguard.telemetry import Telemetry, default_telemetry
from ctxguard.types import (
    DEFAULT_DEPTH,
    DEFAULT_K,
    Flag,
    Hit,
    Mode,
    Ranking,
    Route,
    ScoreKind,
)


class Sampler(Protocol):
    """What the guard asks of a sampler: a decision before retrieval, one append after."""

    def draw(self, request_id: str, /) -> float:
        """The probability with which the request was selected; 0.0 where it was not."""
        ...

    def offer(self, context: Context, probability: float, time_seconds: float, /) -> object:
        """Take a selected request; one of probability 0.0 was put in by hand."""
        ...


Retrieval = Ranking | Iterable[Hit]
RetrieverCallable = Callable[..., Retrieval | Awaitable[Retrieval]]
_Setting = TypeVar("_Setting", Mode, ScoreKind)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to do when one route answers."""

    policy: Policy
    kind: ScoreKind | None
    flags: tuple[Flag, ...]


class _Request(NamedTuple):
    """What is known of a request before it is answered."""

    query: str
    request_id: str
    segment: str | None
    session_id: str | None
    probability: float
    sampled: bool


class ContextGuard:
    """Wraps a retriever and lets only clean context through.

    Args:
        retriever: An object with ``retrieve(query, *, depth)`` (and, where it has one,
            ``aretrieve``), or a plain callable taking ``(query, depth=…)``; sync or async. It
            returns a ``Ranking``, or ``Hit`` objects together with ``score_kind``. None for a
            guard that only filters results already at hand.
        profile: A calibrated ``Profile`` or the path of one. Without it the top ``k`` is
            served and every answer is flagged ``uncalibrated``.
        policy: A policy set by hand for every route, in place of a profile.
        k: The size of a context while nothing is calibrated.
        mode: ``enforce``, ``shadow`` (decide and record, serve the bare top k) or ``off``.
        depth: How many candidates are asked of the retriever.
        score_kind: What plain hits' scores mean.
        fingerprint: Identifies a wrapped system that has no ``fingerprint()`` of its own; it
            is compared with the profile's.
        strict: Refuse a profile of another system at start, instead of serving top k with
            every answer flagged.
        assembly: Order, token budget, duplicates, sanitising, template.
        sampler: Selects the traffic to be judged.
        telemetry: Where requests are counted; the process's default registry unless given.

    Raises:
        ConfigurationError: settings that contradict each other.
        ProfileFormatError: ``profile`` is a path without a readable profile.
        ProfileMismatchError: in strict mode, a profile of another system.
    """

    def __init__(
        self,
        retriever: object | RetrieverCallable | None = None,
        *,
        profile: Profile | Path | str | None = None,
        policy: Policy | None = None,
        k: int = DEFAULT_K,
        mode: Mode | str = Mode.ENFORCE,
        depth: int = DEFAULT_DEPTH,
        score_kind: ScoreKind | str | None = None,
        fingerprint: Mapping[str, str] | None = None,
        strict: bool = False,
        assembly: Assembly | None = None,
        sampler: Sampler | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        if profile is not None and policy is not None:
            raise ConfigurationError("give a profile or a policy, not both: they would compete")
        if depth < 1:
            raise ConfigurationError(f"depth {depth!r} must be at least 1")
        self.mode = _member(Mode, mode, "mode")
        self.depth = depth
        self.score_kind = (
            None if score_kind is None else _member(ScoreKind, score_kind, "score_kind")
        )
        self.profile = Profile.load(profile) if isinstance(profile, str | Path) else profile
        if policy is not None and self.score_kind is ScoreKind.RANK and _compares_scores(policy):
            raise ConfigurationError(
                "min_ratio compares scores, and score_kind 'rank' says that they carry order "
                "only: set min_ratio to 0, or hand over scores that can be compared"
            )
        self.assembly = Assembly() if assembly is None else assembly
        self._sampler = sampler
        self._telemetry = default_telemetry() if telemetry is None else telemetry
        if self.profile is not None and hasattr(retriever, "with_fusion"):
            retriever = cast(Any, retriever).with_fusion(self.profile.fusion)
        self.retriever = retriever
        self._call = None if retriever is None else _callable_of(retriever, "retrieve")
        self._acall = _async_callable_of(retriever)
        self.differences = self._compare(fingerprint)
        if strict and self.differences:
            raise ProfileMismatchError(self.differences)
        self._bare = RatioPolicy(k=k)
        self._plans = {route: self._plan(route, policy) for route in Route}
        self._segment_plans = self._plans_of_segments()

    def retrieve(
        self,
        query: str,
        *,
        request_id: str | None = None,
        segment: str | None = None,
        session_id: str | None = None,
        sample: bool = False,
    ) -> Context:
        """Retrieve and filter one query.

        Args:
            query: The question as asked.
            request_id: Identifies the request in samples; made up where absent.
            segment: The segment that the query belongs to, where the profile was calibrated by
                segments; one without a policy of its own is served by the route's.
            session_id: The session or conversation that the request belongs to: its requests
                are not independent, and the live estimates count them as one cluster.
            sample: Sample this request whatever the sampler draws, for debugging: it is marked,
                and left out of every estimate.

        Returns:
            The context: kept passages, the verdict on every candidate, and flags that say
            what was unusual. Empty only where the retriever found nothing, or by a policy
            that may abstain.

        Raises:
            QueryError: the retriever refuses the query.
            StageUnavailableError: the retriever failed; an outage is never an empty context.
        """
        if self._call is None:
            raise ConfigurationError("this guard has no retriever: pass one, or use filter()")
        request = self._begin(query, request_id, segment, session_id, sample)
        start = perf_counter()
        try:
            retrieved = self._call(query, depth=self.depth)
            if inspect.isawaitable(retrieved):
                if inspect.iscoroutine(retrieved):
                    retrieved.close()  # or Python warns that nobody awaited it
                raise ConfigurationError("the retriever is asynchronous: await aretrieve()")
        except Exception as error:
            raise self._failed(error) from error
        return self._finish(request, retrieved, start)

    async def aretrieve(
        self,
        query: str,
        *,
        request_id: str | None = None,
        segment: str | None = None,
        session_id: str | None = None,
        sample: bool = False,
    ) -> Context:
        """``retrieve`` without blocking the event loop; the same core, contract and errors."""
        if self._acall is None:
            raise ConfigurationError("this guard has no retriever: pass one, or use filter()")
        request = self._begin(query, request_id, segment, session_id, sample)
        start = perf_counter()
        try:
            retrieved = await self._acall(query, depth=self.depth)
        except Exception as error:
            raise self._failed(error) from error
        return self._finish(request, retrieved, start)

    def filter(
        self,
        query: str,
        hits: Retrieval,
        *,
        request_id: str | None = None,
        segment: str | None = None,
        session_id: str | None = None,
        sample: bool = False,
    ) -> Context:
        """Decide on results that the caller already has; the same contract as ``retrieve``."""
        request = self._begin(query, request_id, segment, session_id, sample)
        return self._finish(request, hits, None)

    def _begin(
        self,
        query: str,
        request_id: str | None,
        segment: str | None,
        session_id: str | None,
        sample: bool,
    ) -> _Request:
        request_id = os.urandom(8).hex() if request_id is None else request_id
        probability = 0.0
        if self._sampler is not None:
            # Selected before retrieval, so that a sample cannot depend on how the request went.
            try:
                probability = self._sampler.draw(request_id)
            except Exception:
                self._observer_failed("sampler")
        sampled = self._sampler is not None and (sample or probability > 0.0)
        return _Request(query, request_id, segment, session_id, probability, sampled)

    def _finish(self, request: _Request, retrieved: Retrieval, start: float | None) -> Context:
        received = perf_counter()
        try:
            ranking = self._ranking(retrieved)
            context = self._decide(request, ranking)
        except Exception as error:
            raise self._failed(error) from error
        if request.sampled:
            try:
                cast(Sampler, self._sampler).offer(context, request.probability, time())
            except Exception:
                self._observer_failed("sampler")
        try:
            self._telemetry.answered(
                context, None if start is None else received - start, perf_counter() - received
            )
        except Exception:
            self._observer_failed("telemetry")
        return context

    def _observer_failed(self, observer: str) -> None:
        """Watching a request must not fail it; where even the count fails, nothing is left."""
        with suppress(Exception):
            self._telemetry.observer_failed(observer)

    def _decide(self, request: _Request, ranking: Ranking) -> Context:
        if self.mode is Mode.OFF:
            n = len(ranking)
            flags: tuple[Flag, ...] = ()
            decision = Decision(ranking, self._bare, range(n), min(self._bare.k, n))
        else:
            plan = (
                self._segment_plans.get((ranking.route, request.segment))
                or self._plans[ranking.route]
            )
            policy, flags = plan.policy, plan.flags
            if plan.kind is not None and plan.kind is not ranking.kind:
                # The profile knows this route, but its scores have another meaning here.
                policy, flags = RatioPolicy(k=policy.k), (*flags, Flag.PROFILE_MISMATCH)
            elif ranking.kind is ScoreKind.RANK and _compares_scores(policy):
                policy, flags = RatioPolicy(k=policy.k), (*flags, Flag.RANK_ONLY)
            decision = decide(ranking, policy)
            if decision.flags:
                flags = (*flags, *decision.flags)
        if self.mode is Mode.ENFORCE:
            assembled = assemble(decision, self.assembly)
        else:
            assembled = Assembled(bare_passages(ranking, self._bare.k))
        if ranking.failures:
            flags = (*flags, Flag.DEGRADED)
        if not len(ranking):
            flags = (*flags, Flag.EMPTY_RETRIEVAL)
        return Context(
            request_id=request.request_id,
            query=request.query,
            route=ranking.route,
            mode=self.mode,
            passages=assembled.passages,
            decision=decision,
            dropped_in_assembly=assembled.dropped,
            flags=flags,
            failures=ranking.failures + assembled.failures,
            assembly=self.assembly,
            segment=request.segment,
            session_id=request.session_id,
        )

    def _ranking(self, retrieved: Retrieval) -> Ranking:
        if isinstance(retrieved, Ranking):
            return retrieved
        # An empty string or mapping is iterable too, and must not pass for an empty result.
        iterable = isinstance(retrieved, Iterable) and not isinstance(
            retrieved, str | bytes | Mapping
        )
        hits = tuple(retrieved) if iterable else None
        if hits is None or not all(issubclass(kind, Hit) for kind in set(map(type, hits))):
            raise ConfigurationError(
                f"the retriever returned {_describe(retrieved)}; return a Ranking, or Hit "
                "objects together with score_kind"
            )
        if self.score_kind is None:
            raise ConfigurationError(
                "plain hits need score_kind on the guard: say what the scores mean, one of "
                + ", ".join(kind.value for kind in ScoreKind)
            )
        return Ranking.from_hits(hits, self.score_kind)

    def _failed(self, error: Exception) -> CtxguardError:
        """The typed error that a failure becomes; what is typed already stays as it is."""
        try:
            self._telemetry.failed(self.mode)
        except Exception:
            self._observer_failed("telemetry")
        if isinstance(error, CtxguardError):
            return error
        return StageUnavailableError("retriever", f"{type(error).__name__}: {error}")

    def _compare(self, fingerprint: Mapping[str, str] | None) -> tuple[str, ...]:
        if self.profile is None:
            return ()
        if fingerprint is None:
            own = getattr(self.retriever, "fingerprint", None)
            fingerprint = own() if callable(own) else {}
        return fingerprint_differences(
            self.profile.fingerprint, cast("dict[str, str]", fingerprint)
        )

    def _plan(self, route: Route, policy: Policy | None) -> _Plan:
        if policy is not None:
            return _Plan(policy, None, (Flag.UNCALIBRATED,))
        if self.profile is None:
            return _Plan(self._bare, None, (Flag.UNCALIBRATED,))
        calibrated = self.profile.routes.get(route)
        if calibrated is None:
            flag = Flag.PROFILE_MISMATCH if self.differences else Flag.ROUTE_UNCALIBRATED
            return _Plan(self._bare, None, (flag,))
        if self.differences:
            return _Plan(RatioPolicy(k=calibrated.policy.k), None, (Flag.PROFILE_MISMATCH,))
        return _Plan(calibrated.policy, calibrated.score_kind, ())

    def _plans_of_segments(self) -> dict[tuple[Route, str | None], _Plan]:
        if self.profile is None or self.differences:
            return {}
        return {
            (route, segment): _Plan(own.policy, calibrated.score_kind, ())
            for route, calibrated in self.profile.routes.items()
            for segment, own in calibrated.segments.items()
        }


def _compares_scores(policy: Policy) -> bool:
    return isinstance(policy, RatioPolicy) and policy.min_ratio > 0.0


def _member(kind: type[_Setting], value: _Setting | str, setting: str) -> _Setting:
    try:
        return kind(value)
    except ValueError:
        options = ", ".join(member.value for member in kind)
        raise ConfigurationError(f"{setting} {value!r} is unknown; use one of {options}") from None


def _callable_of(retriever: object, method: str) -> RetrieverCallable:
    found = getattr(retriever, method, None)
    if found is None and callable(retriever):
        found = retriever
    if not callable(found):
        raise ConfigurationError(
            f"{_describe(retriever)} is no retriever: it needs retrieve(query, *, depth), or to "
            "be callable with (query, depth=…)"
        )
    return cast(RetrieverCallable, found)


def _async_callable_of(retriever: object) -> Callable[..., Awaitable[Retrieval]] | None:
    """The retriever's asynchronous call, or its synchronous one on a thread."""
    if retriever is None:
        return None
    found = getattr(retriever, "aretrieve", None)
    if found is None:
        found = _callable_of(retriever, "retrieve")
    if inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(
        getattr(found, "__call__", None)  # noqa: B004 - an object whose call is a coroutine
    ):
        return cast(Callable[..., Awaitable[Retrieval]], found)

    async def on_a_thread(query: str, *, depth: int) -> Retrieval:
        result = await asyncio.to_thread(partial(found, query, depth=depth))
        return cast(Retrieval, await result if inspect.isawaitable(result) else result)

    return on_a_thread


def _describe(value: object) -> str:
    return f"a {type(value).__name__}"
