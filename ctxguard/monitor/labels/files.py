"""Reads and writes the files in which people label passages (JSONL or CSV).

One row is one passage of one request. The rows of a request are together, in the order of grading;
requests are in random order, as not all may be graded. The judge's grades are not in it. Reads and
writes these files.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO, TextIOWrapper
from pathlib import Path

from ctxguard._support.atomic_write import atomic_write
from ctxguard._support.regular_file import open_regular
from ctxguard._support.rows import parsed_json, read_table
from ctxguard.errors import DataError
from ctxguard.measure.worth import Negative
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.labels.human import ALWAYS, rows_left
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.sampling.sampler import HashSampler
from ctxguard.monitor.store import LabelRow, PickedPassage

_ORDER = HashSampler("label rows")
_Refuse = Callable[[str], DataError]
"""The error of a row, with its file and line."""

# A spreadsheet with another separator starts a new cell after each of these.
_CELL_START = r"(?:\A|(?<=[;\t\r\n]))"
_BEFORE_SIGN = r"(?=[\s'\"]*[=+\-@＝＋－＠])"
_FORMULA = re.compile(_CELL_START + _BEFORE_SIGN)
_ESCAPED = re.compile(_CELL_START + "'" + _BEFORE_SIGN)

_REWRITTEN = re.compile(
    r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*[^a-z]*\d|(true|false)\s*\Z",
    re.IGNORECASE,
)
"""Text beginning with a letter that spreadsheets read as a date or a boolean."""

_DECIMALS = re.compile(r",0+\s*\Z")
"""The decimals of 2.0, which spreadsheets in many countries write as 2,0."""

_NEEDED = ("request_id", "passage_id", "grade")
_TABLES = {".csv", ".tsv", ".txt"}
"""File extensions of tables saved by spreadsheets."""

_MAX_BYTES = 2**30

_MOST_CELL_CHARS = 32_000
"""Excel holds 32,767 characters per cell, and continues longer cells in the next row."""


@dataclass(frozen=True, slots=True)
class RowToLabel:
    """A passage to grade.

    Attributes:
        when: ``ALWAYS``, or a condition on the passages above it in its request
            (``human.rows_left``).
    """

    when: str
    query: str
    title: str
    text: str
    grade: None
    negative: None
    request_id: str
    passage_id: str


COLUMNS = tuple(RowToLabel.__dataclass_fields__)


def rows_to_label(
    record: SampleRecord, picked: Sequence[PickedPassage], grades: Mapping[str, Judgment]
) -> list[RowToLabel]:
    """Return the passages of a sample that people may still need to grade, as rows of a file.

    Args:
        picked: The passages draws ask about.
        grades: People's grades so far, by passage id.
    """
    rows = []
    for position, when in rows_left(record, picked, grades):
        passage, name = record.passage(position), record.passage_ids[position]
        about = (record.query or "", passage.title, passage.text)
        rows.append(RowToLabel(when, *about, None, None, record.request_id, name))
    if all(row.when == ALWAYS for row in rows):
        # Where no row depends on another, their order does not reveal the ranks.
        rows.sort(key=lambda row: _ORDER.uniform(f"{row.request_id}\0{row.passage_id}"))
    return rows


def in_file_order(question: float, request_id: str) -> tuple[float, float]:
    """Sort requests by question at random, so that people reach a random part of the questions.

    Args:
        question: The number from ``number_of``.
    """
    return question, _ORDER.uniform(request_id)


def number_of(record: SampleRecord) -> float:
    """Hash a request's question to [0, 1), uniformly; the request itself if no text is kept."""
    return _ORDER.uniform(f"\0{record.request_id}" if record.query is None else record.query)


