"""Reads a folder of documents, or one, as passages: a section under a heading is a passage.

Markdown and text are read as they are; HTML, PDF and Office files are turned into Markdown by
markitdown first. The index cuts sections that are longer than its model reads.
"""

import logging
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from calibration.data.text_files import notes_of, shown
from ctxguard._support.extras import require
from ctxguard.core.types import Passage
from ctxguard.errors import DataError

_MARKDOWN = {".md", ".markdown", ".mdx"}
_TEXT = {".txt", ".text", ".rst"}
_CONVERTERS = {
    ".docx": "DocxConverter",
    ".htm": "HtmlConverter",
    ".html": "HtmlConverter",
    ".pdf": "PdfConverter",
    ".pptx": "PptxConverter",
    ".xhtml": "HtmlConverter",
    ".xlsx": "XlsxConverter",
}
"""Those of markitdown, by name: no guess at a file's kind, and none that asks a service."""

SUFFIXES = frozenset(_MARKDOWN | _TEXT | _CONVERTERS.keys())
"""Names of documents end in these."""

_MAX_BYTES = 100 * 2**20

_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_FENCE = re.compile(r"\s{0,3}(```+|~~~+)")
_HEADING = re.compile(r"\s{0,3}(#{1,6})\s+(.*?)\s*#*\s*")
_UNDERLINE = re.compile(r"(=+|--+)\s*")
_NO_TITLE = re.compile(r"\s*([-*+>|#]|\d+[.)]\s|$)")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_MARKUP = re.compile(r"!?\[([^\]]*)\]\([^)]*\)|[*_`]+|<[^>]+>")


class Section(NamedTuple):
    """Text under a heading.

    Attributes:
        headings: The heading and those above it, outermost first; empty before the first.
        text: What follows, up to the next heading.
    """

    headings: tuple[str, ...]
    text: str


def sections(markdown: str) -> list[Section]:
    """Cut Markdown at its headings; a heading without text of its own makes no section.

    >>> sections("Hello.\\n# Kettle\\n## Cleaning\\nUse vinegar.")
    [Section(headings=(), text='Hello.'), Section(headings=('Kettle', 'Cleaning'), \
text='Use vinegar.')]
    """
    found: list[Section] = []
    above: list[tuple[int, str]] = []
    lines: list[str] = []
    fence = ""

    def close() -> None:
        text = "\n".join(lines).strip()
        if text:
            found.append(Section(tuple([heading for _, heading in above]), text))
        lines.clear()

    def open_section(level: int, heading: str) -> None:
        close()
        while above and above[-1][0] >= level:
            above.pop()
        above.append((level, _MARKUP.sub(r"\1", heading).strip()))

    for line in _FRONT_MATTER.sub("", markdown.replace("\r\n", "\n")).split("\n"):
        opened = _FENCE.match(line)
        if fence or opened:
            lines.append(line)
            if not fence and opened:
                fence = opened[1]
            elif opened and opened[1].startswith(fence):
                fence = ""
            continue
        heading, underline = _HEADING.fullmatch(line), _UNDERLINE.fullmatch(line)
        if heading:
            open_section(len(heading[1]), heading[2])
        elif underline and lines and not _NO_TITLE.match(lines[-1]):
            title = lines.pop()
            open_section(1 if underline[1][0] == "=" else 2, title)
        else:
            lines.append(line)
    close()
    return found


def read_documents(path: Path, counts: Counter[str]) -> Iterator[Passage]:
    """Read a folder of documents, or a single one, a file at a time.

    A passage has the document's path and its heading as ``path`` and ``heading`` in the metadata,
    and an id of both, such as ``guides/kettle.md:cleaning``.

    Args:
        path: The folder or file.
        counts: Receives the files that were left out.

    Raises:
        DataError: there is no document. While iterating: none of them holds text.
        MissingExtraError: one has to be converted, and the extra ``documents`` is missing.
    """
    files = _files(path, counts)
    if not files:
        endings = ", ".join(sorted(SUFFIXES))
        raise DataError(
            f"holds no document and no corpus.jsonl; documents end in {endings}", path=path
        )
    library: Any = None
    if any(file.suffix.lower() in _CONVERTERS for file in files):
        library = require("markitdown", "documents")
        require("markitdown.converters", "documents")
        logging.getLogger("pdfminer").setLevel(logging.ERROR)
    require("semantic_text_splitter", "documents")
    return _read(path, files, library, counts)


def _read(
    path: Path, files: Iterable[Path], library: Any, counts: Counter[str]
) -> Iterator[Passage]:
    n_passages, unreadable = 0, ""
    folder = path if path.is_dir() else path.parent
    for file in files:
        name = file.relative_to(folder).as_posix()
        try:
            found = _sections(file, library)
        except Exception as error:
            reason = shown(" ".join(f"{type(error).__name__}: {error}".split()))
            unreadable = unreadable or f"documents could not be read, first {name}: {reason}"
            counts[unreadable] += 1
            continue
        if not found:
            counts["documents without text"] += 1
        for passage in _passages(name, found):
            n_passages += 1
            yield passage
    if not n_passages:
        raise DataError(f"holds no document with text ({'; '.join(notes_of(counts))})", path=path)


def _sections(file: Path, library: Any) -> list[Section]:
    suffix = file.suffix.lower()
    if suffix not in _CONVERTERS:
        text = file.read_text(encoding="utf-8-sig", errors="replace")
        if suffix in _MARKDOWN:
            return sections(text)
        return [Section((), text)] if text.strip() else []
    converter = getattr(library.converters, _CONVERTERS[suffix])()
    with file.open("rb") as stream, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = converter.convert(stream, library.StreamInfo(extension=suffix))
    title = (converted.title or "").strip()
    return [
        Section((title,), text) if title and not headings else Section(headings, text)
        for headings, text in sections(_COMMENT.sub("", converted.markdown))
    ]


def _passages(name: str, found: Iterable[Section]) -> Iterator[Passage]:
    """Make passages of sections; of a heading that stands twice, the second's id ends in 2."""
    path = re.sub(r"\s+", "_", name)
    taken: Counter[str] = Counter()
    for headings, text in found:
        slug = re.sub(r"\W+", "-", headings[-1].casefold()).strip("-") if headings else ""
        passage_id = f"{path}:{slug}" if slug else path
        taken[passage_id] += 1
        if taken[passage_id] > 1:
            passage_id = f"{passage_id}:{taken[passage_id]}"
        heading = " > ".join(headings)
        metadata = {"path": name, "heading": heading} if heading else {"path": name}
        yield Passage(passage_id, text, heading or Path(name).stem, metadata)


def _files(path: Path, counts: Counter[str]) -> list[Path]:
    """List the documents by name; not hidden files and folders and links to elsewhere."""
    if path.is_file():
        return [path]
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if name.startswith(".") or file.is_symlink() or not file.is_file():
                continue
            if file.suffix.lower() not in SUFFIXES:
                counts["files of other kinds left out"] += 1
            elif file.stat().st_size > _MAX_BYTES:
                counts[f"documents of more than {_MAX_BYTES >> 20} MiB left out"] += 1
            else:
                found.append(file)
    return found
