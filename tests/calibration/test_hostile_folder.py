"""A folder of 200 documents with ten hostile ones, each named or read within bounds."""

from collections import Counter
from pathlib import Path

from calibration.data.readers import read_corpus
from tests.documents import WRITERS, multiplying, rewritten

MOST_PASSAGES = 2_000
"""Of one file: what a hostile one makes must not fill the index."""


def with_part(raw: bytes, part: str, content: bytes) -> bytes:
    return rewritten(raw, lambda name, own: content if name == part else own)


def write_hostile(folder: Path) -> tuple[set[str], set[str]]:
    """Write the ten; return the names of those that cannot be read, and of those that can."""
    fine = {}
    for suffix in (".docx", ".xlsx", ".pdf"):
        WRITERS[suffix](folder / f"fine{suffix}", {"Kettle": "Boil it."})
        fine[suffix] = (folder / f"fine{suffix}").read_bytes()
        (folder / f"fine{suffix}").unlink()
    unreadable = {
        "bomb.docx": with_part(fine[".docx"], "word/document.xml", b"x" * 40_000_000),
        "entities.xlsx": with_part(fine[".xlsx"], "xl/workbook.xml", multiplying()),
        "cut.docx": fine[".docx"][:300],
        "cut.pdf": fine[".pdf"][:200],
        "bytes.txt": bytes(range(256)) * 400,
    }
    readable = {
        "one-line.txt": b"word " * 100_000,
        "nested.html": b"<div>" * 20_000 + b"deep" + b"</div>" * 20_000,
        "quotes.md": b"> " * 20_000 + b"quoted",
        "headings.md": b"".join(b"#" * (1 + n % 6) + b" h\n\nt\n\n" for n in range(2_000)),
        "base64.txt": b"QUJD" * 50_000,
    }
    for name, content in {**unreadable, **readable}.items():
        (folder / name).write_bytes(content)
    return {*unreadable}, {*readable}


def test_a_folder_with_ten_hostile_files(tmp_path: Path) -> None:
    """The 190 others are read whole, and nothing raises."""
    kinds = [".md", ".txt", ".html"] * 62 + [".docx", ".pptx", ".xlsx", ".pdf"]
    for number, suffix in enumerate(kinds):
        WRITERS[suffix](tmp_path / f"good-{number}{suffix}", {"Kettle": f"Boil kettle {number}."})
    unreadable, readable = write_hostile(tmp_path)
    assert len([*tmp_path.iterdir()]) == 200
    corpus = read_corpus(tmp_path)
    passages = list(corpus)
    left_out = {each.path: each.reason for each in corpus.left_out}
    assert unreadable <= left_out.keys() <= unreadable | readable
    assert all(left_out.values())
    of_file = Counter(str((each.metadata or {})["path"]) for each in passages)
    assert len([path for path in of_file if path.startswith("good-")]) == 190
    texts = "\n".join(each.text for each in passages)
    assert all(f"Boil kettle {number}." in texts for number in range(190))
    assert of_file.keys() | left_out.keys() >= readable
    assert all(of_file[name] <= MOST_PASSAGES for name in readable)
    size = sum((tmp_path / name).stat().st_size for name in readable)
    assert sum(len(each.text) for each in passages) <= 2 * size + 100 * 190
