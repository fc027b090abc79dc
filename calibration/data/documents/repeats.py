"""Finds menus and footers by their repetition on most pages of a site.

Keeps the pages in a temporary file, and touches no other file.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from hashlib import blake2b

_LEAST_PAGES, _LEAST_SHARE = 3, 0.2
_FEW_WORDS = 12

_FENCE = re.compile(r"(`{3,})")
_LINK = re.compile(r"\[([^\[\]]*)\]\([^()]*\)")
_MARKS = re.compile(r"[\W_]+")


class SitePages(AbstractContextManager["SitePages"]):
    """A site's pages as Markdown, without the parts that repeat.

    Pages are first added, to a file that the context manager deletes, then read once, in order.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  closed on exit
        self._pages: Counter[bytes] = Counter()
        self._n_pages = 0

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, title: str, markdown: str) -> None:
        """Add a page."""
        self._file.write(json.dumps([title, markdown]) + "\n")
        self._pages.update({_digest(block) for block in _blocks(markdown)})
        self._n_pages += 1

    def read(self) -> Iterator[tuple[str, str]]:
        """Yield the title and the Markdown of each page.

        What stands on a fifth of them, and three at least, is left out where it is a list of links,
        or short text before the first heading or after all other text. A paragraph at these places
        is kept on the first page that has it.
        """
        least = max(_LEAST_PAGES, _LEAST_SHARE * self._n_pages)
        seen: set[bytes] = set()
        self._file.seek(0)
        for line in self._file:
            title, markdown = json.loads(line)
            yield title, "\n\n".join(self._own(_blocks(markdown), least, seen))

    def _own(self, blocks: list[str], least: float, seen: set[bytes]) -> list[str]:
        often = [self._pages[_digest(block)] >= least for block in blocks]
        own = [at for at, b in enumerate(blocks) if not often[at] or _is_heading(b)]
        if not own:  # the whole page repeats: it is not a menu
            return blocks
        first, last = own[0], own[-1]
        if _is_heading(blocks[last]):  # and so is what stands under a heading of its own
            last = len(blocks)
        kept = []
        for at, block in enumerate(blocks):
            if often[at] and _is_links(block):
                continue
            if first <= at <= last:
                kept.append(block)
            elif len(block.split()) > _FEW_WORDS and _digest(block) not in seen:
                seen.add(_digest(block))
                kept.append(block)
        return kept


def _blocks(markdown: str) -> list[str]:
    """Split Markdown at its blank lines, except in code."""
    blocks: list[list[str]] = [[]]
    fence = ""
    for line in markdown.split("\n"):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence):
            fence = ""
        if line.strip() or fence:
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    return ["\n".join(block) for block in blocks if block]


def _is_heading(block: str) -> bool:
    return block.startswith("#")


def _is_links(block: str) -> bool:
    """Return whether nearly all words of a block are links."""
    around = len(_MARKS.sub("", _LINK.sub("", block)))
    linked = sum(len(_MARKS.sub("", text)) for text in _LINK.findall(block))
    return linked > 4 * around


def _digest(block: str) -> bytes:
    return blake2b(block.encode("utf-8", "surrogatepass"), digest_size=12).digest()
