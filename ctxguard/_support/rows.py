"""Reads rows from files that people and spreadsheets write: tables with a header, and JSON lines.

Reads these files; `read_table` sets the process's limit on the size of a field of CSV.
"""

import csv
import json
import re
import sys
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any

from ctxguard._support.regular_file import open_regular
from ctxguard.errors import DataError

_SEPARATORS = ",;\t|"
_SAID = re.compile(r'"?sep=(.)"?\s*\Z', re.IGNORECASE)
"""A first line in which Excel names the separator of cells."""
_MOST_CELL_CHARS = 2**31 - 1
"""The longest cell; Python's default of 131,072 is too short, and files have their own limits."""


def read_table(
    path: Path, max_bytes: int = sys.maxsize, needed: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, str]]]:
    """Read the rows of a table that a spreadsheet saved, with the line on which each begins.

    Cells are separated by commas, semicolons, tabs or bars: by what makes most columns of the
    header. Its names are read in lower case, with ``_`` for spaces and hyphens. Text is UTF-8,
    UTF-16 with its mark, or else Windows-1252. Rows of empty cells are left out.

    Args:
        max_bytes: A larger file is refused.
        needed: Columns that there must be.

    Raises:
        DataError: the file cannot be read, lacks a column, or a row has another number of cells
            than the header.
    """
    csv.field_size_limit(_MOST_CELL_CHARS)
    try:
        encoding = encoding_of(path, max_bytes)
        with (
            open_regular(path, max_bytes) as file,
            TextIOWrapper(file, encoding=encoding, newline="") as text,
        ):
            yield from _rows(path, text, needed)
    except UnicodeDecodeError as error:
        raise DataError(f"is not text ({error.reason}); save it as UTF-8", path=path) from None
    except OSError as error:
        raise DataError(error.strerror or "cannot be read", path=path) from None


def _rows(
    path: Path, text: TextIOWrapper, needed: Sequence[str]
) -> Iterator[tuple[int, dict[str, str]]]:
    skipped, first = 0, text.readline()
    while first and (not first.strip() or _SAID.match(first)):
        skipped, first = skipped + 1, text.readline()

    def columns(separator: str) -> int:
        return len(next(csv.reader([first], delimiter=separator), []))

    reader = csv.reader(chain([first], text), strict=True, delimiter=max(_SEPARATORS, key=columns))
    line = skipped + 1
    try:
        header = [re.sub(r"[\s-]+", "_", name.strip().casefold()) for name in next(reader, [])]
        while header and not header[-1]:
            header.pop()
        if not {*needed} <= {*header}:
            raise DataError(
                f"the columns are {', '.join(header) or 'none'}; {' and '.join(needed)} are needed",
                path=path,
                line=line,
            )
        line = skipped + reader.line_num + 1
        for cells in reader:
            while len(cells) > len(header) and not cells[-1].strip():
                cells.pop()
            if any(cells):
                if len(cells) != len(header):
                    raise DataError(
                        f"has {len(cells)} cells, but the header has {len(header)}",
                        path=path,
                        line=line,
                    )
                yield line, dict(zip(header, cells, strict=True))
            line = skipped + reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"is not CSV: {error}", path=path, line=line) from None


def encoding_of(path: Path, max_bytes: int = sys.maxsize) -> str:
    """Detect the encoding of a file's text: UTF-8, UTF-16 by its mark, or else Windows-1252.

    Raises:
        DataError: some lines are UTF-8, and others are not.
        OSError: it cannot be read.
    """
    with open_regular(path, max_bytes) as file:
        utf_8, other = 0, 0
        for number, line in enumerate(file, start=1):
            if number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff"):
                return "utf-16"
            if not line.isascii():
                try:
                    line.decode()
                    utf_8 += 1
                except UnicodeDecodeError:
                    other = other or number
    if utf_8 and other:
        raise DataError(
            "is not UTF-8, unlike other lines; save the file as UTF-8", path=path, line=other
        )
    return "cp1252" if other else "utf-8-sig"


def parsed_json(text: str) -> Any:
    """Parse JSON in which no object has a key twice.

    Raises:
        ValueError: it is not JSON, or a key is repeated: the last value would count in silence.
        RecursionError: it is nested too deeply.

    >>> parsed_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ...
    ValueError: the key 'a' occurs twice; remove one of them
    """
    return json.loads(text, object_pairs_hook=distinct_keys)


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object; refuse a repeated key, because readers differ in which value they take."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} occurs twice; remove one of them")
    return fields
