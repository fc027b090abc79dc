"""Spreadsheets as a person sees them."""

import io
import zipfile
from collections.abc import Callable
from datetime import date, time
from typing import Any

import pytest

from calibration.data.documents.number_format import shown
from calibration.data.documents.spreadsheet import read_csv, read_workbook

openpyxl: Any = pytest.importorskip("openpyxl")


def read(fill: Callable[[Any], object]) -> tuple[str, list[str]]:
    book, file = openpyxl.Workbook(), io.BytesIO()
    fill(book)
    book.save(file)
    return read_workbook(file)


def cell(value: object, number_format: str | None = None) -> str:
    """Return what a cell shows, below a header."""

    def fill(book: Any) -> None:
        book.active["A1"], book.active["A2"] = "header", value
        if number_format is not None:
            book.active["A2"].number_format = number_format

    return read(fill)[0].rpartition("\n")[2].strip("| ")


@pytest.mark.parametrize(
    ("value", "number_format", "seen"),
    [
        ("01067", None, "01067"),
        ("1.10", None, "1.10"),
        ("NA", None, "NA"),
        ("1e5", None, "1e5"),
        (1067, "00000", "01067"),
        (1.1, "0.00", "1.10"),
        (1067, None, "1067"),
        (0.1 + 0.2, None, "0.3"),
        (12345678901234, None, "12345678901234"),
        (True, None, "TRUE"),
        (False, None, "FALSE"),
        (0.256, "0.0%", "25.6%"),
        (1234567.5, "#,##0.00", "1,234,567.50"),
        (-5, "0;(0)", "(5)"),
        (3, "[$€-407] #,##0.00", "€ 3.00"),
        (date(2024, 3, 15), "dd.mm.yyyy", "15.03.2024"),
        (date(2024, 3, 15), "d mmm yyyy", "15 Mar 2024"),
        (date(2024, 3, 15), None, "2024-03-15"),
        (45366.378472222, "yyyy-mm-dd h:mm", "2024-03-15 9:05"),
        (time(18, 30), "h:mm AM/PM", "6:30 PM"),
        ("a | b\nc", None, "a \\| b c"),
        ("#N/A", None, "#N/A"),
    ],
)
def test_a_cell_is_what_it_shows(value: object, number_format: str | None, seen: str) -> None:
    assert cell(value, number_format) == seen


@pytest.mark.parametrize(
    ("value", "code", "seen"),
    [
        (1.5, "[h]:mm", "36:00"),
        (12345, "0.00E+00", "1.23E+04"),
        (2.5, "# ?/?", "2 1/2"),
        (5551234567, "(###) ###-####", "(555) 123-4567"),
        (1500000, '0.0,,"M"', "1.5M"),
        (7, ";;;", ""),
        (0, '0;-0;"none"', "none"),
        (150, '[>100]"high";0', "high"),
        (-0.001, "0.00", "0.00"),
        (0.5, "0", "1"),
        (1e300, "yyyy", "1E+300"),
    ],
)
def test_formats_of_numbers(value: float, code: str, seen: str) -> None:
    assert shown(value, code) == seen


def test_empty_cells_are_empty() -> None:
    def fill(book: Any) -> None:
        for row in (["a", "b", "c"], ["1", None, "3"], [], [None, "2", None]):
            book.active.append(row)

    table = read(fill)[0].partition("\n\n")[2]
    assert table == "| a | b | c |\n| --- | --- | --- |\n| 1 |  | 3 |\n|  | 2 |  |"


def test_hidden_is_named_left_out() -> None:
    def fill(book: Any) -> None:
        sheet = book.active
        for row in range(1, 7):
            sheet.append([f"{column}{row}" for column in "ABCD"])
        sheet.row_dimensions[3].hidden = sheet.row_dimensions[4].hidden = True
        sheet.column_dimensions["C"].hidden = True
        for name, state in (("Old salaries", "hidden"), ("Older", "veryHidden")):
            book.create_sheet(name).append(["secret"])
            book[name].sheet_state = state

    text, hidden = read(fill)
    assert not any(secret in text for secret in ("secret", "A3", "D4", "C1"))
    assert "| A2 | B2 | D2 |" in text
    assert hidden == [
        "rows 3 to 4 of the sheet 'Sheet' are hidden",
        "columns C of the sheet 'Sheet' are hidden",
        "the sheet 'Old salaries' is hidden",
        "the sheet 'Older' is hidden",
    ]


def test_formulas_without_a_result_are_told() -> None:
    text, left_out = read(lambda book: book.active.append(["=1+1", "=2+2", "3"]))
    assert text.count("=") == 0
    assert left_out == ["2 formulas of the sheet 'Sheet' have no stored result"]


def test_distant_cell_widens_nothing() -> None:
    def fill(book: Any) -> None:
        for at in (1, 300, 16_384):
            book.active.cell(at * 64, at, f"far {at}")
        for at in range(1, 400):
            book.active.cell(at, at, "x")

    text, _ = read(fill)
    assert all(f"far {at}" in text for at in (1, 300, 16_384))
    assert len(text) < 10_000


def test_dates_may_count_from_1904() -> None:
    def fill(book: Any) -> None:
        book.epoch = openpyxl.utils.datetime.MAC_EPOCH
        book.active["A1"] = date(2024, 3, 15)

    assert "2024-03-15" in read(fill)[0]


def test_shared_texts_keep_their_runs() -> None:
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    related = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    relation = '<Relationship Id="{}" Type="x/{}" Target="{}"/>'
    parts = {
        "_rels/.rels": f"<R>{relation.format('a', 'officeDocument', '/xl/workbook.xml')}</R>",
        "xl/workbook.xml": f'<workbook xmlns="{main}" xmlns:r="{related}"><sheets>'
        '<sheet name="S" r:id="s"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": "<R>"
        + relation.format("s", "worksheet", "worksheets/sheet1.xml")
        + relation.format("t", "sharedStrings", "sharedStrings.xml")
        + "</R>",
        "xl/sharedStrings.xml": f'<sst xmlns="{main}"><si><r><t>ket</t></r><r><t>tle</t></r>'
        "<rPh><t>kana</t></rPh></si></sst>",
        "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{main}"><sheetData><row>'
        '<c t="s"><v>0</v></c><c t="str"><f>A1</f><v>007</v></c></row></sheetData></worksheet>',
    }
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in parts.items():
            archive.writestr(name, text)
    assert "| kettle | 007 |" in read_workbook(file)[0]


@pytest.mark.parametrize(
    ("raw", "table"),
    [
        (b"zip,version\n01067,1.10\n", "| zip | version |\n| --- | --- |\n| 01067 | 1.10 |"),
        (b"\xef\xbb\xbfa;b\n1,5;NA\n", "| a | b |\n| --- | --- |\n| 1,5 | NA |"),
        (b'a\tb\n"x\ny"\t\n', "| a | b |\n| --- | --- |\n| x y |  |"),
        ("名\t値\n水\tTRUE\n".encode("utf-16"), "| 名 | 値 |\n| --- | --- |\n| 水 | TRUE |"),
        (b"a,b\n1\n1,2,3\n", "| a | b |  |\n| --- | --- | --- |\n| 1 |  |  |\n| 1 | 2 | 3 |"),
        (b"a," + b"x" * 200_000, "| a | " + "x" * 200_000 + " |\n| --- | --- |"),
    ],
)
def test_separated_values_stay_as_written(raw: bytes, table: str) -> None:
    assert read_csv(raw) == table
