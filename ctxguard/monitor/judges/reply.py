"""Reads a language model's reply: a grade or a question, or the reason why there is none.

Replies are untrusted and read strictly: a server may ignore the schema, and a verdict that needs
guessing is not valid. Pure: no I/O, no clock, no logging.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ctxguard.monitor.judges.prompt import MAX_GRADE
from ctxguard.monitor.judges.usage import InvalidReason

T = TypeVar("T")

_MOST_QUESTION_CHARS = 1_000


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """The verdict and the tokens of one reply.

    Attributes:
        verdict: What was asked for, such as a grade in 0..3, or why there is none.
        input_tokens: Tokens of the prompt; None if the reply does not report them.
        output_tokens: Tokens of the reply; None if it does not report them.
    """

    verdict: T | InvalidReason
    input_tokens: int | None = None
    output_tokens: int | None = None


class _RepeatedKeyError(ValueError):
    pass


def read_grade(content: str) -> int | InvalidReason:
    """Read a grade from the content of a reply."""
    grade = _only_value(content, "grade")
    if isinstance(grade, InvalidReason):
        return grade
    if type(grade) is not int:  # a bool is an int to Python
        return InvalidReason.OFF_SCHEMA
    return grade if 0 <= grade <= MAX_GRADE else InvalidReason.OUT_OF_RANGE


def read_question(content: str) -> str | InvalidReason:
    """Read a question from the content of a reply, on one line.

    >>> read_question('{"question": " How long? "}')
    'How long?'
    """
    question = _only_value(content, "question")
    if isinstance(question, InvalidReason):
        return question
    text = " ".join(question.split()) if isinstance(question, str) else ""
    return text if 0 < len(text) <= _MOST_QUESTION_CHARS else InvalidReason.OFF_SCHEMA


def read_reply(body: str, read: Callable[[str], T | InvalidReason]) -> Reply[T]:
    """Read the body of a chat completion, whose content ``read`` reads.

    >>> body = '{"choices": [{"message": {"content": "{\\\\"grade\\\\": 2}"}}]}'
    >>> read_reply(body, read_grade).verdict
    2
    >>> read_reply("<html>", read_grade).verdict.value
    'malformed'
    """
    try:
        completion = json.loads(body)
    except (ValueError, RecursionError):
        return Reply(InvalidReason.MALFORMED)
    usage = _field(completion, "usage")
    return Reply(
        _verdict(_field(completion, "choices"), read),
        _tokens(_field(usage, "prompt_tokens")),
        _tokens(_field(usage, "completion_tokens")),
    )


def _verdict(choices: object, read: Callable[[str], T | InvalidReason]) -> T | InvalidReason:
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = _field(choice, "message")
    if _field(choice, "finish_reason") == "content_filter" or _field(message, "refusal"):
        return InvalidReason.REFUSED
    if _field(choice, "finish_reason") == "length":
        return InvalidReason.TRUNCATED
    content = _field(message, "content")
    if not isinstance(content, str) or not content.strip():
        return InvalidReason.EMPTY
    return read(content)


def _only_value(content: str, name: str) -> object:
    """The value of a JSON object that has this one key, or the reason why there is none."""
    try:
        verdict = json.loads(content, object_pairs_hook=_unrepeated)
    except _RepeatedKeyError:
        return InvalidReason.OFF_SCHEMA
    except (ValueError, RecursionError):
        return InvalidReason.MALFORMED
    if not isinstance(verdict, dict) or verdict.keys() != {name}:
        return InvalidReason.OFF_SCHEMA
    return verdict[name]


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a repeated key: the json module would silently take its last value."""
    read = dict(pairs)
    if len(read) < len(pairs):
        raise _RepeatedKeyError
    return read


def _field(document: object, name: str) -> object:
    return document.get(name) if isinstance(document, dict) else None


def _tokens(count: object) -> int | None:
    return count if type(count) is int and count >= 0 else None
