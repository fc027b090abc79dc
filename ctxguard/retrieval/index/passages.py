"""Validates, stores and reads the passages of an index.

Each passage is one line of JSON in a block of bytes, in memory or mapped from a file, so that a
search reads only the passages that it returns. Rows are in the order of their ids: a tie broken by
row is a tie broken by passage id, and an index does not depend on the order of its input. Pure, but
for the mapped file.
"""

import hashlib
import json
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.corpus_sketch import CorpusSketch, DigestArray, passage_digest
from ctxguard.core.types import Hit, Passage, ReadTogether
from ctxguard.errors import DataError, IndexFolderError
from ctxguard.retrieval.index.filters import MetadataRows
from ctxguard.retrieval.protocols import RowArray

_METADATA_KEY = b', "metadata": '

_READ = 256
"""How many passages are read at once."""

CHUNK_OF = "chunk_of"
"""The metadata field in which a chunk names the passage it belongs to; see `retrieval.chunks`."""

_CHUNK_ID = re.compile(r".+#[1-9][0-9]*", re.DOTALL)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The numbers of passages that a build indexed, left out and repaired.

    Attributes:
        indexed: Passages in the index.
        empty: Passages left out because they had neither text nor title.
        repaired: Passages in which lone surrogates, which no encoder accepts, were replaced by
            U+FFFD.
        unhandled_letters: Share of the passages' letters, in [0, 1], in scripts that the lexical
            index's analyser does not support.
        script_warning: A warning with its mend if at least 1% of letters are such; else None.
    """

    indexed: int
    empty: int
    repaired: int
    unhandled_letters: float = 0.0
    script_warning: str | None = None


def without_surrogates(text: str) -> str:
    """Replace each lone surrogate with U+FFFD.

    >>> without_surrogates("a\\ud800b")
    'a\ufffdb'
    """
    return _LONE_SURROGATE.sub("\ufffd", text)


def read_passages(passages: Iterable[Passage]) -> "tuple[PassageTable, BuildReport]":
    """Keep the passages that can be indexed, in the order of their ids, and report the rest.

    Raises:
        DataError: a repeated or empty id, a field that is not a string, metadata that JSON cannot
            hold, or no passage with a text or title.
    """
    kept: dict[str, None] = {}
    lines, ends, digests = bytearray(), array("q"), array("Q")
    repeated: list[str] = []
    empty = repaired = total = 0
    for passage in passages:
        total += 1
        _check(passage, total)
        clean = _repaired(passage)
        repaired += clean is not passage
        if not clean.text.strip() and not clean.title.strip():
            empty += 1
        elif clean.passage_id in kept:
            repeated.append(clean.passage_id)
        else:
            lines += passage_line(clean)
            ends.append(len(lines))
            digests.append(passage_digest(clean))
            kept[clean.passage_id] = None
    if repeated:
        raise DataError(
            f"{len(repeated)} of {total} passages have the same id as another, such as "
            f"{repeated[0]!r}; give each passage a different id"
        )
    if not kept:
        raise DataError(
            "the corpus is empty: there is nothing to search"
            if total == 0
            else f"all {total} passages of the corpus have neither text nor title"
        )
    ids = list(kept)
    order = sorted(range(len(ids)), key=ids.__getitem__)
    block, offsets = bytearray(), array("q", [0])
    for at in order:
        block += lines[ends[at - 1] if at else 0 : ends[at]]
        offsets.append(len(block))
    table = PassageTable(
        np.frombuffer(block, np.uint8),
        np.frombuffer(offsets, np.int64),
        [ids[at] for at in order],
        np.frombuffer(digests, np.uint64)[order],
    )
    return table, BuildReport(len(ids), empty, repaired)


def _check(passage: Passage, position: int) -> None:
    for name in ("passage_id", "text", "title"):
        value = getattr(passage, name, None)
        if not isinstance(value, str):
            raise DataError(f"passage number {position} has {name} {value!r}; it must be a string")
    if not passage.passage_id:
        raise DataError(f"passage number {position} has an empty id")


def _repaired(passage: Passage) -> Passage:
    clean = Passage(
        without_surrogates(passage.passage_id),
        without_surrogates(passage.text),
        without_surrogates(passage.title),
        passage.metadata,
    )
    return passage if clean == passage else clean


def searchable_text(passage: Passage | Hit) -> str:
    """Join title and text into what both legs index and a reranker reads."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


def chunk_id(passage_id: str, number: int) -> str:
    """Return the id of a passage's chunk, numbered from 1."""
    return f"{passage_id}#{number}"


def is_chunk_id(passage_id: str) -> bool:
    """Return whether an id has the form of a chunk's id; only the passage tells for certain.

    >>> is_chunk_id("kettle#2"), is_chunk_id("kettle")
    (True, False)
    """
    return _CHUNK_ID.fullmatch(passage_id) is not None


