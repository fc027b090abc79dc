"""A service as people run it: two processes that serve, in front of a reranker over HTTP."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("sqlalchemy")

import httpx2
from http_service import ENDS, listening
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ctxguard.monitor.store import SampleStore
from ctxguard.server import run
from ctxguard.server.limits import MOST_HEAD_BYTES, MOST_PIPELINED
from ctxguard.server.settings import ServiceSettings
from tests.command import invoke
from tests.rerank_endpoint import Answer, RerankEndpoint

PATIENCE_SECONDS = 120
DOCUMENTS = ["0.2 poor", "0.9 best", "0.5 fair"]


@pytest.fixture(scope="module")
def upstream() -> Iterator[RerankEndpoint]:
    """A reranker over HTTP whose scores the documents name."""
    served = RerankEndpoint(lambda _, documents: [float(text.split()[0]) for text in documents])
    yield served
    served.close()


class Process:
    """``ctxguard serve`` in a process of its own."""

    def __init__(self, *options: str) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ctxguard", "serve", "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found, line + self.process.stdout.read()
        self.port = int(found[1])
        self.client = httpx2.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_SECONDS
        )

    def rerank(self, **headers: str) -> httpx2.Response:
        body = {"query": "q", "documents": DOCUMENTS}
        return self.client.post("/rerank", json=body, headers=headers)

    def metric(self, name: str, *labels: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(name) and all(label in line for label in labels)
        )

    def stop(self) -> str:
        """End it as a container's host does, and return what it wrote."""
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        written, _ = self.process.communicate(timeout=PATIENCE_SECONDS)
        return written


def running(folder: Path, system: str, *options: str) -> Iterator[Process]:
    """A process with a file of settings, which ends with the fixture if no test has ended it."""
    (folder / "system.toml").write_text(system, encoding="utf-8")
    started = Process("--system", str(folder / "system.toml"), *options)
    yield started
    if started.process.poll() is None:
        started.stop()


@pytest.fixture
def service(upstream: RerankEndpoint, tmp_path: Path) -> Iterator[Process]:
    system = f'rerank-upstream = "{upstream.url}"\nall-metrics = true\n'
    system += "[serve]\ndeadline-seconds = 60\nworkers = 2"
    store = f"sqlite:///{tmp_path}/samples.db"
    yield from running(tmp_path, system, "--store", store, "--sample-rate", "1")