def write_label_file(path: Path, rows: Iterable[RowToLabel]) -> None:
    """Write rows with empty grades: CSV if the file is named .csv, else JSONL."""
    documents = [asdict(row) for row in rows]
    text = StringIO(newline="")
    if path.suffix.lower() == ".csv":
        text.write("\ufeff")  # without it, Excel reads UTF-8 as another encoding
        writer = csv.DictWriter(text, COLUMNS, quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows([{key: _cell(key, value) for key, value in d.items()} for d in documents])
    else:
        text.writelines([json.dumps(document, ensure_ascii=False) + "\n" for document in documents])
    with atomic_write(path) as file:
        file.write(text.getvalue().encode())


def _cell(column: str, value: str | None) -> str:
    """Write a cell so that no spreadsheet reads a formula; ``_content`` undoes this for ids."""
    text = value or ""
    if column in ("request_id", "passage_id"):
        text = _FORMULA.sub("'", text)
        # Nor as a number, a date or a boolean, which it would rewrite.
        return text if text[:1].isalpha() and not _REWRITTEN.match(text) else f"'{text}"
    if len(text) > _MOST_CELL_CHARS:
        text = f"{text[:_MOST_CELL_CHARS]} […]"
    return _FORMULA.sub("'", text)


def _content(cell: str) -> str:
    """Read the id that ``_cell`` wrote."""
    if cell[:1] == "'" and (not cell[1:2].isalpha() or _REWRITTEN.match(cell[1:])):
        cell = cell[1:]
    return _ESCAPED.sub("", cell)


def read_label_file(
    path: Path, annotator: str, time_seconds: float, max_grade: int
) -> tuple[list[LabelRow], list[str]]:
    """Read a graded file: its labels, and the request id of each row without a grade.

    Args:
        path: A table with a header if it is named .csv, .tsv or .txt, else JSONL.
        annotator: Name of the person who graded it.
        time_seconds: When, in seconds since the epoch; the latest label of an annotator counts.

    Raises:
        DataError: a row is not a label; the message names file and line.
    """
    rows: list[LabelRow] = []
    blank: list[str] = []
    is_table = path.suffix.lower() in _TABLES
    documents = read_table(path, _MAX_BYTES, _NEEDED) if is_table else _json_lines(path)
    for line, document in documents:
        refuse = partial(DataError, path=path, line=line)
        request_id = _identifier(document, "request_id", refuse)
        passage_id = _identifier(document, "passage_id", refuse)
        if is_table:
            request_id, passage_id = _content(request_id), _content(passage_id)
        grade = _grade(document.get("grade"), max_grade, refuse)
        if grade is None:
            blank.append(request_id)
            continue
        negative = document.get("negative") or None
        kinds = [member.value for member in Negative]
        if negative is not None and (grade > 0 or negative not in kinds):
            raise refuse(
                f"negative {negative!r} does not fit grade {grade}; leave it empty, or use "
                f"{' or '.join(kinds)} with grade 0"
            )
        kind = None if negative is None else str(negative)
        rows.append(LabelRow(request_id, passage_id, grade, kind, annotator, time_seconds))
    return rows, blank


def _identifier(document: Mapping[str, object], name: str, refuse: _Refuse) -> str:
    value = document.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise refuse(f"{name} is {value!r}; leave this column as it was exported")
    return value


def _grade(value: object, max_grade: int, refuse: _Refuse) -> int | None:
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        # Spreadsheets and data frames write 2 as 2.0 in a column with empty cells.
        written = _DECIMALS.sub("", value) if isinstance(value, str) else value
        grade = float(written) if isinstance(written, (str, int, float)) else math.nan
    except (ValueError, OverflowError):
        grade = math.nan
    if isinstance(value, bool) or not grade.is_integer() or not 0 <= grade <= max_grade:
        raise refuse(f"grade {value!r} must be a whole number from 0 (irrelevant) to {max_grade}")
    return int(grade)


def _json_lines(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    try:
        with (
            open_regular(path, _MAX_BYTES) as file,
            TextIOWrapper(file, encoding="utf-8-sig", newline="") as lines,
        ):
            for line, text in enumerate(lines, start=1):
                if not text.strip():
                    continue
                try:
                    document = parsed_json(text)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"not JSON ({error})", path=path, line=line) from error
                if not isinstance(document, dict):
                    raise DataError("this line is not a JSON object", path=path, line=line)
                yield line, document
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 ({error.reason})", path=path) from error
    except OSError as error:
        raise DataError(error.strerror or "cannot be read", path=path) from error
