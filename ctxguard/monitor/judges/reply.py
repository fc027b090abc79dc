"""Reads a language model's reply: a grade or a question, or the reason why there is none.

Replies are untrusted and read strictly: a server may ignore the schema, and a verdict that needs
guessing is not valid. Pure: no I/O, no clock, no logging.
"""

import json

from ctxguard.monitor.judges.prompt import MAX_GRADE
from ctxguard.retrieval.usage import InvalidReason

_MOST_QUESTION_CHARS = 1_000


def read_grade(content: str) -> int | InvalidReason:
    """Read a grade from the content of a reply."""
    grade = only_value(content, "grade")
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
    question = only_value(content, "question")
    if isinstance(question, InvalidReason):
        return question
    text = " ".join(question.split()) if isinstance(question, str) else ""
    return text if 0 < len(text) <= _MOST_QUESTION_CHARS else InvalidReason.OFF_SCHEMA


def only_value(content: str, name: str) -> object:
    """Read the value of a JSON object that has this one key, or the reason why there is none."""
    try:
        # Pairs, since the json module would silently take the last value of a repeated key.
        pairs = json.loads(content, object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        return InvalidReason.MALFORMED
    if not isinstance(pairs, tuple) or [key for key, _ in pairs] != [name]:
        return InvalidReason.OFF_SCHEMA
    return pairs[0][1]
