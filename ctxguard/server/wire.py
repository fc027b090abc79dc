"""Defines operations: the path, body and handler of each kind of request.

Calls the handlers, and runs a thread for work on large bodies.
"""

import json
from asyncio import wrap_future
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from starlette.responses import Response
from starlette.types import Scope

from ctxguard._support.fork_safety import reset_in_children
from ctxguard._support.json_values import MOST_VALUES, has_more_values
from ctxguard.core.types import StageFailure
from ctxguard.resilience.threads import DaemonThreads
from ctxguard.server.metrics import Endpoint
from ctxguard.server.problems import Problem, ProblemKind, answer, invalid, invalid_body

_T = TypeVar("_T")

DESCRIBED = ConfigDict(use_attribute_docstrings=True)
"""Makes a field's docstring its description in the OpenAPI document."""
STRICT = ConfigDict(strict=True, use_attribute_docstrings=True)
"""Keeps strings of digits from counting as numbers: pydantic would convert them."""

_QUICK_BYTES = 256 * 2**10
"""The longest body to handle on the event loop; a longer one is handled on a thread."""


def named(most: int) -> BeforeValidator:
    """Refuse an object with too many names, before an error is listed for each."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > most:
            raise ValueError(f"{len(given):,} names, but the limit is {most}")
        return given

    return BeforeValidator(check)


# One: each of several would hold the interpreter in turn, and the loop would wait for all of them.
_thread = DaemonThreads("body", workers=1, waiting=2**20)
reset_in_children(_thread)


async def off_the_loop(scope: Scope, work: Callable[..., _T], *arguments: Any) -> _T:
    """Do work for a request, on the thread for long bodies if its body is long."""
    if scope["state"]["body_bytes"] <= _QUICK_BYTES:
        return work(*arguments)
    return await wrap_future(_thread.submit(partial(work, *arguments)))


def read_body(asked: TypeAdapter[Any], body: bytes | bytearray) -> Any:
    """Read a body as the requested type.

    Half a surrogate pair, which some scrapers leave in texts, is read as a question mark.

    Raises:
        Problem: it is not JSON, does not fit, or has too many values.
    """
    if has_more_values(body):
        raise invalid(
            f"the body has more than {MOST_VALUES:,} values: send fewer documents, or less "
            "metadata with each"
        )
    try:
        return asked.validate_json(body)
    except ValidationError as error:
        if b"\\ud" not in body.lower() or error.errors()[0]["type"] != "json_invalid":
            raise invalid_body(error) from None
    with suppress(ValueError, RecursionError):
        body = json.dumps(json.loads(body), ensure_ascii=False).encode(errors="replace")
    try:
        return asked.validate_json(body)
    except ValidationError as error:
        raise invalid_body(error) from None


@dataclass(frozen=True, slots=True)
class Operation:
    """One path with its handler.

    Attributes:
        endpoint: Takes the body's content and the scope; returns the answer's content, and the
            failure of a stage without which it was found.
        what: The metric label of its requests.
        answers: The type of the answer; None for text, ``Any`` where another API documents it.
        asks: Reads the body of a ``POST``; without one it is a ``GET``.
    """

    path: str
    endpoint: Callable[[Any, Scope], Awaitable[tuple[Any, StageFailure | None]]]
    what: Endpoint
    summary: str
    answers: Any
    asks: TypeAdapter[Any] | None = None

    async def answered(self, scope: Scope) -> Response:
        """Answer a request whose body is in the scope's state, and remove the body from it.

        Raises:
            Problem: it cannot be answered.
        """
        state, given = scope["state"], None
        methods = ("GET", "HEAD") if self.asks is None else ("POST",)
        if scope["method"] not in methods:
            allowed = {"allow": ", ".join(methods)}
            raise Problem(ProblemKind.METHOD_NOT_ALLOWED, "Method Not Allowed", headers=allowed)
        if self.asks is not None:
            given = await off_the_loop(scope, read_body, self.asks, state.pop("body"))
        content, failure = await self.endpoint(given, scope)
        if failure is not None:
            state["degraded"] = True
            return answer(content, {"x-ctxguard-degraded": failure.kind.value})
        return content if isinstance(content, Response) else answer(content)
