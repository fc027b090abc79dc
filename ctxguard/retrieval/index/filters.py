"""Finds the rows of an index that a filter allows.

A filter is applied inside the search, before the best are chosen, so that a search returns as many
allowed passages as its depth, where there are so many. The values of a field are read once and stay
in memory.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.fork_safety import OfProcess
from ctxguard.core.metadata_filter import Token, Where, tokens
from ctxguard.retrieval.protocols import RowArray

MAX_FIELDS = 16
MAX_CACHED_ROWS = 8_000_000
"""Rows cached for filters that were used before, 64 MiB; the least recently used go first."""
ROWS_OF_A_FILTER = 64
"""A cached filter takes the memory of as many rows besides those that it allows."""


@dataclass(frozen=True, slots=True, eq=False)
class AllowedRows:
    """The rows that a filter allows in one index.

    Attributes:
        rows: Ascending, shape (n_allowed,).
        n_passages: The size of the whole index.
    """

    rows: RowArray
    n_passages: int

    def hold(self, rows: RowArray) -> bool:
        """Tell whether every one of these rows is allowed."""
        return bool(np.isin(rows, self.rows, assume_unique=True).all())


class _Field:
    """The rows that hold each value of one field, added row by row, then put in order.

    Attributes:
        numbers: The number of each value, from 0.
    """

    def __init__(self) -> None:
        self.numbers: dict[Token, int] = {}
        self._held, self._at = array("q"), array("q")

    def add(self, row: int, value: object) -> None:
        for token in dict.fromkeys(tokens(value)):
            self._held.append(self.numbers.setdefault(token, len(self.numbers)))
            self._at.append(row)

    def in_order(self) -> Self:
        """Put the rows of value 0 first, ascending, then those of value 1, and so on."""
        held, rows = np.array(self._held, np.int64), np.array(self._at, np.int64)
        # Stable, so that the rows of each value stay ascending.
        self._rows: RowArray = rows[np.argsort(held, kind="stable")]
        counts = np.bincount(held, minlength=len(self.numbers))
        self._ends: RowArray = np.cumsum([0, *counts.tolist()], dtype=np.int64)
        del self._held, self._at
        return self

    def mask(self, wanted: frozenset[Token], n_passages: int) -> NDArray[np.bool_]:
        """Tell whether each row holds any of the values, shape (n_passages,)."""
        holds = np.zeros(n_passages, np.bool_)
        for token in wanted:
            number = self.numbers.get(token)
            if number is not None:
                holds[self._rows[self._ends[number] : self._ends[number + 1]]] = True
        return holds


def _read_fields(
    names: Iterable[str], each_metadata: Iterable[object]
) -> tuple[dict[str, _Field], frozenset[str]]:
    """Read fields in one pass.

    Returns:
        Each field that a passage has; and the names of all the fields that passages have.
    """
    wanted = {name: _Field() for name in names}
    existing: set[str] = set()
    for row, metadata in enumerate(each_metadata):
        # A line of a saved index may hold anything there.
        if not isinstance(metadata, Mapping):
            continue
        existing.update(metadata)
        for name, field in wanted.items():
            if name in metadata:
                field.add(row, metadata[name])
    fields = {name: field.in_order() for name, field in wanted.items() if name in existing}
    return fields, frozenset(existing)


class MetadataRows:
    """Finds the rows of one index that a filter on metadata allows. Safe for several threads.

    A field is read on first use; at most ``MAX_FIELDS`` fields stay in memory. While one thread
    reads a field, only threads that need an unread field wait. A field that no passage has costs
    nothing after the first filter, so that requests for made-up fields cannot keep a server busy.

    Args:
        read: Returns the metadata of every passage, by row.
        n_passages: The number of passages.
    """

    _lock = OfProcess(Lock)
    _reading = OfProcess(Lock)
    # By digest: an access list of thousands of ids would be kept as often as it is written.
    _cached = OfProcess[OrderedDict[bytes, AllowedRows]](OrderedDict)
    _cached_rows = OfProcess(int)

    def __init__(self, read: Callable[[], Iterable[object]], n_passages: int) -> None:
        self._read = read
        self._n_passages = n_passages
        self._names: frozenset[str] | None = None
        self._fields: OrderedDict[str, _Field] = OrderedDict()

    def allowed(self, where: Where) -> AllowedRows:
        """Find the rows that a filter allows."""
        digest = where.digest
        with self._lock:
            cached = self._cached.get(digest)
            if cached is not None:
                self._cached.move_to_end(digest)
                return cached
        allowed = AllowedRows(self._find(where), self._n_passages)
        with self._lock:
            # Another thread may have cached the same filter meanwhile.
            if digest not in self._cached:
                self._cached[digest] = allowed
                self._cached_rows += allowed.rows.size + ROWS_OF_A_FILTER
            while len(self._cached) > 1 and self._cached_rows > MAX_CACHED_ROWS:
                _, oldest = self._cached.popitem(last=False)
                self._cached_rows -= oldest.rows.size + ROWS_OF_A_FILTER
        return allowed

    def _find(self, where: Where) -> RowArray:
        nothing = np.zeros(0, np.int64)
        if not all(wanted for _, wanted in where.conditions):
            return nothing
        fields = self._named(where.fields)
        mask: NDArray[np.bool_] | None = None
        for name, wanted in where.conditions:
            field = fields.get(name)
            if field is None:
                return nothing
            holds = field.mask(wanted, self._n_passages)
            mask = holds if mask is None else mask & holds
        return nothing if mask is None else np.flatnonzero(mask)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields in memory, which a new generation should read before it answers."""
        with self._lock:
            return tuple(self._fields)

    def prepare(self, fields: Iterable[str]) -> None:
        """Read fields before the first filter needs them, all in one pass.

        Filters on fields in memory are answered meanwhile. The first ``MAX_FIELDS`` names are
        read. A field that no passage has is no error.
        """
        self._named(tuple(dict.fromkeys(fields))[:MAX_FIELDS])

    def _named(self, names: Sequence[str]) -> dict[str, _Field]:
        """Return the named fields that a passage has; those not read before are read now."""
        fields, unread = self._in_memory(names)
        if not unread:
            return fields
        with self._reading:
            # Another thread may have read them while this one waited.
            fields, unread = self._in_memory(names)
            if unread:
                read, existing = _read_fields(unread, self._read())
                fields |= read
                with self._lock:
                    self._names = existing
                    self._fields.update(read)
                    while len(self._fields) > MAX_FIELDS:
                        self._fields.popitem(last=False)
        return fields

    def _in_memory(self, names: Sequence[str]) -> tuple[dict[str, _Field], list[str]]:
        """Return the named fields that were read, and the names of others that may exist."""
        fields: dict[str, _Field] = {}
        unread: list[str] = []
        with self._lock:
            for name in names:
                field = self._fields.get(name)
                if field is not None:
                    self._fields.move_to_end(name)
                    fields[name] = field
                elif self._names is None or name in self._names:
                    unread.append(name)
        return fields, unread
