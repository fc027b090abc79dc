"""How much a request may be and hold: its body, its parts, and the requests beside it.

Nothing of a body is parsed before it has passed. It is read here, within its limits, and handed on
whole. The limits that an operator may change are in ``ServiceSettings``; the others are here.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ctxguard.server.accounts import ClientGoneError
from ctxguard.server.metrics import Endpoint
from ctxguard.server.problems import Problem, ProblemKind
from ctxguard.server.settings import ServiceSettings

MOST_HEAD_BYTES = 64 * 2**10
"""Bytes of a request's head."""
MOST_PIPELINED = 8
"""Requests of one connection that wait for an answer; hardly any client sends the next before."""
MOST_UNREAD_SECONDS = 30.0
"""The longest that a client may leave its answer unread."""

MOST_QUERY_BODY_BYTES = 512 * 2**10
"""Body of a search: a query and a filter, no documents."""
MOST_FORM_BYTES = 64 * 2**10
"""Body of a form of the console."""

MOST_CONDITIONS = 32
"""Conditions of a filter."""
MOST_VALUES = 10_000
"""Values of all conditions of a filter together."""
FEW_VALUES = 100
"""A filter of more values is built on a thread."""
MOST_NAMES = 64
"""Names of signals in one request, and names of legs."""
MOST_NAME_CHARS = 256
"""Length of a session id, and of a segment's name."""

_OPEN_IN_FLIGHT = 64
_OPEN_BUFFERED_BYTES = 4 * 2**20
"""Limits of requests that need no token, beside the others."""

_NEVER_SHED = frozenset({Endpoint.HEALTH, Endpoint.METRICS})
_FORMS = frozenset({Endpoint.CONSOLE})
"""Endpoints that take forms instead of JSON."""


Head = Mapping[bytes, bytes]
"""The headers of a request by name."""


@dataclass(slots=True)
class BodyBudget:
    """Counts the requests of one kind and their bytes, against their limits.

    Attributes:
        max_in_flight: The most requests at once.
        max_buffered_bytes: The most bytes of their bodies at once.
        in_flight: Requests under way.
        buffered: Bytes of bodies held.
    """

    max_in_flight: int
    max_buffered_bytes: int
    in_flight: int = 0
    buffered: int = 0


class RequestLimits:
    """Middleware that reads bodies within their limits, and bounds the requests under way.

    Sets ``body`` in the scope's state. Requests that need no token, those to the console, have a
    budget of their own.

    Args:
        app: Answers.
        settings: The limits.
    """

    def __init__(self, app: ASGIApp, settings: ServiceSettings) -> None:
        self._app = app
        self._receive_seconds = settings.receive_seconds
        most = settings.max_body_bytes
        self._most_bytes = {
            **dict.fromkeys(Endpoint, most),
            **dict.fromkeys(_NEVER_SHED, 0),
            **dict.fromkeys(_FORMS, min(most, MOST_FORM_BYTES)),
            Endpoint.CONTEXT: min(most, MOST_QUERY_BODY_BYTES),
            Endpoint.VECTOR_STORE_SEARCH: min(most, MOST_QUERY_BODY_BYTES),
        }
        common = BodyBudget(settings.max_in_flight, settings.max_buffered_bytes)
        self._budgets = {
            **dict.fromkeys(Endpoint, common),
            Endpoint.CONSOLE: BodyBudget(_OPEN_IN_FLIGHT, _OPEN_BUFFERED_BYTES),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand one request on with its whole body, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint: Endpoint = scope["state"]["endpoint"]
        head: Head = scope["state"]["head"]
        budget = self._budgets[endpoint]
        body = b""
        if b"transfer-encoding" in head or head.get(b"content-length", b"0") not in (b"", b"0"):
            most = self._most_bytes[endpoint]
            _check_body(head, endpoint, most)
            body = await self._read(receive, most, budget)
        if endpoint in _NEVER_SHED:
            await self._app(scope, receive, send)
            return
        if budget.in_flight >= budget.max_in_flight:
            raise Problem(
                ProblemKind.OVERLOADED,
                f"{budget.in_flight:,} requests are under way, the most that may be",
            )
        budget.in_flight += 1
        budget.buffered += len(body)
        scope["state"]["body"] = body
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            """Hands on the body that was read already, then what comes after it."""
            return unread.pop() if unread else await receive()

        try:
            await self._app(scope, replay, send)
        finally:
            budget.in_flight -= 1
            budget.buffered -= len(body)

    async def _read(self, receive: Receive, most: int, budget: BodyBudget) -> bytes:
        """The whole body.

        Raises:
            Problem: it is too large or too late, or too much is being received at once.
            ClientGoneError: it will never be whole.
        """
        received = 0
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(self._receive_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    chunk: bytes = message.get("body", b"")
                    received += len(chunk)
                    budget.buffered += len(chunk)
                    if received > most:
                        raise _too_large(most)
                    if budget.buffered > budget.max_buffered_bytes:
                        raise Problem(ProblemKind.OVERLOADED, "too much is being received at once")
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        return chunk if len(chunks) == 1 else b"".join(chunks)
        except TimeoutError:
            raise Problem(
                ProblemKind.TOO_SLOW,
                f"the body was not whole after {self._receive_seconds:g} s",
            ) from None
        finally:
            budget.buffered -= received


def _check_body(head: Head, endpoint: Endpoint, most: int) -> None:
    # What is no number is left to the count of the bytes themselves.
    length = head.get(b"content-length", b"")
    if most == 0 or (length.isdigit() and int(length) > most):
        raise _too_large(most)
    media_type = head.get(b"content-type", b"").partition(b";")[0].strip().lower()
    # A page of another site may send a form or plain text without asking first, JSON never; a
    # browser then sends an Origin, and a script that posts JSON as text sends none.
    is_json = media_type == b"application/json" or media_type.endswith(b"+json")
    is_json |= media_type in (b"", b"text/plain") and not head.get(b"origin")
    if not is_json and endpoint not in _FORMS:
        raise Problem(ProblemKind.NOT_JSON, "send the header Content-Type: application/json")


def _too_large(most: int) -> Problem:
    if most == 0:
        return Problem(ProblemKind.TOO_LARGE, "a request to this path has no body")
    return Problem(
        ProblemKind.TOO_LARGE,
        f"a request to this path may have a body of {most:,} bytes; send fewer or shorter "
        "documents, or a shorter filter",
    )
