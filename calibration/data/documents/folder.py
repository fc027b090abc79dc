"""Reads a document, or a folder of documents, as passages: each section is a passage.

Markdown and text are read as they are; HTML, PDF and Office files are converted first. The index
cuts sections that are longer than its model reads. Functions here add to ``left_out`` each file
that they do not read. Reads the folder, converts files in a process of its own, and writes only a
temporary file. Needs the extra `documents`.
"""

import os
import re
from collections import Counter, deque
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from calibration.data.documents.conversion import MAX_BYTES, Converter
from calibration.data.documents.converters import CONVERTERS
from calibration.data.documents.encodings import UnreadableError, decode
from calibration.data.documents.markdown import Section, read_markdown, without_data
from calibration.data.documents.repeats import SitePages
from ctxguard._support.extras import require
from ctxguard._support.regular_file import read_regular
from ctxguard.core.types import Passage
from ctxguard.errors import DataError

_MARKDOWN = {".md", ".markdown", ".mdx"}
_TEXT = {".txt", ".text", ".rst", ".pdf"}
"""Documents without headings; a PDF has none after conversion either."""
_PAGES = {".htm", ".html", ".xhtml"}

SUFFIXES = frozenset(_MARKDOWN | _TEXT | CONVERTERS.keys())
"""Extensions of documents."""

_NEEDED = {
    **dict.fromkeys(_PAGES, ("lxml", "markdownify")),
    ".docx": ("lxml", "mammoth", "markdownify"),
    ".pdf": ("pypdfium2",),
    ".pptx": ("pptx",),
}

_NOT_IN_ID = re.compile("[\\s%:#\x00-\x1f\x7f]")
_BROKEN = re.compile("[\ud800-\udfff]")
"""Bytes in a name that are not text."""
_BETWEEN_WORDS = re.compile(r"[^\w+#]+")
_MAX_HEADINGS = 160
"""The most characters that headings take in an id."""


class LeftOut(NamedTuple):
    """A file that was left out, or of which a part was.

    Attributes:
        path: Its path in the folder; that of a folder ends in a slash.
        reason: Why, worded to follow the path.
        unread: Whether it may be a document but could not be read at all: its passages stay in the
            index.
    """

    path: str
    reason: str
    unread: bool = False


def read_documents(path: Path, counts: Counter[str], left_out: list[LeftOut]) -> Iterator[Passage]:
    """Read a document, or a folder of them, one file at a time.

    A passage has the document's path and its heading as ``path`` and ``heading`` in the metadata,
    and an id of both, such as ``guides/kettle.md:kettle/cleaning``. The id does not depend on other
    sections, except those with the same headings: then a digest of the text is appended.

    Args:
        counts: Receives what was changed in the texts.
        left_out: Receives whatever is left out while reading.

    Raises:
        DataError: there is no document. While iterating: no document has text.
        MissingExtraError: one has to be converted, and the extra ``documents`` is missing.
    """
    files = _files(path, left_out)
    if not files:
        endings = ", ".join(sorted(SUFFIXES))
        why = f" ({_first_reasons(left_out)})" if left_out else ""
        raise DataError(
            f"contains no documents and no corpus.jsonl; documents end in {endings}{why}", path=path
        )
    for suffix in sorted({file.suffix.lower() for file in files.values()}):
        for library in _NEEDED.get(suffix, ()):
            require(library, "documents")
    require("semantic_text_splitter", "documents")
    return _read(path, files, counts, left_out)


def _read(
    path: Path, files: dict[str, Path], counts: Counter[str], left_out: list[LeftOut]
) -> Iterator[Passage]:
    n_passages = 0
    with Converter() as converter, SitePages() as pages:
        for name, title, sections in _documents(files, converter, pages, left_out):
            clean = [(headings, without_data(text, counts)) for headings, text in sections]
            found = [(headings, text) for headings, text in clean if text.strip()]
            if not found:
                left_out.append(LeftOut(name, "holds no text"))
            n_passages += len(found)
            yield from _passages(name, title, found)
    if not n_passages:
        raise DataError(f"contains no document with text ({_first_reasons(left_out)})", path=path)


def _first_reasons(left_out: list[LeftOut]) -> str:
    shown = [f"{each.path} {each.reason}" for each in left_out[:3]]
    return "; ".join(shown) + (f"; and {len(left_out) - 3:,} more" if len(left_out) > 3 else "")


def _documents(
    files: dict[str, Path], converter: Converter, pages: SitePages, left_out: list[LeftOut]
) -> Iterator[tuple[str, str, list[Section]]]:
    """Yield the name, title and sections of each document; HTML pages after all others."""
    page_names = []
    for name, file in files.items():
        suffix, title, without = file.suffix.lower(), "", list[str]()
        try:
            if file.stat().st_size == 0:
                raise UnreadableError("is empty")
            if suffix in CONVERTERS:
                title, text, without = converter.convert(file)
            else:
                text = decode(read_regular(file, MAX_BYTES))
        except (UnreadableError, OSError) as error:
            why = _unopened(error) if isinstance(error, OSError) else str(error)
            left_out.append(LeftOut(name, why, unread=True))
            continue
        left_out += [LeftOut(name, reason) for reason in without]
        if suffix in _PAGES:
            pages.add(title, text)
            page_names.append(name)
        elif suffix in _TEXT:
            yield name, "", [((), text)]
        else:
            yield name, *read_markdown(text, is_source=suffix in _MARKDOWN)
    for name, (title, markdown) in zip(page_names, pages.read(), strict=True):
        _, sections = read_markdown(markdown, is_source=False)
        # Most page titles also name the site: only a page without headings needs one.
        above = (title,) if title else ()
        yield name, "", [(headings or above, text) for headings, text in sections]


