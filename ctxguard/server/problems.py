"""Answers of the service, and its errors as problem documents (RFC 9457).

A problem never quotes a query or a document: error pages end in logs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from ctxguard._support.error_text import reason_of
from ctxguard.errors import (
    CtxguardError,
    FilterViolationError,
    OverloadedError,
    QueryError,
    StageError,
)

MEDIA_TYPE = b"application/problem+json"
TYPES = "urn:ctxguard:problem:"
"""A problem's ``type`` is this and the kind's name; docs/serve.md explains each."""

_MOST_ERRORS = 10
"""Faults that one problem lists: 10,000 documents of a wrong type are one mistake."""


@dataclass(slots=True)
class HttpAnswer:
    """The answer to a request, as an ASGI application.

    Attributes:
        body: The whole body.
        headers: All of them.
        status: Status of HTTP.
    """

    body: bytes
    headers: list[tuple[bytes, bytes]]
    status: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send it."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


def answer(
    content: Any,
    headers: Mapping[str, str] | None = None,
    status: int = 200,
    media_type: bytes = b"application/json",
) -> HttpAnswer:
    """Write an answer in JSON; a number that JSON cannot carry is null.

    Args:
        content: Its body.
        headers: Besides length and type.
        status: Status of HTTP.
        media_type: Type of the body.
    """
    body = to_json(content, inf_nan_mode="null")
    own = [(b"content-length", b"%d" % len(body)), (b"content-type", media_type)]
    for name, text in headers.items() if headers else ():
        own.append((name.encode("latin-1"), text.encode("latin-1")))
    return HttpAnswer(body, own, status)


class ProblemKind(Enum):
    """Faults of a request: HTTP status and title. A closed set."""

    INVALID_JSON = (400, "The body is not JSON")
    UNKNOWN_ALIAS = (400, "Unknown model alias")
    REPEATED_HEADER = (400, "A header was sent twice")
    UNAUTHORIZED = (401, "A token is needed")
    FOREIGN_HOST = (403, "The Host header names another machine")
    NOT_FOUND = (404, "Nothing is served here")
    METHOD_NOT_ALLOWED = (405, "Method not allowed")
    TOO_SLOW = (408, "The request took too long to arrive")
    TOO_LARGE = (413, "The body is too large")
    NOT_JSON = (415, "The body must be application/json")
    INVALID_REQUEST = (422, "The request cannot be answered as it is")
    INTERNAL = (500, "Internal error")
    FILTER_VIOLATED = (502, "The retriever returned what the filter forbids")
    OVERLOADED = (503, "Too many requests are under way")
    UNAVAILABLE = (503, "No stage is left that could answer")

    def __init__(self, status: int, title: str) -> None:
        self.status = status
        self.title = title


_CLOSES = frozenset({ProblemKind.TOO_SLOW, ProblemKind.TOO_LARGE, ProblemKind.OVERLOADED})


class Problem(Exception):  # noqa: N818 - RFC 9457 calls it a problem
    """A request that is answered with a problem document.

    Args:
        kind: The kind of fault.
        detail: The fault and its mend in words; quotes neither a query nor a document.
        errors: The faulty parts of the body, each with ``loc`` and ``msg``.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        kind: ProblemKind,
        detail: str,
        *,
        errors: list[dict[str, object]] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.errors = errors
        self.headers = headers

    def answer(self, request_id: str | None = None, *, retry_after: bool = False) -> HttpAnswer:
        """Write the problem document.

        Args:
            request_id: The request's id; None if it has none.
            retry_after: Whether the client is told to try again after a second.
        """
        document: dict[str, object] = {
            "type": TYPES + self.kind.name.lower().replace("_", "-"),
            "title": self.kind.title,
            "status": self.kind.status,
            "detail": self.detail,
        }
        if self.errors is not None:
            document["errors"] = self.errors
        if request_id is not None:
            document["request_id"] = request_id
        headers = dict(self.headers or {})
        if retry_after:
            headers["retry-after"] = "1"
        if self.kind in _CLOSES:
            # The rest of the body is neither read nor taken for the next request.
            headers["connection"] = "close"
        return answer(document, headers, self.kind.status, MEDIA_TYPE)


def invalid(detail: str) -> Problem:
    """Make the problem of a request that cannot be answered as it is, with the mend in words."""
    return Problem(ProblemKind.INVALID_REQUEST, detail)


def invalid_body(error: ValidationError) -> Problem:
    """Make the problem of a body that is not JSON, or not the JSON that was asked for."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        return Problem(ProblemKind.INVALID_JSON, found[0]["msg"])
    errors: list[dict[str, object]] = [
        {"loc": list(each["loc"]), "msg": reason_of(each["msg"])} for each in found[:_MOST_ERRORS]
    ]
    first = ".".join(map(str, found[0]["loc"]))
    more = f"; {len(found) - 1:,} more" if len(found) > 1 else ""
    text = f"{first}: {errors[0]['msg']}{more}"
    return Problem(ProblemKind.INVALID_REQUEST, text, errors=errors)


def problem_of(error: Exception) -> Problem:
    """Choose the problem that an error is answered with.

    Only a caller's query can be at fault by then: an endpoint builds the filter, and checks all
    else, before it asks the guard. Other errors, such as of a damaged index, are the service's
    own, and their text holds paths.
    """
    match error:
        case Problem():
            return error
        case QueryError():
            return invalid(str(error))
        case FilterViolationError():
            return Problem(ProblemKind.FILTER_VIOLATED, "nothing was served")
        case OverloadedError():
            return Problem(ProblemKind.OVERLOADED, str(error))
        case StageError():
            return Problem(ProblemKind.UNAVAILABLE, f"{error.stage} did not answer")
    kind = ProblemKind.UNAVAILABLE if isinstance(error, CtxguardError) else ProblemKind.INTERNAL
    return Problem(kind, "the log of the service has the request id")


def of_status(status: int) -> Problem:
    """Make the problem of a status that the framework answers with by itself."""
    kinds = {kind.status: kind for kind in reversed(ProblemKind)}
    kind = kinds.get(status, ProblemKind.INVALID_REQUEST)
    return Problem(kind, HTTPStatus(status).phrase)
