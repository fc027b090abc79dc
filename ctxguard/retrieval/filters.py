"""Which rows of an index a filter allows, and both legs' searches among those alone.

A filter is applied inside the search, before the best are taken, so that a pool holds as many
allowed passages as were asked for wherever they exist. What a field holds is read once for each
generation of an index and kept with it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ctxguard.forks import start_afresh_in_children
from ctxguard.retrieval.protocols import Float32Array, LexicalHits, RowArray
from ctxguard.types import FloatArray
from ctxguard.where import Token, Where, tokens

if TYPE_CHECKING:
    from ctxguard.retrieval.dense import DenseIndex

MAX_FIELDS = 16
MAX_CACHED_ROWS = 8_000_000
"""Rows kept for filters asked before, 64 MiB; the least recently used go first."""

_BLOCK = 256
"""Vectors gathered at a time: few enough to stay in the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class AllowedRows:
    """The rows that a filter allows in one index.

    Attributes:
        rows: Ascending.
        n_passages: Of the whole index.
    """

    rows: RowArray
    n_passages: int

    def hold(self, rows: RowArray) -> bool:
        """Whether every one of these rows is allowed."""
        return bool(np.isin(rows, self.rows, assume_unique=True).all())


@dataclass(frozen=True, slots=True, eq=False)
class _Field:
    """The rows that hold each value of one field.

    Attributes:
        numbers: Of the values, from 0.
        rows: Those of the first value, ascending, then those of the second, and so on.
        ends: Value n has ``rows[ends[n] : ends[n + 1]]``.
    """

    numbers: Mapping[Token, int]
    rows: RowArray
    ends: RowArray

    def mask(self, wanted: frozenset[Token], n_passages: int) -> NDArray[np.bool_]:
        """Which of all rows hold any of the values."""
        found = np.zeros(n_passages, np.bool_)
        for token in wanted:
            number = self.numbers.get(token)
            if number is not None:
                found[self.rows[self.ends[number] : self.ends[number + 1]]] = True
        return found


class _Values:
    """The values of one field as they are come by, row after row."""

    def __init__(self) -> None:
        self._numbers: dict[Token, int] = {}
        self._held, self._rows = array("q"), array("q")

    def add(self, row: int, value: object) -> None:
        for token in dict.fromkeys(tokens(value)):
            self._held.append(self._numbers.setdefault(token, len(self._numbers)))
            self._rows.append(row)

    def field(self) -> _Field:
        of_value, rows = np.array(self._held, np.int64), np.array(self._rows, np.int64)
        # Stable, so that the rows of each value stay ascending.
        order = np.argsort(of_value, kind="stable")
        counts = np.bincount(of_value, minlength=len(self._numbers))
        ends = np.cumsum([0, *counts.tolist()], dtype=np.int64)
        return _Field(self._numbers, rows[order], ends)


def _read_fields(
    names: Iterable[str], each_metadata: Iterable[object]
) -> tuple[dict[str, _Field], frozenset[str]]:
    """Those of the fields that a passage has, and the names of all that there are; in one pass."""
    wanted = {name: _Values() for name in names}
    there: set[str] = set()
    for row, metadata in enumerate(each_metadata):
        # A line of a saved index may hold anything there.
        if not isinstance(metadata, Mapping):
            continue
        there.update(metadata)
        for name, values in wanted.items():
            if name in metadata:
                values.add(row, metadata[name])
    fields = {name: values.field() for name, values in wanted.items() if name in there}
    return fields, frozenset(there)


