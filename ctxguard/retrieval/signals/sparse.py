"""Rows of numbered terms, as passages have them: word stems, or a model's word pieces. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray
from ctxguard.retrieval.protocols import Float32Array, RowArray

_MOST_COUNTED = np.iinfo(np.uint16).max
_PART = 2**20
"""Terms that are counted at once."""


class SparseRows(NamedTuple):
    """The distinct terms of passages, one passage after the other.

    Attributes:
        numbers: The number of each term, ascending in a passage, shape (n_entries,).
        counts: How often its passage has it, same shape.
        starts: Row i is from ``starts[i]`` to ``starts[i + 1]``, shape (n_rows + 1,).
    """

    numbers: NDArray[np.int32]
    counts: NDArray[np.uint16]
    starts: RowArray

    @classmethod
    def counted(cls, numbers: NDArray[np.int32], lengths: NDArray[np.integer]) -> "SparseRows":
        """Count the terms of one passage after the other, given with repetitions and lengths.

        >>> SparseRows.counted(np.array([5, 2, 5, 7], np.int32), np.array([3, 1])).counts.tolist()
        [1, 2, 1]
        """
        n_terms = int(numbers.max(initial=-1)) + 1
        row = np.repeat(np.arange(lengths.size), lengths)
        pairs, counts = np.unique(row * n_terms + numbers, return_counts=True)
        sizes = np.bincount(pairs // max(n_terms, 1), minlength=lengths.size)
        return cls(
            (pairs % max(n_terms, 1)).astype(np.int32),
            np.minimum(counts, _MOST_COUNTED).astype(np.uint16),
            np.concatenate(([0], np.cumsum(sizes))),
        )

    @classmethod
    def of(cls, rows: Sequence[NDArray[np.int32]]) -> "SparseRows":
        """Count the terms of each passage."""
        numbers = np.concatenate([np.zeros(0, np.int32), *rows])
        return cls.counted(numbers, np.array([len(row) for row in rows], np.int64))

    @property
    def row_of_each(self) -> RowArray:
        """The row of each entry."""
        return np.repeat(np.arange(self.starts.size - 1), np.diff(self.starts))

    def places(self, rows: RowArray) -> tuple[RowArray, RowArray]:
        """Find the entries of some rows, one row after the other, and where each row starts."""
        begin = self.starts[rows]
        starts = np.zeros(rows.size + 1, np.int64)
        np.cumsum(self.starts[rows + 1] - begin, out=starts[1:])
        return np.arange(starts[-1]) + np.repeat(begin - starts[:-1], np.diff(starts)), starts

    def taken(self, rows: RowArray) -> "SparseRows":
        """Copy some rows, in their order."""
        at, starts = self.places(rows)
        return SparseRows(self.numbers[at], self.counts[at], starts)

    def between(self, begin: int, end: int) -> "SparseRows":
        """Return the rows from ``begin`` to before ``end``, without copying their entries."""
        starts = self.starts[begin : end + 1]
        at = slice(starts[0], starts[-1])
        return SparseRows(self.numbers[at], self.counts[at], starts - starts[0])

    def followed_by(self, others: "SparseRows") -> "SparseRows":
        """Append rows."""
        return SparseRows(
            np.concatenate((self.numbers, others.numbers)),
            np.concatenate((self.counts, others.counts)),
            np.concatenate((self.starts, self.starts[-1] + others.starts[1:])),
        )


def occurrences(numbers: NDArray[np.int32], n_terms: int) -> NDArray[np.int64]:
    """Count each term, a part at a time: numpy copies what it counts in 64 bits."""
    counts = np.zeros(n_terms, np.int64)
    for at in range(0, numbers.size, _PART):
        counts += np.bincount(numbers[at : at + _PART], minlength=n_terms)
    return counts


def unit_weights(rows: SparseRows, weights: FloatArray) -> Float32Array:
    """Bring the weights of each row's entries to unit length; a row of zeros stays as it is."""
    row = rows.row_of_each
    lengths = np.sqrt(np.bincount(row, np.square(weights), rows.starts.size - 1))
    unit: Float32Array = (weights / np.where(lengths > 0.0, lengths, 1.0)[row]).astype(np.float32)
    return unit


def compact(numbers: NDArray[np.integer]) -> tuple[RowArray, RowArray]:
    """Return the distinct numbers, ascending, and the place of each number among them."""
    there = np.zeros(int(numbers.max(initial=-1)) + 1, np.bool_)
    there[numbers] = True
    distinct = np.flatnonzero(there)
    place = np.empty(there.size, np.int64)
    place[distinct] = np.arange(distinct.size)
    return distinct, place[numbers]
