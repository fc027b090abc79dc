"""The questions of a log: each once, with how often it was asked."""

from pathlib import Path

import pytest

from calibration.asked_questions import asked_questions
from ctxguard.errors import DataError
from tests.documents import write_lines


def test_jsonl_and_csv_say_the_same(tmp_path: Path) -> None:
    rows = write_lines(
        tmp_path / "a.jsonl", {"query": "Why?"}, {"query": " why? "}, {"query": "Who?"}
    )
    table = write_lines(tmp_path / "a.csv", "id,query", "1,Why?", "2,why?", "3,Who?")
    assert asked_questions(rows) == asked_questions(table) == {"Why?": 2, "Who?": 1}


def test_row_counts_as_it_says(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.csv", "query,count", "Why?,3", "why?,", "Who?,2")
    assert asked_questions(file) == {"Why?": 4, "Who?": 2}


@pytest.mark.parametrize("mark", [";", "\t"])
def test_another_separator_is_read(tmp_path: Path, mark: str) -> None:
    file = write_lines(tmp_path / "a.csv", f"id{mark}query", f'1{mark}"Why, then?"')
    assert asked_questions(file) == {"Why, then?": 1}


@pytest.mark.parametrize(
    ("rows", "line", "fault"),
    [
        ([{"frage": "Why?"}], 1, "the fields are frage"),
        (
            [{"query": "Why?"}, {"query": "Who?", "count": 0.5}],
            2,
            "count 0.5 is not a whole number",
        ),
        ([{"query": "Why?", "count": -1}], 1, "count -1 is not a whole number"),
        ([{"query": 3}], 1, "query is 3, which is not text"),
        ([], None, "holds no question"),
    ],
)
def test_a_fault_names_its_line(
    tmp_path: Path, rows: list[object], line: int | None, fault: str
) -> None:
    with pytest.raises(DataError, match=fault) as caught:
        asked_questions(write_lines(tmp_path / "a.jsonl", *rows))
    assert caught.value.line == line
