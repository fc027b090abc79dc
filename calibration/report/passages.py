"""The texts that a report shows: one line each, without what a terminal or a page would obey."""

from collections.abc import Callable
from contextlib import suppress

from ctxguard.core.render import sanitise
from ctxguard.core.types import Passage

SNIPPET = 240

PassageOf = Callable[[str], Passage]


def one_line(text: str) -> str:
    """Write a text as one line without control characters and lone surrogates."""
    return " ".join(sanitise(text).split())


def snippet(text: str, most: int = SNIPPET) -> str:
    """Cut the beginning of a text to one line of at most so many characters."""
    line = one_line(text)
    return line if len(line) <= most else line[:most].rsplit(" ", 1)[0] + " …"


def passage_or_none(passage_id: str, passage_of: PassageOf | None) -> Passage | None:
    """Look up the passage; None if it cannot be looked up."""
    if passage_of is not None:
        with suppress(KeyError):
            return passage_of(passage_id)
    return None
