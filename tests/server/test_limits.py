"""What stands before every endpoint: tokens, hosts, sizes, times, request ids and accounts."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_service import ENDS, NamedScores, Serve, at_once, counted
from prometheus_client import CollectorRegistry
from starlette.responses import Response

from ctxguard.errors import ConfigurationError
from ctxguard.guard.telemetry import made_once
from ctxguard.monitor.sampling.sampler import HashSampler
from ctxguard.monitor.store import SampleStore
from ctxguard.server import limits, rerank, wire
from ctxguard.server.metrics import HttpMetrics
from ctxguard.server.settings import ServiceSettings

TOKEN, METRICS_TOKEN = "a" * 16, "b" * 16
BODY = {"query": "q", "documents": ["0.5"]}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_token_is_needed_if_set(serve: Serve) -> None:
    client = serve(host="0.0.0.0", token=TOKEN)  # noqa: S104
    for headers in ({}, bearer("c" * 16), {"authorization": f"Basic {TOKEN}"}, bearer(TOKEN + "a")):
        response = client.post("/rerank", json=BODY, headers=headers)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    allowed = {**bearer(TOKEN), "host": "search.example"}
    assert client.post("/rerank", json=BODY, headers=allowed).status_code == 200
    assert client.get("/healthz").status_code == 200
    assert client.get("/openapi.json").status_code == 401


def test_metrics_have_their_own_token(serve: Serve) -> None:
    client = serve(token=TOKEN, metrics_token=METRICS_TOKEN)
    assert client.get("/metrics", headers=bearer(TOKEN)).status_code == 401
    assert client.get("/metrics", headers=bearer(METRICS_TOKEN)).status_code == 200
    assert client.post("/rerank", json=BODY, headers=bearer(METRICS_TOKEN)).status_code == 401


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        (("evil.example", "evil.example:8765", "127.0.0.1.evil.example"), 403),
        (("localhost", "127.0.0.1:80", "[::1]:8765", "127.8.8.8"), 200),
    ],
)
def test_without_token_only_this_machine(serve: Serve, hosts: tuple[str, ...], status: int) -> None:
    client = serve()
    for host in hosts:
        assert client.post("/rerank", json=BODY, headers={"host": host}).status_code == status


@pytest.mark.parametrize(
    ("content_type", "origin", "status"),
    [
        ("", "https://a.example", 415),
        ("text/plain", "https://a.example", 415),
        ("text/plain;charset=UTF-8", "https://a.example", 415),
        ("application/x-www-form-urlencoded", "", 415),
        ("application/json", "https://a.example", 200),
        ("text/plain;charset=UTF-8", "", 200),
        ("", "", 200),
    ],
)
def test_body_is_json_cross_site_refused(
    serve: Serve, scorer: NamedScores, content_type: str, origin: str, status: int
) -> None:
    """Such a page may send what is not JSON without asking first."""
    headers = {"content-type": content_type, **({"origin": origin} if origin else {})}
    response = serve().post("/rerank", content=json.dumps(BODY), headers=headers)
    assert (response.status_code, len(scorer.asked)) == (status, status == 200)


def pieces(n: int) -> Iterator[bytes]:
    for _ in range(n):
        yield b" " * 1000


def test_long_body_is_refused_early(serve: Serve, registry: CollectorRegistry) -> None:
    client = serve(max_body_bytes=10_000)
    headers = {"content-type": "application/json"}
    for content in (b" " * 10_001, pieces(11)):
        response = client.post("/rerank", content=content, headers=headers)
        assert (response.status_code, response.headers["connection"]) == (413, "close")
    assert counted(registry, "ctxguard_http_requests_total", outcome="rejected") == 2


def status_of(client, receive) -> int:
    """The status of a request whose body arrives as ``receive`` says; 0 without an answer."""
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/rerank",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", b"5"),
        ],
    }
    asyncio.run(client.app(scope, receive, send))
    return sent[0]["status"] if sent else 0


async def never() -> dict:
    await asyncio.sleep(30)
    return {}


async def gone() -> dict:
    return {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("receive", "status", "outcome"), [(never, 408, "rejected"), (gone, 0, "cancelled")]
)
def test_incomplete_body_is_given_up(
    serve: Serve, registry: CollectorRegistry, receive, status: int, outcome: str
) -> None:
    """A client that goes away is counted and not answered."""
    assert status_of(serve(receive_seconds=0.05), receive) == status
    assert counted(registry, "ctxguard_http_requests_total", outcome=outcome) == 1


def test_too_many_bodies_are_refused(serve: Serve, registry: CollectorRegistry) -> None:
    client = serve(max_buffered_bytes=4)
    response = client.post("/rerank", json=BODY)
    assert response.status_code == 503
    assert "retry-after" not in response.headers
    assert client.post("/v1/filter", json=BODY).headers["retry-after"] == "1"
    assert client.get("/healthz").status_code == 200
    assert counted(registry, "ctxguard_http_requests_total", outcome="shed") == 2


def test_too_many_requests_spare_metrics(
    serve: Serve, scorer: NamedScores, registry: CollectorRegistry
) -> None:
    client = serve(max_in_flight=1)

    async def slowly(work) -> object:
        await asyncio.sleep(0.1)
        return work()

    with scorer.fault.injected(slowly):
        rerank, others = ("POST", "/rerank", BODY), ("/healthz", "/metrics")
        answers = at_once(client, *[rerank] * 3, *[("GET", path, None) for path in others])
    statuses = [answer.status_code for answer in answers]
    assert (sorted(statuses[:3]), statuses[3:]) == ([200, 503, 503], [200, 200])
    by_outcome = [
        counted(registry, "ctxguard_http_requests_total", endpoint="rerank", outcome=each)
        for each in ENDS
    ]
    assert by_outcome == [1, 0, 0, 2, 0, 0]
    received = counted(registry, "ctxguard_http_received_requests_total", endpoint="rerank")
    assert received == sum(by_outcome)


def test_request_id_joins_both_parts(serve: Serve) -> None:
    """A request id begins with the caller's and ends in the services own."""
    client = serve()
    ids = []
    for _ in range(2):
        response = client.post("/rerank", json=BODY, headers={"x-request-id": "order-7"})
        ids.append(response.headers["x-request-id"])
        assert re.fullmatch("order-7[.][0-9a-f]{16}", ids[-1])
        assert response.json()["meta"]["ctxguard"]["request_id"] == ids[-1]
    assert ids[0] != ids[1]
    for bad in ("a" * 129, "two words", "é"):
        response = client.post("/rerank", json=BODY, headers={"x-request-id": bad.encode()})
        assert response.status_code == 200
        assert re.fullmatch("[0-9a-f]{16}", response.headers["x-request-id"])


