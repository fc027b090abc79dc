"""A reranker, and the service in front of it with a profile, both over HTTP."""

from collections.abc import Iterator

import pytest
from cases import MIN_RATIO, relevance

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route, ScoreKind
from ctxguard.profile.schema import RouteProfile
from tests.profiles import profile_with
from tests.rerank_endpoint import RerankEndpoint


@pytest.fixture(scope="session")
def plain() -> Iterator[str]:
    """URL of a reranker that keeps every document."""
    endpoint = RerankEndpoint(relevance)
    yield endpoint.url
    endpoint.close()


@pytest.fixture(scope="module")
def guarded(plain: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the service in front of it, which drops what has too low a share of the best odds."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    from http_service import listening
    from prometheus_client import CollectorRegistry

    from ctxguard.server.app import create_app
    from ctxguard.server.settings import ServiceSettings

    profile = profile_with(
        {
            Route.EXTERNAL: RouteProfile(
                policy=RatioPolicy(k=1_000, min_ratio=MIN_RATIO), score_kind=ScoreKind.PROBABILITY
            )
        },
        fingerprint={"reranker": "cohere (default model)", "score_kind": "probability"},
    )
    file = tmp_path_factory.mktemp("profile") / "profile.json"
    profile.save(file)
    settings = ServiceSettings(rerank_upstream=plain, profile=file, deadline_seconds=60.0)
    app = create_app(settings, registry=CollectorRegistry())
    with listening(app, log_level="warning", ws="none") as url:
        yield url


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
