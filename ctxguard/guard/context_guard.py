"""Handles requests: ContextGuard retrieves, decides, assembles, counts and samples.

``retrieve``, ``aretrieve`` and ``filter`` differ only in where the candidates come from. A policy
that cannot be applied falls back to the retriever's own order at the route's k. A retriever that
fails is a typed error, never an empty context (DESIGN.md §7). Calls the retriever (on threads), the
assessor and the observers, reads the profile's file, uses the clocks and random ids, counts and
logs.
"""

import logging
import os
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from ctxguard._support.checks import check_at_least
from ctxguard._support.error_text import describe_error
from ctxguard._support.fork_safety import OfProcess
from ctxguard.core.assembly import DEFAULT_ASSEMBLY, Assembly
from ctxguard.core.context import Context
from ctxguard.core.metadata_filter import Where
from ctxguard.core.policies import Policy, RatioPolicy
from ctxguard.core.types import DEFAULT_DEPTH, Mode, ModeName, ScoreKind, ScoreKindName, member_of
from ctxguard.errors import ConfigurationError, ProfileMismatchError, QueryError
from ctxguard.guard.assess import AssessorStage
from ctxguard.guard.bound_profile import BoundProfile, bind_profile
from ctxguard.guard.build_context import Request, build_context, decide_request, question_of
from ctxguard.guard.observers import RequestSampler, RequestSpan, Tracing
from ctxguard.guard.telemetry import Telemetry, default_telemetry
from ctxguard.guard.wrapped_retriever import describe, probed
from ctxguard.profile.comparison import DEFAULT_CHECK, ProfileCheck, SystemComparison
from ctxguard.profile.reranker_probe import RETRIEVER_KEY
from ctxguard.profile.schema import Profile
from ctxguard.resilience.bounded_caller import (
    DEFAULT_REQUEST_LIMITS,
    BoundedCaller,
    RequestLimits,
    typed,
)

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import AnyRetriever, Retrieval

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

DEFAULT_MAX_QUERY_CHARS = 10_000


