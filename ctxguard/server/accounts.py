"""The outermost duty: request ids, accounts, and problem documents for whatever is refused."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ctxguard._support.error_text import describe_error
from ctxguard.errors import CtxguardError
from ctxguard.server.metrics import Endpoint, HttpMetrics, Outcome
from ctxguard.server.problems import Problem, ProblemKind

_log = logging.getLogger(__name__)

_MOST_LABEL_CHARS = 128
_BEAR_RETRY_AFTER = frozenset({Endpoint.FILTER, Endpoint.CONTEXT, Endpoint.VECTOR_STORE_SEARCH})
"""Clients of the rerank protocol retry as often as ten times when they are told when to."""


class ClientGoneError(Exception):
    """The client closed the connection before its request was whole."""


@dataclass(frozen=True, slots=True)
class Head:
    """The headers of a request that the middlewares read; empty where one is missing.

    Attributes:
        repeated: The header that came twice and must not, because whoever reads the other one, such
            as a proxy, would take the request for another.
    """

    host: bytes = b""
    authorization: bytes = b""
    content_type: bytes = b""
    origin: bytes = b""
    content_length: bytes = b""
    transfer_encoding: bytes = b""
    x_request_id: bytes = b""
    repeated: str = ""

    @classmethod
    def of(cls, scope: Scope) -> "Head":
        """The head of an HTTP request."""
        found: dict[str, bytes] = {}
        repeated = ""
        for name, value in scope["headers"]:
            if name in _FIELDS:
                if name in _ONCE and _FIELDS[name] in found:
                    repeated = name.decode("ascii")
                found[_FIELDS[name]] = value
        return cls(**found, repeated=repeated)

    @property
    def has_body(self) -> bool:
        """Whether a body follows."""
        return bool(self.transfer_encoding) or self.content_length not in (b"", b"0")


_FIELDS = {
    b"host": "host",
    b"authorization": "authorization",
    b"content-type": "content_type",
    b"origin": "origin",
    b"content-length": "content_length",
    b"transfer-encoding": "transfer_encoding",
    b"x-request-id": "x_request_id",
}
_ONCE = frozenset({b"host", b"authorization"})


class RequestAccounts:
    """Middleware that counts every request once, and answers each `Problem` with a document.

    Sets ``request_id``, ``endpoint`` and ``head`` in the scope's state.

    Args:
        app: Answers.
        metrics: Where requests are counted.
        endpoint_of: What a path asks for.
    """

    def __init__(
        self, app: ASGIApp, metrics: HttpMetrics, endpoint_of: Callable[[str], Endpoint]
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._endpoint_of = endpoint_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand one request on, and account for how it ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = perf_counter()
        head, endpoint = Head.of(scope), self._endpoint_of(scope["path"])
        self._metrics.received(endpoint)
        answer = _Answer(send, request_id_for(head.x_request_id))
        state = scope.setdefault("state", {})
        state.update(request_id=answer.request_id, endpoint=endpoint, head=head)
        outcome = Outcome.CANCELLED
        try:
            try:
                if head.repeated:
                    raise Problem(
                        ProblemKind.REPEATED_HEADER, f"{head.repeated} may be sent once only"
                    )
                await self._app(scope, receive, answer.send)
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
                # Such as a damaged index: its text holds paths, and it is not the caller's fault.
                is_known = isinstance(error, CtxguardError)
                kind = ProblemKind.UNAVAILABLE if is_known else ProblemKind.INTERNAL
                unknown = Problem(kind, "the log of the service has the request id")
                await unknown.response(answer.request_id)(scope, receive, answer.send)
        finally:
            self._metrics.ended(endpoint, outcome, perf_counter() - start)


def request_id_for(label: bytes) -> str:
    """A request id of the service's own, which begins with the caller's if that can be a label.

    Samples are drawn, judged and labelled by hashes of their request ids, so that a caller who
    chose the whole id could choose what is sampled, and what of it.
    """
    own = os.urandom(8).hex()
    if 0 < len(label) <= _MOST_LABEL_CHARS and all(33 <= each <= 126 for each in label):
        return f"{label.decode('ascii')}.{own}"
    return own


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


def _outcome(status: int, state: Mapping[str, object]) -> Outcome:
    if status >= 500:
        return Outcome.FAILED
    if status >= 400:
        return Outcome.REJECTED
    return Outcome.DEGRADED if state.get("degraded") else Outcome.OK
