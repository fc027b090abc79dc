"""Lays out help pages, as wide as the terminal: paragraphs, and lists of names with their meaning.

Reads the terminal's width.
"""

import shutil
import textwrap
from collections.abc import Iterable, Mapping

Rows = Iterable[tuple[str, str]]

_MAX_COLUMNS = 80
_MAX_NAME = 30
"""The longest name that shares its line with its meaning."""


def page(usage: str, paragraphs: Iterable[str], sections: Mapping[str, Rows]) -> str:
    """Lay out a page of help, without empty paragraphs and sections."""
    columns = min(shutil.get_terminal_size().columns, _MAX_COLUMNS)
    parts = [f"Usage: ctxguard {usage}"]
    parts += [_filled(" ".join(text.split()), columns, "  ") for text in paragraphs if text]
    for title, rows in sections.items():
        listed = list(rows)
        if listed:
            at = 4 + max(len(name) for name, _ in listed if len(name) <= _MAX_NAME)
            lines = [line for row in listed for line in _entry(*row, at, columns)]
            parts.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(parts)


def _entry(name: str, text: str, at: int, columns: int) -> list[str]:
    first, *rest = _filled(text, columns, " " * at).splitlines()
    if len(name) > at - 4:
        return [f"  {name}", first, *rest]
    return [f"  {name}".ljust(at) + first[at:], *rest]


def _filled(text: str, columns: int, indent: str) -> str:
    return textwrap.fill(
        text, columns, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