class MetadataRows:
    """What the fields of one generation's passages hold; read on first use, and bounded.

    Safe to use from several threads at once: while one reads a field, only who needs a field that
    was not read yet waits. A field that no passage has costs nothing after the first filter, so
    that asking for absent ones in turn is no way to keep a server busy.

    Args:
        read: Gives the metadata of every passage, by row.
        n_passages: How many there are.
    """

    def __init__(self, read: Callable[[], Iterable[object]], n_passages: int) -> None:
        self._read = read
        self._n_passages = n_passages
        self._names: frozenset[str] | None = None
        self._fields: OrderedDict[str, _Field] = OrderedDict()
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Forget the filters asked before and take new locks; for a forked child."""
        self._asked: OrderedDict[Where, AllowedRows] = OrderedDict()
        self._cached_rows = 0
        self._lock = Lock()
        self._reading = Lock()

    def allowed(self, where: Where) -> AllowedRows:
        """The rows that a filter allows."""
        with self._lock:
            found = self._asked.get(where)
            if found is not None:
                self._asked.move_to_end(where)
                return found
        found = AllowedRows(self._rows(where), self._n_passages)
        with self._lock:
            # Another thread may have asked the same meanwhile.
            if where not in self._asked:
                self._asked[where] = found
                self._cached_rows += found.rows.size
            while self._cached_rows > MAX_CACHED_ROWS and len(self._asked) > 1:
                _, oldest = self._asked.popitem(last=False)
                self._cached_rows -= oldest.rows.size
        return found

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that were read so far, and a new generation should read beforehand."""
        with self._lock:
            return tuple(self._fields)

    def prepare(self, fields: Iterable[str]) -> None:
        """Read fields before the first filter asks for them, all in one pass.

        Filters on other fields are answered meanwhile. Of more than ``MAX_FIELDS`` the first are
        read; one that no passage has is no error.
        """
        self._held(tuple(dict.fromkeys(fields))[:MAX_FIELDS])

    def _rows(self, where: Where) -> RowArray:
        nothing = np.zeros(0, np.int64)
        if not all(wanted for _, wanted in where.conditions):
            return nothing
        held = self._held(where.fields)
        mask: NDArray[np.bool_] | None = None
        for name, wanted in where.conditions:
            field = held.get(name)
            if field is None:
                return nothing
            found = field.mask(wanted, self._n_passages)
            mask = found if mask is None else mask & found
        return nothing if mask is None else np.flatnonzero(mask)

    def _held(self, names: Sequence[str]) -> dict[str, _Field]:
        """Those of the fields that a passage has; what was not read yet is read now."""
        held, unread = self._looked_up(names)
        if not unread:
            return held
        with self._reading:
            # Another thread may have read them while this one waited.
            held, unread = self._looked_up(names)
            if unread:
                read, there = _read_fields(unread, self._read())
                held |= read
                with self._lock:
                    self._names = there
                    self._fields.update(read)
                    while len(self._fields) > MAX_FIELDS:
                        self._fields.popitem(last=False)
        return held

    def _looked_up(self, names: Sequence[str]) -> tuple[dict[str, _Field], list[str]]:
        """The fields that were read already, and the names of those that may be there unread."""
        held: dict[str, _Field] = {}
        unread: list[str] = []
        with self._lock:
            for name in names:
                field = self._fields.get(name)
                if field is not None:
                    self._fields.move_to_end(name)
                    held[name] = field
                elif self._names is None or name in self._names:
                    unread.append(name)
        return held, unread


def among(hits: LexicalHits, allowed: AllowedRows, k: int) -> LexicalHits:
    """The at most ``k`` best of the allowed rows that score above zero, ties by row.

    Scores are those of the whole index: how rare a word is was counted over all its passages.
    """
    scores = hits.every[allowed.rows]
    matching = np.flatnonzero(scores > 0.0)
    rows, scores = allowed.rows[matching], scores[matching]
    best = _best(scores, k)
    return LexicalHits(rows[best], scores[best].astype(np.float64), hits.every)


def nearest_among(
    dense: "DenseIndex", vector: Float32Array, k: int, allowed: AllowedRows, *, exact_limit: int
) -> tuple[RowArray, FloatArray]:
    """The at most ``k`` allowed rows nearest to a unit vector, best first, with their cosines.

    Up to ``exact_limit`` allowed vectors are all compared; above, all codes are and the
    best allowed ones' vectors.
    """
    rows = allowed.rows
    k = min(k, rows.size)
    if not dense.is_exact and rows.size > exact_limit:
        found, cosines = dense.search_codes(vector, k, allowed)
        if found.size == k:
            return found, cosines
    scores = np.empty(rows.size, np.float32)
    buffer = np.empty((min(_BLOCK, rows.size), dense.dimension), np.float32)
    for start in range(0, rows.size, _BLOCK):
        block = rows[start : start + _BLOCK]
        gathered = buffer[: block.size]
        np.take(dense.vectors, block, axis=0, out=gathered, mode="clip")
        np.dot(gathered, vector, out=scores[start : start + block.size])
    best = _best(scores, k)
    return rows[best], scores[best].astype(np.float64)


def _best(scores: Float32Array, k: int) -> RowArray:
    """Positions of the ``k`` highest scores, best first, ties by position."""
    if scores.size > k > 0:
        least = np.partition(scores, scores.size - k)[scores.size - k]
        candidates = np.flatnonzero(scores >= least)
    else:
        candidates = np.arange(scores.size)
    return candidates[np.argsort(-scores[candidates], kind="stable")[:k]]
