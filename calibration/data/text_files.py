"""Reads and writes text files line by line; every error names the file and the line.

JSONL, CSV and tables of columns are read as the same ``Record``. Touches the files it is given.
"""

import csv
import json
import re
import tempfile
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from ctxguard._support.atomic_write import atomic_write
from ctxguard._support.error_text import first_fault
from ctxguard._support.regular_file import open_regular, read_regular
from ctxguard._support.rows import encoding_of, parsed_json, read_table
from ctxguard.errors import ConfigurationError, DataError

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_SHOWN = 80


def shown(value: object) -> str:
    """Format a value for an error message: quoted, and cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def read_lines(path: Path, *, is_table: bool = False) -> Iterator[tuple[int, str]]:
    """Read a UTF-8 file's numbered lines, without its byte-order mark and blank lines.

    Args:
        is_table: A spreadsheet may have saved it, in UTF-16 or Windows-1252 (`encoding_of`).

    Raises:
        DataError: the file is missing or unreadable, or one of its bytes is not UTF-8.
    """
    try:
        encoding = encoding_of(path) if is_table else "utf-8-sig"
        # A byte that is not UTF-8 becomes half a surrogate pair, so that its line can be named.
        errors = "surrogateescape" if encoding == "utf-8-sig" else "strict"
        with (
            open_regular(path) as file,
            TextIOWrapper(file, encoding, errors, newline="\n") as lines,
        ):
            for number, text in enumerate(lines, start=1):
                try:
                    text.encode()
                except UnicodeEncodeError as error:
                    at = error.start
                    raise DataError(
                        f"byte {ord(text[at]) - 0xDC00:#04x} (byte {len(text[:at].encode()) + 1} "
                        "of the line) is not UTF-8; save the file as UTF-8",
                        path=path,
                        line=number,
                    ) from None
                if text and not text.isspace():
                    yield number, text.rstrip("\r\n")
    except FileNotFoundError:
        raise DataError("there is no such file", path=path) from None
    except UnicodeDecodeError as error:
        raise DataError(f"is not text ({error.reason}); save it as UTF-8", path=path) from None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=path) from None


class Record(NamedTuple):
    """One JSON object or row of a file; each reader of a field raises DataError if it fails.

    Attributes:
        line: 1-based.
        counts: Counter of repairs, by description.
    """

    path: Path
    line: int
    fields: Mapping[str, object]
    counts: Counter[str]

    def error(self, message: str) -> DataError:
        """Return an error that names this line."""
        return DataError(message, path=self.path, line=self.line)

    def identifier(self, *names: str) -> str:
        """Return the first of these fields that exists, as an id: a string or a whole number."""
        name, value = self._first(names)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"{name} is {shown(value)}; an id must be a string or a whole number")
        return clean(value, self.counts)

    def identifiers(self, name: str) -> list[str]:
        """Return a field that is a list of ids."""
        value = self.fields.get(name)
        if not isinstance(value, list):
            raise self.error(f"{name} is {shown(value)}; write a list of passage ids")
        return [self._replace(fields={name: item}).identifier(name) for item in value]

    def text(self, *names: str, default: str | None = None) -> str:
        """Return the first of these fields that exists, as text; ``default`` if absent or null."""
        if default is not None and all(self.fields.get(name) is None for name in names):
            return default
        name, value = self._first(names)
        if not isinstance(value, str):
            raise self.error(f"{name} is {shown(value)}; it must be a string")
        return clean(value, self.counts)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a field that is a list of texts, none of them blank; empty if absent or null."""
        value = self.fields.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(v, str) and v.strip() for v in value):
            raise self.error(f"{name} is {shown(value)}; write a list of strings")
        return tuple([clean(text, self.counts) for text in value])

    def metadata(self) -> Mapping[str, object] | None:
        """Return the field ``metadata``, an object; None if absent or null."""
        value = self.fields.get("metadata")
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(f"metadata is {shown(value)}; it must be an object")
        return value

    def whole_number(self, value: object, name: str) -> int:
        """Parse a whole number from text or JSON; ``1.0`` is one."""
        try:
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError
            number = float(value)
            if number != int(number):
                raise ValueError
        except (ValueError, OverflowError):
            raise self.error(f"{name} {shown(value)} is not a whole number") from None
        return int(number)

    def _first(self, names: tuple[str, ...]) -> tuple[str, object]:
        for name in names:
            if name in self.fields:
                return name, self.fields[name]
        wanted = names[0] if len(names) == 1 else f"{names[0]} (or {', '.join(names[1:])})"
        raise self.error(
            f"the field {wanted} is missing; the object has {', '.join(self.fields) or 'none'}"
        )


