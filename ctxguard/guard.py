"""ContextGuard: the request path. Retrieve, decide, assemble, count, sample.

``retrieve`` and ``aretrieve`` share one core; only the call of the retriever differs. Quality
decisions fail open, towards the upstream order at the route's k; a retriever that fails is a
typed error, never an empty context (DESIGN.md §7).
"""

import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from time import perf_counter, time
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from ctxguard.context import Assembled, Assembly, Context, assemble, bare_passages
from ctxguard.errors import (
    ConfigurationError,
    CtxguardError,
    FilterViolationError,
    OverloadedError,
    ProfileMismatchError,
    QueryError,
)
from ctxguard.forks import start_afresh_in_children
from ctxguard.policy import Decision, Policy, RatioPolicy, decide
from ctxguard.profile import Profile
from ctxguard.serving import (
    Retrieval,
    RetrieverCallable,
    Serving,
    bind,
    describe,
)
from ctxguard.stages import DEFAULT_MAX_IN_FLIGHT, Asking, cause_of, typed
from ctxguard.telemetry import Telemetry, default_telemetry
from ctxguard.types import (
    DEFAULT_DEPTH,
    DEFAULT_K,
    Flag,
    Hit,
    Mode,
    Ranking,
    ScoreKind,
)
from ctxguard.where import Where, verified

_log = logging.getLogger(__name__)

DEFAULT_MAX_QUERY_CHARS = 10_000


class Sampler(Protocol):
    """What the guard asks of a sampler: a decision before retrieval, one append after."""

    def draw(self, request_id: str, /) -> float:
        """The probability with which the request was selected; 0.0 where it was not."""
        ...

    def offer(self, context: Context, probability: float, time_seconds: float, /) -> object:
        """Take a selected request; one of probability 0.0 was put in by hand."""
        ...


_Setting = TypeVar("_Setting", Mode, ScoreKind)


class _Request(NamedTuple):
    """What is known of a request before it is answered."""

    serving: Serving
    query: str
    request_id: str
    segment: str | None
    session_id: str | None
    probability: float
    sampled: bool
    where: Where | None


