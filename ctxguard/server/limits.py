"""Decides which requests are admitted, and how large they may be.

No body is parsed before admission. It is read here, within its limits, and passed on whole. The
limits that an operator may change are in ``ServiceSettings``; the others are here. Calls the
server's ``receive``, within a time limit, and touches nothing else.
"""

import asyncio
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from ctxguard.server.metrics import Endpoint
from ctxguard.server.problems import Problem, ProblemKind
from ctxguard.server.settings import ServiceSettings, is_loopback

MOST_HEAD_BYTES = 64 * 2**10
"""The most bytes in a request's head."""
MOST_PIPELINED = 8
"""The most requests of one connection that wait for an answer; few clients send the next one
early."""
MOST_UNREAD_SECONDS = 30.0
"""The longest that a client may leave its answer unread."""

MOST_QUERY_BODY_BYTES = 512 * 2**10
"""The most bytes in the body of a search: a query and a filter, without documents."""
MOST_FORM_BYTES = 64 * 2**10
"""The most bytes in the body of one of the console's forms."""

MOST_CONDITIONS = 32
"""The most conditions in a filter."""
MOST_VALUES = 10_000
"""The most values in all of a filter's conditions together."""
FEW_VALUES = 100
"""A filter with more values is built on a thread."""
MOST_NAMES = 64
"""The most names of signals in one request, and the most names of legs."""
MOST_NAME_CHARS = 256
"""The longest session id."""

_OPEN_IN_FLIGHT = 64
_OPEN_BUFFERED_BYTES = 4 * 2**20
"""Limits on requests that require no token, in addition to the others."""

Head = Mapping[bytes, bytes]
"""The headers of a request by name."""


@dataclass(slots=True)
class Budget:
    """Counts requests in progress and the bytes of their bodies against limits."""

    max_in_flight: int
    max_buffered_bytes: int
    in_flight: int = 0
    buffered: int = 0


@dataclass(frozen=True, slots=True)
class EndpointRule:
    """The requirements and limits of requests to an endpoint.

    Without a token, requests to foreign host names are refused: otherwise another site's page could
    reach the service through a name of its own. The body may be a form if ``is_form``, else JSON.
    """

    token: bytes | None
    is_any_host: bool
    most_bytes: int
    receive_seconds: float
    budget: Budget
    is_form: bool = False

    def admit(self, head: Head) -> bool:
        """Admit a request by its headers; return whether it has a body.

        Raises:
            Problem: it is refused.
        """
        if not self.is_any_host and not _is_own(head.get(b"host", b"")):
            raise Problem(
                ProblemKind.FOREIGN_HOST,
                "without a token, only requests to localhost, 127.0.0.1 or [::1] are answered",
            )
        if self.token is not None:
            _check_token(head.get(b"authorization", b""), self.token)
        length = head.get(b"content-length", b"")
        if length in (b"", b"0") and b"transfer-encoding" not in head:
            return False
        # What is not a number is left to the count of the bytes themselves.
        if self.most_bytes == 0 or (length.isdigit() and int(length) > self.most_bytes):
            raise self._too_large()
        media_type = head.get(b"content-type", b"").partition(b";")[0].strip().lower()
        # A page of another site may send a form or plain text without asking first, JSON never; a
        # browser then sends an Origin, and a script that posts JSON as text sends none.
        is_json = media_type == b"application/json" or media_type.endswith(b"+json")
        is_json |= media_type in (b"", b"text/plain") and not head.get(b"origin")
        if not is_json and not self.is_form:
            raise Problem(ProblemKind.NOT_JSON, "send the header Content-Type: application/json")
        return True

    async def enter(self, head: Head, receive: Receive) -> bytearray:
        """Admit a request, read its body, and count both as in progress.

        One array grows, because joining pieces would take the memory twice, and small pieces are
        not returned to the system.

        Raises:
            Problem: it is refused or late, or too much is in progress.
            ClientDisconnect: the client left before sending the whole body.
        """
        budget, more = self.budget, self.admit(head)
        body = bytearray()
        try:
            async with asyncio.timeout(self.receive_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    chunk: bytes = message.get("body", b"")
                    body += chunk
                    budget.buffered += len(chunk)
                    if len(body) > self.most_bytes:
                        raise self._too_large()
                    if budget.buffered > budget.max_buffered_bytes:
                        busy = "too many bytes are being received at once"
                        raise Problem(ProblemKind.OVERLOADED, busy)
                    more = message.get("more_body", False)
            if budget.in_flight >= budget.max_in_flight:
                busy = f"{budget.in_flight:,} requests are in progress, the maximum"
                raise Problem(ProblemKind.OVERLOADED, busy)
        except BaseException as error:
            budget.buffered -= len(body)
            if isinstance(error, TimeoutError):
                late = f"the body was incomplete after {self.receive_seconds:g} s"
                raise Problem(ProblemKind.TOO_SLOW, late) from None
            raise
        budget.in_flight += 1
        return body

    def _too_large(self) -> Problem:
        if self.most_bytes == 0:
            return Problem(ProblemKind.TOO_LARGE, "a request to this path has no body")
        return Problem(
            ProblemKind.TOO_LARGE,
            f"a request to this path may have a body of at most {self.most_bytes:,} bytes; send "
            "fewer or shorter documents, or a shorter filter",
        )


def rules_of(settings: ServiceSettings) -> dict[Endpoint, EndpointRule]:
    """Make each endpoint's rule; the console's requests without a token count separately."""
    most, seconds = settings.max_body_bytes, settings.receive_seconds
    token = None if settings.token is None else settings.token.encode()
    metrics = token if settings.metrics_token is None else settings.metrics_token.encode()
    common = Budget(settings.max_in_flight, settings.max_buffered_bytes)
    never_shed = Budget(2**62, settings.max_buffered_bytes)
    usual = EndpointRule(token, token is not None, most, seconds, common)
    return {
        **dict.fromkeys(Endpoint, usual),
        Endpoint.CONTEXT: replace(usual, most_bytes=min(most, MOST_QUERY_BODY_BYTES)),
        Endpoint.METRICS: replace(usual, token=metrics, most_bytes=0, budget=never_shed),
        Endpoint.HEALTH: replace(usual, token=None, most_bytes=0, budget=never_shed),
        Endpoint.CONSOLE: EndpointRule(
            None,  # it has a sign-in of its own
            settings.console_token is not None,
            min(most, MOST_FORM_BYTES),
            seconds,
            Budget(_OPEN_IN_FLIGHT, _OPEN_BUFFERED_BYTES),
            is_form=True,
        ),
    }


def _check_token(authorization: bytes, token: bytes) -> None:
    scheme, _, given = authorization.partition(b" ")
    # Compared in any case, so that the time tells nothing of the token.
    is_equal = hmac.compare_digest(given.strip(), token)
    if not is_equal or scheme.lower() != b"bearer":
        raise Problem(
            ProblemKind.UNAUTHORIZED,
            "send the service's token as Authorization: Bearer …",
            headers={"www-authenticate": "Bearer"},
        )


@lru_cache(maxsize=64)
def _is_own(host: bytes) -> bool:
    """Return whether a Host header, with or without a port, names this machine.

    >>> _is_own(b"localhost:80"), _is_own(b"[::1]:80"), _is_own(b"a.example")
    (True, True, False)
    """
    name = host[1:].partition(b"]")[0] if host[:1] == b"[" else host.partition(b":")[0].lower()
    return is_loopback(name.decode("latin-1"))
