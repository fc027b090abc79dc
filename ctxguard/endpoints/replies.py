"""Parses endpoints' answers: bounded JSON, errors in every known form, chat completions.

All of it is untrusted. Pure.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic_core import from_json

from ctxguard._support.json_values import MOST_VALUES, has_more_values
from ctxguard.endpoints.failures import (
    BAD_REQUEST,
    NOT_FOUND,
    SERVER_ERROR,
    TOO_MANY_REQUESTS,
    CallError,
    InvalidReason,
    status_error,
)
from ctxguard.endpoints.http import Answer

T = TypeVar("T")

OK = 200
_MOST_TOKENS = 10**9
_MOST_SAID_CHARS = 300
_MOST_KEPT_BYTES = 4_000
_MOST_ERRORS = 20
_MOST_OBJECTS = 20
"""The most JSON objects to look for in a model's prose."""
_STATUS_OF_CODE = (
    ("rate_limit", TOO_MANY_REQUESTS),
    ("quota", TOO_MANY_REQUESTS),
    ("api_key", 401),
    ("authentication", 401),
    ("permission", 403),
    ("not_found", NOT_FOUND),
    ("invalid_request", BAD_REQUEST),
    ("context_length", BAD_REQUEST),
    ("unsupported", BAD_REQUEST),
)
"""Statuses for errors that come with HTTP 200 and a code in words, by a part of that code."""
_END_OF_THOUGHTS = re.compile(r"</(?:think|thinking|reasoning)>")
_OPEN_THOUGHT = re.compile(r"\s*<(?:think|thinking|reasoning)>")


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """A model's reply.

    Attributes:
        answer: The requested value, such as a grade in 0..3, or the reason why there is none.
        body: The body of the reply, or the endpoint's message or our words; without the key.
        input_tokens, output_tokens: None if the reply does not report them.
        seconds: Duration of the last attempt; None if not measured.
        why: Why there is no answer, without quotes; empty if there is one.
    """

    answer: T | InvalidReason
    body: str
    input_tokens: int | None = None
    output_tokens: int | None = None
    seconds: float | None = None
    why: str = ""


def document_of(answer: Answer, host: str, model: str | None = None) -> object:
    """Parse a host's answer of any status; ``model`` is the requested one, for errors.

    Raises:
        CallError: the answer is an error (even with HTTP 200), is not JSON, or has too many values.
    """
    body = answer.body
    if answer.status != OK:
        raise _status_error(answer, host, model)
    start = body.lstrip()[:5]
    if start[:1] == b"<":
        words = (
            f"{host} answered with a web page, not JSON: check the URL, which ends in /v1 on most "
            "servers"
        )
        raise CallError(InvalidReason.DENIED, words)
    is_stream = start in (b"data:", b"event") or start[:1] == b":"
    document = _joined(body) if is_stream else _parsed(body, host)
    found = _error_in(document)
    if found is not None:
        part, status = found
        error = status_error(host, status, *said_of(part), model)
        error.is_final = True
        raise error
    return document


def _parsed(body: bytes, host: str) -> object:
    words = ""
    if has_more_values(body):
        words = f"has more than {MOST_VALUES:,} values"
    else:
        try:
            return from_json(body.removeprefix(b"\xef\xbb\xbf"))
        except ValueError:
            words = "is not JSON"
            try:
                body.decode()
            except UnicodeDecodeError:
                words = "is not JSON in UTF-8"
    said = body[:_MOST_KEPT_BYTES].decode("utf-8", "replace")
    raise CallError(InvalidReason.MALFORMED, f"the answer from {host} {words}", said=said)


def _status_error(answer: Answer, host: str, model: str | None) -> CallError:
    named = ""
    if location := answer.headers.get("location"):
        said = f"a redirect to {location}"
    else:
        try:
            said, named = said_of(_parsed(answer.body, host))
        except CallError:
            said = "" if answer.body[:1] == b"<" else answer.body.decode("utf-8", "replace")
    error = status_error(host, answer.status, said[:_MOST_SAID_CHARS], named, model)
    error.wait_seconds = answer.wait_seconds
    return error


