"""Runs the service: the socket, uvicorn, worker processes, and limits of connections.

Opens the socket and a temporary folder, starts processes, sets an environment variable, changes the
process's limit of files and garbage collection, and logs. The application, and ``resource`` (absent
on Windows), are imported where they are used.
"""

import asyncio
import gc
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn
from prometheus_client import disable_created_metrics
from starlette.types import ASGIApp
from uvicorn.config import STARTUP_FAILURE
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.supervisors import Multiprocess

from ctxguard.errors import ConfigurationError, CtxguardError
from ctxguard.server.limits import MOST_HEAD_BYTES, MOST_PIPELINED, MOST_UNREAD_SECONDS
from ctxguard.server.settings import ServiceSettings

_log = logging.getLogger("uvicorn.error")
# Not uvicorn's: a warning for each request that is not HTTP would let anybody fill the log.
_request_log = logging.getLogger(__name__)
_request_log.setLevel(logging.ERROR)

_KEEP_ALIVE_SECONDS = 30
_SPARE_FILES = 200
_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


def serve(
    settings: ServiceSettings, announce: Callable[[str], object], app: ASGIApp | None = None
) -> None:
    """Serve until a signal arrives; then finish requests in progress and store samples.

    Args:
        settings: The system to serve, and the address.
        announce: Called with the URL once it can be reached.
        app: Of a single process; None builds the one in the settings.

    Raises:
        CtxguardError: the server cannot listen on the address, or open a part of the system.
    """
    _raise_file_limit(settings.max_connections)
    listening = _listening(settings)
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    with listening, tempfile.TemporaryDirectory(prefix="ctxguard-metrics-") as folder:
        if settings.workers == 1:
            from ctxguard.server.app import create_app

            # A second series for each, which nobody reads; of several workers there are none.
            disable_created_metrics()  # type: ignore[no-untyped-call]
            app = create_app(settings) if app is None else app
            announce(url)
            _spare_collector()
            uvicorn.Server(_config(settings, app)).run([listening])
            return
        # Read by prometheus-client when a worker imports it.
        os.environ.setdefault(_MULTIPROCESS, folder)
        announce(url)
        Multiprocess(_config(settings, partial(_app_of_worker, settings)), [listening]).run()


def _app_of_worker(settings: ServiceSettings) -> ASGIApp:
    """Make the application of a worker process, or end the process."""
    from ctxguard.server.app import create_app

    try:
        app = create_app(settings)
        _spare_collector()
        return app
    except CtxguardError as error:
        _log.error("%s", error)
        sys.exit(STARTUP_FAILURE)


def _config(settings: ServiceSettings, app: Any) -> uvicorn.Config:
    protocol = partial(
        BoundedHttpProtocol,
        receive_seconds=settings.receive_seconds,
        max_connections=settings.max_connections,
    )
    return uvicorn.Config(
        app,
        factory=isinstance(app, partial),
        workers=settings.workers,
        http=protocol,  # type: ignore[arg-type]  # it is only called
        ws="none",
        lifespan="on",
        # uvicorn's own default believes whoever connects from this machine.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(settings.shutdown_seconds + 0.5),
    )


def _spare_collector() -> None:
    """Exclude all present objects from garbage collection, which would scan them again."""
    gc.collect()
    gc.freeze()


def _listening(settings: ServiceSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror or error}): "
            "choose another --host or --port"
        ) from None


def _raise_file_limit(connections: int) -> None:
    """Raise the limit on open files to fit the connections, or as far as the system allows."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits on connections and on bytes that one sends or leaves unread.

    A head may take ``receive_seconds``, from the opening of the connection or from its first byte.
    """

    def __init__(
        self, *args: Any, receive_seconds: float, max_connections: int, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.logger = _request_log
        self._receive_seconds = receive_seconds
        self._max_connections = max_connections
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        """Bytes of the URL and of complete headers in the head that is being read."""
        self._part_bytes = 0
        """Bytes received since that head began, which may be one long part of it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            transport.abort()
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._late = _cancelled(self._late)
        self._unread = _cancelled(self._unread)
        # Whoever waits for an answer's turn waits for nothing.
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._part_bytes += len(data)
        super().data_received(data)
        if self._late is not None and self._part_bytes > MOST_HEAD_BYTES:
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._part_bytes = 0
        if self._late is None:
            self._expect_head()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Answer a request whose head is complete, or queue it, or close the connection."""
        self._late = _cancelled(self._late)
        if len(self.pipeline) >= MOST_PIPELINED:
            self.transport.abort()
            raise ConnectionAbortedError  # ends the parser: a packet may hold thousands of requests
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """Wait for a client that reads too slowly, but only for a limited time."""
        super().pause_writing()
        self._unread = self.loop.call_later(MOST_UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._unread = _cancelled(self._unread)
        super().resume_writing()

    def _count(self, n: int) -> None:
        self._head_bytes += n
        if self._head_bytes > MOST_HEAD_BYTES:
            self.transport.close()
            raise ConnectionAbortedError

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP, unless the connection was already closed."""
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def _expect_head(self) -> None:
        self._late = self.loop.call_later(self._receive_seconds, self.timeout_keep_alive_handler)


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None
