"""How much a request may be and hold: its body, its parts, and the requests beside it.

Nothing of a body is parsed before it has passed. It is read here, within its limits, and handed on
whole. The limits that an operator may change are in ``ServiceSettings``; the others are here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Receive

from ctxguard.resilience.within import LateError, within
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


class ClientGoneError(Exception):
    """The client closed the connection before its request was whole."""


class RequestLimits:
    """Reads bodies within their limits, and bounds the requests under way.

    Requests that need no token, those to the console, have a budget of their own.

    Args:
        settings: The limits.
    """

    def __init__(self, settings: ServiceSettings) -> None:
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
            **dict.fromkeys(_NEVER_SHED, BodyBudget(2**62, common.max_buffered_bytes)),
            Endpoint.CONSOLE: BodyBudget(_OPEN_IN_FLIGHT, _OPEN_BUFFERED_BYTES),
        }

    async def body(self, endpoint: Endpoint, head: Head, receive: Receive) -> bytes:
        """The whole body of a request; empty without one.

        Raises:
            Problem: it is of another type, too large or too late, or too much is being received.
            ClientGoneError: it will never be whole.
        """
        if b"transfer-encoding" not in head and head.get(b"content-length", b"0") in (b"", b"0"):
            return b""
        most, budget = self._most_bytes[endpoint], self._budgets[endpoint]
        _check_body(head, endpoint, most)
        try:
            return await within(self._receive_seconds, _received(receive, most, budget))
        except LateError:
            raise Problem(
                ProblemKind.TOO_SLOW,
                f"the body was not whole after {self._receive_seconds:g} s",
            ) from None

    def enter(self, endpoint: Endpoint, body: bytes) -> BodyBudget:
        """Count a request that is answered from now on, until it leaves its budget.

        Raises:
            Problem: too many are under way.
        """
        budget = self._budgets[endpoint]
        if budget.in_flight >= budget.max_in_flight:
            raise Problem(
                ProblemKind.OVERLOADED,
                f"{budget.in_flight:,} requests are under way, the most that may be",
            )
        budget.in_flight += 1
        budget.buffered += len(body)
        return budget


async def _received(receive: Receive, most: int, budget: BodyBudget) -> bytes:
    """The whole body, of at most so many bytes."""
    received = 0
    chunks: list[bytes] = []
    try:
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
