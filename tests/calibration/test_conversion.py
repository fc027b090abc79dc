"""Files that take too much are stopped, and named; those after them are read."""

import io
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from calibration.data.readers import read_corpus
from tests.documents import WRITERS, multiplying, rewritten

pytest.importorskip("mammoth")
pytest.importorskip("pptx")
pytest.importorskip("pypdfium2")
pytest.importorskip("openpyxl")

from calibration.data.documents import conversion
from calibration.data.documents.conversion import Converter
from calibration.data.documents.converters import convert
from calibration.data.documents.encodings import UnreadableError
from tests.documents import pdf

Write = Callable[[str], Path]
KETTLE = {"Cleaning": "Boil it with vinegar.", "Repair": "Send it to the workshop."}


@pytest.fixture(scope="module")
def converter() -> Iterator[Converter]:
    with Converter() as found:
        yield found


@pytest.fixture
def kettle(tmp_path: Path) -> Write:
    """Writes a file of a kind."""

    def write(suffix: str) -> Path:
        WRITERS[suffix](tmp_path / f"a{suffix}", KETTLE)
        return tmp_path / f"a{suffix}"

    return write


def packed(file: Path, part: str, old: str, new: str) -> bytes:
    """Return an Office file with a text in one of its parts replaced."""

    def change(name: str, content: bytes) -> bytes:
        return content.replace(old.encode(), new.encode()) if part in name else content

    return rewritten(file.read_bytes(), change)


def why(suffix: str, raw: bytes) -> str:
    with pytest.raises(UnreadableError) as error:
        convert(suffix, raw)
    return str(error.value)


def test_a_process_converts_file_after_file(converter: Converter, kettle: Write) -> None:
    running = set()
    for suffix in sorted({*WRITERS} - {".md", ".txt"}):
        found = converter.convert(kettle(suffix))[1]
        assert all(text in found for text in KETTLE.values())
        running.add(converter._running)
    assert len(running) == 1


@pytest.mark.parametrize("suffix", [".docx", ".pptx", ".xlsx", ".pdf"])
def test_a_file_cut_short_says_so(suffix: str, kettle: Write, converter: Converter) -> None:
    file = kettle(suffix)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2][:400])
    with pytest.raises(UnreadableError, match=r"is truncated|broken"):
        converter.convert(file)


ON_LINUX = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")


@pytest.mark.parametrize(
    ("large", "seconds", "says"),
    [
        ("<p>x" * 100_000, 0.2, r"takes longer than 0\.2 s"),
        pytest.param("<p><b>x</b>" * 2_000_000, 300.0, "MiB of memory", marks=ON_LINUX),
    ],
    ids=["time", "memory"],
)
def test_time_and_memory_are_bounded(
    large: str, seconds: float, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next file is read by a new process, also where somebody else has ended one."""
    monkeypatch.setattr(conversion, "_seconds", lambda n: seconds if n > 10_000 else 60.0)
    for name, text in (("large.html", large), ("fine.html", "<p>fine")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    with Converter() as converter:
        with pytest.raises(UnreadableError, match=says):
            converter.convert(tmp_path / "large.html")
        assert converter.convert(tmp_path / "fine.html")[1].strip() == "fine"
        process, _ = converter._running
        process.kill()
        process.wait()
        assert converter.convert(tmp_path / "fine.html")[1].strip() == "fine"


@pytest.mark.parametrize("suffix", [".docx", ".pptx", ".xlsx"])
def test_archive_bomb_is_refused(suffix: str, kettle: Write) -> None:
    raw = packed(kettle(suffix), ".xml", "Boil it", "Boil it " + "x" * 30_000_000)
    assert "unpacks to" in why(suffix, raw)


@pytest.mark.parametrize(
    ("suffix", "part"), [(".xlsx", "xl/workbook.xml"), (".docx", "word/document.xml")]
)
def test_entities_that_multiply_are_refused(suffix: str, part: str, kettle: Write) -> None:
    raw = with_part(kettle(suffix).read_bytes(), part, multiplying())
    assert "broken" in why(suffix, raw)


@pytest.mark.parametrize("suffix", [".docx", ".pptx", ".xlsx"])
def test_a_password_is_told(suffix: str) -> None:
    assert "password" in why(suffix, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600)


def pages(file: Path, texts: list[dict[str, str]]) -> bytes:
    """Return a PDF of several pages, each of these texts by heading."""
    pypdfium2 = pytest.importorskip("pypdfium2")
    out, made = pypdfium2.PdfDocument.new(), io.BytesIO()
    for text in texts:
        pdf(file, text)
        out.import_pages(pypdfium2.PdfDocument(file.read_bytes()))
    out.save(made)
    return made.getvalue()


def test_pages_without_text_are_counted(tmp_path: Path) -> None:
    raw = pages(tmp_path / "a.pdf", [{"": "Only page."}, *[{}] * 9])
    assert convert(".pdf", raw)[2] == ["9 of 10 pages hold no text"]
    assert "none of its 3 pages holds text" in why(".pdf", pages(tmp_path / "a.pdf", [{}] * 3))


def test_margins_of_pages_are_left_out(tmp_path: Path) -> None:
    """The lines at their top and bottom that stand on most of them, numbers aside."""
    top, own = {"Acme handbook": "Confidential"}, {"Own text {}.": "More of {}.", "Then": "last"}
    texts = [
        {**top, **{k.format(n): v.format(n) for k, v in own.items()}, f"Page {n}": "of 5"}
        for n in range(1, 6)
    ]
    expected = [f"Own text {n}.\nMore of {n}.\nThen\nlast" for n in range(1, 6)]
    _, found, _ = convert(".pdf", pages(tmp_path / "a.pdf", texts))
    assert found == "\n\n".join(expected)


def test_hidden_words_are_not_read(kettle: Write) -> None:
    hidden = "it</w:t></w:r><w:r><w:rPr><w:vanish/></w:rPr><w:t>secret"
    raw = packed(kettle(".docx"), "document.xml", "it with", f"{hidden}</w:t></w:r><w:r><w:t> with")
    assert "Boil it with vinegar." in convert(".docx", raw)[1].replace("  ", " ")
    assert "secret" not in convert(".docx", raw)[1]


def test_formulas_are_text(kettle: Write) -> None:
    maths = "http://schemas.openxmlformats.org/officeDocument/2006/math"
    formula = f'it</w:t></w:r><m:oMath xmlns:m="{maths}"><m:r><m:t>E=mc</m:t></m:r></m:oMath>'
    raw = packed(kettle(".docx"), "document.xml", "it with", f"{formula}<w:r><w:t> with")
    assert "E=mc" in convert(".docx", raw)[1]


def test_hidden_slides_are_named(kettle: Write) -> None:
    raw = packed(kettle(".pptx"), "slides/slide2.xml", "<p:sld ", '<p:sld show="0" ')
    _, markdown, left_out = convert(".pptx", raw)
    assert "workshop" not in markdown
    assert left_out == ["slide 2 is hidden"]


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
