"""Finds the rows of an index that a filter allows, and keeps the values of the fields it read.

A filter is applied inside the search, before the best are chosen, so that a search returns as many
allowed passages as its depth, if they exist. No I/O; threads share what is kept.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping
from threading import Lock

import numpy as np

from ctxguard._support.fork_safety import OfProcess
from ctxguard.core.metadata_filter import Token, Where, tokens
from ctxguard.retrieval.protocols import RowArray

_Field = dict[Token, "array[int]"]
"""The rows, ascending, that hold each value of a field."""


def _read_fields(
    names: Iterable[str], each_metadata: Iterable[object]
) -> tuple[dict[str, _Field], frozenset[str]]:
    """Read the named fields that occur, and the names of all that occur, in one pass."""
    wanted: dict[str, _Field] = {name: {} for name in names}
    existing: set[str] = set()
    for row, metadata in enumerate(each_metadata):
        # A line of a saved index may hold anything there.
        if not isinstance(metadata, Mapping):
            continue
        existing.update(metadata)
        for name, field in wanted.items():
            if name in metadata:
                for token in dict.fromkeys(tokens(metadata[name])):
                    field.setdefault(token, array("q")).append(row)
    return {name: wanted[name] for name in wanted if name in existing}, frozenset(existing)


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
            fields = self._fields
            if all(name in fields for name in where.fields):
                allowed = np.ones(self._n_passages, np.bool_)
                for name, wanted in where.conditions:
                    holds = np.zeros(self._n_passages, np.bool_)
                    for token in wanted & fields[name].keys():
                        holds[np.frombuffer(fields[name][token], np.int64)] = True
                    allowed &= holds
                rows = np.flatnonzero(allowed)
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