def document_of(passage: Passage) -> str | None:
    """Return the id of a chunk's parent; None if the passage is not a chunk."""
    document = (passage.metadata or {}).get(CHUNK_OF)
    return document if isinstance(document, str) else None


@dataclass(eq=False, repr=False)
class PassageLines(ReadTogether):
    """Passages by position, each read from its line of JSON when it is accessed."""

    lines: NDArray[np.uint8]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def many(self, positions: Sequence[int]) -> list[Passage]:
        """Read the passages at these positions; refuse a file altered after it was opened."""
        passages: list[Passage] = []
        starts, ends = self.starts, self.ends
        try:
            for at in positions:
                record = json.loads(self.lines[starts[at] : ends[at]].tobytes())
                title, metadata = record.get("title", ""), record.get("metadata")
                passages.append(Passage(record["_id"], record["text"], title, metadata))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise IndexFolderError(
                f"a passage cannot be read ({type(error).__name__}): the files of the index were "
                "changed while it was in use; save it again and reload it"
            ) from error
        return passages

    def __iter__(self) -> Iterator[Passage]:
        return (self[position] for position in range(len(self)))

    def line(self, position: int) -> bytes:
        """Return the line of a passage, as `passage_line` wrote it."""
        return self.lines[self.starts[position] : self.ends[position]].tobytes()


class PassageTable(PassageLines):
    """The passages of an index, by row, in ascending order of their ids.

    ``offsets`` says where each line starts and the last ends, shape (n + 1,); ``digests`` identify
    each passage's id, title and text by 64 bits, shape (n,).
    """

    def __init__(
        self,
        lines: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        ids: Sequence[str],
        digests: DigestArray,
    ) -> None:
        super().__init__(lines, offsets[:-1], offsets[1:])
        self.ids: tuple[str, ...] = tuple(ids)
        self.offsets, self.digests = offsets, digests
        self.metadata_rows = MetadataRows(self._each_metadata, len(self))

    def texts(self, rows: Iterable[int] | None = None) -> Iterator[str]:
        """Yield the searchable text of some or all passages, reading a few at a time."""
        each = iter(range(len(self)) if rows is None else rows)
        while some := list(islice(each, _READ)):
            yield from map(searchable_text, self.many(some))

    def select(self, rows: RowArray) -> tuple[tuple[str, ...], PassageLines]:
        """Return the ids of rows, in their order, and their passages, read when accessed."""
        passages = PassageLines(self.lines, self.starts[rows], self.ends[rows])
        return tuple([self.ids[row] for row in rows.tolist()]), passages

    def row_of(self, passage_id: str) -> int | None:
        """Return the row of a passage; None if the index lacks it."""
        row = bisect_left(self.ids, passage_id)
        return row if row < len(self.ids) and self.ids[row] == passage_id else None

    def _each_metadata(self) -> Iterator[object]:
        """Yield each passage's metadata, by row, without reading its text; None if unreadable."""
        for line in map(self.line, range(len(self))):
            # Inside a text the quotes would be escaped, so this can only be the key.
            at = line.find(_METADATA_KEY)
            try:
                yield json.loads(line[at + len(_METADATA_KEY) : -2]) if at >= 0 else None
            except (ValueError, RecursionError):
                yield None

    @cached_property
    def sketch(self) -> CorpusSketch:
        """The sketch of all passages."""
        return CorpusSketch.of(self.digests)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the digests of ids, titles and texts; it ignores the corpus's order."""
        return hashlib.sha256(self.digests.astype("<u8").tobytes()).hexdigest()


def _refuse_one_key_twice(value: object) -> None:
    """Refuse ``{1: …, "1": …}``: JSON keys are strings, and one of two equal keys would be lost."""
    if isinstance(value, dict):
        names = {key if isinstance(key, str) else json.dumps(key) for key in value}
        if len(names) < len(value):
            raise ValueError("two of its keys become one in JSON, such as 1 and '1'")
        for each in value.values():
            _refuse_one_key_twice(each)
    elif isinstance(value, list | tuple):
        for each in value:
            _refuse_one_key_twice(each)


def passage_line(passage: Passage) -> bytes:
    """Write a passage as one line of JSON; equal passages have equal lines.

    Raises:
        DataError: metadata that JSON cannot hold.
    """
    record: dict[str, object] = {
        "_id": passage.passage_id,
        "title": passage.title,
        "text": passage.text,
    }
    try:
        if passage.metadata is not None:
            record["metadata"] = dict(passage.metadata)
            _refuse_one_key_twice(record["metadata"])
        line = json.dumps(record, ensure_ascii=False)
        if _LONE_SURROGATE.search(line):
            # Only metadata has any left; replaced, two tenants could become one.
            line = json.dumps(record)
        return line.encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"the metadata of passage {passage.passage_id!r} cannot be kept as JSON: {error}"
        ) from error
