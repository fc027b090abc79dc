"""Documents as passages: cut at headings, named by their path, bad files told and left out."""

from pathlib import Path

import pytest

from calibration.data import documents
from calibration.data.documents import Section, sections
from calibration.data.readers import read_corpus
from ctxguard.errors import DataError, MissingExtraError
from tests.documents import WRITERS, markdown

KETTLE = {"Cleaning": "Boil it with vinegar.", "Repair": "Send it to the workshop."}


def test_markdown_is_cut_at_its_headings_with_those_above_them() -> None:
    text = """---
title: x
---
Before.
# Kettle
## Cleaning *deeply*
Vinegar.
### With [lemon](x.html)
Lemon.
## Repair
Workshop.
"""
    assert sections(text) == [
        Section((), "Before."),
        Section(("Kettle", "Cleaning deeply"), "Vinegar."),
        Section(("Kettle", "Cleaning deeply", "With lemon"), "Lemon."),
        Section(("Kettle", "Repair"), "Workshop."),
    ]


def test_underlined_headings_count_and_rules_and_tables_do_not() -> None:
    text = "Kettle\n======\nA\n\n---\nB\n\n| a |\n| - |\n- item\n---\nCare\n---\nC"
    assert [each.headings for each in sections(text)] == [("Kettle",), ("Kettle", "Care")]


def test_a_heading_inside_code_is_code() -> None:
    text = "# A\n```sh\n# no heading\n~~~\n```\n# B\nb"
    assert [each.headings for each in sections(text)] == [("A",), ("B",)]


@pytest.mark.parametrize("suffix", WRITERS)
def test_each_kind_of_document_is_read(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("markitdown")
    WRITERS[suffix](tmp_path / f"kettle{suffix}", KETTLE)
    passages = list(read_corpus(tmp_path))
    assert {(passage.metadata or {})["path"] for passage in passages} == {f"kettle{suffix}"}
    text = " ".join(passage.text for passage in passages)
    assert all(each in text for each in KETTLE.values())
    if suffix not in {".txt", ".pdf"}:
        headings = [str((passage.metadata or {})["heading"]) for passage in passages]
        assert [heading.rpartition(" > ")[2] for heading in headings] == list(KETTLE)
        ids = [f"kettle{suffix}:cleaning", f"kettle{suffix}:repair"]
        assert [passage.passage_id for passage in passages] == ids


def test_ids_have_the_path_and_are_distinct(tmp_path: Path) -> None:
    (tmp_path / "how to").mkdir()
    (tmp_path / "how to" / "a.md").write_text("x\n# Care!\ny\n# Care\nz", encoding="utf-8")
    found = [passage.passage_id for passage in read_corpus(tmp_path)]
    assert found == ["how_to/a.md", "how_to/a.md:care", "how_to/a.md:care:2"]


def test_what_cannot_be_read_is_told_and_left_out(tmp_path: Path) -> None:
    pytest.importorskip("markitdown")
    markdown(tmp_path / "a.md", KETTLE)
    (tmp_path / "b.docx").write_bytes(b"no archive")
    (tmp_path / "c.png").touch()
    (tmp_path / "d.txt").touch()
    (tmp_path / ".hidden.md").write_text("x", encoding="utf-8")
    (tmp_path / "e.md").symlink_to(tmp_path / "a.md")
    corpus = read_corpus(tmp_path)
    assert [passage.passage_id for passage in corpus] == ["a.md:cleaning", "a.md:repair"]
    notes = "\n".join(corpus.notes)
    assert "1 files of other kinds left out" in notes
    assert "1 documents without text" in notes
    assert "1 documents could not be read, first b.docx: " in notes


def test_a_folder_without_documents_says_what_is_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no corpus\.jsonl; documents end in \.docx"):
        read_corpus(tmp_path)
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="no document with text"):
        list(read_corpus(tmp_path))


def test_the_extra_is_named_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "markitdown", None)
    markdown(tmp_path / "a.md", KETTLE)
    assert read_corpus(tmp_path).are_documents
    (tmp_path / "b.pdf").touch()
    with pytest.raises(MissingExtraError, match=r"\[documents\]"):
        read_corpus(tmp_path)


def test_a_folder_with_a_corpus_is_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"_id": "a", "text": "b"}\n', encoding="utf-8")
    (tmp_path / "readme.md").write_text("x", encoding="utf-8")
    assert not read_corpus(tmp_path).are_documents


def test_a_document_that_is_too_large_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_MAX_BYTES", 10)
    (tmp_path / "a.txt").write_text("short", encoding="utf-8")
    (tmp_path / "b.txt").write_text("longer than ten", encoding="utf-8")
    corpus = read_corpus(tmp_path)
    assert len(list(corpus)) == 1
    assert any("left out" in note for note in corpus.notes)
