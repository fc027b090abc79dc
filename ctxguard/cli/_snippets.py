"""The part of a passage's text that has most of a query's terms, for a terminal.

Pure: no I/O, no clock, no logging.
"""

import re
from collections.abc import Callable, Sequence

from rich.text import Text

from ctxguard.cli._console import one_line

_MOST_CHARACTERS = 20_000
_BEFORE = 0.2
_ELLIPSIS = "…"
_WORD = re.compile(r"\w+")
_MATCH_STYLE = "bold"


Match = tuple[int, int, str]
"""The start and the end of a match in a line, and the term."""


def snippet(text: str, query: str, analyse: Callable[[str], Sequence[str]], width: int) -> Text:
    """Cut the stretch of a text with most of a query's terms, which are printed bold.

    Args:
        text: A passage's; control characters are removed, and white space becomes one space. Only
            the first 20,000 characters of a long text are searched.
        query: The query.
        analyse: Splits a text into terms, as the lexical index does.
        width: The most characters of the stretch, ≥ 1.

    Returns:
        The beginning of the text if no term is in it. An ellipsis stands for what is left out.

    >>> snippet("One two three four five six", "the five", str.split, 12).plain
    '… five six'
    """
    line = one_line(text[:_MOST_CHARACTERS])
    terms = frozenset(analyse(query))
    matches = _matches(line, terms, analyse)
    start, end = _stretch(line, matches, width)
    shown = Text(line[start:end])
    for first, last, _ in matches:
        if start <= first and last <= end:
            shown.stylize(_MATCH_STYLE, first - start, last - start)
    left_out = end < len(line) or len(text) > _MOST_CHARACTERS
    return Text.assemble(f"{_ELLIPSIS} " if start else "", shown, _ELLIPSIS if left_out else "")


def _matches(
    line: str, terms: frozenset[str], analyse: Callable[[str], Sequence[str]]
) -> list[Match]:
    """Find the terms: the words that give one, or in a script without spaces the terms."""
    found = []
    for word in _WORD.finditer(line):
        given = terms.intersection(analyse(word[0]))
        for term in sorted(given):
            inside = word[0].casefold().find(term)
            if word[0].isascii() or inside < 0:
                found.append((word.start(), word.end(), term))
            else:
                start = word.start() + inside
                found.append((start, start + len(term), term))
    return sorted(found)


def _stretch(line: str, matches: Sequence[Match], width: int) -> tuple[int, int]:
    """Bound the stretch: at the first match from which most terms fit, after some words."""
    if len(line) <= width:
        return 0, len(line)

    def terms_from(first: Match) -> int:
        end = first[0] + round(width * (1 - _BEFORE))
        return len({term for start, _, term in matches if first[0] <= start < end})

    best = max(matches, key=terms_from)[0] if matches else 0
    earliest = min(max(best - round(width * _BEFORE), 0), len(line) - width)
    start = earliest
    if earliest and line[earliest - 1] != " ":  # the next word; a text may have no spaces
        start = line.find(" ", earliest, earliest + 30) + 1 or earliest
    start = min(start, best)
    room = width - len(_ELLIPSIS) - (len(_ELLIPSIS) + 1 if start else 0)
    end = min(start + room, len(line))
    if end < len(line):
        space = line.rfind(" ", start, end + 1)
        end = end if space <= start else space
    return start, end
