"""The application: what the settings name, behind the gate."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prometheus_client import REGISTRY, CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ctxguard.core.context import Assembly
from ctxguard.guard import ContextGuard
from ctxguard.request.telemetry import default_telemetry
from ctxguard.server.limits import Gate
from ctxguard.server.metrics import Endpoint, http_metrics
from ctxguard.server.problems import of_status
from ctxguard.server.rerank import RerankEndpoint
from ctxguard.server.scoring import BoundedScorer, Scorer
from ctxguard.server.settings import Settings

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")

_NO_DROPS = Assembly(drop_duplicates=False, max_passage_chars=2**62)
"""A rerank answer holds what the decision says, and assembly adds no drops of its own."""


def create_app(
    settings: Settings, *, scorer: Scorer | None = None, registry: CollectorRegistry = REGISTRY
) -> Starlette:
    """The application that the settings describe.

    Args:
        settings: What is served, and within which limits.
        scorer: Scores documents, in place of what the settings name.
        registry: Where everything is counted.

    Raises:
        CtxguardError: something that the settings name cannot be opened.
    """
    telemetry = default_telemetry(registry)
    routes: list[BaseRoute] = []
    closing: list[Callable[[], object]] = []
    guard = ContextGuard(
        profile=settings.profile,
        mode=settings.mode,
        # Without a calibration nothing is dropped.
        k=settings.max_documents,
        score_kind=settings.score_kind,
        fingerprint={"rerank": scorer.fingerprint} if scorer is not None else None,
        assembly=_NO_DROPS,
        telemetry=telemetry,
    )
    if scorer is not None:
        bounded = BoundedScorer(
            scorer, settings.deadline_seconds, settings.max_scoring, telemetry
        )
        endpoint = RerankEndpoint(
            guard, bounded, settings.score_kind, settings.rerank_model, settings.max_documents
        )
        routes += [Route(path, endpoint.__call__, methods=["POST"]) for path in RERANK_PATHS]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        if scorer is not None:
            await scorer.aclose()

    return Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_problem},
        middleware=[
            Middleware(
                Gate, settings=settings, metrics=http_metrics(registry), endpoint_of=endpoint_of
            )
        ],
    )


def endpoint_of(path: str) -> Endpoint:
    """What a path asks for, as a metric label."""
    return _ENDPOINTS.get(path, Endpoint.OTHER)


_ENDPOINTS = {
    **dict.fromkeys(RERANK_PATHS, Endpoint.RERANK),
    "/v1/filter": Endpoint.FILTER,
    "/v1/context": Endpoint.CONTEXT,
    "/metrics": Endpoint.METRICS,
    "/healthz": Endpoint.HEALTH,
    "/readyz": Endpoint.HEALTH,
}


async def _http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = of_status(error.status_code)
    problem.headers = error.headers
    return problem.response(request.scope["state"]["request_id"])
