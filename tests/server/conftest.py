"""A service in this process: a scorer whose scores the documents name, a profile, and a client."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx2")

from http_service import NamedScores, Serve
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route, ScoreKind
from ctxguard.profile.schema import RouteProfile
from ctxguard.server.app import create_app
from ctxguard.server.settings import ServiceSettings
from tests.doubles import FaultyRetriever
from tests.profiles import profile_with, unenforced


@pytest.fixture(scope="module", autouse=True)
def _no_watcher_is_left() -> Iterator[None]:
    """Services of a module's tests have stopped watching their files when its last test ends."""
    yield
    assert not [each for each in threading.enumerate() if each.name.endswith("-watcher")]


@pytest.fixture
def scorer() -> NamedScores:
    return NamedScores()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture(scope="session")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keeps at most three documents, with at least half of the odds of the best."""
    file = tmp_path_factory.mktemp("profile") / "profile.json"
    policy = RatioPolicy(k=3, min_ratio=0.5, min_keep=0)
    profile_with(
        {Route.EXTERNAL: RouteProfile(policy=policy, score_kind=ScoreKind.PROBABILITY)},
        fingerprint={"reranker": "named scores", "score_kind": "probability"},
    ).save(file)
    return file


@pytest.fixture(params=["keep", "shadow", "off", "no profile"])
def unenforced_settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, object]:
    """Settings of a service that enforces no policy."""
    if request.param in ("off", "no profile"):
        return {"mode": "off"} if request.param == "off" else {}
    profile_with(
        {Route.EXTERNAL: unenforced(request.param, ScoreKind.PROBABILITY)},
        fingerprint={"reranker": "named scores", "score_kind": "probability"},
    ).save(tmp_path / "profile.json")
    return {"profile": tmp_path / "profile.json"}


@pytest.fixture(scope="module")
def index(request: pytest.FixtureRequest) -> FaultyRetriever:
    """An index of the module's `PASSAGES`, whose stages can fail."""
    return FaultyRetriever(request.module.PASSAGES)


@pytest.fixture
def client(serve: Serve, index: FaultyRetriever) -> TestClient:
    """A client of a service that searches the index."""
    return serve(retriever=index.retriever)


@pytest.fixture
def serve(scorer: NamedScores, registry: CollectorRegistry) -> Iterator[Serve]:
    """Start a service with these settings, and return a client of it."""
    clients: list[TestClient] = []

    def start(*, retriever: object = None, **settings: object) -> TestClient:
        app = create_app(
            ServiceSettings(**{"all_metrics": True, **settings}),  # type: ignore[arg-type]
            scorer=scorer if retriever is None else None,
            retriever=retriever,
            registry=registry,
        )
        client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
        clients.append(client.__enter__())
        return client

    yield start
    for client in clients:
        client.__exit__(None, None, None)
