"""The formats on docs/labels.md are those that the readers read and the schema describes."""

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from calibration.data.readers import read_beir, read_jsonl
from ctxguard.errors import DataError

jsonschema = pytest.importorskip("jsonschema")

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "labels.md").read_text(encoding="utf-8")
SCHEMA = json.loads((DOCS / "labels.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
QUESTION = {"_id": "q", "text": "?", "relevant": ["a"]}


def example(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_example_follows_the_schema(tmp_path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for line in example("json").splitlines():
        VALIDATOR.validate(json.loads(line))
    file = tmp_path / "labels.jsonl"
    file.write_text(example("json"), encoding="utf-8")
    data = read_jsonl(file)
    assert (data.qrels["q1"], data.qrels["q3"]) == ({"kettle-3": 2, "kettle-7": 1, "iron-1": 0}, {})
    assert data.distractors == {"q2": {"tent-9": "hard_negative"}}
    assert data.keywords == {"q4": ("E27",)}
    assert not data.positives_only


def test_the_example_of_distractors_is_read(tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("q2\ttent-1\t1\n", encoding="utf-8")
    (tmp_path / "queries.jsonl").write_text('{"_id": "q2", "text": "?"}\n', encoding="utf-8")
    (tmp_path / "distractors.tsv").write_text(example("tsv"), encoding="utf-8")
    assert read_beir(tmp_path).distractors == {"q2": {"tent-9": "hard_negative"}}


TAKEN = [
    {**QUESTION, "_id": 7, "relevant": {"a": 2.0, "b": "1", "c": -1}},
    {"query_id": "q", "query": "?", "keywords": ["kettle"]},
    {**QUESTION, "relevant": None, "keywords": ["kettle"]},
    {**QUESTION, "distractors": None, "metadata": None, "keywords": []},
    {**QUESTION, "another": "field"},
]
REFUSED = [
    {"text": "?", "relevant": ["a"]},
    {"_id": "q", "relevant": ["a"]},
    {"_id": "q", "text": "?"},
    {"_id": "q", "text": "?", "keywords": []},
    {"_id": "q", "text": "?", "relevant": None},
    {**QUESTION, "_id": " "},
    {**QUESTION, "_id": True},
    {**QUESTION, "text": ""},
    {**QUESTION, "relevant": "a"},
    {**QUESTION, "relevant": [None]},
    {**QUESTION, "relevant": {"a": "good"}},
    {**QUESTION, "relevant": {"a": 1.5}},
    {**QUESTION, "relevant": {"a": True}},
    {**QUESTION, "distractors": {"b": 1}},
    {**QUESTION, "distractors": {"b": "irrelevant"}},
    {**QUESTION, "keywords": "kettle"},
    {**QUESTION, "keywords": [" "]},
    {**QUESTION, "metadata": "light"},
]


@pytest.mark.parametrize("row", [*TAKEN, *REFUSED])
def test_reader_and_schema_agree(row: dict[str, object], tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    file.write_text(json.dumps(row), encoding="utf-8")
    assert VALIDATOR.is_valid(row) is (row in TAKEN)
    with nullcontext() if row in TAKEN else pytest.raises(DataError):
        assert len(read_jsonl(file)) == 1