def _error_in(document: object) -> tuple[object, int] | None:
    """Return the error in an answer that claims success, and its status; None if there is none."""
    error = field_of(document, "error") or field_of(_choice_in(document), "error")
    if not error or (field_of(document, "results") or field_of(document, "answers")):
        return None
    status = SERVER_ERROR
    for name in ("status", "code", "type"):
        code = field_of(error, name)
        if isinstance(code, str) and code.isdecimal() and len(code) == 3:
            code = int(code)
        if type(code) is int and BAD_REQUEST <= code < 600:
            return error, code
        for part, of_part in _STATUS_OF_CODE:
            if isinstance(code, str) and part in code.lower():
                status = of_part
    return error, status


def said_of(document: object) -> tuple[str, str]:
    """Return an error's message, in any usual form, and the fields and codes that it names.

    FastAPI's copy of the request (``input``) is not read.

    >>> said_of({"error": {"message": "no", "param": "max_tokens"}})
    ('no', 'max_tokens')
    >>> said_of({"detail": [{"loc": ["body", "seed"], "msg": "Extra inputs", "input": 1}]})
    ('Extra inputs', 'body.seed')
    """
    messages, names = [], []

    def visit(part: object, depth: int) -> None:
        if isinstance(part, str):
            messages.append(part)
        elif isinstance(part, list) and depth:
            for each in part[:_MOST_ERRORS]:
                visit(each, depth - 1)
        elif isinstance(part, dict) and depth:
            for name in ("message", "msg", "error", "detail", "errors"):
                if name in part:
                    visit(part[name], depth - 1)
            for name in ("param", "code", "type", "loc"):
                value = part.get(name)
                if isinstance(value, list):
                    value = ".".join(map(str, value[:_MOST_ERRORS]))
                if isinstance(value, str):
                    names.append(value[:_MOST_SAID_CHARS])

    visit(document, 4)
    return "; ".join(messages)[:_MOST_SAID_CHARS], " ".join(names)[:_MOST_SAID_CHARS]


def _joined(body: bytes) -> dict[str, object]:
    """Join the events of a stream into one completion."""
    texts: list[str] = []
    found: dict[str, object] = {"usage": None}
    reason, refusal, is_over = None, None, False
    for line in body.splitlines():
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            is_over = True
        if not line.startswith(b"data:") or is_over or not data:
            continue
        event = _parsed(data, "the stream")
        if _error_in(event) is not None:
            return {"error": field_of(event, "error") or "failed"}
        found["usage"] = field_of(event, "usage") or found["usage"]
        choice = _choice_in(event)
        part = field_of(choice, "delta") or field_of(choice, "message")
        texts.append(content_of(field_of(part, "content")))
        reason = field_of(choice, "finish_reason") or reason
        refusal = field_of(part, "refusal") or refusal
    if reason is None and not is_over:
        raise CallError(InvalidReason.UNREACHABLE, "the stream ended before the answer did")
    message = {"content": "".join(texts), "refusal": refusal}
    return {"choices": [{"message": message, "finish_reason": reason}], **found}


def content_of(content: object) -> str:
    """Return a message's text, or that of its parts; empty if there is none.

    >>> content_of([{"type": "reasoning", "text": "so"}, {"type": "text", "text": "yes"}])
    'yes'
    """
    if isinstance(content, list):
        texts = [
            field_of(part, "text")
            for part in content
            if field_of(part, "type") in (None, "text", "output_text")
        ]
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def read_reply(document: object, read: Callable[[str], T | InvalidReason]) -> Reply[T]:
    """Read a chat completion; ``read`` parses its content, from which thoughts are removed.

    >>> read_reply({"choices": [{"message": {"content": "<think>or no?</think> yes "}}]}, str).answer
    'yes'
    >>> read_reply("<html>", str).answer.value
    'empty'
    """  # noqa: E501
    usage = field_of(document, "usage")
    tokens = tokens_of(usage, "prompt_tokens"), tokens_of(usage, "completion_tokens")
    return Reply(_answer(_choice_in(document), read), "", *tokens)


