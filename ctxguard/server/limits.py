"""The gate before every endpoint: token, host, size and time limits, request ids, accounts.

Nothing of a body is parsed before it has passed. The body is read here, within its limits, and
handed on whole.
"""

import asyncio
import hmac
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ctxguard._support.error_text import describe_error
from ctxguard.server.metrics import Endpoint, HttpMetrics, Outcome
from ctxguard.server.problems import Problem, ProblemKind
from ctxguard.server.settings import Settings, is_loopback

_log = logging.getLogger(__name__)

_MOST_ID_CHARS = 128
_NEVER_SHED = frozenset({Endpoint.HEALTH, Endpoint.METRICS})
_WITHOUT_TOKEN = frozenset({Endpoint.HEALTH, Endpoint.CONSOLE})
"""The console has a log-in of its own."""
_BEAR_RETRY_AFTER = frozenset({Endpoint.FILTER, Endpoint.CONTEXT, Endpoint.VECTOR_STORE_SEARCH})
"""Clients of the rerank protocol retry as often as ten times when they are told when to."""


@dataclass(frozen=True, slots=True)
class _Head:
    """What the gate reads from the head of a request."""

    host: bytes = b""
    authorization: bytes = b""
    content_type: bytes = b""
    content_length: bytes = b""
    transfer_encoding: bytes = b""
    request_id: bytes = b""

    @classmethod
    def of(cls, scope: Scope) -> "_Head":
        found: dict[str, bytes] = {}
        for name, value in scope["headers"]:
            if name in _NAMES:
                found[_NAMES[name]] = value
        return cls(**found)

    @property
    def has_body(self) -> bool:
        return bool(self.transfer_encoding) or self.content_length not in (b"", b"0")


_NAMES = {
    b"host": "host",
    b"authorization": "authorization",
    b"content-type": "content_type",
    b"content-length": "content_length",
    b"transfer-encoding": "transfer_encoding",
    b"x-request-id": "request_id",
}


class ClientGoneError(Exception):
    """The client closed the connection before its request was whole."""


