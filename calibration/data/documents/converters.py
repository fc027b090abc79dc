"""Converts Word, PowerPoint, PDF, Excel and HTML files to Markdown, in a process with bounds.

Pure: bytes in, Markdown out. Each format needs a library of the extra `documents`.
"""

import io
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from calibration.data.documents.encodings import UnreadableError, decode
from calibration.data.documents.markdown import guarded, table
from ctxguard._support.extras import require

_UNPACKED_BYTES, _UNPACKED_SHARE = 10 * 2**20, 100
"""The bytes to which any archive may unpack, and the multiple of its size; XML seldom compresses
40-fold."""
_EDGE_LINES = 2
"""Lines at the top and the bottom of a PDF's page that may be its header and footer."""
_HEADER_PAGES = 3
_MAX_TITLE = 80

_COMPOUND = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
"""The first bytes of an Office file that is encrypted or in a format older than 2007."""
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_MATHS = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
_NUMBER = re.compile(r"\d+")


Converted = tuple[str, str, list[str]]
"""A document's title, empty if the file names none; its text as Markdown, whose special characters
are not escaped (that of a PDF is plain); and the parts that were left out, in words."""


def convert(suffix: str, raw: bytes) -> Converted:
    """Convert the content of a file with the extension ``suffix``, such as ``.docx``.

    Raises:
        UnreadableError: the file is broken, encrypted or without text.
    """
    if suffix in _ARCHIVES:
        _check_archive(raw)
    try:
        return CONVERTERS[suffix](raw)
    except (UnreadableError, MemoryError):
        raise
    except RecursionError:
        raise UnreadableError("is nested too deeply") from None
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnreadableError(f"is broken or not what its name says ({reason[:120]})") from None


def _html(raw: bytes) -> Converted:
    from calibration.data.documents.web_page import to_markdown

    title, markdown = to_markdown(decode(raw, declares=True))
    return title, markdown, []


def _csv(raw: bytes) -> Converted:
    from calibration.data.documents.spreadsheet import read_csv

    return "", read_csv(raw), []


def _workbook(raw: bytes) -> Converted:
    from calibration.data.documents.spreadsheet import read_workbook

    return "", *read_workbook(io.BytesIO(raw))


def _word(raw: bytes) -> Converted:
    mammoth = require("mammoth", "documents")
    from bs4 import BeautifulSoup

    from calibration.data.documents.web_page import written

    found = mammoth.convert_to_html(
        io.BytesIO(_without_hidden_runs(raw)),
        convert_image=mammoth.images.img_element(lambda _: {}),
    )
    return "", written(BeautifulSoup(found.value, "lxml")), []


def _without_hidden_runs(raw: bytes) -> bytes:
    """Remove hidden runs from a Word file, and turn its formulas into text."""
    etree = require("lxml.etree", "documents")
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as archive, zipfile.ZipFile(packed, "w") as out:
        for item in archive.infolist():
            if item.filename.startswith("word/media/"):
                out.writestr(item.filename, b"")
                continue
            content = archive.read(item)
            if item.filename.startswith("word/") and (b"vanish" in content or b"oMath" in content):
                parser = etree.XMLParser(resolve_entities=False, no_network=True)
                tree = etree.fromstring(content, parser)
                for mark in [*tree.iter(f"{_WORD}vanish")]:
                    run = mark.getparent().getparent()
                    off = mark.get(f"{_WORD}val") in {"0", "false", "off"}
                    if run is not None and run.tag == f"{_WORD}r" and not off:
                        run.clear()
                for formula in [*tree.iter(f"{_MATHS}oMath")]:
                    text = "".join(
                        ["".join(each.itertext()) for each in formula.iter(f"{_MATHS}t")]
                    )
                    formula.clear()
                    formula.tag = f"{_WORD}r"
                    etree.SubElement(formula, f"{_WORD}t").text = text
                content = etree.tostring(tree)
            out.writestr(item.filename, content)
    return packed.getvalue()


