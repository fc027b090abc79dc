"""The file of a reader's answers."""

import json
from pathlib import Path

import pytest

from calibration.answers import AnswerFile
from ctxguard.errors import DataError


@pytest.mark.parametrize("name", ["query_id", "pipeline", "reader", "context_digest"])
def test_nameless_row_is_refused_by_line(tmp_path: Path, name: str) -> None:
    file = tmp_path / "answers.jsonl"
    row = {"query_id": "q", "pipeline": "guard", "reader": "r", "context_digest": "0"}
    file.write_text("\n".join(map(json.dumps, (row, {**row, name: ["x"]}))))
    with pytest.raises(DataError) as caught:
        AnswerFile(file, "r")
    assert caught.value.line == 2


def test_other_tools_row_stays(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"query_id": 7, "note": "ours"}\n')
    AnswerFile(file, "r").save()
    assert json.loads(file.read_text()) == {"query_id": 7, "note": "ours"}
