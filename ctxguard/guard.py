"""ContextGuard: the request path. Retrieve, decide, assemble, count, sample.

``retrieve`` and ``aretrieve`` share one core; only the call of the retriever differs. Quality
decisions fail open, towards the upstream order at the route's k; a retriever that fails is a
typed error, never an empty context (DESIGN.md §7).
"""

import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from threading import Lock
from time import perf_counter, time
from typing import Any, NoReturn, TypeVar, cast

from ctxguard.answer import answer, compares_scores, ranking_of
from ctxguard.context import Assembly, Context
from ctxguard.errors import (
    ConfigurationError,
    CtxguardError,
    OverloadedError,
    ProfileMismatchError,
)
from ctxguard.forks import start_afresh_in_children
from ctxguard.observers import Observers, Sampler
from ctxguard.policy import Policy, RatioPolicy
from ctxguard.profile import Profile
from ctxguard.request import Asked, Request
from ctxguard.serving import Retrieval, RetrieverCallable, Serving, bind, describe
from ctxguard.stages import DEFAULT_MAX_IN_FLIGHT, Asking, typed
from ctxguard.telemetry import Telemetry, default_telemetry
from ctxguard.types import DEFAULT_DEPTH, DEFAULT_K, Mode, ScoreKind
from ctxguard.where import Where

__all__ = ["DEFAULT_MAX_QUERY_CHARS", "ContextGuard", "Sampler"]

_log = logging.getLogger(__name__)

DEFAULT_MAX_QUERY_CHARS = 10_000

_Setting = TypeVar("_Setting", Mode, ScoreKind)


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
        if policy is not None and self.score_kind is ScoreKind.RANK and compares_scores(policy):
            raise ConfigurationError(
                "min_ratio compares scores, and score_kind 'rank' says that they carry order "
                "only: set min_ratio to 0, or hand over scores that can be compared"
            )
        self.assembly = Assembly() if assembly is None else assembly
        telemetry = default_telemetry() if telemetry is None else telemetry
        self._observers = Observers(telemetry, sampler)
        self._asking = Asking(deadline_seconds, max_in_flight)
        self._asking.watch(telemetry.circuit_changed)
        if hasattr(retriever, "watch_stages"):
            cast(Any, retriever).watch_stages(telemetry.circuit_changed)
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
        request = self._begin(Asked(query, request_id, segment, session_id, sample, where))
        call = self._call_for(request)
        self._enter()
        try:
            start = perf_counter()
            try:
                retrieved = self._asking.ask(call)
            except Exception as error:
                self._fail(error)
            except BaseException:
                self._observers.cancelled(self.mode)
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
        request = self._begin(Asked(query, request_id, segment, session_id, sample, where))
        call = self._call_for(request)
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
                self._fail(error)
            except BaseException:
                self._observers.cancelled(self.mode)
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
        request = self._begin(Asked(query, request_id, segment, session_id, sample, where))
        return self._finish(request, hits, None)

    def _begin(self, asked: Asked) -> Request:
        self._observers.received(self.mode)
        refusal = asked.refusal(self.max_query_chars)
        if refusal is not None:
            raise self._failed(refusal)
        try:
            serving = self._current()
        except Exception as error:
            self._fail(error)
        request_id = os.urandom(8).hex() if asked.request_id is None else asked.request_id
        # Selected before retrieval, so that a sample cannot depend on how the request went.
        return Request(asked, request_id, serving, self._observers.draw(request_id))

    def _call_for(self, request: Request) -> partial[Any]:
        """The call that answers a request, if there is one that can."""
        call, where = request.serving.call, request.asked.where
        if call is None:
            raise self._failed(
                ConfigurationError("this guard has no retriever: pass one, or use filter()")
            )
        if where is None:
            return partial(call, request.asked.query, depth=self.depth)
        if not request.serving.can_filter:
            raise self._failed(
                ConfigurationError(
                    f"{describe(self._wrapped)} cannot filter, and searching unfiltered would "
                    "show what `where` forbids: give its retrieve (and aretrieve) a keyword `where`"
                )
            )
        return partial(call, request.asked.query, depth=self.depth, where=where)

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

    def _finish(self, request: Request, retrieved: Retrieval, start: float | None) -> Context:
        received = perf_counter()
        try:
            ranking = ranking_of(retrieved, self.score_kind, request.asked.where)
            context = answer(request, ranking, self.mode, self.assembly, self._bare)
        except Exception as error:
            self._fail(error)
        except BaseException:
            self._observers.cancelled(self.mode)
            raise
        if request.asked.sample or request.probability > 0.0:
            self._observers.offer(context, request.probability, time())
        self._observers.answered(
            context, None if start is None else received - start, perf_counter() - received
        )
        return context

    def _enter(self) -> None:
        try:
            self._asking.enter()
        except OverloadedError as error:
            raise self._failed(error) from None

    def _fail(self, error: Exception) -> NoReturn:
        failure = self._failed(error)
        if failure is error:
            raise error
        raise failure from error

    def _failed(self, error: Exception) -> CtxguardError:
        """The typed error that a failure becomes, counted; what is typed stays as it is."""
        failure = typed(error)
        self._observers.failed(self.mode, error, failure)
        return failure

    def _bound(self, profile: Profile | None, *, lenient: bool = False) -> Serving:
        return bind(
            self._wrapped,
            profile,
            policy=self._policy,
            bare=self._bare,
            fingerprint=self._fingerprint,
            lenient=lenient,
        )


def _member(kind: type[_Setting], value: _Setting | str, setting: str) -> _Setting:
    try:
        return kind(value)
    except ValueError:
        options = ", ".join(member.value for member in kind)
        raise ConfigurationError(f"{setting} {value!r} is unknown; use one of {options}") from None