def _answer(choice: object, read: Callable[[str], T | InvalidReason]) -> T | InvalidReason:
    message = field_of(choice, "message")
    if field_of(choice, "finish_reason") == "content_filter" or field_of(message, "refusal"):
        return InvalidReason.REFUSED
    content = without_thoughts(content_of(field_of(message, "content")))
    if field_of(choice, "finish_reason") == "length":
        return InvalidReason.TRUNCATED
    return read(content) if content else InvalidReason.EMPTY


def spent_on_thoughts(document: object) -> bool:
    """Return whether a completion hit its token limit before the first word of its answer."""
    choice = _choice_in(document)
    content = content_of(field_of(field_of(choice, "message"), "content"))
    return field_of(choice, "finish_reason") == "length" and not without_thoughts(content)


def _choice_in(document: object) -> object:
    choices = field_of(document, "choices")
    return choices[0] if isinstance(choices, list) and choices else None


def without_thoughts(content: str) -> str:
    """Remove a model's thoughts before its answer, in tags that it opened, closed or both.

    >>> without_thoughts("so</think> yes"), without_thoughts("<think>so")
    ('yes', '')
    """
    content = _END_OF_THOUGHTS.split(content)[-1]
    return "" if _OPEN_THOUGHT.match(content) else content.strip()


def _objects_in(content: str) -> Iterator[object]:
    """Yield the JSON in a reply: the whole reply, or the objects in a fence or in prose.

    Objects are tuples of pairs, since a dictionary would hide repeated keys.
    """
    decoder = json.JSONDecoder(object_pairs_hook=tuple)
    try:
        yield decoder.decode(content.strip())
        return
    except (ValueError, RecursionError):
        pass
    at = -1
    for _ in range(_MOST_OBJECTS):
        at = content.find("{", at + 1)
        if at < 0:
            return
        try:
            found, end = decoder.raw_decode(content, at)
        except (ValueError, RecursionError):
            continue
        at = end - 1
        yield found


def only_value(content: str, name: str) -> object:
    """Read the value of a key from a reply's object, or the reason why there is none.

    A reply with several objects has to give one value: which of two is meant would be a guess.

    >>> only_value('Sure: {"grade": 2, "why": "so"}', "grade"), only_value("2", "grade").value
    (2, 'off_schema')
    >>> only_value('{"grade": 1} or {"grade": 2}', "grade").value
    'off_schema'
    """
    objects = list(_objects_in(content))
    if not objects:
        return InvalidReason.MALFORMED
    found = [
        [value for key, value in pairs if key == name]
        for pairs in objects
        if isinstance(pairs, tuple)
    ]
    values = [value for each in found for value in each]
    if (
        not values
        or max(map(len, found)) > 1
        or any(repr(each) != repr(values[0]) for each in values)
    ):
        return InvalidReason.OFF_SCHEMA
    return values[0]


def whole_number(value: object) -> object:
    """Return ``2`` for ``"2"``, ``2.0`` and ``"2.0"``; anything else unchanged.

    >>> whole_number(" 2.0 "), whole_number(2.5), whole_number(True), whole_number("two")
    (2, 2.5, True, 'two')
    """
    number = value
    if isinstance(value, str) and len(value) <= _MOST_SAID_CHARS and value.isascii():
        try:
            number = float(value)
        except ValueError:
            return value
    return int(number) if isinstance(number, float) and number.is_integer() else value


def field_of(document: object, name: str) -> object:
    """Return a value from a JSON object; None if the document is not an object."""
    return document.get(name) if isinstance(document, dict) else None


def tokens_of(usage: object, name: str) -> int | None:
    """Return a count from a reply's usage; None if it is missing or impossible."""
    count = field_of(usage, name)
    return count if type(count) is int and 0 <= count <= _MOST_TOKENS else None