class ContextGuard:
    """Wraps a retriever and lets only clean context through.

    Args:
        retriever: A `Retriever`, an `AsyncRetriever`, or a function ``(query, *, depth)``, plain or
            asynchronous. It returns a ``Ranking``, or ``Hit`` objects if ``score_kind`` is given.
            A `SwappingRetriever` may replace its index while it serves. None for a guard that only
            filters the caller's own results.
        profile: A calibrated ``Profile``, or the path of one. Without a profile the top ``k`` is
            served and every answer is flagged ``uncalibrated``.
        policy: A policy set by hand for every route, in place of a profile.
        k: The most passages in a context while nothing is calibrated or enforced. By default 5, or
            with a profile the number that it was compared with.
        mode: ``enforce``; ``shadow`` decides and records, but serves the bare top k; ``off``
            decides nothing and serves the bare top k. None follows the profile's verdict on each
            route (DESIGN.md §6), and means ``enforce`` without a profile.
        depth: Number of candidates to request from the retriever.
        score_kind: The kind of the scores of plain hits; None if the retriever returns rankings, or
            hits without scores.
            With ``rank``, or without scores, only k applies.
        check: The fingerprint of a system that has none of its own, and how far the system may
            differ from the profile's.
        assembly: Order, token budget, duplicates, sanitising and template of a context.
        limits: The longest query, the longest call of the retriever, and the most calls at once.
        sampler: Selects the traffic to be judged.
        telemetry: Where requests are counted; by default in the process's default registry.
        tracing: Begins a span for each request, such as
            ``ctxguard.integrations.opentelemetry.OpenTelemetryTracing``; None for no spans.
        assessor: Asked about candidates if the profile says that it pays; None to ask nobody.

    Raises:
        ConfigurationError: a setting is out of range, or two contradict each other.
        ProfileFormatError: ``profile`` is the path of a file that is not a profile.
        ProfileMismatchError: the check is strict, and anything differs or cannot be compared.
    """

    _rebinding = OfProcess(Lock)

    def __init__(
        self,
        retriever: "AnyRetriever | None" = None,
        *,
        profile: Profile | Path | str | None = None,
        policy: Policy | None = None,
        k: int | None = None,
        mode: Mode | ModeName | None = None,
        depth: int = DEFAULT_DEPTH,
        score_kind: ScoreKind | ScoreKindName | None = None,
        check: ProfileCheck = DEFAULT_CHECK,
        assembly: Assembly = DEFAULT_ASSEMBLY,
        limits: RequestLimits = DEFAULT_REQUEST_LIMITS,
        sampler: RequestSampler | None = None,
        telemetry: Telemetry | None = None,
        tracing: Tracing | None = None,
        assessor: AssessorStage | None = None,
    ) -> None:
        if profile is not None and policy is not None:
            raise ConfigurationError("give a profile or a policy, not both: they would conflict")
        check_at_least(1, depth=depth)
        self._mode = None if mode is None else member_of(Mode, mode, "mode")
        self.depth: Final = depth
        self.score_kind: Final = (
            None if score_kind is None else member_of(ScoreKind, score_kind, "score_kind")
        )
        if limits.max_query_chars is not None and hasattr(retriever, "with_max_query_chars"):
            retriever = cast(Any, retriever).with_max_query_chars(limits.max_query_chars)
        self.max_query_chars: Final = limits.max_query_chars or DEFAULT_MAX_QUERY_CHARS
        compares_scores = isinstance(policy, RatioPolicy) and policy.min_ratio > 0.0
        if compares_scores and self.score_kind is ScoreKind.RANK:
            raise ConfigurationError(
                "min_ratio compares scores, and score_kind 'rank' says that they carry "
                "only order: set min_ratio to 0, or return scores that can be compared"
            )
        self.assembly: Final = assembly
        telemetry = default_telemetry() if telemetry is None else telemetry
        self._telemetry, self._sampler = telemetry, sampler
        self._begin_span = None if tracing is None else tracing.begin
        self._caller = BoundedCaller(limits, getattr(retriever, "concurrency", None))
        self._caller.watch(telemetry.circuit_changed)
        self._assessor = assessor
        if assessor is not None:
            assessor.watch(telemetry.circuit_changed)
        if hasattr(retriever, "watch_stages"):
            cast(Any, retriever).watch_stages(telemetry.circuit_changed)
        self._wrapped = retriever
        self._check = check
        self._policy = policy
        self.k: Final = k
        self._probed: dict[str, str] = {}
        loaded = Profile.load(profile) if isinstance(profile, str | Path) else profile
        self._ask_probes(loaded)
        self._bound = self._bind(loaded)
        if check.strict and self.differences:
            raise ProfileMismatchError(self.differences)
        self._say_mode()

    def __setattr__(self, name: str, value: object) -> None:
        # Some settings are read at once and others when a profile is bound: a change would be half.
        if not name.startswith("_") and name in self.__dict__:
            raise AttributeError(f"{name} cannot change once a guard is made: make a new guard")
        super().__setattr__(name, value)

    @property
    def mode(self) -> Mode:
        """Whether decisions are enforced or only recorded; may be set while the guard serves.

        A mode set here applies to every route. Without one this is the mode of the profile's main
        route; other routes have their own (`Context.mode`). A request keeps the mode that it began
        with. Set a ``Mode``, its name, or None to follow the profile's verdict.

        Raises:
            ConfigurationError: the mode is unknown; the former mode stays in force.
        """
        return self._bound.mode if self._mode is None else self._mode

    @mode.setter
    def mode(self, mode: Mode | ModeName | None) -> None:
        self._mode = None if mode is None else member_of(Mode, mode, "mode")
        self._say_mode()

    @property
    def profile(self) -> Profile | None:
        """The profile in force; None without one."""
        return self._bound.profile

    @property
    def differences(self) -> tuple[str, ...]:
        """Differences between the profile's system and this one, one readable line for each."""
        return self.comparison.differences

    @property
    def comparison(self) -> SystemComparison:
        """The profile's system compared with this one, including how much of the corpus changed."""
        return self._current().comparison

    @property
    def retriever(self) -> Any:
        """The wrapped retriever, under the profile's fusion if it can be set; None without one."""
        return self._bound.retriever

    def use_profile(self, profile: Profile | Path | str) -> None:
        """Use another profile, or the one at a path, starting with the next request.

        Requests in progress finish with the former one, which stays in force if an error is raised.

        Raises:
            ConfigurationError: the guard has a policy set by hand.
            ProfileFormatError: the file at the path is not a profile.
            ProfileMismatchError: the profile was made for another system; or, in strict mode, the
                corpus has changed since or the profile is unverified.
        """
        if self._policy is not None:
            raise ConfigurationError(
                "this guard has a policy set by hand, which would conflict with a profile; make a "
                "guard without that policy"
            )
        loaded = Profile.load(profile) if isinstance(profile, str | Path) else profile
        self._ask_probes(loaded)
        with self._rebinding:
            bound = self._bind(loaded)
            comparison = bound.comparison
            refused = comparison.differences if self._check.strict else comparison.mismatches
            if refused:
                raise ProfileMismatchError(refused)
            self._bound = bound
        self._say_mode()

    def _say_mode(self) -> None:
        """Log a warning if the mode set by hand overrules the profile's verdict."""
        verdict = None if self._bound.profile is None else self._bound.profile.verdict
        if self._mode is not None and verdict is not None and self._mode is not verdict.mode:
            _log.warning(
                "mode %r was set by hand; the profile's verdict is %r",
                self._mode.value,
                verdict.decision,
            )

    def probe(self) -> SystemComparison:
        """Check again whether a `ProbedRetriever` still uses the profile's embedder and reranker.

        This waits for the retriever, so call it outside requests, such as hourly on a thread. If
        the retriever raises, its last answer still applies.
        """
        self._ask_probes(self._bound.profile)
        with self._rebinding:
            self._bound = self._bind(self._bound.profile, lenient=True)
        return self.comparison

    def _ask_probes(self, profile: Profile | None) -> None:
        """Get the similarities of the probe texts if the profile has them; else return nothing."""
        if profile is None or RETRIEVER_KEY not in profile.fingerprint:
            return
        try:
            self._probed = probed(self._wrapped)
        except Exception as error:
            _log.warning("the retriever did not answer the probe texts: %s", describe_error(error))

    def use_fingerprint(self, fingerprint: Mapping[str, str]) -> None:
        """From the next request on, compare the profile with another fingerprint of the system."""
        with self._rebinding:
            self._check = replace(self._check, fingerprint=fingerprint)
            self._bound = self._bind(self._bound.profile, lenient=True)

    def retrieve(
        self,
        query: str,
        *,
        request_id: str | None = None,
        session_id: str | None = None,
        sample: bool = False,
        where: Where | None = None,
    ) -> Context:
        """Retrieve candidates for one query, and build the context from them.

        Args:
            query: The question, at most ``max_query_chars`` long.
            request_id: Identifies the request in samples; None for a random one. A hash of it
                decides on sampling, so a client that chooses the whole id can choose whether it is
                sampled.
            session_id: The session or conversation that the request belongs to. Requests of one
                session are not independent: the live estimates count them as one cluster.
            sample: Sample this request even if the sampler does not select it, for debugging; it
                is marked, and left out of every estimate.
            where: Which passages may be returned, by their metadata (tenant, access list); None
                for all. The retriever applies it, and the guard checks every candidate again.

        Returns:
            The kept passages, the decision on every candidate, and flags for anything unusual. It
            is empty only if the retriever returned nothing, the policy abstains (``min_keep`` 0),
            or no passage is within the budget and none may be cut (flag ``over_budget``).

        Raises:
            QueryError: the query is too long, or the retriever refused it.
            ConfigurationError: ``where`` is not a ``Where``, the retriever cannot filter, or its
                result is neither a ranking nor hits.
            FilterViolationError: the retriever returned a passage that ``where`` forbids; nothing
                is served.
            StageUnavailableError: the retriever failed, was late, or returned only unreadable
                passages.
            OverloadedError: too many requests are in progress.
        """
        request = self._begin(query, request_id, session_id, sample, where, is_retrieved=True)
        return _run_blocking(self._answer(request, blocks=True))

    async def aretrieve(
        self,
        query: str,
        *,
        request_id: str | None = None,
        session_id: str | None = None,
        sample: bool = False,
        where: Where | None = None,
    ) -> Context:
        """``retrieve`` without blocking the event loop: same arguments, result and errors.

        A retriever without an asynchronous call runs on one of the guard's threads: 32, or as many
        as its ``concurrency`` says. A request that is cancelled while waiting counts as failed.
        """
        request = self._begin(query, request_id, session_id, sample, where, is_retrieved=True)
        return await self._answer(request)

    def filter(
        self,
        query: str,
        hits: "Retrieval",
        *,
        request_id: str | None = None,
        session_id: str | None = None,
        sample: bool = False,
        where: Where | None = None,
        k: int | None = None,
    ) -> Context:
        """Build the context from results that the caller already has; see also ``retrieve``.

        Args:
            query: The question that was searched.
            hits: A ``Ranking``, or ``Hit`` objects if the guard has a ``score_kind``, in any order.
                Ranks, if given, are the engine's and show the direction of the scores.
            request_id: See ``retrieve``.
            session_id: See ``retrieve``.
            sample: See ``retrieve``.
            where: Only checked here.
            k: Number of results served while no policy is enforced, such as all that a reranker
                returned; None for as many as ``retrieve`` would serve.

        Raises:
            QueryError: the query is too long.
            ConfigurationError: ``k`` is below 1, ``hits`` is neither a ranking nor hits, or
                ``where`` is not a ``Where``.
            FilterViolationError: a passage does not satisfy ``where``; nothing is served.
            StageUnavailableError: there are passages, but none can be read.
        """
        request = self._begin(query, request_id, session_id, sample, where, k=k)
        return _run_blocking(self._answer(request, hits, blocks=True))

    async def afilter(
        self,
        query: str,
        hits: "Retrieval",
        *,
        request_id: str | None = None,
        session_id: str | None = None,
        sample: bool = False,
        where: Where | None = None,
        k: int | None = None,
    ) -> Context:
        """``filter`` without blocking the event loop while an assessor is asked."""
        request = self._begin(query, request_id, session_id, sample, where, k=k)
        return await self._answer(request, hits)

    def _begin(
        self,
        query: str,
        request_id: str | None,
        session_id: str | None,
        sample: bool,
        where: Where | None,
        *,
        is_retrieved: bool = False,
        k: int | None = None,
    ) -> Request:
        """Count a request, check its input, and pick the state that answers it."""
        mode, bound, most = self._mode, self._bound, self.max_query_chars
        sampler, span = self._sampler, None
        if self._begin_span is not None:
            begin = partial(self._begin_span, query, self.depth, request_id)
            span = self._safely("tracing", begin, None)
        if request_id is None:
            request_id = (None if span is None else span.request_id) or os.urandom(8).hex()
        counted = bound.mode if mode is None else mode
        try:
            self._telemetry.received(counted)
        except Exception:
            self._observer_failed("telemetry")
        try:
            if not isinstance(query, str):
                raise QueryError(f"a query must be a string, not {describe(query)}")
            if len(query) > most:
                raise QueryError(
                    f"the query has {len(query):,} characters, but the limit is {most:,} "
                    "(max_query_chars of the guard)"
                )
            if where is not None and not isinstance(where, Where):
                raise ConfigurationError(f"where must be a ctxguard.Where, not {describe(where)}")
            if k is not None and k < 1:
                raise ConfigurationError(f"k {k!r} must be at least 1, or None for the guard's own")
            if bound.swaps and bound.generation is not bound.retriever.generation:
                bound = self._current()
        except BaseException as error:
            raise self._counted(counted, error, span)  # noqa: B904
        # Selected before retrieval, so that a sample cannot depend on how the request went.
        probability = 0.0
        if sampler is not None:
            # Compared there, so that a result that is not a number is the sampler's error.
            probability = self._safely("sampler", lambda: max(0.0, sampler.draw(request_id)), 0.0)
        return Request(
            query=query,
            request_id=request_id,
            session_id=session_id,
            sample=sample,
            where=where,
            bound=bound,
            mode=mode,
            probability=probability,
            span=span,
            is_retrieved=is_retrieved,
            k=k,
        )

    def _current(self) -> BoundProfile:
        """Return the current profile, bound to the retriever's current index generation."""
        bound = self._bound
        if not bound.swaps or bound.generation is bound.retriever.generation:
            return bound
        with self._rebinding:
            if self._bound is not bound:  # another request was quicker
                return self._bound
            rebound = self._bound = self._bind(bound.profile, lenient=True)
        if rebound.comparison.flags != bound.comparison.flags:
            found, standing = rebound.comparison, "holds again"
            if found.mismatches:
                standing = "does not match the new one, so the top k are served"
            elif found.reservations:
                standing = "still applies, but calibrate again"
            _log.warning(
                "the index was swapped: the profile in force %s (%d differences)",
                standing,
                len(found.differences),
            )
        return rebound

    async def _answer(
        self, request: Request, hits: "Retrieval" = (), *, blocks: bool = False
    ) -> Context:
        """Retrieve unless the caller gave results, decide, ask, build, and account for it.

        With ``blocks`` it never waits for an event loop, for plain callers (`_run_blocking`).
        """
        began, retrieve_seconds, waited = perf_counter(), None, 0.0
        span, sampler, stage = request.span, self._sampler, self._assessor
        try:
            if request.is_retrieved:
                calls = request.bound.calls
                options: dict[str, Any] = {"depth": self.depth}
                if request.where is not None:
                    if not calls.can_filter:
                        raise ConfigurationError(
                            f"{describe(self._wrapped)} cannot filter, and searching unfiltered "
                            "would show what `where` forbids: give its retrieve (and aretrieve) a "
                            "keyword `where`"
                        )
                    options["where"] = request.where
                hits = await self._caller.call(
                    calls.call, calls.acall, request.query, blocks=blocks, **options
                )
                received = perf_counter()
                retrieve_seconds, began = received - began, received
            if span is not None:
                self._safely("tracing", span.retrieved, None)
            applies, decision = decide_request(request, hits, self.score_kind)
            assessment = question = None
            if applies.assessor is not None:
                applies, decision, question = question_of(
                    request, applies, decision, applies.assessor, stage
                )
            if question is not None and stage is not None:
                asked = perf_counter()
                assessment = stage.ask(question) if blocks else await stage.aask(question)
                waited = perf_counter() - asked
            context = build_context(request, applies, decision, self.assembly, assessment)
        except BaseException as error:
            mode = request.bound.mode if request.mode is None else request.mode
            raise self._counted(mode, error, span)  # noqa: B904  it sets the cause
        probability = request.probability
        if sampler is not None and (request.sample or probability > 0.0):
            self._safely("sampler", lambda: sampler.offer(context, probability, time()), None)
        try:
            guard_seconds = perf_counter() - began - waited
            self._telemetry.answered(context, retrieve_seconds, guard_seconds)
        except Exception:
            self._observer_failed("telemetry")
        if span is not None:
            self._safely("tracing", lambda: span.answered(context, probability), None)
        return context

    def _counted(self, mode: Mode, error: BaseException, span: RequestSpan | None) -> BaseException:
        """Count a request that ended in an error, and return the typed error to raise."""
        if span is not None:
            self._safely("tracing", lambda: span.failed(error), None)
        self._safely("telemetry", lambda: self._telemetry.raised(mode, error), None)
        if not isinstance(error, Exception):
            return error
        failure = typed(error)
        if failure is not error:
            failure.__cause__ = error
        return failure

    def _safely(self, observer: str, call: Callable[[], _T], otherwise: _T) -> _T:
        """Call an observer; if it raises, count the error and return ``otherwise``."""
        try:
            return call()
        except Exception:
            self._observer_failed(observer)
            return otherwise

    def _observer_failed(self, observer: str) -> None:
        # If even this count fails, nothing is left to report it with.
        with suppress(Exception):
            self._telemetry.observer_failed(observer)

    def _bind(self, profile: Profile | None, *, lenient: bool = False) -> BoundProfile:
        return bind_profile(
            self._wrapped,
            profile,
            policy=self._policy,
            k=self.k,
            check=self._check,
            probed=self._probed,
            lenient=lenient,
        )


def _run_blocking(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine whose awaits all block this thread."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        result: _T = ended.value
        return result
    raise RuntimeError("it waited for an event loop")
