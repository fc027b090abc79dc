"""Builds the ASGI application from `ServiceSettings`, behind the gate."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import Receive, Scope, Send

from ctxguard import __version__
from ctxguard.core.assembly import DEFAULT_ASSEMBLY, Assembly
from ctxguard.core.types import DEFAULT_DEPTH
from ctxguard.guard import ContextGuard, Tracing
from ctxguard.guard.reload import IndexWatcher, ProfileWatcher
from ctxguard.profile.schema import Profile
from ctxguard.request.telemetry import Telemetry, default_telemetry
from ctxguard.resilience import Deadlines
from ctxguard.server import clients, context, filtering, rerank
from ctxguard.server.gate import Gate
from ctxguard.server.metrics import Endpoint, forget_dead_workers, http_metrics
from ctxguard.server.openapi import Operation, openapi
from ctxguard.server.problems import HttpAnswer, ProblemKind, of_status
from ctxguard.server.reranker_check import RerankerCheck, log_differences
from ctxguard.server.scoring import BoundedScorer, LocalScorer, Scorer
from ctxguard.server.settings import ServiceSettings, is_loopback
from ctxguard.server.wire import answer

_SEARCH_PATH = "/v1/vector_stores/{vector_store_id}/search"
_NO_DROPS = Assembly(drop_duplicates=False, max_passage_chars=2**62)
"""A rerank answer holds what the decision says, and assembly adds no drops of its own."""


_OBJECT: TypeAdapter[Any] = TypeAdapter(dict[str, Any])
"""The type of an answer that another API documents."""


class Service:
    """The guard, scorer and store that the settings name.

    Args:
        settings: Names all that is served.
        scorer: Scores documents, in place of the settings' reranker.
        retriever: Is searched, in place of the settings' index.
        telemetry: Where the guard counts.
        tracing: Begins a span for each request, in place of OpenTelemetry's.

    Attributes:
        guard: Decides.
        scorer: Scores documents; None without a reranker.
        samples: Writes sampled requests; None without a store.

    Raises:
        CtxguardError: something cannot be opened.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        scorer: Scorer | None,
        retriever: Any,
        telemetry: Telemetry,
        tracing: Tracing | None,
    ) -> None:
        self.settings = settings
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
            enforce_share=settings.enforce_share,
            k=settings.k,
            depth=DEFAULT_DEPTH if profile is None else profile.provenance.depth,
            score_kind=settings.kind,
            fingerprint=self._fingerprint(),
            assembly=replace(
                _NO_DROPS if self._retriever is None else DEFAULT_ASSEMBLY,
                flag_conflicts=settings.flag_conflicts,
            ),
            sampler=None if self.samples is None else self.samples.sampler,
            telemetry=telemetry,
            # An index in a folder has deadlines of its own, by which it answers in part.
            deadline_seconds=None if settings.engine is None else settings.deadline_seconds,
            tracing=_tracing(settings) if tracing is None else tracing,
            assessor=self._assessor,
        )
        self.scorer = (
            None
            if self._scorer is None
            else BoundedScorer(
                self._scorer,
                # The settings' own scorers keep the deadline themselves.
                None if scorer is None else settings.deadline_seconds,
                settings.max_scoring,
                telemetry,
            )
        )
        self._check = (
            None
            if self._scorer is None
            else RerankerCheck(
                self.guard, self._scorer, self._fingerprint() or {}, settings.probe_seconds
            )
        )

    def _fingerprint(self) -> Mapping[str, str] | None:
        """Identifies the system whose candidates are decided on; None for the index's own."""
        if self._scorer is not None:
            return {
                "reranker": self._scorer.fingerprint,
                "score_kind": self.settings.kind.value,
            }
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
                watcher = ProfileWatcher(
                    self.guard, self.settings.profile, telemetry=self._telemetry
                )
                stack.enter_context(watcher)
            if self._check is not None:
                await self._check.ask()
                stack.push_async_callback(_cancelled, asyncio.create_task(self._check.run()))
            log_differences(self.guard)
            if getattr(self._retriever, "folder", None) is not None:
                stack.enter_context(IndexWatcher(self._retriever, telemetry=self._telemetry))
            yield

    async def health(self, _: Request) -> HttpAnswer:
        """Whether the process serves, and whether its reranker is left out at present."""
        is_open = None if self.scorer is None else self.scorer.is_open
        words = {None: None, False: "in use", True: "left out: it failed repeatedly"}
        return answer({"status": "ok", "reranker": words[is_open]})

    def operations(self) -> list[Operation]:
        """The operations that this service answers."""
        settings = self.settings
        operations = [
            Operation(
                "/v1/filter",
                filtering.FilterEndpoint(self.guard, settings.kind, settings.max_documents),
                Endpoint.FILTER,
                "Decide on scored candidates, with the reason and the threshold of each",
                TypeAdapter(filtering.FilterAnswer),
                filtering.REQUEST.adapter,
                (ProblemKind.UNAVAILABLE,),
            )
        ]
        if self.scorer is not None:
            fields = (self.guard, self.scorer, settings.kind, settings.rerank_model)
            for paths, (asks, answers) in rerank.BODIES.items():
                endpoint = rerank.RerankEndpoint(
                    *fields, max_documents=settings.max_documents, request=asks
                )
                operations += [
                    Operation(
                        path,
                        endpoint,
                        Endpoint.RERANK,
                        "Rerank documents; those that the decision drops have a score of 0.0",
                        answers,
                        asks.adapter,
                    )
                    for path in paths
                ]
            operations += [
                Operation(path, _told(content), Endpoint.OTHER, summary, _OBJECT)
                for path, (summary, content) in clients.documents(settings).items()
            ]
        if self._retriever is not None:
            operations += self._index_operations()
        return operations

    def console(self) -> list[BaseRoute]:
        """The console, where there is a store and nobody else can reach it without a token."""
        settings = self.settings
        if self.samples is None or not (
            settings.secrets.console_token or is_loopback(settings.host)
        ):
            return []
        from ctxguard.server.console.routes import console_routes

        routes = console_routes(
            self.samples.store, self.guard.profile, token=settings.secrets.console_token
        )
        return [Mount("/console", routes=routes)]

    def _index_operations(self) -> list[Operation]:
        failures = (ProblemKind.UNAVAILABLE, ProblemKind.FILTER_VIOLATED)
        name = self.settings.index_name
        store = context.SearchEndpoint(self.guard, name)
        return [
            Operation(
                "/v1/context",
                context.ContextEndpoint(self.guard),
                Endpoint.CONTEXT,
                "Search the index, and build the context that the model gets",
                TypeAdapter(context.ContextAnswer),
                context.CONTEXT_REQUEST,
                failures,
            ),
            Operation(
                _SEARCH_PATH,
                store,
                Endpoint.VECTOR_STORE_SEARCH,
                f"Search the index as OpenAI's vector store {name}",
                TypeAdapter(context.SearchAnswer),
                context.SEARCH_REQUEST,
                (*failures, ProblemKind.NOT_FOUND),
            ),
            Operation(
                "/v1/vector_stores",
                store.list_all,
                Endpoint.VECTOR_STORE_SEARCH,
                "List the vector stores: there is one",
                _OBJECT,
            ),
            Operation(
                "/v1/vector_stores/{vector_store_id}",
                store.retrieve,
                Endpoint.VECTOR_STORE_SEARCH,
                "Describe the index as a vector store",
                _OBJECT,
                None,
                (ProblemKind.NOT_FOUND,),
            ),
        ]


