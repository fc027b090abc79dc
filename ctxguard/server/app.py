"""Builds the ASGI application from `ServiceSettings`, behind the gate.

Reads the environment, and makes the metrics of the given registry; ``service`` opens what is
served. The console, and the metrics of several workers, are imported where they are used.
"""

import os
from asyncio import to_thread
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, Router

from ctxguard import __version__
from ctxguard.guard.observers import Tracing
from ctxguard.guard.telemetry import default_telemetry, made_once
from ctxguard.server import context, filtering, rerank
from ctxguard.server.gate import Gate
from ctxguard.server.limits import rules_of
from ctxguard.server.metrics import Endpoint, HttpMetrics, forget_dead_workers
from ctxguard.server.openapi import openapi
from ctxguard.server.problems import answer
from ctxguard.server.scoring import Scorer
from ctxguard.server.service import Service
from ctxguard.server.settings import ServiceSettings, is_loopback
from ctxguard.server.wire import Operation

_HEALTH_PATHS = {
    "/healthz": "Whether the process lives",
    "/readyz": "Whether the process answers requests",
    "/health": "The same, as TEI and vLLM name it",
}
_HEALTH_WORDS = {None: None, False: "in use", True: "left out: it failed repeatedly"}


def create_app(
    settings: ServiceSettings,
    *,
    scorer: Scorer | None = None,
    retriever: Any = None,
    registry: CollectorRegistry = REGISTRY,
    tracing: Tracing | None = None,
) -> Gate:
    """Build the application that the settings describe.

    Args:
        settings: The system to serve, and the limits.
        scorer: Scores documents; replaces the settings' reranker.
        retriever: Replaces the settings' index; see ``ContextGuard``.
        registry: Holds all metrics.
        tracing: Begins a span for each request; replaces OpenTelemetry's.

    Raises:
        CtxguardError: a part named in the settings cannot be opened.
    """
    telemetry = default_telemetry(registry, all_metrics=settings.all_metrics)
    service = Service(settings, scorer, retriever, telemetry, tracing)
    operations, rules = _operations(service, registry), rules_of(settings)
    # Described when it is first asked for: that takes longer than all else here.
    described = cache(lambda: openapi(operations, __version__, rules))
    routes = [Route("/openapi.json", lambda _: answer(described()), methods=["GET"])]
    router = Router([*routes, *_console(service)], lifespan=service.running)
    metrics = made_once(registry, HttpMetrics, all_metrics=settings.all_metrics)
    return Gate(router, operations, rules, metrics)


def console_app(
    settings: ServiceSettings, routes: Sequence[BaseRoute], registry: CollectorRegistry = REGISTRY
) -> Gate:
    """Build an application that serves only a console, behind the same gate."""
    router = Router([Mount("/console", routes=routes)])
    return Gate(router, [], rules_of(settings), made_once(registry, HttpMetrics))


def _operations(service: Service, registry: CollectorRegistry) -> list[Operation]:
    """List the operations that this service answers."""
    operations = [
        Operation(
            "/v1/filter",
            partial(filtering.decide, service),
            Endpoint.FILTER,
            "Decide on scored candidates, with the reason and the threshold of each",
            filtering.FilterAnswer,
            filtering.REQUEST,
        ),
        Operation(
            "/metrics",
            partial(_metrics, registry, service.settings.all_metrics),
            Endpoint.METRICS,
            "Metrics for Prometheus",
            None,
        ),
    ]
    health = dict[Literal["status", "reranker", "profile"], str | None]
    operations += [
        Operation(path, partial(_health, service), Endpoint.HEALTH, summary, health)
        for path, summary in _HEALTH_PATHS.items()
    ]
    if service.scorer is not None:
        operations += [
            Operation(
                path,
                partial(rerank.rerank, service, service.scorer),
                Endpoint.RERANK,
                "Rerank documents; those that the decision drops have a score of 0.0",
                Any,
                asks,
            )
            for paths, asks in rerank.BODIES.items()
            for path in paths
        ]
        operations += [
            Operation(path, partial(_tell, content), Endpoint.OTHER, summary, Any)
            for path, (summary, content) in rerank.clients_documents(service.settings).items()
        ]
    if service.guard.retriever is None:
        return operations
    return [
        *operations,
        Operation(
            "/v1/context",
            partial(context.answer_context, service),
            Endpoint.CONTEXT,
            "Search the index, and build the context that the model gets",
            context.ContextAnswer,
            context.CONTEXT_REQUEST,
        ),
    ]


def _console(service: Service) -> list[BaseRoute]:
    """Mount the console if there is a store and either a token or only local access."""
    token, store = service.settings.console_token, service.samples
    if store is None or not (token or is_loopback(service.settings.host)):
        return []
    from ctxguard.server.console.routes import console_routes

    routes = console_routes(store.store, service.guard.profile, token=token)
    return [Mount("/console", routes=routes)]


async def _health(service: Service, *_: object) -> tuple[dict[str, str | None], None]:
    """Report that the process is up, and whether its reranker and profile are in use."""
    is_open = None if service.scorer is None else service.scorer.is_open
    profile = None
    if service.guard.profile is not None:
        differences = "; ".join(service.guard.comparison.mismatches)
        profile = f"does not apply, so the top k are served: {differences}"
        profile = profile if differences else "applies"
    return {"status": "ok", "reranker": _HEALTH_WORDS[is_open], "profile": profile}, None


async def _metrics(
    registry: CollectorRegistry, all_metrics: bool, *_: object
) -> tuple[Response, None]:
    text = await to_thread(_written, registry, all_metrics=all_metrics)
    return Response(text, media_type=CONTENT_TYPE_LATEST), None


def _written(registry: CollectorRegistry, *, all_metrics: bool) -> bytes:
    """Write the metrics of this process, or of all workers from their many files."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if folder and registry is REGISTRY:
        from ctxguard.monitor.export.multiprocess import registry_for_scrape

        forget_dead_workers(Path(folder))
        registry = registry_for_scrape(all_metrics=all_metrics)
    return generate_latest(registry)


async def _tell(content: object, *_: object) -> tuple[object, None]:
    """Return a fixed answer."""
    return content, None