def _slides(raw: bytes) -> Converted:
    deck = require("pptx", "documents").Presentation(io.BytesIO(raw))
    written: list[str] = []
    left_out = []
    for number, slide in enumerate(deck.slides, start=1):
        if slide._element.get("show") in {"0", "false"}:
            left_out.append(f"slide {number} is hidden")
            continue
        title = slide.shapes.title
        parts = [part for part in _shapes(slide.shapes, title) if part.strip()]
        heading = " ".join(title.text.split()) if title is not None and title.has_text_frame else ""
        if not heading and parts:
            heading = parts[0].lstrip("-|# ").partition("\n")[0].rstrip("| ")[:_MAX_TITLE]
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            notes = slide.notes_slide.notes_text_frame.text.strip()
            parts += [guarded(f"Notes: {notes}")] if notes else []
        written.append("\n\n".join([f"# {heading}", *parts]))
    return "", "\n\n".join(written), left_out


def _shapes(shapes: Iterable[Any], title: Any) -> Iterator[str]:
    """Yield the texts, tables and charts in shapes, in reading order."""
    for shape in shapes:
        if title is not None and shape.shape_id == title.shape_id:
            continue
        if hasattr(shape, "shapes"):
            yield from _shapes(shape.shapes, title)
        elif getattr(shape, "has_table", False):
            yield table([[cell.text for cell in row.cells] for row in shape.table.rows])
        elif getattr(shape, "has_chart", False):
            chart = shape.chart
            if chart.has_title and chart.chart_title.has_text_frame:
                yield chart.chart_title.text_frame.text
            plot = chart.plots[0]
            series = [(each.name or "", [*each.values]) for each in plot.series]
            names = [*map(str, plot.categories)]
            rows = [
                [name, *[str(v[at]) for _, v in series if at < len(v)]]
                for at, name in enumerate(names)
            ]
            yield table([["", *[name for name, _ in series]], *rows])
        elif shape.has_text_frame:
            yield guarded(shape.text_frame.text.replace("\v", "\n"))


def _pdf(raw: bytes) -> Converted:
    pdfium = require("pypdfium2", "documents")
    try:
        document = pdfium.PdfDocument(raw)
    except pdfium.PdfiumError as error:
        if "password" in str(error).casefold():
            raise UnreadableError("is password-protected") from None
        raise
    pages: list[str] = []
    for number in range(len(document)):
        page = document[number]
        text = page.get_textpage()
        pages.append(text.get_text_bounded().replace("\ufffe\r\n", "").replace("\ufffe", ""))
        text.close()
        page.close()
    empty = sum(not page.strip() for page in pages)
    if empty == len(pages):
        raise UnreadableError(f"none of its {len(pages)} pages holds text: it may be scanned")
    about = [f"{empty} of {len(pages)} pages hold no text"] if empty else []
    document.close()
    return "", "\n\n".join(_without_margins(pages)), about


def _without_margins(pages: list[str]) -> Iterator[str]:
    """Yield pages without the lines repeated at the top or the bottom of most of them."""
    lines = [[line.strip() for line in page.splitlines() if line.strip()] for page in pages]
    edges: list[set[str]] = [
        {_NUMBER.sub("0", line) for line in (*page[:_EDGE_LINES], *page[-_EDGE_LINES:])}
        for page in lines
    ]
    often = Counter([line for page in edges for line in page])
    least = max(_HEADER_PAGES, len(pages) / 2)
    for page in lines:
        last = len(page) - _EDGE_LINES
        yield "\n".join(
            [
                line
                for at, line in enumerate(page)
                if _EDGE_LINES <= at < last or often[_NUMBER.sub("0", line)] < least
            ]
        )


def _check_archive(raw: bytes) -> None:
    if raw.startswith(_COMPOUND):
        raise UnreadableError("is password-protected, or in a format older than 2007")
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            parts = [each for each in archive.infolist() if "/media/" not in each.filename]
    except (zipfile.BadZipFile, ValueError, OSError):
        raise UnreadableError("is truncated, or not what its name says") from None
    unpacked = sum(each.file_size for each in parts)
    if unpacked > _UNPACKED_BYTES + _UNPACKED_SHARE * len(raw):
        raise UnreadableError(f"unpacks to {unpacked >> 20:,} MiB")


CONVERTERS: dict[str, Callable[[bytes], Converted]] = {
    ".csv": _csv,
    ".docx": _word,
    ".htm": _html,
    ".html": _html,
    ".pdf": _pdf,
    ".pptx": _slides,
    ".tsv": _csv,
    ".xhtml": _html,
    ".xlsm": _workbook,
    ".xlsx": _workbook,
}
"""Converters by file extension; a file's kind is never guessed."""
_ARCHIVES = {".docx", ".pptx", ".xlsm", ".xlsx"}
