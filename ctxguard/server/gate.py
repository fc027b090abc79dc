"""Guards the service: request ids, admission, accounting, and problem documents.

Receives and sends HTTP messages over the server, calls the operations and the application, uses the
monotonic clock and random ids, counts and logs.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ctxguard._support.error_text import describe_error
from ctxguard.errors import QueryError, StageError
from ctxguard.server.limits import EndpointRule
from ctxguard.server.metrics import Endpoint, HttpMetrics, Outcome
from ctxguard.server.problems import Problem, ProblemKind, problem_of
from ctxguard.server.wire import Operation

_log = logging.getLogger(__name__)

_MOST_LABEL_CHARS = 128
_BEAR_RETRY_AFTER = frozenset({Endpoint.FILTER, Endpoint.CONTEXT})
"""Endpoints that may answer with ``Retry-After``; clients of the rerank protocol would retry up to
ten times."""

_ENDS = {
    (digit, is_degraded): outcome
    for is_degraded, answered in ((False, Outcome.OK), (True, Outcome.DEGRADED))
    for digit, outcome in enumerate([*[answered] * 4, Outcome.REJECTED, Outcome.FAILED])
}
"""Outcomes, by the first digit of the status and whether a stage was left out."""

_ONCE = frozenset({b"host", b"authorization"})
"""Headers that may occur only once: a proxy may have read another value, and so have let pass
another request."""


class Gate:
    """An application that stands in front of all others.

    It gives each request an id, refuses it or reads its body, has an operation or the application
    answer, turns a `Problem` into a document, and counts the outcome. It sets ``request_id``,
    ``body_bytes`` and ``body`` in the scope's state; the reader of the body removes it.
    """

    def __init__(
        self,
        app: ASGIApp,
        operations: Iterable[Operation],
        rules: Mapping[Endpoint, EndpointRule],
        metrics: HttpMetrics,
    ) -> None:
        self.app = app
        self._operations = {each.path: each for each in operations}
        self._rules, self._metrics = rules, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and count its outcome."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, path = perf_counter(), scope["path"].removeprefix(scope.get("root_path", ""))
        operation = self._operations.get(path.rstrip("/"))
        endpoint = operation.what if operation else _endpoint_of(path)
        self._metrics.received(endpoint)
        given = dict(scope["headers"])
        label, request_id = given.get(b"x-request-id"), os.urandom(8).hex()
        if label:
            request_id = _labelled(label, request_id)
        state = scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        named = (b"x-request-id", request_id.encode("ascii"))
        outcome, status = Outcome.CANCELLED, 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].append(named)
            await send(message)

        try:
            if len(given) < len(scope["headers"]):
                _check_repeated(scope["headers"])
            rule = self._rules[endpoint]
            state["body"] = await rule.enter(given, receive)
            n_bytes = state["body_bytes"] = len(state["body"])
            try:
                if operation:
                    answer = await operation.answered(scope)
                    answer.raw_headers.append(named)
                    status = answer.status_code
                    await answer(scope, receive, send)
                else:
                    # Without it Starlette's router answers by itself what it does not know.
                    scope["app"] = self.app
                    await self.app(scope, _replaying(state, receive), send_named)
            finally:
                rule.budget.in_flight -= 1
                rule.budget.buffered -= n_bytes
            outcome = _ENDS[status // 100, "degraded" in state]
        except ClientDisconnect:
            pass
        except Exception as error:
            outcome, answer = _refused(error, endpoint, request_id)
            if status == 0:
                await answer(scope, receive, send_named)
        finally:
            self._metrics.ended(endpoint, outcome, perf_counter() - start)


def _refused(error: Exception, endpoint: Endpoint, request_id: str) -> tuple[Outcome, Response]:
    """Return the outcome of a request that raised an error, and its answer."""
    if not isinstance(error, (Problem, StageError, QueryError, HTTPException)):
        _log.error("request %s failed: %s", request_id, describe_error(error))
    problem = problem_of(error)
    is_shed = problem.kind is ProblemKind.OVERLOADED
    outcome = Outcome.SHED if is_shed else _ENDS[problem.kind.status // 100, False]
    retry_after = is_shed and endpoint in _BEAR_RETRY_AFTER
    return outcome, problem.answer(request_id, retry_after=retry_after)


def _endpoint_of(path: str) -> Endpoint:
    of_console = path == "/console" or path.startswith("/console/")
    return Endpoint.CONSOLE if of_console else Endpoint.OTHER


def _replaying(state: dict[str, Any], receive: Receive) -> Receive:
    """Replay the body that was already read, unless it was taken, then later messages."""

    async def replay() -> Message:
        if "body" in state:
            return {"type": "http.request", "body": bytes(state.pop("body")), "more_body": False}
        return await receive()

    return replay


def _check_repeated(headers: Iterable[tuple[bytes, bytes]]) -> None:
    names = [name for name, _ in headers if name in _ONCE]
    if len(names) > len(set(names)):
        repeated = max(names, key=names.count).decode("ascii")
        raise Problem(ProblemKind.REPEATED_HEADER, f"the header {repeated} may be sent only once")


def _labelled(label: bytes, own: str) -> str:
    """Return our request id, prefixed with the caller's ``X-Request-ID`` if that is valid.

    Samples are drawn, judged and labelled by hashes of their request ids, so that a caller who
    chose the whole id could choose the samples, and the passages to judge.
    """
    if len(label) <= _MOST_LABEL_CHARS and all(33 <= each <= 126 for each in label):
        return f"{label.decode('ascii')}.{own}"
    return own
