"""Reads the cells of a spreadsheet as a person sees them.

A workbook is read from its XML (ECMA-376), cell by cell: libraries return floats and dates where a
cell shows ``01067`` or ``1.10``, and rows as long as the sheet is wide. Bytes in, Markdown out.
Pure, except that `read_csv` raises the process's limit on the size of a field of CSV; needs the
extra `documents`.
"""

import csv
import io
import posixpath
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import IO
from xml.etree.ElementTree import Element

from defusedxml import ElementTree  # type: ignore[import-untyped]

from calibration.data.documents.encodings import decode
from calibration.data.documents.markdown import cell, table
from calibration.data.documents.number_format import BUILT_IN, shown, shown_text

_OFF = {None, "0", "false"}
_COLUMN = re.compile(r"([A-Z]{1,3})(\d{1,7})")
_MAX_BLANKS = 20
"""A sheet with more empty cells than this for each full one is not a table."""
_NAMED_RANGES = 5

_Cells = dict[int, str]
"""Texts, by the number of their column, from 1."""


def read_workbook(file: IO[bytes]) -> tuple[str, list[str]]:
    """Read a workbook as Markdown: a heading and a table for each sheet that is not hidden.

    Returns:
        The Markdown, and a description of what was left out.

    Raises:
        ValueError: it is not a workbook.
    """
    with zipfile.ZipFile(file) as archive:
        mains = [part for _, part in _targets(archive, "", "officeDocument")]
        if not mains:
            raise ValueError("is not a workbook")
        workbook = _tree(archive, mains[0])
        parts = dict(_targets(archive, mains[0]))
        properties = workbook.find(".//{*}workbookPr")
        text_of = partial(
            _text_of,
            texts=_shared_texts(archive, mains[0]),
            formats=_formats(archive, mains[0]),
            from_1904=properties is not None and properties.get("date1904") not in _OFF,
        )
        written, left_out = [], []
        for sheet in workbook.iterfind(".//{*}sheet"):
            name = sheet.get("name") or ""
            part = next((parts.get(v) for k, v in sheet.items() if k.endswith("}id")), None)
            if part is None or "worksheets" not in part:
                continue
            if sheet.get("state", "visible") != "visible":
                left_out.append(f"the sheet {name!r} is hidden")
                continue
            with archive.open(part) as stream:
                rows, unseen = _visible_rows(stream, name, text_of)
            left_out += unseen
            if text := _table(rows):
                written.append(f"## {' '.join(name.split())}\n\n{text}")
        return "\n\n".join(written), left_out


def read_csv(raw: bytes) -> str:
    """Read values that are separated by commas, semicolons, tabs or bars as a table."""
    csv.field_size_limit(sys.maxsize)
    text = decode(raw)
    first = re.sub('"[^"]*"', "", text.lstrip().partition("\n")[0])
    rows = csv.reader(io.StringIO(text), delimiter=max(",;\t|", key=first.count))
    return _table(
        [{at: each.strip() for at, each in enumerate(row) if each.strip()} for row in rows]
    )


def _table(rows: Iterable[_Cells]) -> str:
    """Write rows as a Markdown table; a sparse sheet as its filled cells, one per line."""
    full = [row for row in rows if row]
    columns = sorted({column for row in full for column in row})
    if len(full) * len(columns) > _MAX_BLANKS * sum(map(len, full)) + 1_000:
        return "\n".join([" | ".join([cell(row[at]) for at in sorted(row)]) for row in full])
    return table([[row.get(at, "") for at in columns] for row in full])


def _visible_rows(
    stream: IO[bytes], name: str, text_of: Callable[[Element, str], str]
) -> tuple[list[_Cells], list[str]]:
    """Read the rows of a sheet, and describe what is left out."""
    rows: list[_Cells] = []
    ranges: list[tuple[int, int]] = []
    hidden_rows: list[int] = []
    hidden_columns: set[int] = set()
    number, n_unsolved, rows_hidden = 0, 0, False
    for _, element in ElementTree.iterparse(stream):
        kind = element.tag.rpartition("}")[2]
        if kind == "col" and _is_hidden(element, "width"):
            ranges.append((int(element.get("min", 0)), int(element.get("max", 0))))
        elif kind == "sheetFormatPr":
            rows_hidden = element.get("zeroHeight") not in _OFF
        elif kind == "row":
            number = int(element.get("r") or number + 1)
            row: _Cells = {}
            column = 0
            for each in element:
                place = _COLUMN.fullmatch(each.get("r") or "")
                column = _column_number(place[1]) if place else column + 1
                value = each.findtext("{*}v") or ""
                n_unsolved += not value and each.find("{*}f") is not None
                text = text_of(each, value)
                if text.strip():
                    row[column] = text
            if row and (_is_hidden(element, "ht") or (rows_hidden and not element.get("ht"))):
                hidden_rows.append(number)
            else:
                unseen = {at for at in row if any(low <= at <= up for low, up in ranges)}
                hidden_columns |= unseen
                rows.append({at: text for at, text in row.items() if at not in unseen})
            element.clear()
    left_out = []
    if hidden_rows:
        left_out.append(f"rows {_in_words(hidden_rows, str)} of the sheet {name!r} are hidden")
    if hidden_columns:
        columns = _in_words(sorted(hidden_columns), _column_name)
        left_out.append(f"columns {columns} of the sheet {name!r} are hidden")
    if n_unsolved:
        left_out.append(f"{n_unsolved:,} formulas of the sheet {name!r} have no stored result")
    return rows, left_out


