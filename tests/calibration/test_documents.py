"""Documents as passages: named by path and headings, bad files told and left out."""

import os
from pathlib import Path

import pytest

from calibration.data.documents import folder
from calibration.data.readers import read_corpus
from ctxguard.core.types import Passage
from ctxguard.errors import DataError, MissingExtraError
from tests.documents import WRITERS, markdown

KETTLE = {"Cleaning": "Boil it with vinegar.", "Repair": "Send it to the workshop."}


def written(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text, encoding="utf-8")
    return path


def read(path: Path) -> tuple[list[Passage], dict[str, str]]:
    """Return the passages of a folder, and why each other path was left out."""
    corpus = read_corpus(path)
    return list(corpus), {each.path: each.reason for each in corpus.left_out}


def ids_of(path: Path) -> list[str]:
    return [passage.passage_id for passage in read(path)[0]]


@pytest.mark.parametrize("suffix", WRITERS)
def test_each_kind_of_document_is_read(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("mammoth")
    WRITERS[suffix](tmp_path / f"kettle{suffix}", KETTLE)
    passages, _ = read(tmp_path)
    assert {(passage.metadata or {})["path"] for passage in passages} == {f"kettle{suffix}"}
    text = " ".join(passage.text for passage in passages)
    assert all(each in text for each in KETTLE.values())
    if suffix not in {".txt", ".pdf"}:
        headings = [str((passage.metadata or {})["heading"]) for passage in passages]
        assert [heading.rpartition(" > ")[2] for heading in headings] == list(KETTLE)
        ids = [f"kettle{suffix}:cleaning", f"kettle{suffix}:repair"]
        assert [passage.passage_id for passage in passages] == ids


@pytest.mark.parametrize(
    "files",
    [
        {"tea time.md": "# Boil\n\nwater", "tea_time.md": "# Boil\n\nmilk"},
        {"tea time.txt": "a", "tea\u00a0time.txt": "b", "tea%20time.txt": "c"},
        {"A.md": "# X\n\na", "a.md": "# X\n\nb"},
        {"a.md": "Intro.\n\n# ⚠️\n\nAlert.\n\n# 2\n\nSecond.\n\n# ❗\n\nThird."},
        {"a.md": "# Care\n\na\n\n# Care\n\nb\n\n# Care\n\na"},
        {"a.md": "# C\n\na\n\n# C++\n\nb\n\n# C#\n\nc\n\n# C-\n\nd"},
        {"a.md": "# US\n\na\n\n# us\n\nb"},
        {"a.md": f"# {'x' * 900}y\n\na\n\n# {'x' * 900}z\n\nb"},
        {"a.md": "# b.md:c\n\na", "a.md:b.md": "# c\n\nb", "b#1.md": "a"},
        {"a/b.md": "a", "a b.md": "b", "a-b.md": "c"},
    ],
)
def test_ids_are_distinct_and_without_spaces(files: dict[str, str], tmp_path: Path) -> None:
    found = ids_of(written(tmp_path, files))
    assert len({*found}) == len(found) >= len(files)
    assert all(each.split() == [each] for each in found)


def test_headings_section_is_no_chunk(tmp_path: Path) -> None:
    """Chunks end in # and a number."""
    found = ids_of(written(tmp_path, {"a.md": "# C\n\na\n\n# C#1\n\nb", "x#1.md": "c"}))
    assert not any("#" in each for each in found)


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("new", ["New", "Care", "❗", "C"])
def test_a_new_section_moves_no_other(new: str, place: int, tmp_path: Path) -> None:
    sections = [
        "# Care\n\na\n\n",
        "# Care\n\nb\n\n## Steps\n\ns\n\n",
        "# C#\n\nc\n\n",
        "# ⚠️\n\nd\n\n",
    ]
    before = ids_of(written(tmp_path, {"a.md": "".join(sections)}))
    sections.insert(place, f"# {new}\n\nn\n\n")
    after = ids_of(written(tmp_path, {"a.md": "".join(sections)}))
    assert [each for each in after if each in before] == before
    assert len(after) == len(before) + 1


def test_equal_headings_differ_by_parents(tmp_path: Path) -> None:
    text = "# 1.1\n\n## Fixed\n\na\n\n# 1.0\n\n## Fixed\n\nb"
    assert ids_of(written(tmp_path, {"a.md": text})) == ["a.md:1-1/fixed", "a.md:1-0/fixed"]


def test_titles_have_the_documents_title(tmp_path: Path) -> None:
    files = {
        "a.md": "---\ntitle: Kettle\n---\nIntro.\n\n## Care\n\na",
        "b.md": "---\ntitle: Pot\n---\n# Pot\n\n## Care\n\na",
        "c.md": "No title.",
    }
    titles = [each.title for each in read(written(tmp_path, files))[0]]
    assert titles == ["Kettle", "Kettle > Care", "Pot > Care", "c"]


def test_unreadable_is_named_with_reason(tmp_path: Path) -> None:
    pytest.importorskip("mammoth")
    markdown(tmp_path / "a.md", KETTLE)
    (tmp_path / "b.docx").write_bytes(b"no archive")
    (tmp_path / "c.png").touch()
    (tmp_path / "d.txt").touch()
    (tmp_path / "e.md").write_text(" \n", encoding="utf-8")
    (tmp_path / "f.txt").write_bytes(bytes(range(256)))
    (tmp_path / ".hidden.md").write_text("x", encoding="utf-8")
    os.mkfifo(tmp_path / "g.md")
    passages, left_out = read(tmp_path)
    assert [passage.passage_id for passage in passages] == ["a.md:cleaning", "a.md:repair"]
    assert left_out == {
        "b.docx": "is truncated, or not what its name says",
        "c.png": "ends in .png, a kind that is not read",
        "d.txt": "is empty",
        "e.md": "holds no text",
        "f.txt": "is not UTF-8, and its encoding cannot be determined; save it as UTF-8",
        "g.md": "is not a regular file",
    }


def test_links_are_read_within_the_folder(tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap: each file is a link into a hidden folder."""
    mount = tmp_path / "mount"
    written(mount, {"..2024/a.md": "alpha", "..2024/sub/b.md": "beta", "own.md": "own"})
    (mount / "..data").symlink_to("..2024")
    (mount / "a.md").symlink_to("..data/a.md")
    (mount / "sub").symlink_to("..data/sub")
    passages, left_out = read(mount)
    assert [each.passage_id for each in passages] == ["a.md", "own.md", "sub/b.md"]
    assert left_out == {}


def test_outside_links_are_left_out(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    written(tmp_path, {"secret.md": "secret", "mount/a.md": "alpha", "mount/sub/b.md": "beta"})
    (mount / "again.md").symlink_to("a.md")
    (mount / "circle").symlink_to(".")
    (mount / "twice").symlink_to("sub")
    (mount / "nowhere.md").symlink_to("gone.md")
    (mount / "itself.md").symlink_to("itself.md")
    (mount / "secret.md").symlink_to("../secret.md")
    (mount / "above").symlink_to("..")
    passages, left_out = read(mount)
    assert [each.text for each in passages] == ["alpha", "beta"]
    assert left_out == {
        "again.md": "is a link to a.md, which is read",
        "circle": "is a link to ./, which is read",
        "twice": "is a link to sub/, which is read",
        "nowhere.md": "is a link that leads nowhere",
        "itself.md": "is a link that leads nowhere",
        "secret.md": "is a link that leads outside the folder",
        "above": "is a link that leads outside the folder",
    }


def test_folder_may_be_a_link(tmp_path: Path) -> None:
    written(tmp_path, {"real/a.md": "alpha"})
    (tmp_path / "link").symlink_to("real")
    assert ids_of(tmp_path / "link") == ["a.md"]


def test_non_text_name_is_read(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.md")).write_text("x", encoding="utf-8")
    (passage,) = read(tmp_path)[0]
    assert passage.passage_id.isascii()
    assert (passage.metadata or {})["path"] == "caf%E9.md"


def test_empty_folder_says_what_reads(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no corpus\.jsonl; documents end in \.csv"):
        read_corpus(tmp_path)
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match=r"no document with text \(a\.txt is empty\)"):
        list(read_corpus(tmp_path))


@pytest.mark.parametrize(
    ("name", "module"),
    [("b.pdf", "pypdfium2"), ("b.docx", "mammoth"), ("b.pptx", "pptx"), ("b.html", "markdownify")],
)
def test_extra_is_named_before_work(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    markdown(tmp_path / "a.md", KETTLE)
    assert read_corpus(tmp_path).are_documents
    (tmp_path / name).touch()
    with pytest.raises(MissingExtraError, match=r"\[documents\]"):
        read_corpus(tmp_path)


def test_folder_with_corpus_is_corpus(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"_id": "a", "text": "b"}\n', encoding="utf-8")
    (tmp_path / "readme.md").write_text("x", encoding="utf-8")
    assert not read_corpus(tmp_path).are_documents


def test_oversized_document_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "MAX_BYTES", 10)
    passages, left_out = read(written(tmp_path, {"a.txt": "short", "b.txt": "longer than ten"}))
    assert len(passages) == 1
    assert left_out == {"b.txt": "is larger than 0 MiB"}
