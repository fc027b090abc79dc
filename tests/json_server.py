"""A local server of JSON, from which stand-ins of model servers are made: every misbehaviour."""

import json
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Generic, Literal, TypeVar

_DRIP_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One HTTP answer.

    With ``drip`` the headers or the body come a byte at a time, with short pauses; with ``hang``
    nothing comes until the server is closed; with ``cut`` the connection ends halfway.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    drip: Literal["headers", "body"] | None = None
    hang: bool = False
    cut: bool = False

    def sent(self) -> bytes:
        """The body."""
        raise NotImplementedError


R = TypeVar("R", bound=Reply)


class JsonServer(Generic[R]):
    """Serves on 127.0.0.1 until closed; remembers what it was asked."""

    base = ""
    """What its clients' URLs end with."""

    def __init__(self) -> None:
        self.script: deque[R] = deque()
        """Answers that come first."""
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[Message] = []
        self.released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}{self.base}"

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def asked(self, path: str, headers: Message, request: dict[str, Any]) -> Reply:
        """Remember a request, and answer it."""
        self.paths.append(path)
        self.headers.append(headers)
        self.requests.append(request)
        self.wait(request)
        reply = self.script.popleft() if self.script else self.answer(path, request)
        if reply.hang:
            self.released.wait()
        return reply

    def wait(self, request: dict[str, Any]) -> None:
        """Before a request is answered."""

    def answer(self, path: str, request: dict[str, Any]) -> R:
        """Answer a request for which the script has nothing."""
        raise NotImplementedError


def _handler(server: JsonServer[Any]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # A body waits for the acknowledgement of its headers otherwise, 40 ms each time.
        disable_nagle_algorithm = True

        def handle(self) -> None:
            with suppress(ConnectionError):  # a client that went away is not a fault of this server
                super().handle()

        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = json.loads(body or b"{}")
            reply = server.asked(self.path, self.headers, request)
            try:
                self._send(reply, reply.sent())
            except OSError:
                self.close_connection = True  # the client did not wait

        def _send(self, reply: Reply, body: bytes) -> None:
            self.send_response(reply.status)
            if reply.drip == "headers":
                self.flush_headers()
                self._drip(b"X-Padding: " + b"." * 100 + b"\r\n")
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if reply.drip == "body":
                self._drip(body)
            elif reply.cut:
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
            else:
                self.wfile.write(body)

        def _drip(self, data: bytes) -> None:
            for place in range(len(data)):
                self.wfile.write(data[place : place + 1])
                time.sleep(_DRIP_SECONDS)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its own name
            pass

    return Handler
