"""The file of a reader's answers."""

import json
from pathlib import Path

import pytest

from calibration.answers import AnswerFile
from ctxguard.errors import DataError


@pytest.mark.parametrize("name", ["query_id", "pipeline", "reader", "context_digest"])
def test_a_row_whose_name_is_no_text_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    file = tmp_path / "answers.jsonl"
    row = {"query_id": "q", "pipeline": "guard", "reader": "r", "context_digest": "0"}
    file.write_text("\n".join(map(json.dumps, (row, {**row, name: ["x"]}))))
    with pytest.raises(DataError) as caught:
        AnswerFile(file, "r")
    assert caught.value.line == 2


def test_a_row_of_another_tool_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"query_id": 7, "note": "ours"}\n')
    AnswerFile(file, "r").save()
    assert json.loads(file.read_text()) == {"query_id": 7, "note": "ours"}
