"""Operations: what is asked at a path, who answers it, and how its body is read."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.types import Receive, Scope, Send

from ctxguard.core.types import StageFailure
from ctxguard.server.metrics import Endpoint
from ctxguard.server.problems import HttpAnswer, ProblemKind, answer, invalid_body

STRICT = ConfigDict(strict=True)
"""A text that reads like a number is none: pydantic would turn it into one."""


def named(most: int) -> tuple[BeforeValidator, msgspec.Meta]:
    """Refuses an object of more names, before it lists an error for each of them."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > most:
            raise ValueError(f"{len(given):,} names, the limit is {most}")
        return given

    return BeforeValidator(check), msgspec.Meta(max_length=most)


def bounded(**bounds: Any) -> tuple[Any, msgspec.Meta]:
    """Bounds of a field, such as ``ge=0``, told to both readers of a body."""
    return Field(**bounds), msgspec.Meta(**bounds)


class Body:
    """The body of a request as the type that is asked for.

    `msgspec` reads it, in a fraction of the time of `pydantic`, which reads what `msgspec` refuses:
    it names each fault, and takes some numbers that `msgspec` does not.

    Args:
        asked: A typed dictionary; a bound of a field is told to both.
        is_quick: Whether `msgspec` can tell its alternatives apart.

    Attributes:
        adapter: Describes the type, and reads it by `pydantic`.
    """

    def __init__(self, asked: Any, *, is_quick: bool = True) -> None:
        self.adapter: TypeAdapter[Any] = TypeAdapter(asked)
        self.decode: Callable[[bytes], Any] = (
            msgspec.json.Decoder(asked).decode if is_quick else self.parse
        )

    def parse(self, body: bytes) -> Any:
        """Read a body by `pydantic`.

        Half a surrogate pair, which some scrapers leave in texts, is read as a question mark.

        Raises:
            Problem: it is not JSON, or does not fit.
        """
        try:
            return self.adapter.validate_json(body)
        except ValidationError as error:
            if b"\\ud" not in body.lower() or error.errors()[0]["type"] != "json_invalid":
                raise invalid_body(error) from None
        with suppress(ValueError, RecursionError):
            body = json.dumps(json.loads(body), ensure_ascii=False).encode(errors="replace")
        try:
            return self.adapter.validate_json(body)
        except ValidationError as error:
            raise invalid_body(error) from None


@dataclass(frozen=True, slots=True)
class Operation:
    """One path with its method, who answers it, and how; an ASGI application where it has a body.

    Attributes:
        path: Where it is asked.
        endpoint: Answers it. With a body: a coroutine of what was asked and the scope, which
            returns the answer's content, and the failure of a stage without which it was found.
            Without one: an endpoint as Starlette takes it.
        what: The metric label of its requests.
        summary: One line for people.
        answers: The type of the answer; None for text.
        asks: The body; None without one, and its method is then ``GET`` instead of ``POST``.
        problems: Its own problems, beside those of any operation.
        without_token: Whether it needs no token.
    """

    path: str
    endpoint: Callable[..., Any]
    what: Endpoint
    summary: str
    answers: Any
    asks: Body | None = None
    problems: tuple[ProblemKind, ...] = ()
    without_token: bool = False

    @property
    def method(self) -> str:
        """``POST`` for those with a body."""
        return "GET" if self.asks is None else "POST"

    async def answered(self, scope: Scope) -> HttpAnswer:
        """Answer a request whose body is in the scope's state.

        Raises:
            Problem: it cannot be answered.
        """
        assert self.asks is not None  # noqa: S101 - others are answered by Starlette
        state = scope["state"]
        try:
            given = self.asks.decode(state["body"])
        except (ValueError, RecursionError):
            given = self.asks.parse(state["body"])
        failure: StageFailure | None
        content, failure = await self.endpoint(given, scope)
        if failure is None:
            return answer(content)
        state["degraded"] = True
        return answer(content, {"x-ctxguard-degraded": failure.kind.value})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request that Starlette's router hands on."""
        answered = await self.answered(scope)
        await answered(scope, receive, send)