def clean(text: str, counts: Counter[str]) -> str:
    """Replace lone surrogates, which no encoding can hold, with U+FFFD, and count them."""
    if text.isascii():
        return text
    text, replaced = _LONE_SURROGATE.subn("\ufffd", text)
    if replaced:
        counts["lone surrogates replaced by U+FFFD"] += replaced
    return text


def read_records(path: Path, counts: Counter[str]) -> Iterator[Record]:
    """Read the objects of a JSONL file, one per line."""
    for number, text in read_lines(path):
        wrong = ""
        try:
            value = parsed_json(text)
        except json.JSONDecodeError as error:
            formats = "; JSONL is read, one JSON object per line" if number == 1 else ""
            wrong = f"broken JSON at column {error.colno}: {error.msg}, in {shown(text)}{formats}"
        except (ValueError, RecursionError) as error:
            wrong = f"unreadable JSON ({error}), in {shown(text)}"
        else:
            if not isinstance(value, dict):
                wrong = f"{shown(text)} is not a JSON object; write one object per line"
        if wrong:
            raise DataError(wrong, path=path, line=number)
        yield Record(path, number, value, counts)


def read_csv(path: Path, counts: Counter[str]) -> Iterator[Record]:
    """Read the rows of a table with a header, as `read_table` does; an empty cell is null."""
    for line, row in read_table(path):
        fields = {name: cell.strip() or None for name, cell in row.items()}
        yield Record(path, line, fields, counts)


def read_columns(
    path: Path, columns: Container[int], form: str, counts: Counter[str]
) -> Iterator[tuple[Record, list[str]]]:
    """Read lines with their cells, which are separated by tabs, or else by white space.

    Where these make another number of columns, semicolons or commas may do, as in a table that a
    spreadsheet saved.

    Args:
        columns: The numbers of columns that a line may have.
        form: Describes the columns, for the error of a line with others or an empty one.
    """
    for number, text in read_lines(path, is_table=True):
        record = Record(path, number, {}, counts)
        cells = _cells(text, "\t") if "\t" in text else text.split()
        for separator in ";,":
            if len(cells) not in columns and separator in text:
                cells = _cells(text, separator)
        if len(cells) not in columns or not all(cells):
            n = len([cell for cell in cells if cell])
            raise record.error(f"{shown(text)} has {n} columns; {form}")
        yield record, cells


def _cells(text: str, separator: str) -> list[str]:
    rows = [text.split(separator)]
    if '"' in text:
        # Not csv's: it refuses a carriage return outside quotes, which an id may hold.
        with suppress(csv.Error):
            rows = list(csv.reader([text], delimiter=separator)) or rows
    return [cell.strip() for cell in rows[0]]


Model = TypeVar("Model", bound=BaseModel)


def read_model(form: type[Model], path: Path | str, max_bytes: int, what: str) -> Model:
    """Read a JSON file; errors name its form, such as ``the snapshot of a golden set``."""
    try:
        return form.model_validate_json(read_regular(Path(path), max_bytes))
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=path) from None
    except ValidationError as error:
        raise DataError(f"is not {what} ({first_fault(error)})", path=path) from None


def notes_of(counts: Counter[str]) -> tuple[str, ...]:
    """Format the counts in words, one line each."""
    return tuple([f"{n} {what}" for what, n in counts.items()])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines as UTF-8, ending in line feeds on every platform; all of them or none."""
    with atomic_write(path) as file:
        for line in lines:
            file.write(line.encode() + b"\n")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, which is renamed to ``folder`` once it is complete.

    Only its owner can access it. A file, or a folder that is not empty, is refused.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"{folder} exists already; name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True
    ) as staged:
        yield Path(staged)
        if folder.exists():
            folder.rmdir()
        Path(staged).rename(folder)
