"""Splits passages that are longer than an embedding model reads into chunks that it reads whole.

A chunk is a passage of its own. Its id is its parent's with ``#`` and a number from 1, it has its
parent's title and metadata, and names its parent in the metadata, so that labels of whole documents
can be read as labels of their chunks. Pure; needs the extra `embedded`, and to split also `chunk`.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

from ctxguard._support.extras import require
from ctxguard.core.types import Passage
from ctxguard.retrieval.index.passages import (
    CHUNK_OF,
    chunk_id,
    searchable_text,
    without_surrogates,
)

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_RULE = re.compile(r"[ \t|:-]+")
_SURELY_LONGER = 64
"""Characters per token beyond which a text's beginning is enough to tell that it is longer."""


class _Block(NamedTuple):
    """Lines that may be split, and those that each part must have around it: header or fence."""

    lines: list[str]
    above: str = ""
    below: str = ""


class PassageWindow:
    """The part of a passage that a model reads, measured in tokens.

    Args:
        tokenizer: The content of the model's ``tokenizer.json``.
        tokens: Number of tokens that it reads, including its own special tokens.
        prompt: Text that it puts before a passage.
    """

    def __init__(self, tokenizer: str, tokens: int, prompt: str = "") -> None:
        self._tokenizer: Any = require("tokenizers", "embedded").Tokenizer.from_str(tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._prompt = prompt
        self.tokens = tokens
        self._splitter = cache(self._new_splitter)

    def is_longer(self, text: str) -> bool:
        """Return whether a text is longer than the model reads."""
        start = text[: self.tokens * _SURELY_LONGER]
        if self._tokens_of(start) > self.tokens:
            return True
        return len(start) < len(text) and self._tokens_of(text) > self.tokens

    def split(self, text: str, heading: str = "") -> list[str]:
        """Split a text into chunks that fit the window; each begins with its heading.

        Chunks end at the end of a sentence, line or paragraph if they can. Each part of a table has
        its header, and each part of code its fence. A heading longer than three quarters of the
        window leaves room for a quarter.
        """
        room = max(self.tokens - self._tokens_of(heading), self.tokens // 4)
        blocks = [*_blocks(text)]
        if not any(block.above for block in blocks):
            return self._prose(text, room)
        chunks: list[str] = []
        taken = room + 1
        for piece in (piece for block in blocks for piece in self._pieces(block, room)):
            size = self._tokens_of(piece)
            if taken + size > room:
                chunks.append(piece)
                taken = size
            else:
                chunks[-1] += f"\n\n{piece}"
                taken += size
        return chunks

    def _pieces(self, block: _Block, room: int) -> list[str]:
        """Split a block into pieces that fit, each with the lines that it must have around it."""
        whole = "\n".join([each for each in (block.above, *block.lines, block.below) if each])
        if not block.above:
            return self._prose(whole, room)
        if self._tokens_of(whole) <= room:
            return [whole]
        left = room - self._tokens_of(f"{block.above}\n{block.below}")
        if left < room // 4:  # the header of a wide table
            return self._prose(whole, room)
        none = self._tokens_of("")
        pieces: list[list[str]] = []
        taken = left + 1
        for line in block.lines:
            size = self._tokens_of(line) - none
            for part in [line] if size <= left else self._prose(line, left):
                size = self._tokens_of(part) - none
                if taken + size > left:
                    pieces.append([])
                    taken = 0
                pieces[-1].append(part)
                taken += size
        around = (block.above, block.below)
        return ["\n".join([around[0], *each, *around[1:]]).rstrip("\n") for each in pieces]

    def _prose(self, text: str, room: int) -> list[str]:
        chunks: list[str] = self._splitter(room).chunks(text)
        return chunks

    def _tokens_of(self, text: str) -> int:
        return len(self._tokenizer.encode(self._prompt + text).ids)

    def _new_splitter(self, capacity: int) -> Any:
        library = require("semantic_text_splitter", "chunk")
        return library.TextSplitter.from_huggingface_tokenizer(self._tokenizer, capacity)


def chunked(passages: Iterable[Passage], window: PassageWindow) -> Iterator[Passage]:
    """Yield passages, splitting those that are longer than the model's window.

    Raises:
        MissingExtraError: a passage is longer, and the splitting library is not installed.
    """
    for passage in passages:
        if not window.is_longer(without_surrogates(searchable_text(passage))):
            yield passage
            continue
        text, title = without_surrogates(passage.text), without_surrogates(passage.title)
        heading = f"{title}\n" if title else ""
        metadata = {**(passage.metadata or {}), CHUNK_OF: passage.passage_id}
        for number, chunk in enumerate(window.split(text, heading), start=1):
            yield Passage(chunk_id(passage.passage_id, number), chunk, passage.title, metadata)


def _blocks(text: str) -> Iterator[_Block]:
    """Split a text into tables, fenced code, and the parts between them."""
    lines = text.split("\n")
    between: list[str] = []
    at = 0
    while at < len(lines):
        block, end = _code(lines, at) or _table(lines, at) or (None, at + 1)
        if block is None:
            between.append(lines[at])
        else:
            if any(map(str.strip, between)):
                yield _Block(between)
            yield block
            between = []
        at = end
    if any(map(str.strip, between)):
        yield _Block(between)


def _code(lines: list[str], at: int) -> tuple[_Block, int] | None:
    """Return the code that begins at a line, and where it ends."""
    opened = _FENCE.match(lines[at])
    if opened is None or "`" in opened[2]:
        return None
    for end in range(at + 1, len(lines)):
        closing = _FENCE.match(lines[end])
        if closing and closing[1].startswith(opened[1]) and not closing[2].strip():
            return _Block(lines[at + 1 : end], lines[at], lines[end]), end + 1
    return _Block(lines[at + 1 :], lines[at], opened[1]), len(lines)


def _table(lines: list[str], at: int) -> tuple[_Block, int] | None:
    """Return the table that begins at a line, and where it ends."""
    rule = lines[at + 1] if at + 1 < len(lines) else ""
    if "|" not in lines[at] or not ("-" in rule and "|" in rule and _RULE.fullmatch(rule)):
        return None
    end = at + 2
    while end < len(lines) and "|" in lines[end]:
        end += 1
    return _Block(lines[at + 2 : end], f"{lines[at]}\n{rule}"), end
