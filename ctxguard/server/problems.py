"""Builds the service's answers, and its errors as problem documents (RFC 9457).

A problem never quotes a query or a document: error pages end in logs. Pure.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ctxguard._support.error_text import reason_of
from ctxguard.errors import (
    CtxguardError,
    FilterViolationError,
    OverloadedError,
    QueryError,
    StageError,
)

MEDIA_TYPE = "application/problem+json"
TYPES = "urn:ctxguard:problem:"
"""A problem's ``type`` is this and the kind's name; docs/serve.md explains each."""

_MOST_ERRORS = 10
"""The most faults that one problem lists: 10,000 documents of a wrong type are one mistake."""


def answer(
    content: Any,
    headers: Mapping[str, str] | None = None,
    status: int = 200,
    media_type: str = "application/json",
) -> Response:
    """Write an answer in JSON; a number that JSON cannot represent becomes null."""
    return Response(to_json(content, inf_nan_mode="null"), status, headers, media_type)


class ProblemKind(Enum):
    """The kinds of faults of a request, with HTTP status and title. A closed set."""

    INVALID_JSON = (400, "The body is not JSON")
    UNKNOWN_ALIAS = (400, "Unknown model alias")
    REPEATED_HEADER = (400, "A header was sent twice")
    UNAUTHORIZED = (401, "A token is required")
    FOREIGN_HOST = (403, "The Host header names another machine")
    NOT_FOUND = (404, "Nothing is served here")
    METHOD_NOT_ALLOWED = (405, "Method not allowed")
    TOO_SLOW = (408, "The request took too long to arrive")
    TOO_LARGE = (413, "The body is too large")
    NOT_JSON = (415, "The body must be application/json")
    INVALID_REQUEST = (422, "The request cannot be answered as it is")
    INTERNAL = (500, "Internal error")
    FILTER_VIOLATED = (502, "The retriever returned what the filter forbids")
    OVERLOADED = (503, "Too many requests are in progress")
    UNAVAILABLE = (503, "No stage is left that can answer")

    def __init__(self, status: int, title: str) -> None:
        self.status = status
        self.title = title


_CLOSES = frozenset({ProblemKind.TOO_SLOW, ProblemKind.TOO_LARGE, ProblemKind.OVERLOADED})


class Problem(Exception):  # noqa: N818 - RFC 9457 calls it a problem
    """An error that is answered with a problem document.

    ``detail`` says what mends the fault; ``errors`` are the faulty parts of the body, each with
    ``loc`` and ``msg``.
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
        self.kind, self.detail = kind, detail
        self.errors, self.headers = errors, headers

    def answer(self, request_id: str, *, retry_after: bool) -> Response:
        """Write the problem document; ``retry_after`` asks the client to try again in a second."""
        document: dict[str, object] = {
            "type": TYPES + self.kind.name.lower().replace("_", "-"),
            "title": self.kind.title,
            "status": self.kind.status,
            "detail": self.detail,
            "request_id": request_id,
        }
        if self.errors is not None:
            document["errors"] = self.errors
        headers = dict(self.headers or {})
        if retry_after:
            headers["retry-after"] = "1"
        if self.kind in _CLOSES:
            # The rest of the body is neither read nor taken for the next request.
            headers["connection"] = "close"
        return answer(document, headers, self.kind.status, MEDIA_TYPE)


def invalid(detail: str) -> Problem:
    """Refuse an invalid request; the detail says how to fix it."""
    return Problem(ProblemKind.INVALID_REQUEST, detail)


def invalid_body(error: ValidationError) -> Problem:
    """Refuse a body that is not JSON, or not of the requested type."""
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
    """Choose the problem with which to answer an error.

    Only a caller's query can still be at fault: an endpoint checks everything else before it asks
    the guard. Other errors, such as a damaged index, are the service's own, and their messages hold
    paths.
    """
    kind, detail = ProblemKind.INTERNAL, "look for the request id in the service's log"
    match error:
        case Problem():
            return error
        case HTTPException():  # the framework's own, such as for an unknown path
            kinds = {kind.status: kind for kind in reversed(ProblemKind)}
            kind = kinds.get(error.status_code, ProblemKind.INVALID_REQUEST)
            return Problem(kind, error.detail, headers=error.headers)
        case QueryError():
            kind, detail = ProblemKind.INVALID_REQUEST, str(error)
        case FilterViolationError():
            kind, detail = ProblemKind.FILTER_VIOLATED, "nothing was served"
        case OverloadedError():
            kind, detail = ProblemKind.OVERLOADED, str(error)
        case StageError():
            kind, detail = ProblemKind.UNAVAILABLE, f"{error.stage} did not answer"
        case CtxguardError():
            kind = ProblemKind.UNAVAILABLE
    return Problem(kind, detail)