def create_app(
    settings: ServiceSettings,
    *,
    scorer: Scorer | None = None,
    retriever: Any = None,
    registry: CollectorRegistry = REGISTRY,
    tracing: Tracing | None = None,
) -> Gate:
    """The application that the settings describe.

    Args:
        settings: The system to serve, and the limits.
        scorer: Scores documents, in place of the settings' reranker.
        retriever: Is searched, in place of the settings' index; see ``ContextGuard``.
        registry: Where everything is counted.
        tracing: Begins a span for each request, in place of OpenTelemetry's.

    Raises:
        CtxguardError: something that the settings name cannot be opened.
    """
    service = Service(settings, scorer, retriever, default_telemetry(registry), tracing)
    operations = [*service.operations(), *_own_operations(service, registry)]
    document = openapi(operations, __version__, needs_token=settings.secrets.token is not None)
    routes: list[BaseRoute] = [
        Route(
            each.path,
            # Starlette's own wrapper of an endpoint takes longer than many a decision.
            each.endpoint if each.asks is None else _Answering(each.endpoint),
            methods=[each.method],
        )
        for each in operations
    ]
    routes.append(Route("/openapi.json", _told(document), methods=["GET"]))
    routes += service.console()
    router = Router(routes, lifespan=service.running)
    app = ExceptionMiddleware(router, {HTTPException: _http_problem})
    direct = {
        each.path: each.endpoint
        for each in operations
        if each.asks is not None and "{" not in each.path
    }
    return Gate(app, direct, settings, http_metrics(registry))


