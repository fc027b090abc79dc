"""Which rows of an index a filter allows, and both legs' searches among those alone.

A filter is applied inside the search, before the best are taken, so that a pool holds as many
allowed passages as were asked for wherever they exist. What a field holds is read once for each
generation of an index and kept with it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
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


class _Field:
    """The rows that hold each value of one field."""

    def __init__(self, numbers: dict[Token, int], rows: RowArray, ends: RowArray) -> None:
        self._numbers = numbers
        self._rows = rows
        self._ends = ends

    @classmethod
    def read(cls, name: str, each_metadata: Iterable[Mapping[str, object]]) -> "_Field":
        numbers: dict[Token, int] = {}
        held, rows = array("q"), array("q")
        for row, metadata in enumerate(each_metadata):
            for token in dict.fromkeys(tokens(metadata.get(name))):
                held.append(numbers.setdefault(token, len(numbers)))
                rows.append(row)
        of_value = np.frombuffer(held, np.int64) if held else np.zeros(0, np.int64)
        all_rows = np.frombuffer(rows, np.int64) if rows else np.zeros(0, np.int64)
        # Stable, so that the rows of each value stay ascending.
        order = np.argsort(of_value, kind="stable")
        counts = np.bincount(of_value, minlength=len(numbers))
        return cls(numbers, all_rows[order], np.cumsum([0, *counts.tolist()], dtype=np.int64))

    def mask(self, wanted: frozenset[Token], n_passages: int) -> NDArray[np.bool_]:
        """Which of all rows hold any of the values."""
        found = np.zeros(n_passages, np.bool_)
        for token in wanted:
            number = self._numbers.get(token)
            if number is not None:
                found[self._rows[self._ends[number] : self._ends[number + 1]]] = True
        return found


class MetadataRows:
    """What the fields of one generation's passages hold; read on first use, and bounded.

    Safe to use from several threads at once. A field that no passage has costs nothing after the
    first filter, so that asking for absent ones in turn is no way to keep a server busy.

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
        """Forget the filters asked before and take a new lock; for a forked child."""
        self._asked: OrderedDict[Where, AllowedRows] = OrderedDict()
        self._cached_rows = 0
        self._lock = Lock()

    def allowed(self, where: Where) -> AllowedRows:
        """The rows that a filter allows."""
        with self._lock:
            found = self._asked.get(where)
            if found is not None:
                self._asked.move_to_end(where)
                return found
            found = AllowedRows(self._rows(where), self._n_passages)
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
        """Read fields before the first filter asks for them."""
        for name in fields:
            with self._lock:
                self._field(name)

    def _rows(self, where: Where) -> RowArray:
        mask: NDArray[np.bool_] | None = None
        for name, wanted in where.conditions:
            field = self._field(name)
            if field is None or not wanted:
                return np.zeros(0, np.int64)
            held = field.mask(wanted, self._n_passages)
            mask = held if mask is None else mask & held
        return np.flatnonzero(mask) if mask is not None else np.zeros(0, np.int64)

    def _field(self, name: str) -> _Field | None:
        if self._names is not None and name not in self._names:
            return None
        field = self._fields.get(name)
        if field is None:
            names: set[str] = set()
            field = _Field.read(name, self._each(names))
            self._names = frozenset(names)
            if name not in names:
                return None
            self._fields[name] = field
            if len(self._fields) > MAX_FIELDS:
                self._fields.popitem(last=False)
        self._fields.move_to_end(name)
        return field

    def _each(self, names: set[str]) -> Iterator[Mapping[str, object]]:
        """The metadata of every passage; notes the names of its fields on the way."""
        for metadata in self._read():
            # A line of a saved index may hold anything there.
            known = metadata if isinstance(metadata, Mapping) else {}
            names.update(known)
            yield known


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
