"""What the commands say of files that they cannot use: the file, the line, the value."""

import json
from pathlib import Path

import pytest
from household import write_collection
from running import Run


@pytest.mark.parametrize(
    ("content", "said", "line"),
    [
        (b"\n \n", "holds no passage", None),
        (b'{"_id": "a", "text": "x"}\n{"_id": "a", "text": "y"}\n', "'a'", 2),
    ],
)
def test_unreadable_corpus_names_the_place(
    run: Run, tmp_path: Path, content: bytes, said: str, line: int | None
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(content)
    result = run.refused(
        "index", corpus, "--out", tmp_path / "i", "--json", says=(str(corpus), said)
    )
    error = json.loads(result.stdout)["error"]
    assert str(corpus) in error["message"]
    assert line is None or f"line {line}" in error["message"]
    assert not (tmp_path / "i").exists()


def test_foreign_folder_is_refused_first(run: Run, tmp_path: Path) -> None:
    data = write_collection(tmp_path / "d")
    precious = tmp_path / "out" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("precious")
    for out in (precious.parent, precious):
        result = run.refused("index", data, "--out", out, says="thesis.tex")
        assert "encoding" not in result.stderr
    assert precious.read_text() == "precious"


@pytest.mark.model
def test_error_is_json_too(run: Run, index: Path, tmp_path: Path) -> None:
    result = run.refused("evaluate", "--index", index, "--data", tmp_path / "gone", "--json")
    assert set(json.loads(result.stdout)) == {"error"}


@pytest.mark.model
def test_unreadable_labels_name_the_place(run: Run, index: Path, tmp_path: Path) -> None:
    data = write_collection(tmp_path / "d")
    qrels = data / "qrels" / "test.tsv"
    qrels.write_text("query-id\tcorpus-id\tscore\nq1\tclean-piano\thigh\n")
    says = (f"{qrels}, line 2", "'high'")
    run.refused("evaluate", "--index", index, "--data", data, says=says)