def test_caller_cannot_choose_samples(serve: Serve, tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    drawn = HashSampler("sampling")
    ids = [str(n) for n in range(1_000) if drawn.selects(str(n), 0.2)][:60]
    client = serve(store=f"sqlite:///{tmp_path}/samples.db", sample_rate=0.2)
    for request_id in [*ids, *[ids[0]] * 60]:
        client.post("/rerank", json=BODY, headers={"x-request-id": request_id})
    with SampleStore.open(f"sqlite:///{tmp_path}/samples.db") as store:
        client.__exit__(None, None, None)
        # All of them if the caller's ids decided; a share of 1/2 has a chance of 1e-12.
        assert 1 <= sum(store.states().values()) < 60


@pytest.mark.parametrize("name", ["host", "authorization"])
def test_callers_header_comes_once(serve: Serve, name: str) -> None:
    client = serve(token=TOKEN)
    twice = [*bearer(TOKEN).items(), ("host", "localhost"), (name, "another")]
    response = client.get("/openapi.json", headers=twice)
    assert response.status_code == 400
    assert response.json()["type"].endswith(":repeated-header")
    assert name in response.json()["detail"]


def test_health_and_metrics_take_no_body(serve: Serve) -> None:
    client = serve()
    for path in ("/healthz", "/readyz", "/metrics"):
        for body in (b"a", pieces(1)):
            response = client.request("GET", path, content=body)
            assert (response.status_code, response.headers["connection"]) == (413, "close")
        assert client.get(path).status_code == 200


def test_tokenless_requests_have_a_budget(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_OPEN_BUFFERED_BYTES", 10)
    monkeypatch.setattr(limits, "MOST_FORM_BYTES", 20)
    client = serve(token=TOKEN, max_buffered_bytes=1_000)
    form = {"content-type": "application/x-www-form-urlencoded"}
    for size, status in ((10, 404), (11, 503), (21, 413)):
        response = client.post("/console/sign-in", content=b"a" * size, headers=form)
        assert response.status_code == status
    assert client.post("/rerank", json=BODY, headers=bearer(TOKEN)).status_code == 200


def test_unknown_paths_are_problem_documents(serve: Serve) -> None:
    client = serve()
    assert client.get("/nothing").json()["status"] == 404
    assert client.get("/healthz/", follow_redirects=False).status_code == 200
    response = client.get("/rerank")
    assert (response.json()["status"], response.headers["allow"]) == (405, "POST")


def test_own_error_tells_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, registry: CollectorRegistry
) -> None:
    """An error of our own is a problem document that tells nothing."""

    def fail(_context: object) -> object:
        raise RuntimeError("a secret")

    monkeypatch.setattr(rerank, "ranked_of", fail)
    response = serve().post("/rerank", json=BODY)
    assert response.status_code == 500
    assert "secret" not in response.text
    assert counted(registry, "ctxguard_http_requests_total", outcome="failed") == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "0.0.0.0"},  # noqa: S104
        {"host": "search.example"},
        {"token": "short"},
        {"console_token": "é" * 20},
        {"workers": 0},
        {"trusted_proxies": ["*"]},
        {"trusted_proxies": ["proxy.example"]},
        {"deadline_seconds": 0.0},
        {"sample_rate": 1.5},
        {"port": 70_000},
        {"rerank_upstream": "http://a", "index": "folder"},
        {"rerank_upstream": "http://a", "fingerprint": {"a": "b"}},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict) -> None:
    with pytest.raises(ConfigurationError):
        ServiceSettings(**settings)


def test_settings_show_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXGUARD_TOKEN", TOKEN)
    settings = ServiceSettings()
    assert settings.token == TOKEN
    assert TOKEN not in repr(settings) + settings.model_dump_json()


def test_failing_count_costs_no_answer(
    serve: Serve, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve()

    class Full:
        def __getitem__(self, _: object) -> None:
            raise OSError("no space left for the workers' files")

    for counts in ("_received", "_requests", "_seconds"):
        monkeypatch.setattr(made_once(registry, HttpMetrics), counts, Full())
    assert client.post("/rerank", json=BODY).status_code == 200


def test_failed_request_stays_failed(
    serve: Serve, scorer: NamedScores, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed request is failed though it went on without a stage."""
    monkeypatch.setattr(wire, "answer", lambda *_: Response(b"", 500))
    with scorer.fault.injected(lambda work: None):
        assert serve().post("/rerank", json=BODY).status_code == 500
    assert counted(registry, "ctxguard_http_requests_total", outcome="failed") == 1
