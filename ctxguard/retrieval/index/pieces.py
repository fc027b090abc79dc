"""Keeps the word pieces of an index's passages, to be matched against a query's pieces.

Pure, except that `Pieces.read` calls the model's tokenizer and may compute its table.
"""

from array import array
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray
from ctxguard.retrieval.index.lexical import SparseRows, idf, occurrences
from ctxguard.retrieval.protocols import RowArray, TokenEncoder

MOST_PIECES = 2_048
"""How many word pieces of a passage are read, from its beginning."""

_BLOCK = 64
"""How many passages are read at once."""


class Pieces(NamedTuple):
    """The distinct word pieces among the first `MOST_PIECES` of each passage; see `SparseRows`.

    ``weights`` are the inverse document frequency of each piece of the model, shape (n_pieces,).
    """

    numbers: NDArray[np.int32]
    starts: RowArray
    weights: FloatArray

    @classmethod
    def counted(cls, numbers: NDArray[np.int32], starts: RowArray, n_pieces: int) -> "Pieces":
        """Weigh passages' pieces by their rarity."""
        return cls(numbers, starts, idf(occurrences(numbers, n_pieces), starts.size - 1))

    @classmethod
    def read(cls, texts: Iterable[str], encoder: TokenEncoder) -> "Pieces":
        """Read the pieces of texts, a block at a time."""
        numbers, starts, each = array("i"), array("q", [0]), iter(texts)
        while block := list(islice(each, _BLOCK)):
            for row in encoder.pieces(block):
                distinct = np.unique(np.asarray(row[:MOST_PIECES], np.int32))
                numbers.frombytes(distinct.tobytes())
                starts.append(len(numbers))
        return cls.counted(
            np.frombuffer(numbers, np.int32),
            np.frombuffer(starts, np.int64),
            len(encoder.piece_table),
        )

    def joined(self, new: "Pieces", rows: RowArray) -> "Pieces":
        """Take rows from both, numbered consecutively."""
        both, _ = self.rows.followed_by(new.rows).taken(rows)
        return self.counted(both.numbers, both.starts, self.weights.size)

    @property
    def rows(self) -> SparseRows:
        """The pieces of each passage, each counted once."""
        ones = np.broadcast_to(np.ones(1, np.uint16), self.numbers.shape)  # takes no memory
        return SparseRows(self.numbers, ones, self.starts)
