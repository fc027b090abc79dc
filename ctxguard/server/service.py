"""The guard, scorer and store named in the settings, for the lifetime of the service.

Reads the profile, opens the index or engine, the models and the store, each imported where it is
opened, and runs watchers of what may change.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from ctxguard.core.assembly import DEFAULT_ASSEMBLY, Assembly
from ctxguard.core.passages import UNBOUNDED_CHARS
from ctxguard.core.types import DEFAULT_DEPTH
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.observers import Tracing
from ctxguard.guard.reload import IndexWatcher, ProfileWatcher
from ctxguard.guard.telemetry import Telemetry
from ctxguard.profile.comparison import ProfileCheck
from ctxguard.profile.schema import Profile
from ctxguard.resilience.bounded_caller import RequestLimits
from ctxguard.resilience.deadlines import Deadlines
from ctxguard.retrieval.protocols import ProbedRetriever
from ctxguard.server.problems import Problem, invalid
from ctxguard.server.reranker_check import keep_comparing, keep_probing, log_differences
from ctxguard.server.scoring import BoundedScorer, LocalScorer, Scorer
from ctxguard.server.settings import ServiceSettings

_NO_DROPS = Assembly(drop_duplicates=False, max_passage_chars=UNBOUNDED_CHARS)
"""Rerank answers state only the decision, so assembly must add no drops of its own."""


class Service:
    """The guard, scorer and store named in the settings; see ``create_app`` for the others.

    Attributes:
        scorer: Scores documents; None without a reranker.
        samples: Writes sampled requests; None without a store.
        kind: The kind of the scores.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        scorer: Scorer | None,
        retriever: Any,
        telemetry: Telemetry,
        tracing: Tracing | None,
    ) -> None:
        self.settings, self.kind = settings, settings.kind
        self._telemetry = telemetry
        profile = None if settings.profile is None else Profile.load(settings.profile)
        self._scorer = _scorer(settings) if scorer is None else scorer
        self._retriever = _retriever(settings) if retriever is None else retriever
        self.samples = _samples(settings)
        self._assessor = settings.assessor_stage()
        self.guard = ContextGuard(
            self._retriever,
            profile=profile,
            mode=settings.mode,
            k=settings.k,
            depth=DEFAULT_DEPTH if profile is None else profile.provenance.depth,
            score_kind=self.kind,
            check=ProfileCheck(self._fingerprint()),
            assembly=_NO_DROPS if self._retriever is None else DEFAULT_ASSEMBLY,
            sampler=None if self.samples is None else self.samples.sampler,
            telemetry=telemetry,
            # An index in a folder has deadlines of its own, by which it answers in part.
            limits=RequestLimits(None if settings.engine is None else settings.deadline_seconds),
            tracing=_tracing(settings) if tracing is None else tracing,
            assessor=self._assessor,
        )
        self.scorer: BoundedScorer | None = None
        if self._scorer is not None:
            # The settings' own scorers keep the deadline themselves.
            seconds = None if scorer is None else settings.deadline_seconds
            self.scorer = BoundedScorer(self._scorer, seconds, settings.max_scoring, telemetry)

    def too_many(self, n: int, what: str) -> Problem:
        """Refuse a request with too many documents or candidates."""
        return invalid(
            f"{n:,} {what}, but the limit is {self.settings.max_documents:,}: send fewer, or start "
            "the service with a larger max-documents"
        )

    def _fingerprint(self) -> Mapping[str, str] | None:
        """Identify the system behind the candidates; None for the index's own fingerprint."""
        if self._scorer is not None:
            return {"reranker": self._scorer.fingerprint, "score_kind": self.kind.value}
        return self.settings.fingerprint if self._retriever is None else None

    @asynccontextmanager
    async def running(self, _: object) -> AsyncIterator[None]:
        """Watch the files while requests are served; then close, and store the last samples."""
        async with AsyncExitStack() as stack:
            if self._scorer is not None:
                stack.push_async_callback(self._scorer.aclose)
            if self.settings.engine is not None:
                stack.callback(self._retriever.close)
            if self._assessor is not None:
                stack.callback(self._assessor.close)
            if self.samples is not None:
                stack.callback(self.samples.stop)
            if self.settings.profile is not None:
                profile = self.settings.profile
                stack.enter_context(ProfileWatcher(self.guard, profile, telemetry=self._telemetry))
            seconds = self.settings.probe_seconds
            if self._scorer is not None:
                fingerprint, compared = self._fingerprint() or {}, asyncio.Event()
                keep = keep_comparing(self.guard, self._scorer, fingerprint, seconds, compared)
                stack.push_async_callback(_cancelled, asyncio.create_task(keep))
                await compared.wait()
            if isinstance(self._retriever, ProbedRetriever):
                probing = asyncio.create_task(keep_probing(self.guard, seconds))
                stack.push_async_callback(_cancelled, probing)
            log_differences(self.guard)
            if getattr(self._retriever, "folder", None) is not None:
                stack.enter_context(IndexWatcher(self._retriever, telemetry=self._telemetry))
            yield


def _tracing(settings: ServiceSettings) -> Tracing | None:
    if not settings.opentelemetry:
        return None
    from ctxguard.integrations.opentelemetry import OpenTelemetryTracing

    return OpenTelemetryTracing(settings.index_name if settings.searches else None)


def _scorer(settings: ServiceSettings) -> Scorer | None:
    seconds = settings.deadline_seconds
    if settings.rerank_upstream is not None:
        key = settings.upstream_key
        return settings.upstream(settings.rerank_upstream, key, seconds, settings.rerank_model)
    if settings.reranker is None or settings.searches:
        return None
    from ctxguard.retrieval.models.reranker import CrossEncoderReranker

    return LocalScorer(CrossEncoderReranker(settings.reranker), seconds, settings.max_scoring)


def _retriever(settings: ServiceSettings) -> Any:
    if not settings.searches:
        return None
    from ctxguard.integrations.engines.retriever import EngineRetriever

    retriever: Any = (
        settings.open_index(Deadlines(total_seconds=settings.deadline_seconds))
        if settings.engine is None
        else EngineRetriever.open(settings.engine)
    )
    retriever.warm_up()
    return retriever


def _samples(settings: ServiceSettings) -> Any:
    if settings.store is None:
        return None
    from ctxguard.monitor.store.writer import sample_to

    return sample_to(settings.store, rate=settings.sample_rate)


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
