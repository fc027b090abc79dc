"""The sentences of passages: their vectors and word pieces, and the signals that they give.

They come from the pass through the model that gives a passage its vector. A passage of 200 words
takes some 3 KB: 384 bytes a sentence, two a word piece.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.index.growing import Growing, blocks
from ctxguard.retrieval.index.kernels import rows_with
from ctxguard.retrieval.index.lexical import idf
from ctxguard.retrieval.index.part_files import (
    PartFiles,
    check_numbers,
    check_starts,
    read_only,
)
from ctxguard.retrieval.index.rows import Rows
from ctxguard.retrieval.protocols import Int8Array, QueryTokens, RowArray, Sentences
from ctxguard.retrieval.signals.sentences import (
    NAMES,
    SentenceInputs,
    sentence_signals,
    weighted_pieces,
)

_FREQUENCIES = "frequencies"
_TABLE = "table.npy"


class TokenTable(NamedTuple):
    """The state of each word piece of a model by itself.

    Attributes:
        table_id: Unique to the table.
        states: 127 times the unit vector of each piece, rounded, shape (n_vocabulary, d).
    """

    table_id: str
    states: Int8Array

    @classmethod
    def of(cls, states: Int8Array) -> "TokenTable":
        """Make a new table."""
        return cls(token_hex(8), read_only(states))

    def save(self, folder: Path) -> None:
        """Write an array into a folder that is there."""
        np.save(folder / _TABLE, self.states)

    @classmethod
    def load(cls, files: PartFiles, table_id: str) -> "TokenTable":
        """Read the files of ``save``.

        Raises:
            ValueError, OSError: the file is not one of ``save``.
        """
        return cls(table_id, read_only(files.array(_TABLE, "int8", ndim=2)))


class _Part(NamedTuple):
    """The sentences of a segment's passages, read-only.

    Attributes:
        sentences: The sentences of every row.
        frequencies: The number of rows that have each piece, shape (n_vocabulary,).
    """

    sentences: Sentences
    frequencies: NDArray[np.int32]

    def frequencies_of(self, rows: RowArray) -> NDArray[np.int32]:
        """Count how many of some rows have each piece, shape (n_vocabulary,)."""
        return _frequencies(self.sentences, rows, self.frequencies.size)


class SentenceIndex:
    """The sentences of passages by row, and the signals that they give for a query.

    Args:
        table: The model's token table.
        segments: The sentences of each segment.
        rows: Their rows.

    Attributes:
        table: As given.

    Raises:
        ValueError: the table and the sentences are not of one model.
    """

    def __init__(self, table: TokenTable, segments: Sequence[_Part], rows: Rows) -> None:
        self.table = table
        self._segments, self._rows = segments, rows
        frequencies = np.zeros(len(table.states), np.int64)
        for part, of_index in zip(segments, rows.of_segments, strict=True):
            if (part.frequencies.size, part.sentences.vectors.shape[1]) != table.states.shape:
                raise ValueError("the token table and the sentences are not of one model")
            deleted = np.flatnonzero(of_index < 0)
            frequencies += part.frequencies - part.frequencies_of(deleted)
        self._weights = idf(frequencies, len(rows))

    @classmethod
    def build(cls, table: TokenTable, sentences: Sentences) -> Self:
        """Keep the sentences of every row."""
        sentences = Sentences(*[read_only(each) for each in sentences])
        rows = Rows.whole(len(sentences.starts) - 1)
        frequencies = _frequencies(sentences, rows.stored, len(table.states))
        return cls(table, [_Part(sentences, read_only(frequencies))], rows)

    @classmethod
    def over(cls, indexes: "Sequence[SentenceIndex]", rows: Rows) -> Self:
        """Read segments as one index."""
        segments = [each for index in indexes for each in index._segments]
        return cls(indexes[0].table, segments, rows)

    def merged(self) -> Self:
        """Store the sentences as one segment, without encoding anything."""
        sizes = np.concatenate([np.diff(each.sentences.starts, axis=0) for each in self._segments])
        n_bytes = sizes[self._rows.stored] @ [self.table.states.shape[1], 2]
        return self.build(self.table, collected(map(self.taken, blocks(n_bytes))))

    def taken(self, rows: RowArray) -> Sentences:
        """Copy the sentences of some rows, in their order."""
        every = np.arange(rows.size)
        parts, places = [], []
        for (at, stored), part in zip(self._rows.split(rows), self._segments, strict=True):
            parts.append(sentences_at(part.sentences, stored))
            places.append(every[at])
        return sentences_at(Sentences.of(parts), np.argsort(np.concatenate(places)))

    def __len__(self) -> int:
        return len(self._rows)

    def signals(self, query: QueryTokens, rows: RowArray) -> dict[str, FloatArray]:
        """Compute the sentence family of some rows, shape (n,) each; see `signals.sentences`.

        A piece of the query weighs ln(1 + (n − df + ½) / (df + ½)), where df of n passages have
        it. All signals are NaN for a row without a piece, and for a query without one.

        Raises:
            ConfigurationError: the query was encoded by another model.
        """
        places = rows if self._rows.is_plain else np.arange(rows.size)
        found = sentence_signals(self.inputs(query, rows), places)
        return dict(zip(NAMES, found, strict=True))

    def inputs(self, query: QueryTokens, rows: RowArray) -> SentenceInputs:
        """Return a query's pieces with the sentences of some rows: of all in one plain segment.

        Raises:
            ConfigurationError: As for `signals`.
        """
        n_vocabulary, d = self.table.states.shape
        pieces, states = query.pieces, query.states
        is_known = not pieces.size or 0 <= pieces.min() <= pieces.max() < n_vocabulary
        if states.shape != (pieces.size, d) or not is_known:
            raise ConfigurationError(
                f"the query's {pieces.size} word pieces, with states of shape {states.shape}, are "
                f"not those of the index's model ({n_vocabulary} pieces, length {d}): encode the "
                "query with the index's embedder"
            )
        own = self._segments[0].sentences if self._rows.is_plain else self.taken(rows)
        vectors, lengths, numbers, starts = own
        narrow: Any
        wide: Any
        narrow, wide = (numbers, None) if numbers.dtype == np.uint16 else (None, numbers)
        scaled, shares = weighted_pieces(states, self._weights[pieces])
        return SentenceInputs(
            scaled, shares, self.table.states, vectors, lengths, narrow, wide, starts
        )

    def save(self, folder: Path) -> None:
        """Write the arrays of one segment."""
        ((sentences, frequencies),) = self._segments
        for name, array in (*sentences._asdict().items(), (_FREQUENCIES, frequencies)):
            np.save(folder / _file(name), array)

    @classmethod
    def load(cls, files: PartFiles, table: TokenTable | None) -> Self | None:
        """Read the files of ``save``; return None without a table.

        Raises:
            ValueError, OSError: files that ``save`` did not write together.
        """
        if table is None:
            return None
        sentences = Sentences(
            files.large_array(_file("vectors"), "int8", ndim=2),
            files.large_array(_file("lengths"), "uint8"),
            files.large_array(_file("pieces"), "uint16", "int32"),
            files.array(_file("starts"), "int64", ndim=2),
        )
        frequencies = files.array(_file(_FREQUENCIES), "int32")
        _check(sentences, frequencies)
        part = _Part(Sentences(*[read_only(each) for each in sentences]), read_only(frequencies))
        return cls(table, [part], Rows.whole(len(sentences.starts) - 1))


def _frequencies(sentences: Sentences, rows: RowArray, n_vocabulary: int) -> NDArray[np.int32]:
    itself = read_only(np.arange(n_vocabulary, dtype=np.int32))
    starts = np.ascontiguousarray(sentences.starts[:, 1])
    return rows_with(sentences.pieces, starts, rows, itself, n_vocabulary).astype(np.int32)


def sentences_at(sentences: Sentences, rows: RowArray) -> Sentences:
    """Copy the sentences of some rows, in their order."""
    vectors, lengths, pieces, starts = sentences
    begin, sizes = starts[rows], (starts[1:] - starts[:-1])[rows]
    new_starts = np.zeros((rows.size + 1, 2), np.int64)
    np.cumsum(sizes, axis=0, out=new_starts[1:])
    shift = begin - new_starts[:-1]
    sentence, piece = (
        np.repeat(shift[:, at], sizes[:, at]) + np.arange(new_starts[-1, at]) for at in (0, 1)
    )
    return Sentences(vectors[sentence], lengths[sentence], pieces[piece], new_starts)


def collected(parts: Iterable[Sentences]) -> Sentences:
    """`Sentences.of`, for sentences that may together be larger than memory; at least one part."""
    columns: list[Growing] = []
    starts, end = [np.zeros((1, 2), np.int64)], np.zeros(2, np.int64)
    for *arrays, own_starts in parts:
        columns = columns or [Growing(each.dtype) for each in arrays]
        for column, each in zip(columns, arrays, strict=True):
            column.extend(each)
        starts.append(end + own_starts[1:])
        end = end + own_starts[-1]
    vectors, lengths, pieces = (column.array() for column in columns)
    return Sentences(vectors, lengths, pieces, np.concatenate(starts))


def _check(sentences: Sentences, frequencies: NDArray[np.int32]) -> None:
    """Refuse arrays with which the compiled loops would read outside of them.

    Digests are not checked on every load.
    """
    vectors, lengths, pieces, starts = sentences
    if starts.shape[1] != 2:
        raise ValueError(f"the sentences' starts have shape {starts.shape}")
    n_passages = len(starts) - 1
    check_starts("the sentences of passages", starts[:, 0], n_passages, len(vectors))
    check_starts("the sentences' word pieces", starts[:, 1], n_passages, pieces.size)
    fit = len(vectors) == lengths.size
    for rows in blocks(np.diff(starts[:, 0]) + 1):
        first, _ = begin = starts[rows[0]]
        own = starts[rows[0] : rows[-1] + 2] - begin
        ends = np.cumsum(np.append(0, lengths[first : first + own[-1, 0]]), dtype=np.int64)
        fit = fit and bool((ends[own[:, 0]] == own[:, 1]).all())
    if not fit:
        raise ValueError("the sentences, their pieces and the passages do not belong together")
    check_numbers("the word pieces", pieces, frequencies.size)
    check_numbers("the passages with a word piece", frequencies, n_passages + 1)


def _file(name: str) -> str:
    return f"sentences.{name}.npy"