class ContextGuard:
    """Wraps a retriever and lets only clean context through.

    Args:
        retriever: An object with ``retrieve(query, *, depth)`` (and, where it has one,
            ``aretrieve``), or a plain callable taking ``(query, depth=…)``; sync or async. It
            returns a ``Ranking``, or ``Hit`` objects together with ``score_kind``. None for a
            guard that only filters results already at hand. One that also has ``generation``
            (another object after every change of what it searches) and ``pinned()`` (itself over
            the generation of this moment) is followed through its changes: each request is
            answered from one generation, and the profile is compared with every new one.
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
        max_query_chars: Longer queries are refused before they are searched or sampled.
        sampler: Selects the traffic to be judged.
        telemetry: Where requests are counted; the process's default registry unless given.
        deadline_seconds: How long the retriever may take; None for as long as it takes. With
            a deadline a plain retriever runs on one of 32 threads of the guard's own, which
            costs a hand-over, and one that fails again and again is not asked for a while. The
            embedded retriever has deadlines by stage (``Deadlines``), and answers with what is
            left.
        max_in_flight: The most requests under way at once; more are refused at once.

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
        max_query_chars: int = DEFAULT_MAX_QUERY_CHARS,
        sampler: Sampler | None = None,
        telemetry: Telemetry | None = None,
        deadline_seconds: float | None = None,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
    ) -> None:
        if profile is not None and policy is not None:
            raise ConfigurationError("give a profile or a policy, not both: they would compete")
        if depth < 1:
            raise ConfigurationError(f"depth {depth!r} must be at least 1")
        if max_query_chars < 1:
            raise ConfigurationError(f"max_query_chars {max_query_chars!r} must be at least 1")
        self.mode = _member(Mode, mode, "mode")
        self.depth = depth
        self.score_kind = (
            None if score_kind is None else _member(ScoreKind, score_kind, "score_kind")
        )
        self.max_query_chars = max_query_chars
        if policy is not None and self.score_kind is ScoreKind.RANK and _compares_scores(policy):
            raise ConfigurationError(
                "min_ratio compares scores, and score_kind 'rank' says that they carry order "
                "only: set min_ratio to 0, or hand over scores that can be compared"
            )
        self.assembly = Assembly() if assembly is None else assembly
        self._sampler = sampler
        self._telemetry = default_telemetry() if telemetry is None else telemetry
        self._asking = Asking(deadline_seconds, max_in_flight)
        self._asking.watch(self._telemetry.circuit_changed)
        if hasattr(retriever, "watch_stages"):
            cast(Any, retriever).watch_stages(self._telemetry.circuit_changed)
        self._wrapped = retriever
        self._fingerprint = fingerprint
        self._policy = policy
        self._bare = RatioPolicy(k=k)
        self._serving = self._bound(
            Profile.load(profile) if isinstance(profile, str | Path) else profile
        )
        if strict and self.differences:
            raise ProfileMismatchError(self.differences)
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Take a new lock: another thread may have held it when this process was forked."""
        self._swapping = Lock()

    @property
    def profile(self) -> Profile | None:
        """The calibration in force."""
        return self._serving.profile

    @property
    def differences(self) -> tuple[str, ...]:
        """What differs between the profile's system and this one, one readable line each."""
        return self._current().differences

    @property
    def retriever(self) -> Any:
        """The wrapped retriever, under the profile's fusion where it can be set."""
        return self._serving.retriever

    def use_profile(self, profile: Profile | Path | str) -> None:
        """Serve by another profile from the next request on.

        One reference is swapped: a request that has begun ends under the profile that it began
        with, its retrieval and its decision alike.

        Args:
            profile: Calibrated on this system.

        Raises:
            ConfigurationError: the guard has a policy set by hand.
            ProfileFormatError: a path without a readable profile; the one in force stays.
            ProfileMismatchError: it was made for another system; the one in force stays.
        """
        if self._policy is not None:
            raise ConfigurationError(
                "this guard has a policy set by hand, with which a profile would compete; make a "
                "guard without it"
            )
        loaded = Profile.load(profile) if isinstance(profile, str | Path) else profile
        with self._swapping:
            serving = self._bound(loaded)
            if serving.differences:
                raise ProfileMismatchError(serving.differences)
            self._serving = serving

    def retrieve(
        self,
        query: str,
        *,
        request_id: str | None = None,
        segment: str | None = None,
        session_id: str | None = None,
        sample: bool = False,
        where: Where | None = None,
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
            where: The passages that may be found, by their metadata (tenant, access list); None
                for all. The retriever applies it, and every candidate is checked again here.

        Returns:
            The context: kept passages, the verdict on every candidate, and flags that say
            what was unusual. Empty only where the retriever found nothing, or by a policy
            that may abstain.

        Raises:
            QueryError: the query is too long, or the retriever refuses it.
            ConfigurationError: a filter that is no ``Where``, or a retriever without the keyword
                ``where``: nothing is retrieved rather than unfiltered.
            FilterViolationError: the retriever gave what the filter forbids; nothing is served.
            StageUnavailableError: the retriever failed, or did not answer by its deadline; an
                outage is never an empty context.
            OverloadedError: more requests at once than can be served.
        """
        request = self._begin(query, request_id, segment, session_id, sample=sample, where=where)
        call = partial(self._checked(request), query, depth=self.depth, **_filtering(where))
        self._enter()
        try:
            start = perf_counter()
            try:
                retrieved = self._asking.ask(call)
            except Exception as error:
                raise self._failed(error) from error
            except BaseException:
                self._cancelled()
                raise
            return self._finish(request, retrieved, start)
        finally:
            self._asking.leave()

    async def aretrieve(
        self,
        query: str,
        *,
        request_id: str | None = None,
        segment: str | None = None,
        session_id: str | None = None,
        sample: bool = False,
        where: Where | None = None,
    ) -> Context:
        """``retrieve`` without blocking the event loop; the same core, contract and errors.

        A plain retriever is called on one of 32 threads of the guard's own. A request that is
        cancelled while it waits counts as failed.
        """
        request = self._begin(query, request_id, segment, session_id, sample=sample, where=where)
        call = partial(self._checked(request), query, depth=self.depth, **_filtering(where))
        acall = request.serving.acall
        self._enter()
        try:
            start = perf_counter()
            try:
                retrieved = await (
                    self._asking.ask_aside(call)
                    if acall is None
                    else self._asking.ask_natively(partial(acall, *call.args, **call.keywords))
                )
            except Exception as error:
                raise self._failed(error) from error
            except BaseException:
                self._cancelled()
                raise
            return self._finish(request, retrieved, start)
        finally:
            self._asking.leave()

    def filter(
        self,
        query: str,
        hits: Retrieval,
        *,
        request_id: str | None = None,
        segment: str | None = None,
        session_id: str | None = None,
        sample: bool = False,
        where: Where | None = None,
    ) -> Context:
        """Decide on results that the caller already has; the same contract as ``retrieve``."""
        request = self._begin(query, request_id, segment, session_id, sample=sample, where=where)
        return self._finish(request, hits, None)

    def _begin(
        self,
        query: str,
        request_id: str | None,
        segment: str | None,
        session_id: str | None,
        *,
        sample: bool,
        where: Where | None,
    ) -> _Request:
        try:
            self._telemetry.received(self.mode)
        except Exception:
            self._observer_failed("telemetry")
        self._check(query, where)
        try:
            serving = self._current()
        except Exception as error:
            raise self._failed(error) from error
        request_id = os.urandom(8).hex() if request_id is None else request_id
        probability = 0.0
        if self._sampler is not None:
            # Selected before retrieval, so that a sample cannot depend on how the request went.
            try:
                probability = self._sampler.draw(request_id)
            except Exception:
                self._observer_failed("sampler")
        sampled = self._sampler is not None and (sample or probability > 0.0)
        return _Request(
            serving, query, request_id, segment, session_id, probability, sampled, where
        )

    def _check(self, query: object, where: object) -> None:
        """Refuse what must be neither searched nor sampled."""
        if not isinstance(query, str):
            raise self._failed(QueryError(f"a query must be a text, not {describe(query)}"))
        if len(query) > self.max_query_chars:
            raise self._failed(
                QueryError(
                    f"the query has {len(query):,} characters, the limit is "
                    f"{self.max_query_chars:,} (max_query_chars)"
                )
            )
        if where is not None and not isinstance(where, Where):
            raise self._failed(
                ConfigurationError(f"where must be a ctxguard.Where, not {describe(where)}")
            )

    def _checked(self, request: _Request) -> RetrieverCallable:
        """The call that answers a request, if there is one that can."""
        call = request.serving.call
        if call is None:
            raise self._failed(
                ConfigurationError("this guard has no retriever: pass one, or use filter()")
            )
        if request.where is not None and not request.serving.can_filter:
            raise self._failed(
                ConfigurationError(
                    f"{describe(self._wrapped)} cannot filter, and searching unfiltered would "
                    "show what `where` forbids: give its retrieve (and aretrieve) a keyword `where`"
                )
            )
        return call

    def _current(self) -> Serving:
        """What the next request is served by, over the retriever's generation of now."""
        serving = self._serving
        if serving.is_current:
            return serving
        with self._swapping:
            before = self._serving
            if before.is_current:
                return before
            serving = self._serving = self._bound(before.profile, lenient=True)
        if bool(serving.differences) != bool(before.differences):
            _log.warning(
                "the index was swapped: the profile in force %s (%d differences)",
                "is not for this one, top k is served" if serving.differences else "holds again",
                len(serving.differences),
            )
        return serving

    def _finish(self, request: _Request, retrieved: Retrieval, start: float | None) -> Context:
        received = perf_counter()
        try:
            ranking = self._ranking(retrieved)
            if request.where is not None:
                ranking = verified(ranking, request.where)
            context = self._decide(request, ranking)
        except Exception as error:
            raise self._failed(error) from error
        except BaseException:
            self._cancelled()
            raise
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
            plan = request.serving.plan(ranking.route, request.segment)
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
            profile_id=request.serving.profile_id,
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
                f"the retriever returned {describe(retrieved)}; return a Ranking, or Hit "
                "objects together with score_kind"
            )
        if self.score_kind is None:
            raise ConfigurationError(
                "plain hits need score_kind on the guard: say what the scores mean, one of "
                + ", ".join(kind.value for kind in ScoreKind)
            )
        return Ranking.from_hits(hits, self.score_kind)

    def _enter(self) -> None:
        try:
            self._asking.enter()
        except OverloadedError as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> CtxguardError:
        """The typed error that a failure becomes, counted; what is typed stays as it is."""
        failure = typed(error)
        try:
            if isinstance(failure, OverloadedError):
                self._telemetry.shed(self.mode)
            else:
                self._telemetry.failed(self.mode, cause_of(error))
            if isinstance(failure, FilterViolationError):
                self._telemetry.filter_violated()
        except Exception:
            self._observer_failed("telemetry")
        return failure

    def _cancelled(self) -> None:
        """Count a request that whoever asked has given up."""
        try:
            self._telemetry.failed(self.mode, "cancelled")
        except Exception:
            self._observer_failed("telemetry")

    def _bound(self, profile: Profile | None, *, lenient: bool = False) -> Serving:
        return bind(
            self._wrapped,
            profile,
            policy=self._policy,
            bare=self._bare,
            fingerprint=self._fingerprint,
            lenient=lenient,
        )


def _compares_scores(policy: Policy) -> bool:
    return isinstance(policy, RatioPolicy) and policy.min_ratio > 0.0


def _member(kind: type[_Setting], value: _Setting | str, setting: str) -> _Setting:
    try:
        return kind(value)
    except ValueError:
        options = ", ".join(member.value for member in kind)
        raise ConfigurationError(f"{setting} {value!r} is unknown; use one of {options}") from None


def _filtering(where: Where | None) -> dict[str, Where]:
    """The keyword for a retriever that filters; none, so that others are called as ever."""
    return {} if where is None else {"where": where}
