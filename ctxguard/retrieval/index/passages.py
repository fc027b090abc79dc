"""The passages of an index: which are valid, and how they are stored and read.

Each passage is one line of JSON in one block of bytes, in memory or mapped from a file, so that a
search reads only the passages that it returns. Rows are in the order of their ids: a tie broken by
row is a tie broken by passage id, and an index does not depend on the order of its input.
"""

import hashlib
import json
import mmap
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import Passage
from ctxguard.errors import DataError
from ctxguard.retrieval.index.filters import MetadataRows
from ctxguard.retrieval.protocols import RowArray

PASSAGES = "passages.jsonl"
OFFSETS = "passages.offsets.npy"
IDS = "passages.ids.json"

_METADATA_KEY = b', "metadata": '

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What happened to the passages that an index was built from.

    Attributes:
        indexed: Passages in the index.
        empty: Passages left out because they had neither text nor title.
        repaired: Passages in which lone surrogates, which no encoder accepts, were replaced by
            U+FFFD, the replacement character.
        unhandled_letters: Share of the passages' letters, in [0, 1], that are of scripts which the
            lexical index's analyser is not made for.
        script_warning: From 1% of such letters on, one sentence that says so and what to do; None
            below.
    """

    indexed: int
    empty: int
    repaired: int
    unhandled_letters: float = 0.0
    script_warning: str | None = None


def without_surrogates(text: str) -> str:
    """Text with each lone surrogate replaced by U+FFFD.

    >>> without_surrogates("a\\ud800b")
    'a\ufffdb'
    """
    return _LONE_SURROGATE.sub("\ufffd", text)


def validate_passages(passages: Iterable[Passage]) -> tuple[list[Passage], BuildReport]:
    """The passages that can be indexed, in the order of their ids, and what happened to the rest.

    Raises:
        DataError: a repeated or empty id, a field that is not a string, or no passage with a text
            or title.
    """
    valid: dict[str, Passage] = {}
    repeated: list[str] = []
    empty = repaired = total = 0
    for passage in passages:
        total += 1
        _check(passage, total)
        clean = _repaired(passage)
        repaired += clean is not passage
        if not clean.text.strip() and not clean.title.strip():
            empty += 1
        elif clean.passage_id in valid:
            repeated.append(clean.passage_id)
        else:
            valid[clean.passage_id] = clean
    if repeated:
        raise DataError(
            f"{len(repeated)} of {total} passages repeat the id of another, first "
            f"{repeated[0]!r}; give each passage an id of its own"
        )
    if not valid:
        raise DataError(
            "the corpus is empty: there is nothing to search"
            if total == 0
            else f"all {total} passages of the corpus have neither text nor title"
        )
    ordered = [valid[passage_id] for passage_id in sorted(valid)]
    return ordered, BuildReport(len(ordered), empty, repaired)


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


def searchable_text(passage: Passage) -> str:
    """The text that both legs index and a reranker reads: title and text."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


class PassageLines:
    """Passages by position, each read from its line of JSON when it is accessed.

    Args:
        lines: The lines, in one block of bytes.
        starts: Where each passage's line starts, shape (n,).
        ends: Where it ends, shape (n,).
    """

    def __init__(
        self, lines: bytes | mmap.mmap, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> None:
        self._lines = lines
        self._starts = starts
        self._ends = ends

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, position: int, /) -> Passage:
        record = json.loads(self._lines[self._starts[position] : self._ends[position]])
        return Passage(
            record["_id"], record["text"], record.get("title", ""), record.get("metadata")
        )

    def __iter__(self) -> Iterator[Passage]:
        return (self[position] for position in range(len(self)))


class PassageTable(PassageLines):
    """The passages of an index, by row.

    Attributes:
        ids: Every passage id, ascending.
    """

    def __init__(
        self, lines: bytes | mmap.mmap, offsets: NDArray[np.int64], ids: tuple[str, ...]
    ) -> None:
        super().__init__(lines, offsets[:-1], offsets[1:])
        self._offsets = offsets
        self.ids = ids
        self._ids_by_row = np.array(ids, dtype=object)

    @classmethod
    def of(cls, passages: Iterable[Passage]) -> "PassageTable":
        """Keep passages that ``validate_passages`` returned.

        Raises:
            DataError: metadata that JSON cannot hold.
        """
        lines, ids = [], []
        for passage in passages:
            lines.append(_line(passage))
            ids.append(passage.passage_id)
        offsets = np.cumsum([0, *map(len, lines)], dtype=np.int64)
        return cls(b"".join(lines), offsets, tuple(ids))

    def select(self, rows: RowArray) -> tuple[tuple[str, ...], PassageLines]:
        """The ids of rows, in their order, and their passages, which are read when accessed."""
        passages = PassageLines(self._lines, self._starts[rows], self._ends[rows])
        return tuple(self._ids_by_row[rows].tolist()), passages

    @cached_property
    def row_of(self) -> dict[str, int]:
        """The row of each passage id."""
        return {passage_id: row for row, passage_id in enumerate(self.ids)}

    @cached_property
    def metadata_rows(self) -> MetadataRows:
        """Which rows a filter on metadata allows."""
        return MetadataRows(self._each_metadata, len(self))

    def _each_metadata(self) -> Iterator[object]:
        """What each passage says of itself, by row, without reading its text.

        A line that cannot be read, or is not written as ``_line`` does, says nothing.
        """
        for start, end in pairwise(self._offsets.tolist()):
            line = self._lines[start:end]
            # Inside a text the quotes would be escaped, so this can only be the key.
            at = line.find(_METADATA_KEY)
            try:
                yield json.loads(line[at + len(_METADATA_KEY) : -2]) if at >= 0 else None
            except (ValueError, RecursionError):
                yield None

    def digest(self) -> str:
        """sha256 over every id, title and text; it does not depend on the order given."""
        digest = hashlib.sha256()
        for passage in self:
            fields = json.dumps([passage.passage_id, passage.title, passage.text])
            digest.update(fields.encode())
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the lines, their offsets and the ids."""
        (folder / PASSAGES).write_bytes(self._lines)
        np.save(folder / OFFSETS, self._offsets)
        (folder / IDS).write_text(json.dumps(self.ids, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "PassageTable":
        """Read what ``save`` wrote, the lines memory-mapped."""
        with (folder / PASSAGES).open("rb") as stream:
            lines = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        offsets = np.load(folder / OFFSETS, allow_pickle=False)
        ids = tuple(json.loads((folder / IDS).read_text(encoding="utf-8")))
        if offsets.shape != (len(ids) + 1,) or offsets[-1] != len(lines):
            raise ValueError(f"{PASSAGES}, {OFFSETS} and {IDS} do not belong together")
        return cls(lines, offsets, ids)


def _line(passage: Passage) -> bytes:
    record: dict[str, object] = {
        "_id": passage.passage_id,
        "title": passage.title,
        "text": passage.text,
    }
    try:
        if passage.metadata is not None:
            record["metadata"] = dict(passage.metadata)
        line = json.dumps(record, ensure_ascii=False)
        if _LONE_SURROGATE.search(line):
            # Only metadata has any left; replaced, two tenants could become one.
            line = json.dumps(record)
        return line.encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the metadata of passage {passage.passage_id!r} cannot be kept as JSON: {error}"
        ) from error
