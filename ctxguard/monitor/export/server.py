"""Serves prometheus-client's pages at /metrics, even if clients are slow or numerous.

prometheus-client's own server gives each client a thread for as long as it likes. Touches sockets
and the monotonic clock, and runs threads.
"""

import socket
import threading
import time
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

CALL_SECONDS = 30.0
"""Longest life of a connection; Prometheus gives up after 10 seconds unless told otherwise."""
MOST_CONNECTIONS = 64
"""The most connections at once; further ones are closed without an answer."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves a registry, on threads that end with the process.

    Port 0 takes any free one, which ``server_port`` names. An OSError where the address cannot be
    listened on.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self._open: dict[socket.socket, float] = {}
        self._changing = threading.Lock()
        super().__init__((host, port), _Handler)
        self.set_app(make_wsgi_app(registry))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own, or close the connection if there are too many."""
        with self._changing:
            is_welcome = len(self._open) < MOST_CONNECTIONS
            if is_welcome:
                self._open[request] = time.monotonic()
        if is_welcome:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._changing:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that have lasted too long; the server calls it twice a second."""
        oldest = time.monotonic() - CALL_SECONDS
        with self._changing:
            late = [request for request, since in self._open.items() if since < oldest]
        for request in late:
            # Wakes the thread that waits for this client, which closes the connection.
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: the client has gone, or was too slow."""


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its own name
        """Log nothing, because a scrape is not an event."""
