"""Finds the rows of an index that a filter allows, and keeps the values of the fields it read.

A filter is applied inside the search, before the best are chosen, so that a search returns as many
allowed passages as its depth, if they exist. Pure.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.fork_safety import OfProcess
from ctxguard.core.metadata_filter import Token, Where, tokens
from ctxguard.retrieval.protocols import RowArray


class _Field:
    """The rows that hold each value of one field, added row by row, then put in order."""

    def __init__(self) -> None:
        # Values are numbered from 0.
        self._numbers: dict[Token, int] = {}
        self._held, self._at = array("q"), array("q")

    def add(self, row: int, value: object) -> None:
        for token in dict.fromkeys(tokens(value)):
            self._held.append(self._numbers.setdefault(token, len(self._numbers)))
            self._at.append(row)

    def in_order(self) -> Self:
        """Put the rows of value 0 first, ascending, then those of value 1, and so on."""
        held, rows = np.array(self._held, np.int64), np.array(self._at, np.int64)
        # Stable, so that the rows of each value stay ascending.
        self._rows: RowArray = rows[np.argsort(held, kind="stable")]
        counts = np.bincount(held, minlength=len(self._numbers))
        self._ends: RowArray = np.cumsum([0, *counts.tolist()], dtype=np.int64)
        del self._held, self._at
        return self

    def mask(self, wanted: frozenset[Token], n_passages: int) -> NDArray[np.bool_]:
        """Return whether each row holds any of the values, shape (n_passages,)."""
        holds = np.zeros(n_passages, np.bool_)
        for token in wanted:
            number = self._numbers.get(token)
            if number is not None:
                holds[self._rows[self._ends[number] : self._ends[number + 1]]] = True
        return holds


def _read_fields(
    names: Iterable[str], each_metadata: Iterable[object]
) -> tuple[dict[str, _Field], frozenset[str]]:
    """Read the named fields that occur, and the names of all that occur, in one pass."""
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

    A field is read on first use. While one thread reads a field, only threads that need an unread
    field wait. A field that no passage has costs nothing after the first filter, so that requests
    for made-up fields cannot keep a server busy.

    Args:
        read: Returns the metadata of every passage, by row.
    """

    _reading = OfProcess(Lock)

    def __init__(self, read: Callable[[], Iterable[object]], n_passages: int) -> None:
        self._read = read
        self._n_passages = n_passages
        self._names: frozenset[str] | None = None
        # Replaced as a whole, so that nobody waits to look a field up.
        self._fields: dict[str, _Field] = {}

    def allowed(self, where: Where) -> RowArray:
        """Find the rows that a filter allows, ascending, shape (n_allowed,)."""
        rows: RowArray = np.zeros(0, np.int64)
        if all(wanted for _, wanted in where.conditions):
            self.prepare(where.fields)
            fields, n = self._fields, self._n_passages
            if all(name in fields for name in where.fields):
                masks = [fields[name].mask(wanted, n) for name, wanted in where.conditions]
                rows = np.flatnonzero(np.logical_and.reduce(masks))
        return rows

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields in memory, which a new generation should read before it answers."""
        return tuple(self._fields)

    def prepare(self, names: Iterable[str]) -> None:
        """Read fields in one pass, before the first filter needs them; unknown ones are ignored."""
        names = tuple(names)
        if not self._unread(names):
            return
        with self._reading:
            # Another thread may have read them while this one waited.
            if unread := self._unread(names):
                read, self._names = _read_fields(unread, self._read())
                self._fields = {**self._fields, **read}

    def _unread(self, names: Iterable[str]) -> list[str]:
        """List the fields that may exist but were not read yet."""
        exist, fields = self._names, self._fields
        return [name for name in names if name not in fields and (exist is None or name in exist)]
