"""Which stored row holds each passage of an edited index.

An edited index stores the passages of its base and, behind them, those of its tail: its *stored
rows*. A *row* counts only the passages that are there, in the order of their ids, as the rows of an
index without edits do.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ctxguard.retrieval.protocols import RowArray


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """Rows and stored rows of one edited index.

    Attributes:
        stored: The stored row of each row, shape (n,).
        rows: The row of each stored row, −1 where it was deleted, shape (n_stored,).
        n_base: Stored rows of the base; those of the tail follow.
    """

    stored: RowArray
    rows: RowArray
    n_base: int

    @classmethod
    def of(cls, base_ids: Sequence[str], tail_ids: Sequence[str], deleted: RowArray) -> "RowMap":
        """Merge the passages of a base and a tail.

        Args:
            base_ids: Ascending.
            tail_ids: Ascending; none that the base still holds.
            deleted: The rows of the base that were deleted.
        """
        n_base, n_tail = len(base_ids), len(tail_ids)
        is_there = np.ones(n_base, np.bool_)
        is_there[deleted] = False
        before: RowArray = np.concatenate((np.zeros(1, np.int64), np.cumsum(is_there)))
        in_base = [bisect_left(base_ids, passage_id) for passage_id in tail_ids]
        at: RowArray = before[np.array(in_base, np.int64)]
        stored = np.insert(np.flatnonzero(is_there), at, np.arange(n_base, n_base + n_tail))
        rows = np.full(n_base + n_tail, -1, np.int64)
        rows[stored] = np.arange(stored.size)
        # Compiled loops have one variant for arrays that cannot be written to.
        rows.flags.writeable = stored.flags.writeable = False
        return cls(stored, rows, n_base)

    @property
    def base_rows(self) -> RowArray:
        """The row of each row of the base, −1 where it was deleted."""
        return self.rows[: self.n_base]

    @property
    def tail_rows(self) -> RowArray:
        """The row of each row of the tail."""
        return self.rows[self.n_base :]

    def split(self, rows: RowArray) -> tuple[RowArray, RowArray]:
        """The rows of the base and of the tail that hold these rows, in the order given."""
        stored = self.stored[rows]
        in_base = stored < self.n_base
        return stored[in_base], stored[~in_base] - self.n_base