class Gate:
    """ASGI middleware that lets through what is allowed, whole and within the limits.

    Args:
        app: What answers.
        settings: The limits and the tokens.
        metrics: Where requests are counted.
        endpoint_of: What a path asks for.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        metrics: HttpMetrics,
        endpoint_of: Callable[[str], Endpoint],
    ) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._endpoint_of = endpoint_of
        self._token = _bytes(settings.secrets.token)
        self._metrics_token = _bytes(settings.secrets.metrics_token) or self._token
        self._console_needs_token = settings.secrets.console_token is not None
        self._in_flight = 0
        self._buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = perf_counter()
        head, endpoint = _Head.of(scope), self._endpoint_of(scope["path"])
        self._metrics.received(endpoint)
        answer = _Answer(send, _request_id(head.request_id))
        state = scope.setdefault("state", {})
        state["request_id"] = answer.request_id
        outcome = Outcome.CANCELLED
        try:
            try:
                await self._pass(scope, receive, answer, head, endpoint)
            except Problem as problem:
                is_shed = problem.kind is ProblemKind.OVERLOADED
                retry_after = is_shed and endpoint in _BEAR_RETRY_AFTER
                response = problem.response(answer.request_id, retry_after=retry_after)
                await response(scope, receive, answer.send)
                outcome = Outcome.SHED if is_shed else _outcome(answer.status, state)
            else:
                outcome = _outcome(answer.status, state)
        except ClientGoneError:
            pass
        except Exception as error:
            outcome = Outcome.FAILED
            _log.error("request %s failed: %s", answer.request_id, describe_error(error))
            if answer.status == 0:
                unknown = Problem(ProblemKind.INTERNAL, "the log of the service has the request id")
                await unknown.response(answer.request_id)(scope, receive, answer.send)
        finally:
            self._metrics.ended(endpoint, outcome, perf_counter() - start)

    async def _pass(
        self, scope: Scope, receive: Receive, answer: "_Answer", head: _Head, endpoint: Endpoint
    ) -> None:
        self._check_host(head, endpoint)
        self._check_token(head, endpoint)
        body = b""
        if head.has_body:
            self._check_body(head, endpoint)
            body = await self._read(receive)
        if endpoint in _NEVER_SHED:
            await self._app(scope, receive, answer.send)
            return
        if self._in_flight >= self._settings.max_in_flight:
            raise Problem(
                ProblemKind.OVERLOADED,
                f"{self._in_flight:,} requests are under way, the most that may be",
            )
        self._in_flight += 1
        self._buffered += len(body)
        try:
            await self._app(scope, _Replay(body, receive), answer.send)
        finally:
            self._in_flight -= 1
            self._buffered -= len(body)

    def _check_host(self, head: _Head, endpoint: Endpoint) -> None:
        # Without a token, a page of another site could reach this one by a name of its own.
        needs_token = self._console_needs_token if endpoint is Endpoint.CONSOLE else self._token
        if needs_token or _host_name(head.host) in _OWN_NAMES:
            return
        if not is_loopback(_host_name(head.host).decode("latin-1")):
            raise Problem(
                ProblemKind.FOREIGN_HOST,
                "without a token only requests to localhost, 127.0.0.1 or [::1] are answered",
            )

    def _check_token(self, head: _Head, endpoint: Endpoint) -> None:
        if endpoint in _WITHOUT_TOKEN:
            return
        token = self._metrics_token if endpoint is Endpoint.METRICS else self._token
        if token is None:
            return
        scheme, _, given = head.authorization.partition(b" ")
        # Compared in any case, so that the time tells nothing of the token.
        is_equal = hmac.compare_digest(given.strip(), token)
        if not is_equal or scheme.lower() != b"bearer":
            raise Problem(
                ProblemKind.UNAUTHORIZED,
                "send the service's token as Authorization: Bearer …",
                headers={"www-authenticate": "Bearer"},
            )

    def _check_body(self, head: _Head, endpoint: Endpoint) -> None:
        most = self._settings.max_body_bytes
        # What is no number is left to the count of the bytes themselves.
        if head.content_length.isdigit() and int(head.content_length) > most:
            raise _too_large(most)
        if endpoint is Endpoint.CONSOLE:
            return
        media_type = head.content_type.partition(b";")[0].strip().lower()
        # A page of another site may send a form or plain text without asking first, JSON never.
        if media_type != b"application/json" and not media_type.endswith(b"+json"):
            raise Problem(ProblemKind.NOT_JSON, "send the header Content-Type: application/json")

    async def _read(self, receive: Receive) -> bytes:
        """The whole body.

        Raises:
            Problem: it is too large or too late, or too much is being received at once.
            ClientGoneError: it will never be whole.
        """
        received = 0
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(self._settings.receive_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    chunk: bytes = message.get("body", b"")
                    received += len(chunk)
                    self._buffered += len(chunk)
                    if received > self._settings.max_body_bytes:
                        raise _too_large(self._settings.max_body_bytes)
                    if self._buffered > self._settings.max_buffered_bytes:
                        raise Problem(ProblemKind.OVERLOADED, "too much is being received at once")
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        return chunk if len(chunks) == 1 else b"".join(chunks)
        except TimeoutError:
            raise Problem(
                ProblemKind.TOO_SLOW,
                f"the body was not whole after {self._settings.receive_seconds:g} s",
            ) from None
        finally:
            self._buffered -= received


class _Answer:
    """Sends an answer with its request id, and remembers its status; 0 before it has one."""

    __slots__ = ("_send", "request_id", "status")

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"].append((b"x-request-id", self.request_id.encode("ascii")))
        await self._send(message)


class _Replay:
    """Hands on a body that was read already, then what comes after it."""

    __slots__ = ("_body", "_receive")

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


_OWN_NAMES = frozenset({b"localhost", b"127.0.0.1", b"::1"})


def _bytes(token: str | None) -> bytes | None:
    return None if token is None else token.encode()


def _host_name(host: bytes) -> bytes:
    """The host of a Host header, without port and brackets.

    >>> _host_name(b"localhost:80"), _host_name(b"[::1]:80"), _host_name(b"a.example")
    (b'localhost', b'::1', b'a.example')
    """
    if host.startswith(b"["):
        return host[1:].partition(b"]")[0]
    return host.partition(b":")[0].lower()


def _request_id(given: bytes) -> str:
    """The caller's request id if it can be one, else a random one."""
    if 0 < len(given) <= _MOST_ID_CHARS and all(33 <= each <= 126 for each in given):
        return given.decode("ascii")
    return os.urandom(8).hex()


def _outcome(status: int, state: Mapping[str, object]) -> Outcome:
    if status >= 500:
        return Outcome.FAILED
    if status >= 400:
        return Outcome.REJECTED
    return Outcome.DEGRADED if state.get("degraded") else Outcome.OK


def _too_large(most: int) -> Problem:
    return Problem(
        ProblemKind.TOO_LARGE,
        f"a body may have {most:,} bytes; send fewer or shorter documents, or start the service "
        "with a larger --max-body-bytes",
    )
