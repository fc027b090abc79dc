"""The server of /metrics answers scrapes, and slow clients hold neither threads nor scrapes up."""

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, Gauge

from ctxguard.monitor.export import server as server_module
from ctxguard.monitor.export.server import MetricsServer
from tests.timing import PATIENCE_SECONDS, until


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Gauge("answer", "What it is.", registry=registry).set(42)
    made = MetricsServer("127.0.0.1", 0, registry)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def scrape(server: MetricsServer) -> str:
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
        text: str = answer.read().decode()
    return text


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), PATIENCE_SECONDS)


def test_a_scrape_is_answered(server: MetricsServer) -> None:
    assert "answer 42.0" in scrape(server)
    until(lambda: not server._open)


def test_endless_client_is_let_go(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(20)]
        for client in clients:
            client.sendall(b"GET /metrics HTT")
        until(lambda: len(server._open) == 20)
        assert "answer 42.0" in scrape(server)
        monkeypatch.setattr(server_module, "CALL_SECONDS", 0.0)
        assert [client.recv(1) for client in clients] == [b""] * 20
    until(lambda: not server._open)


def test_excess_clients_are_closed(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_CONNECTIONS", 3)
    with ExitStack() as stack:
        waiting = [stack.enter_context(connect(server)) for _ in range(3)]
        until(lambda: len(server._open) == 3)
        assert stack.enter_context(connect(server)).recv(1) == b""
        waiting[0].close()
        until(lambda: len(server._open) == 2)
        assert "answer 42.0" in scrape(server)


def test_ipv6_address_is_listened_on() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        MetricsServer("::1", 0, CollectorRegistry()).server_close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
