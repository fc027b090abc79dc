"""The outermost duty: request ids, accounts, and problem documents for whatever is refused."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ctxguard._support.error_text import describe_error
from ctxguard.errors import CtxguardError, QueryError, StageError
from ctxguard.server.metrics import Endpoint, HttpMetrics, Outcome
from ctxguard.server.problems import Problem, ProblemKind, problem_of

_log = logging.getLogger(__name__)

_MOST_LABEL_CHARS = 128
_BEAR_RETRY_AFTER = frozenset({Endpoint.FILTER, Endpoint.CONTEXT, Endpoint.VECTOR_STORE_SEARCH})
"""Clients of the rerank protocol retry as often as ten times when they are told when to."""


_ONCE = frozenset({b"host", b"authorization"})
"""Whoever reads the other one of two, such as a proxy, would take the request for another."""


class ClientGoneError(Exception):
    """The client closed the connection before its request was whole."""


class RequestAccounts:
    """Middleware that counts every request once, and answers each `Problem` with a document.

    Sets ``request_id``, ``endpoint`` and ``head``, the headers by name, in the scope's state.

    Args:
        app: Answers.
        metrics: Where requests are counted.
        endpoint_of: Names the endpoint of a path.
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
        headers, endpoint = scope["headers"], self._endpoint_of(scope["path"])
        head = dict(headers)
        self._metrics.received(endpoint)
        request_id = request_id_for(head.get(b"x-request-id", b""))
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, endpoint=endpoint, head=head)
        outcome, status = Outcome.CANCELLED, 0

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].append((b"x-request-id", request_id.encode("ascii")))
            await send(message)

        try:
            try:
                if len(head) < len(headers):
                    _check_repeated(headers)
                await self._app(scope, receive, send_counted)
            except (Problem, StageError, QueryError) as error:
                problem = problem_of(error)
                is_shed = problem.kind is ProblemKind.OVERLOADED
                retry_after = is_shed and endpoint in _BEAR_RETRY_AFTER
                response = problem.response(request_id, retry_after=retry_after)
                await response(scope, receive, send_counted)
                outcome = Outcome.SHED if is_shed else _outcome(status, state)
            else:
                outcome = _outcome(status, state)
        except ClientGoneError:
            pass
        except Exception as error:
            outcome = Outcome.FAILED
            _log.error("request %s failed: %s", request_id, describe_error(error))
            if status == 0:
                # Such as a damaged index: its text holds paths, and it is not the caller's fault.
                is_known = isinstance(error, CtxguardError)
                kind = ProblemKind.UNAVAILABLE if is_known else ProblemKind.INTERNAL
                unknown = Problem(kind, "the log of the service has the request id")
                await unknown.response(request_id)(scope, receive, send_counted)
        finally:
            self._metrics.ended(endpoint, outcome, perf_counter() - start)


def _check_repeated(headers: Iterable[tuple[bytes, bytes]]) -> None:
    names = [name for name, _ in headers if name in _ONCE]
    if len(names) > len(set(names)):
        repeated = max(names, key=names.count).decode("ascii")
        raise Problem(ProblemKind.REPEATED_HEADER, f"{repeated} may be sent once only")


def request_id_for(label: bytes) -> str:
    """A request id of the service's own, which begins with the caller's if that can be a label.

    Samples are drawn, judged and labelled by hashes of their request ids, so that a caller who
    chose the whole id could choose the samples, and the passages to judge.
    """
    own = os.urandom(8).hex()
    if 0 < len(label) <= _MOST_LABEL_CHARS and all(33 <= each <= 126 for each in label):
        return f"{label.decode('ascii')}.{own}"
    return own


def _outcome(status: int, state: Mapping[str, object]) -> Outcome:
    if status >= 500:
        return Outcome.FAILED
    if status >= 400:
        return Outcome.REJECTED
    return Outcome.DEGRADED if state.get("degraded") else Outcome.OK
