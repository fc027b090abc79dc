"""The rows of an index, and the rows of its segments that hold them.

An index stores the passages of its segments one segment after the other: its *stored rows*. A *row*
counts only the passages that are there, in the order of their ids, whatever segment holds them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ctxguard.retrieval.index.part_files import PartFiles
from ctxguard.retrieval.protocols import RowArray

_DELETED = "deleted.npy"


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows and stored rows of one index.

    Attributes:
        of_segments: For each segment, the row of each of its rows; −1 where it was deleted.
        stored: The stored row of each row, shape (n,).
        starts: The first stored row of each segment, then their total, shape (n_segments + 1,).
        is_plain: Whether there is one segment, all of which is there: rows are stored rows.
    """

    of_segments: tuple[RowArray, ...]
    stored: RowArray
    starts: RowArray
    is_plain: bool

    @classmethod
    def of(cls, of_segments: Sequence[RowArray]) -> "Rows":
        """Take the row of each row of each segment, −1 where it was deleted."""
        rows = np.concatenate(of_segments)
        there = np.flatnonzero(rows >= 0)
        stored = np.empty(there.size, np.int64)
        stored[rows[there]] = there
        starts = np.cumsum([0, *map(len, of_segments)], dtype=np.int64)
        # Shared with every index that has the segment.
        for array in (stored, *of_segments):
            array.flags.writeable = False
        is_plain = len(of_segments) == 1 and stored.size == rows.size
        return cls(tuple(of_segments), stored, starts, is_plain)

    @classmethod
    @lru_cache(maxsize=1)
    def whole(cls, n_passages: int) -> "Rows":
        """Number the rows of one segment; all that is kept of its passages shares them."""
        rows = np.arange(n_passages)
        rows.flags.writeable = False
        return cls((rows,), rows, np.array([0, n_passages]), is_plain=True)

    @classmethod
    def in_order(cls, ids: Sequence[Sequence[str]], kept: Sequence[NDArray[np.bool_]]) -> "Rows":
        """Number the rows that segments keep in the order of their ids.

        Args:
            ids: The ids of each segment, ascending; none is kept twice.
            kept: Which rows of each segment are there.
        """
        there = np.flatnonzero(np.concatenate(kept))
        names = np.concatenate([np.array(each, object) for each in ids])[there]
        rows = np.full(sum(map(len, ids)), -1, np.int64)
        # Timsort: the ids of each segment are in order already.
        rows[there[np.argsort(names, kind="stable")]] = np.arange(there.size)
        return cls.of([each.copy() for each in np.split(rows, _bounds(ids))])

    def __len__(self) -> int:
        return self.stored.size

    def kept_without(self, gone: RowArray) -> list[NDArray[np.bool_]]:
        """Tell which rows of each segment are there without some rows of the index."""
        kept = [rows >= 0 for rows in self.of_segments]
        for each, (_, rows) in zip(kept, self.split(gone), strict=True):
            each[rows] = False
        return kept

    def split(self, rows: RowArray) -> Iterator[tuple[RowArray | slice, RowArray]]:
        """Yield for each segment the positions of its rows among ``rows``, and its own rows."""
        if self.is_plain:
            yield slice(None), rows
            return
        stored = self.stored[rows]
        for start, end in pairwise(self.starts.tolist()):
            at = np.flatnonzero((start <= stored) & (stored < end))
            yield at, stored[at] - start

    def save(self, folder: Path) -> None:
        """Write the stored rows that were deleted into a folder that is there."""
        np.save(folder / _DELETED, np.flatnonzero(np.concatenate(self.of_segments) < 0))

    @classmethod
    def load(cls, files: PartFiles, ids: Sequence[Sequence[str]]) -> "Rows":
        """Read the files of ``save``, for the segments of these ids.

        Raises:
            ValueError, OSError: the file is not one of ``save`` for them.
        """
        deleted, kept = files.array(_DELETED, "int64"), np.ones(sum(map(len, ids)), np.bool_)
        if deleted.size and not 0 <= deleted[0] <= deleted[-1] < kept.size:
            raise ValueError(f"{_DELETED} names a row that no segment has")
        if (np.diff(deleted) <= 0).any():
            raise ValueError(f"{_DELETED} is not as it was saved")
        kept[deleted] = False
        return cls.in_order(ids, np.split(kept, _bounds(ids)))


def _bounds(ids: Sequence[Sequence[str]]) -> RowArray:
    return np.cumsum([len(each) for each in ids[:-1]], dtype=np.int64)
