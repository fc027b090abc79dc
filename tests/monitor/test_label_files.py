"""Files of passages to label: safe in a spreadsheet, and read back as they were."""

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.errors import DataError
from ctxguard.monitor.judges.prompt import INSTRUCTIONS
from ctxguard.monitor.labels.files import RowToLabel, read_label_file, write_label_file
from ctxguard.monitor.labels.guide import grading_guide, meanings
from ctxguard.monitor.labels.unknown_ids import probably_meant

SIGNS = "=+-@＝＋－＠"
HOSTILE = st.text(st.sampled_from(f"{SIGNS};\t\r\n ,'\"|a1é中"), min_size=1, max_size=12)
IDS = st.one_of(HOSTILE, st.text(st.characters(codec="utf-8"), min_size=1, max_size=12))


def row(request_id: str = "r", passage_id: str = "p", text: str = "") -> RowToLabel:
    return RowToLabel("always", text, text, text, None, None, request_id, passage_id)


def begins_a_formula(cell: str) -> bool:
    return cell.lstrip().startswith(tuple(SIGNS))


@given(st.lists(st.tuples(IDS, IDS, HOSTILE, st.integers(0, 3)), min_size=1, max_size=5))
def test_written_is_read_without_formulas(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str, int]]
) -> None:
    """What is written is read back and no cell begins a formula."""
    file = tmp_path_factory.getbasetemp() / "round.csv"
    write_label_file(file, [row(request, passage, text) for request, passage, text, _ in rows])
    content = file.read_text(encoding="utf-8-sig")
    for separator in ",;\t":
        # As a spreadsheet that takes this for the separator reads it.
        for line in csv.reader(io.StringIO(content, newline=""), delimiter=separator):
            assert not any(begins_a_formula(cell) for cell in line)
    with file.open(encoding="utf-8-sig", newline="") as opened:
        reader = csv.DictReader(opened)
        graded = [{**one, "grade": rows[n][3]} for n, one in enumerate(reader)]
        columns = list(reader.fieldnames or ())
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, columns)
        writer.writeheader()
        writer.writerows(graded)
    labels, _ = read_label_file(file, "ann", 1.0, 3)
    assert [(one.request_id, one.passage_id, one.grade) for one in labels] == [
        (request, passage, grade) for request, passage, _, grade in rows
    ]


@pytest.mark.parametrize(
    "name",
    ["4983", "007", "1e5", "12-3", "2026-11-22", "3f2a90", "may-12", "Jan 5", "MARCH1", "True"],
)
def test_ids_like_numbers_stay_texts(tmp_path: Path, name: str) -> None:
    write_label_file(tmp_path / "a.csv", [row(name, name)])
    with (tmp_path / "a.csv").open(encoding="utf-8-sig", newline="") as opened:
        (found,) = csv.DictReader(opened)
    assert found["request_id"] == found["passage_id"] == f"'{name}"


def test_overlong_text_is_cut(tmp_path: Path) -> None:
    for name in ("a.csv", "a.jsonl"):
        write_label_file(tmp_path / name, [row(text="x" * 40_000)])
    assert len(max((tmp_path / "a.csv").read_text().split(","), key=len)) < 32_767
    assert "x" * 40_000 in (tmp_path / "a.jsonl").read_text()


def test_grades_mean_what_judges_mean() -> None:
    for grade, meaning in meanings(3).items():
        assert f"{grade}: it " in INSTRUCTIONS
        assert meaning in INSTRUCTIONS


@pytest.mark.parametrize("max_grade", [1, 2, 3, 5])
def test_guide_explains_every_grade(max_grade: int) -> None:
    guide = grading_guide("todo.csv", max_grade)
    for grade in range(max_grade + 1):
        assert f"\n| {grade} | it " in guide
    for words in ("`always`", "`if all above are 0`", "`hard_negative`", "`distractor`"):
        assert words in guide
    assert len(guide.splitlines()) <= 50


def test_impossible_path_is_refused() -> None:
    with pytest.raises(DataError, match="null byte"):
        read_label_file(Path("a\0b.jsonl"), "ann", 1.0, 3)


SAVED = {
    "semicolons": (";", "utf-8"),
    "semicolons of Windows": (";", "cp1252"),
    "tabs": ("\t", "utf-8"),
    "tabs in UTF-16": ("\t", "utf-16"),
    "commas with a mark": (",", "utf-8-sig"),
    "bars": ("|", "utf-8"),
}


@pytest.mark.parametrize("name", ["a.csv", "a.txt"])
@pytest.mark.parametrize("form", SAVED)
def test_table_is_read_as_saved(tmp_path: Path, form: str, name: str) -> None:
    """With cells that hold separators, quotes and line breaks, and one of 200,000 characters."""
    separator, encoding = SAVED[form]
    with (tmp_path / name).open("w", encoding=encoding, newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(["Query", "text", "Grade", "Request ID", "passage-id ", ""])
        writer.writerow(['a; "b",\tc|\n\né', "x" * 200_000, "2,0", "r", "'may-12", ""])
        writer.writerow([""] * 6)
        writer.writerow(["q", "t", "", "s", "é", ""])
    labels, blank = read_label_file(tmp_path / name, "ann", 1.0, 3)
    assert [(one.request_id, one.passage_id, one.grade) for one in labels] == [("r", "may-12", 2)]
    assert blank == ["s"]


def test_first_line_may_name_separator(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("sep=;\nrequest_id;passage_id;grade\nr;a,b;1\nr;c;x\n")
    with pytest.raises(DataError, match=r"line 4: grade 'x'"):
        read_label_file(file, "ann", 1.0, 3)


@pytest.mark.parametrize(
    ("wrong", "known"),
    [
        ("12-May", "may-12"),
        ("May-12", "may-12"),
        ("05-Jan", "Jan 5"),
        ("1-Mar", "MARCH1"),
        ("2026-05-12", "may-12"),
        ("05/12/2026", "may-12"),
        ("12.05.2026", "may-12"),
        ("May-12", "may-2012"),
        ("1067", "01067"),
        ("1.1", "1.10"),
        ("1,1", "1.10"),
        ("1E+05", "1e5"),
        ("TRUE", "true"),
        ("'doc-7 ", "doc-7"),
        ("kettel-cleaning", "kettle-cleaning"),
    ],
)
def test_of_what_spreadsheets_and_people_write(wrong: str, known: str) -> None:
    """The id that was meant, where a spreadsheet or a person has made another of it."""
    assert probably_meant(wrong, [known, "quite another"]) == known


@pytest.mark.parametrize(
    ("wrong", "known"),
    [
        ("1", ["01", "001"]),
        ("doc-77", ["doc-78", "doc-79"]),
        ("3-Feb", ["2-3", "3-2"]),
        ("unlike", ["anything"]),
        ("", ["a"]),
    ],
)
def test_none_unless_one_can_be_meant(wrong: str, known: list[str]) -> None:
    assert probably_meant(wrong, known) is None