def _is_hidden(element: Element, size: str) -> bool:
    """Return whether a row or column is hidden, or has no height or width."""
    length = element.get(size)
    is_flat = length is not None and not length.strip("0.")
    return is_flat or element.get("hidden") not in _OFF


def _text_of(
    cell: Element, value: str, *, texts: Sequence[str], formats: Sequence[str], from_1904: bool
) -> str:
    """Return the text that a cell with a stored value shows."""
    kind, style = cell.get("t", "n"), int(cell.get("s") or 0)
    code = formats[style] if 0 <= style < len(formats) else "General"
    if kind == "s":
        at = int(value or -1)
        return shown_text(texts[at], code) if 0 <= at < len(texts) else ""
    if kind in {"inlineStr", "str"}:
        inline = cell.find("{*}is")
        return shown_text(value if inline is None else _rich(inline), code)
    if kind == "b":
        return {"1": "TRUE", "true": "TRUE", "0": "FALSE", "false": "FALSE"}.get(value, value)
    if kind != "n" or not value:
        return value
    try:
        return shown(float(value), code, from_1904=from_1904)
    except (ValueError, OverflowError):
        return value


def _shared_texts(archive: zipfile.ZipFile, main: str) -> list[str]:
    texts = []
    for _, part in _targets(archive, main, "sharedStrings"):
        with archive.open(part) as stream:
            for _, element in ElementTree.iterparse(stream):
                if element.tag.rpartition("}")[2] == "si":
                    texts.append(_rich(element))
                    element.clear()
    return texts


def _rich(element: Element) -> str:
    """Return the runs of a text, without its pronunciation guide."""
    runs = [*element.iterfind("{*}t"), *element.iterfind("{*}r/{*}t")]
    return "".join([each.text or "" for each in runs])


def _formats(archive: zipfile.ZipFile, main: str) -> list[str]:
    """Return the code of each cell style."""
    codes: list[str] = []
    for _, part in _targets(archive, main, "styles"):
        tree = _tree(archive, part)
        numbered = tree.iterfind(".//{*}numFmt")
        own = {int(each.get("numFmtId", -1)): each.get("formatCode", "") for each in numbered}
        for style in tree.iterfind(".//{*}cellXfs/{*}xf"):
            number = int(style.get("numFmtId") or 0)
            codes.append(own.get(number) or BUILT_IN.get(number, "General"))
    return codes


def _targets(archive: zipfile.ZipFile, part: str, kind: str = "") -> list[tuple[str, str]]:
    """Return the ids and names of the parts to which a part refers: all, or those of one kind."""
    folder, name = posixpath.split(part)
    relations = _tree(archive, posixpath.join(folder, "_rels", f"{name}.rels"))
    found = []
    for each in relations.iterfind(".//{*}Relationship"):
        if each.get("TargetMode") != "External" and each.get("Type", "").endswith(kind):
            target = posixpath.normpath(posixpath.join("/", folder, each.get("Target", "")))
            found.append((each.get("Id", ""), target.lstrip("/")))
    return found


def _tree(archive: zipfile.ZipFile, part: str) -> Element:
    with archive.open(part) as stream:
        root: Element = ElementTree.parse(stream).getroot()
    return root


def _column_number(letters: str) -> int:
    number = 0
    for letter in letters:
        number = number * 26 + ord(letter) - 64
    return number


def _column_name(number: int) -> str:
    name = ""
    while number:
        number, letter = divmod(number - 1, 26)
        name = chr(65 + letter) + name
    return name


def _in_words(numbers: Sequence[int], name: Callable[[int], str]) -> str:
    """Write ascending numbers as ranges, such as ``3 to 7, 9``; only the first if there are
    many."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    words = [" to ".join(map(name, each)) for each in ranges[:_NAMED_RANGES]]
    return ", ".join(words) + (" and more" if len(ranges) > _NAMED_RANGES else "")