def _unopened(error: OSError) -> str:
    return f"cannot be opened: {error.strerror or error}"


def _passages(name: str, title: str, sections: list[Section]) -> Iterator[Passage]:
    path = _NOT_IN_ID.sub(_quoted, name)
    slugs = [_slug(headings) for headings, _ in sections]
    headings_of: dict[str, set[tuple[str, ...]]] = {}
    for slug, (headings, _) in zip(slugs, sections, strict=True):
        headings_of.setdefault(slug, set()).add(headings)
    n_equal, taken = Counter([headings for headings, _ in sections]), Counter[str]()
    for shared, (headings, text) in zip(slugs, sections, strict=True):
        slug = shared
        # A digest tells it from its namesakes; a number would shift with each new section.
        if len(headings_of[shared]) > 1:
            slug += f"~{_digest(*headings)}"
        if n_equal[headings] > 1:
            slug += f"~{_digest(text)}"
        passage_id = f"{path}:{slug}" if slug else path
        taken[passage_id] += 1
        if taken[passage_id] > 1:  # a copy, under the same headings
            passage_id += f"~{taken[passage_id]}"
        above = (title,) if title not in {"", *headings[:1]} else ()
        heading = " > ".join([*above, *headings])
        metadata = {"path": name, "heading": heading} if heading else {"path": name}
        yield Passage(passage_id, text, heading or Path(name).stem, metadata)


def _slug(headings: tuple[str, ...]) -> str:
    """Return headings as they appear in an id; a digest if they contain no letter."""
    words = [_BETWEEN_WORDS.sub("-", each.casefold()).strip("-") for each in headings]
    slug = "/".join([w or f"~{_digest(each)}" for w, each in zip(words, headings, strict=True)])
    slug = slug.replace("#", "%23")
    return slug if len(slug) <= _MAX_HEADINGS else f"{slug[:_MAX_HEADINGS]}~{_digest(*headings)}"


def _quoted(character: re.Match[str]) -> str:
    return quote(os.fsencode(character[0]), safe="")


def _digest(*texts: str) -> str:
    joined = "\0".join(texts).encode("utf-8", "surrogatepass")
    return blake2b(joined, digest_size=4).hexdigest()


def _files(path: Path, left_out: list[LeftOut]) -> dict[str, Path]:
    """List the documents by name, without hidden files and folders.

    Links are followed as far as they stay in the folder; a file with several names is read once,
    under its own.
    """
    if path.is_file():
        return {_BROKEN.sub(_quoted, path.name): path}
    root, found, taken = path.resolve(), dict[str, Path](), dict[Path, str]()
    folders, links = deque([("", root)]), deque[tuple[str, Path]]()

    def leave_out(name: str, reason: str, *, unread: bool = True) -> None:
        left_out.append(LeftOut(name, reason, unread))

    def take(name: str, file: Path) -> None:
        suffix = Path(name).suffix.lower()
        if suffix not in SUFFIXES:
            kind = f"ends in {suffix}" if suffix else "has no ending"
            leave_out(name, f"{kind}, a kind that is not read", unread=False)
        elif not file.is_file():
            leave_out(name, "is not a regular file")
        elif file.stat().st_size > MAX_BYTES:
            leave_out(name, f"is larger than {MAX_BYTES >> 20} MiB")
        elif name in found:
            leave_out(name, "has the name of another")
        else:
            found[name], taken[file] = file, name

    def follow(name: str, link: Path) -> None:
        try:
            target = link.resolve(strict=True)
        except (OSError, RuntimeError):
            leave_out(name, "is a link that leads nowhere")
            return
        if not target.is_relative_to(root):
            leave_out(name, "is a link that leads outside the folder")
        elif target in taken:
            leave_out(name, f"is a link to {taken[target] or './'}, which is read", unread=False)
        elif target.is_dir():
            folders.append((f"{name}/", target))
        else:
            take(name, target)

    while folders or links:
        if not folders:
            follow(*links.popleft())
            continue
        prefix, folder = folders.popleft()
        taken.setdefault(folder, prefix)
        try:
            seen = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
        except OSError as error:
            leave_out(prefix or "./", _unopened(error))
            continue
        for entry in sorted(seen, key=lambda entry: entry.name):
            name, file = prefix + _BROKEN.sub(_quoted, entry.name), folder / entry.name
            if entry.is_symlink():
                links.append((name, file))
            elif entry.is_dir():
                folders.append((f"{name}/", file))
            else:
                take(name, file)
    return dict(sorted(found.items()))
