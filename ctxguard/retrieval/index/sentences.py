"""The sentences of passages: their vectors and word pieces, and the signals that they give.

They come from the pass through the model that gives a passage its vector. A passage of 200 words
takes some 2 KB: 194 bytes a sentence, two a word piece. The vectors of single word pieces are not
kept here: they are one table for every index of a model, which its encoder gives.
"""

from collections.abc import Iterable, Sequence
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
        frequencies = _frequencies(sentences, rows.stored, n_vocabulary)
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
        pieces, states, n_vocabulary = query.pieces, query.states, self.n_vocabulary
        is_known = not pieces.size or 0 <= pieces.min() <= pieces.max() < n_vocabulary
        if (
            len(states) != pieces.size
            or not is_known
            or row_bytes(states.shape[1]) != self._row_bytes
            or table.shape != (n_vocabulary, self._row_bytes)
        ):
            raise ConfigurationError(
                f"the query's {pieces.size} word pieces, with states of shape {states.shape}, and "
                f"the token table of shape {table.shape} are not those of the index's model "
                f"({n_vocabulary} pieces in rows of {self._row_bytes} bytes): encode the query "
                "with the index's embedder"
            )
        own = self._segments[0].sentences if self._rows.is_plain else self.taken(rows)
        vectors, lengths, numbers, starts = own
        narrow: Any
        wide: Any
        narrow, wide = (numbers, None) if numbers.dtype == np.uint16 else (None, numbers)
        scaled, shares = weighted_pieces(states, self._weights[pieces])
        return SentenceInputs(scaled, shares, table, vectors, lengths, narrow, wide, starts)

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


def _frequencies(sentences: Sentences, rows: RowArray, n_vocabulary: int) -> NDArray[np.int32]:
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
