"""The sentences of passages: their vectors and word pieces, and the signals that they give.

They come from the pass through the model that gives a passage its vector. A passage of 200 words
takes some 2 KB: 194 bytes a sentence, two a word piece. The vectors of single word pieces are not
kept here: they are one table for every index of a model, which its encoder gives.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
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
from ctxguard.retrieval.nibbles import row_bytes
from ctxguard.retrieval.protocols import NibbleArray, QueryTokens, RowArray, Sentences
from ctxguard.retrieval.signals.sentences import (
    NAMES,
    SentenceInputs,
    sentence_signals,
    weighted_pieces,
)

_FREQUENCIES = "frequencies"
_HEADER = struct.Struct("<4i")
_PIECES: Mapping[int, type] = {2: np.uint16, 4: np.int32}


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
        return piece_frequencies(self.sentences, rows, self.frequencies.size)


class SentenceIndex:
    """The sentences of passages by row, and the signals that they give for a query.

    Args:
        segments: The sentences of each segment.
        rows: Their rows.

    Attributes:
        n_vocabulary: Number of pieces that the model has.

    Raises:
        ValueError: the segments are not of one model.
    """

    def __init__(self, segments: Sequence[_Part], rows: Rows) -> None:
        self._segments, self._rows = segments, rows
        self.n_vocabulary: int = segments[0].frequencies.size
        self._row_bytes: int = segments[0].sentences.vectors.shape[1]
        frequencies = np.zeros(self.n_vocabulary, np.int64)
        for part, of_index in zip(segments, rows.of_segments, strict=True):
            shape = part.frequencies.size, part.sentences.vectors.shape[1]
            if shape != (self.n_vocabulary, self._row_bytes):
                raise ValueError("the sentences of segments are not of one model")
            deleted = np.flatnonzero(of_index < 0)
            frequencies += part.frequencies - part.frequencies_of(deleted)
        self._weights = idf(frequencies, len(rows))

    @classmethod
    def build(cls, sentences: Sentences, n_vocabulary: int) -> Self:
        """Keep the sentences of every row."""
        sentences = Sentences(*[read_only(each) for each in sentences])
        rows = Rows.whole(len(sentences.starts) - 1)
        frequencies = piece_frequencies(sentences, rows.stored, n_vocabulary)
        return cls([_Part(sentences, read_only(frequencies))], rows)

    @classmethod
    def over(cls, indexes: "Sequence[SentenceIndex]", rows: Rows) -> Self:
        """Read segments as one index."""
        segments = [each for index in indexes for each in index._segments]
        return cls(segments, rows)

    def merged(self) -> Self:
        """Store the sentences as one segment, without encoding anything."""
        sizes = np.concatenate([np.diff(each.sentences.starts, axis=0) for each in self._segments])
        n_bytes = sizes[self._rows.stored] @ [self._row_bytes, 2]
        return self.build(collected(map(self.taken, blocks(n_bytes))), self.n_vocabulary)

    def taken(self, rows: RowArray) -> Sentences:
        """Copy the sentences of some rows, in their order."""
        every = np.arange(rows.size)
        parts, places = [], []
        for (at, stored), part in zip(self._rows.split(rows), self._segments, strict=True):
            parts.append(part.sentences.at(stored))
            places.append(every[at])
        return Sentences.of(parts).at(np.argsort(np.concatenate(places)))

    def __len__(self) -> int:
        return len(self._rows)

    def signals(
        self, query: QueryTokens, rows: RowArray, table: NibbleArray
    ) -> dict[str, FloatArray]:
        """Compute the sentence family of some rows, shape (n,) each; see `signals.sentences`.

        A piece of the query weighs ln(1 + (n − df + ½) / (df + ½)), where df of n passages have
        it. All signals are NaN for a row without a piece, and for a query without one.

        Args:
            query: From the model that encoded the passages.
            rows: At least one.
            table: The model's, as `TokenEncoder.token_table` gives it.

        Raises:
            ConfigurationError: the query was encoded by another model.
        """
        places = rows if self._rows.is_plain else np.arange(rows.size)
        found = sentence_signals(self.inputs(query, rows, table), places)
        return dict(zip(NAMES, found, strict=True))

    def inputs(self, query: QueryTokens, rows: RowArray, table: NibbleArray) -> SentenceInputs:
        """Return a query's pieces with the sentences of some rows: of all in one plain segment.

        Raises:
            ConfigurationError: As for `signals`.
        """
        own = self._segments[0].sentences if self._rows.is_plain else self.taken(rows)
        return sentence_inputs(query, own, table, self._weights)

    def save(self, folder: Path) -> None:
        """Write the arrays of one segment."""
        ((sentences, frequencies),) = self._segments
        for name, array in (*sentences._asdict().items(), (_FREQUENCIES, frequencies)):
            np.save(folder / _file(name), array)

    @classmethod
    def load(cls, files: PartFiles) -> Self | None:
        """Read the files of ``save``; return None if there are none.

        Raises:
            ValueError, OSError: files that ``save`` did not write together.
        """
        if _file("vectors") not in files:
            return None
        sentences = Sentences(
            files.large_array(_file("vectors"), "uint8", ndim=2),
            files.large_array(_file("lengths"), "uint8"),
            files.large_array(_file("pieces"), "uint16", "int32"),
            files.array(_file("starts"), "int64", ndim=2),
        )
        frequencies = files.array(_file(_FREQUENCIES), "int32")
        _check(sentences, frequencies)
        part = _Part(Sentences(*[read_only(each) for each in sentences]), read_only(frequencies))
        return cls([part], Rows.whole(len(sentences.starts) - 1))


def sentence_inputs(
    query: QueryTokens, sentences: Sentences, table: NibbleArray, weights: FloatArray
) -> SentenceInputs:
    """Combine a query's pieces with the sentences of passages.

    Args:
        query: From the model that encoded the passages.
        sentences: The passages' sentences.
        table: The model's, as `TokenEncoder.token_table` gives it.
        weights: The weight of each piece, shape (n_vocabulary,).

    Raises:
        ConfigurationError: the query was encoded by another model.
    """
    pieces, states, shape = query.pieces, query.states, (weights.size, sentences.vectors.shape[1])
    is_known = not pieces.size or 0 <= pieces.min() <= pieces.max() < weights.size
    fits = len(states) == pieces.size and row_bytes(states.shape[1]) == shape[1]
    if not is_known or not fits or table.shape != shape:
        raise ConfigurationError(
            f"the query's {pieces.size} word pieces, with states of shape {states.shape}, and "
            f"the token table of shape {table.shape} are not those of the index's model "
            f"({shape[0]} pieces in rows of {shape[1]} bytes): encode the query with the index's "
            "embedder"
        )
    vectors, lengths, numbers, starts = sentences
    narrow: Any
    wide: Any
    narrow, wide = (numbers, None) if numbers.dtype == np.uint16 else (None, numbers)
    scaled, shares = weighted_pieces(states, weights[pieces])
    return SentenceInputs(scaled, shares, table, vectors, lengths, narrow, wide, starts)


def sentences_to_bytes(sentences: Sentences) -> list[bytes]:
    """Write the sentences of each row, for `sentences_from_bytes`."""
    vectors, lengths, pieces, starts = sentences
    written = []
    for (first, at), (end, last) in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        header = _HEADER.pack(end - first, vectors.shape[1], last - at, pieces.itemsize)
        arrays = (vectors[first:end], pieces[at:last], lengths[first:end])
        written.append(header + b"".join([each.tobytes() for each in arrays]))
    return written


def sentences_from_bytes(written: Sequence[bytes | memoryview]) -> Sentences:
    """Read rows that `sentences_to_bytes` wrote; at least one.

    Raises:
        ValueError: one is something else, or they are of several models.
    """
    vectors, pieces, lengths, sizes, forms = [], [], [], [(0, 0)], set()
    for each in written:
        row = memoryview(each)
        if len(row) < _HEADER.size:
            raise ValueError("sentences end before their sizes")
        n, width, n_pieces, piece_bytes = _HEADER.unpack_from(row)
        middle = _HEADER.size + n * width
        end = middle + n_pieces * piece_bytes
        if min(n, width, n_pieces) < 0 or end + n != len(row):
            raise ValueError(f"sentences take {len(row)} bytes, not {end + n}")
        forms.add((width, piece_bytes))
        sizes.append((n, n_pieces))
        vectors.append(row[_HEADER.size : middle])
        pieces.append(row[middle:end])
        lengths.append(row[end:])
    if len(forms) != 1 or (form := forms.pop())[1] not in _PIECES:
        raise ValueError("the sentences are of several models, or of none")
    return Sentences(
        np.frombuffer(b"".join(vectors), np.uint8).reshape(-1, form[0]),
        np.frombuffer(b"".join(lengths), np.uint8),
        np.frombuffer(b"".join(pieces), _PIECES[form[1]]),
        np.cumsum(sizes, axis=0),
    )


def piece_frequencies(sentences: Sentences, rows: RowArray, n_vocabulary: int) -> NDArray[np.int32]:
    """Count how many of some rows have each word piece, shape (n_vocabulary,)."""
    itself = read_only(np.arange(n_vocabulary, dtype=np.int32))
    starts = np.ascontiguousarray(sentences.starts[:, 1])
    return rows_with(sentences.pieces, starts, rows, itself, n_vocabulary).astype(np.int32)


def collected(parts: Iterable[Sentences]) -> Sentences:
    """`Sentences.of`, for sentences that may together be larger than memory; at least one part."""
    columns: list[Growing] = []
    end = np.zeros((1, 2), np.int64)
    for part in parts:
        if not columns:
            columns = [Growing(each.dtype) for each in part]
            columns[-1].extend(end)
        starts = end + part.starts[1:]
        for column, each in zip(columns, (*part[:-1], starts), strict=True):
            column.extend(each)
        end = end + part.starts[-1]
    return Sentences(*[column.array() for column in columns])


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