def test_service_from_start_to_last_sample(
    service: Process, upstream: RerankEndpoint, tmp_path: Path
) -> None:
    for number in range(6):
        response = service.rerank(**{"x-request-id": f"request-{number}"})
        assert [each["index"] for each in response.json()["results"]] == [1, 2, 0]
    upstream.script.append(Answer(status=500))
    response = service.rerank()
    assert (response.status_code, response.headers["x-ctxguard-degraded"]) == (200, "error")
    assert [each["index"] for each in response.json()["results"]] == [0, 1, 2]
    assert service.client.post("/rerank", json={"query": "q"}).status_code == 422

    received = service.metric("ctxguard_http_received_requests_total", 'endpoint="rerank"')
    by_end = {
        end: service.metric("ctxguard_http_requests_total", 'endpoint="rerank"', f'outcome="{end}"')
        for end in ENDS
    }
    assert by_end == {**dict.fromkeys(ENDS, 0), "ok": 6, "degraded": 1, "rejected": 1}
    assert received == sum(by_end.values())
    assert "Decisions" in service.client.get("/console/", follow_redirects=True).text

    written = service.stop()
    assert "Traceback" not in written
    with SampleStore.open(f"sqlite:///{tmp_path}/samples.db") as store:
        totals = store.accounts()
    assert (totals.sampled, totals.stored, totals.pending) == (7, 7, 0)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A service with small limits, that only filters."""
    yield from running(tmp_path_factory.mktemp("small"), "[serve]\nmax-body-bytes = 100000")


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)


def test_slow_requests_hold_no_others(small: Process) -> None:
    head = b"POST /v1/filter HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    halves = [connected(small.port) for _ in range(20)]
    for one in halves:
        one.sendall(head)
    slow = connected(small.port)
    slow.sendall(head + b"Content-Length: 1000\r\n\r\n{")
    huge = connected(small.port)
    huge.sendall(head + b"Content-Length: 1000000000\r\n\r\n")
    assert b" 413 " in huge.recv(4096)
    endless = connected(small.port)
    endless.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
    chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    with suppress(OSError):
        for _ in range(100):
            endless.sendall(chunk)
    answer = b" 413 "  # it is lost where the rest of the body meets a close
    with suppress(OSError):
        answer = endless.recv(4096)
    assert b" 413 " in answer
    long_head, closed = connected(small.port), b""
    with suppress(OSError):
        for _ in range(200):
            long_head.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * 1000)
            time.sleep(0.001)
        closed = long_head.recv(4096)
    assert b" 200 " not in closed
    body = {"query": "q", "candidates": [{"id": "a", "score": 0.5}]}
    assert small.client.post("/v1/filter", json=body).json()["kept_ids"] == ["a"]
    for one in (*halves, slow, huge, endless, long_head):
        one.close()


def answers(one: socket.socket, n: int) -> int:
    """How many answers with status 200 arrive before the connection ends, of n that may."""
    received = b""
    with suppress(OSError):
        while received.count(b" 200 OK") < n and (piece := one.recv(2**16)):
            received += piece
    return received.count(b" 200 OK")


HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


def test_pipelined_requests_are_limited(small: Process) -> None:
    """A connection may send a few requests ahead and is closed for more."""
    for sent, answered in ((1, 1), (1 + MOST_PIPELINED, 1 + MOST_PIPELINED), (1_000, 0)):
        with connected(small.port) as one:
            one.sendall((HEALTH + b"\r\n") * sent)
            assert answers(one, sent) == answered


def test_overlong_head_is_not_answered(small: Process) -> None:
    """A head above its limit is not answered though it comes in one piece."""
    for size, answered in ((MOST_HEAD_BYTES - 1_000, 1), (MOST_HEAD_BYTES + 1_000, 0)):
        for headers in (b"X: " + b"a" * size + b"\r\n", b"X: aaaaaa\r\n" * (size // 7)):
            with connected(small.port) as one:
                with suppress(OSError):
                    one.sendall(HEALTH + headers + b"\r\n")
                assert answers(one, 1) == answered


def test_no_series_says_its_creation(small: Process) -> None:
    assert "_created" not in small.client.get("/metrics").text


def test_client_that_reads_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MOST_UNREAD_SECONDS", 0.05)
    ended = threading.Event()

    async def answer(_request: Request) -> Response:
        return StreamingResponse(endless())

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b" " * 2**20
                await asyncio.sleep(0.0)
        finally:
            ended.set()

    app = Starlette(routes=[Route("/", answer)])
    config = run._config(ServiceSettings(), app)
    with listening(config) as url, connected(int(url.rpartition(":")[2])) as one:
        one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert ended.wait(PATIENCE_SECONDS)


def test_non_http_fills_no_log(small: Process) -> None:
    """The last test of this process, which is told to end."""
    with connected(small.port) as one:
        one.sendall(b"this is no request\r\n\r\n")
        assert b" 400 " in one.recv(4096)
    body = json.dumps({"query": "q", "candidates": []}).encode()
    with connected(small.port) as one:
        one.sendall(
            b"POST /v1/filter HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body[:5]
        )
        small.client.get("/healthz")
        small.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        one.sendall(body[5:])
        assert b" 200 " in one.recv(4096)
    small.client.close()
    written = small.process.communicate(timeout=PATIENCE_SECONDS)[0]
    assert "Traceback" not in written
    assert "Invalid HTTP" not in written


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "CTXGUARD_TOKEN"),  # noqa: S104
        (["--profile", "no-such.json"], "no-such.json"),
        (["--rerank-upstream", "ftp://a"], "http://"),
        (["--system", "no-such.toml"], "no-such.toml"),
    ],
)
def test_unservable_is_said_at_start(options: list[str], words: str) -> None:
    result = invoke(["serve", "--port", "0", *options])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("proxies", "seen"),
    [
        ([], "127.0.0.1 http"),
        (["10.0.0.7"], "127.0.0.1 http"),
        (["127.0.0.0/8"], "203.0.113.9 https"),
    ],
)
def test_forwarded_address_needs_named_proxy(
    proxies: list[str], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each attempt to sign in could come from another address."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")

    async def client_of(request: Request) -> Response:
        assert request.client is not None
        return Response(f"{request.client.host} {request.url.scheme}")

    app = Starlette(routes=[Route("/", client_of)])
    config = run._config(ServiceSettings(trusted_proxies=proxies), app)
    headers = {"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https"}
    with listening(config) as url:
        assert httpx2.get(url, headers=headers).text == seen