class _Answering:
    """The ASGI application of an endpoint that reads its body from the scope's state."""

    def __init__(self, endpoint: Callable[[Scope], Awaitable[HttpAnswer]]) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answered = await self._endpoint(scope)
        await answered(scope, receive, send)


def _own_operations(service: Service, registry: CollectorRegistry) -> list[Operation]:
    health: TypeAdapter[Any] = TypeAdapter(dict[Literal["status", "reranker"], str | None])
    return [
        Operation(
            "/metrics",
            partial(_metrics, registry),
            Endpoint.METRICS,
            "Metrics for Prometheus",
            None,
        ),
        *[
            Operation(
                path,
                service.health,
                Endpoint.HEALTH,
                summary,
                health,
                without_token=True,
            )
            for path, summary in (
                ("/healthz", "Whether the process lives"),
                ("/readyz", "Whether the process answers requests"),
                ("/health", "The same, as TEI and vLLM name it"),
            )
        ],
    ]


def _tracing(settings: ServiceSettings) -> Tracing | None:
    if not settings.opentelemetry:
        return None
    from ctxguard.integrations.opentelemetry import OpenTelemetryTracing

    return OpenTelemetryTracing(settings.index_name if settings.searches else None)


def _scorer(settings: ServiceSettings) -> Scorer | None:
    if settings.rerank_upstream is not None:
        from ctxguard.retrieval.rerank_client import RerankClient

        return RerankClient(
            settings.rerank_upstream,
            protocol=settings.rerank_protocol,
            key=settings.secrets.upstream_key,
            model=settings.rerank_model,
            timeout_seconds=settings.deadline_seconds,
        )
    if settings.reranker is None or settings.searches:
        return None
    from ctxguard.retrieval.models.reranker import CrossEncoderReranker

    local = LocalScorer(
        CrossEncoderReranker(settings.reranker), settings.deadline_seconds, settings.max_scoring
    )
    local.warm_up()
    return local


def _retriever(settings: ServiceSettings) -> Any:
    from ctxguard.retrieval.signals.ranker import Ranker

    ranker = None if settings.ranker is None else Ranker.load(settings.ranker)
    if settings.engine is not None:
        from ctxguard.integrations.engines.retriever import EngineRetriever

        engine = EngineRetriever.open(settings.engine, ranker=ranker)
        engine.warm_up()
        return engine
    if settings.index is None:
        return None
    from ctxguard.retrieval import HybridRetriever
    from ctxguard.retrieval.models.reranker import CrossEncoderReranker

    retriever = HybridRetriever.load(
        settings.index,
        reranker=None if settings.reranker is None else CrossEncoderReranker(settings.reranker),
        ranker=ranker,
        deadlines=Deadlines(total_seconds=settings.deadline_seconds),
    )
    retriever.warm_up()
    return retriever


def _samples(settings: ServiceSettings) -> Any:
    if settings.store is None:
        return None
    from ctxguard.monitor.sampling.writer import sample_to

    return sample_to(settings.store, rate=settings.sample_rate)


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _metrics(registry: CollectorRegistry, _: Request) -> Response:
    """Metrics of this process, or of all workers; on a thread, because there may be many files."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if folder and registry is REGISTRY:
        from ctxguard.monitor.export.multiprocess import registry_for_scrape

        forget_dead_workers(Path(folder))
        registry = registry_for_scrape()
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _told(content: object) -> Callable[[Request], Awaitable[HttpAnswer]]:
    """An endpoint that always gives the same answer."""

    async def tell(_: Request) -> HttpAnswer:
        return answer(content)

    return tell


async def _http_problem(request: Request, error: Exception) -> Any:
    """The framework's own refusals, such as of an unknown path, as problem documents."""
    assert isinstance(error, HTTPException)  # noqa: S101 - it handles no other
    problem = of_status(error.status_code)
    problem.headers = error.headers
    return problem.answer(request.scope["state"]["request_id"])
