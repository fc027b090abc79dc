"""Finds the rows of an index that a filter allows, and keeps the values of the fields it read.

A filter is applied inside the search, before the best are chosen, so that a search returns as many
allowed passages as its depth, if they exist. The first filter on a field calls ``read``, which may
read the index's file; threads share what is kept.
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


class MetadataRows:
    """Finds the rows of one index that a filter on metadata allows. Safe for several threads.

    A field is read on first use. While one thread reads a field, only threads that need an unread
    field wait. A field that no passage has costs nothing after the first filter, so that requests
    for made-up fields cannot keep a server busy.

    ``read`` returns the metadata of every passage, by row.
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
        if not all(wanted for _, wanted in where.conditions):
            return np.zeros(0, np.int64)
        self.prepare(where.fields)
        fields = self._fields
        if not all(name in fields for name in where.fields):
            return np.zeros(0, np.int64)
        allowed = np.ones(self._n_passages, np.bool_)
        for name, wanted in where.conditions:
            holds = np.zeros(self._n_passages, np.bool_)
            for token in wanted & fields[name].keys():
                holds[np.frombuffer(fields[name][token], np.int64)] = True
            allowed &= holds
        return np.flatnonzero(allowed)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields in memory, which a new generation should also read before it answers."""
        return tuple(self._fields)

    def prepare(self, names: Iterable[str]) -> None:
        """Read fields in one pass, before the first filter needs them; unknown ones are ignored."""
        names = tuple(names)
        if not self._unread(names):
            return
        with self._reading:
            # Another thread may have read them while this one waited.
            wanted: dict[str, _Field] = {name: {} for name in self._unread(names)}
            if not wanted:
                return
            existing: set[str] = set()
            for row, metadata in enumerate(self._read()):
                # A line of a saved index may hold anything there.
                if isinstance(metadata, Mapping):
                    existing.update(metadata)
                    for name in wanted.keys() & metadata.keys():
                        for token in dict.fromkeys(tokens(metadata[name])):
                            wanted[name].setdefault(token, array("q")).append(row)
            self._names = frozenset(existing)
            read = {name: field for name, field in wanted.items() if name in existing}
            self._fields = {**self._fields, **read}

    def _unread(self, names: Iterable[str]) -> list[str]:
        """List the fields that may exist but have not been read yet."""
        exist, fields = self._names, self._fields
        return [name for name in names if name not in fields and (exist is None or name in exist)]
