"""The sentences of passages: their vectors and word pieces, and what they say of a query.

They come from the pass through the model that gives a passage its vector. A passage of 200 words
takes some 3 KB: 384 bytes a sentence, two a word piece.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.index.lexical import idf, read_only
from ctxguard.retrieval.index.part_files import PartFiles
from ctxguard.retrieval.index.row_map import RowMap
from ctxguard.retrieval.protocols import Int8Array, QueryTokens, RowArray, Sentences

_FREQUENCIES = "frequencies"
_TABLE = "table.npy"


class TokenTable(NamedTuple):
    """The state of each word piece of a model by itself.

    Attributes:
        table_id: No other table has it.
        states: 127 times the unit vector of each piece, rounded, shape (n_vocabulary, d).
    """

    table_id: str
    states: Int8Array

    @classmethod
    def of(cls, states: Int8Array) -> "TokenTable":
        """A new table."""
        return cls(token_hex(8), read_only(states))

    def save(self, folder: Path) -> None:
        """Write an array into a folder that is there."""
        np.save(folder / _TABLE, self.states)

    @classmethod
    def load(cls, files: PartFiles, table_id: str) -> "TokenTable":
        """Read what ``save`` wrote.

        Raises:
            ValueError, OSError: it is not what ``save`` wrote.
        """
        states = files.array(_TABLE)
        if states.dtype != np.int8 or states.ndim != 2:
            raise ValueError(f"{_TABLE} holds {states.dtype} of shape {states.shape}")
        return cls(table_id, read_only(states))


class SentenceIndex:
    """The sentences of passages by row.

    Args:
        sentences: Of every row.
        frequencies: How many rows have each piece, shape (n_vocabulary,); None to count them.
        n_vocabulary: How many pieces the model has, where they are to be counted.

    Attributes:
        sentences: As given, read-only.
        frequencies: As given or counted, read-only.
    """

    def __init__(
        self,
        sentences: Sentences,
        frequencies: NDArray[np.int32] | None = None,
        *,
        n_vocabulary: int = 0,
    ) -> None:
        # Read-only whether built or mapped, so that numba compiles one variant of each loop.
        self.sentences = Sentences(*map(read_only, sentences))
        self._n_vocabulary = n_vocabulary if frequencies is None else frequencies.size
        rows = np.arange(len(self))
        self.frequencies = read_only(
            self.frequencies_of(rows) if frequencies is None else frequencies
        )

    @classmethod
    def joined(cls, indexes: "Sequence[SentenceIndex]", rows: Sequence[RowArray]) -> Self:
        """One index of several, without encoding anything; arguments as for `Segment.joined`."""
        kept = [np.flatnonzero(new >= 0) for new in rows]
        parts = [_taken(each.sentences, at) for each, at in zip(indexes, kept, strict=True)]
        order = np.argsort(np.concatenate([new[at] for new, at in zip(rows, kept, strict=True)]))
        return cls(_taken(Sentences.of(parts), order), n_vocabulary=indexes[0].frequencies.size)

    def frequencies_of(self, rows: RowArray) -> NDArray[np.int32]:
        """How many of some rows have each piece, shape (n_vocabulary,)."""
        _, _, pieces, starts = self.sentences
        frequencies: NDArray[np.int32] = _kernels().rows_with_pieces(
            pieces, starts, rows, self._n_vocabulary
        )
        return frequencies

    def __len__(self) -> int:
        return len(self.sentences.starts) - 1

    def save(self, folder: Path) -> None:
        """Write the arrays."""
        for name, array in self.sentences._asdict().items():
            np.save(folder / _file(name), array)
        np.save(folder / _file(_FREQUENCIES), self.frequencies)

    @classmethod
    def load(cls, files: PartFiles) -> Self | None:
        """Read what ``save`` wrote; None where it wrote nothing.

        Raises:
            ValueError, OSError: files that ``save`` did not write together.
        """
        if _file(_FREQUENCIES) not in files:
            return None
        vectors, lengths, pieces = (
            files.large_array(_file(name)) for name in ("vectors", "lengths", "pieces")
        )
        sentences = Sentences(vectors, lengths, pieces, files.array(_file("starts")))
        frequencies = files.array(_file(_FREQUENCIES))
        _check(sentences, frequencies)
        return cls(sentences, frequencies)


class SearchedSentences:
    """The sentences of one generation of an index, and what they say of a query.

    Args:
        table: The model's token table.
        base: The base's sentences.
        tail: The tail's; None for an index without edits.
        row_map: Which of their passages are there; None for an index without edits.

    Attributes:
        table: As given.

    Raises:
        ValueError: the table and the sentences are not of one model.
    """

    def __init__(
        self,
        table: TokenTable,
        base: SentenceIndex,
        tail: SentenceIndex | None = None,
        row_map: RowMap | None = None,
    ) -> None:
        self.table = table
        self._base, self._tail, self._row_map = base, tail, row_map
        for part in (base, base if tail is None else tail):
            if (part.frequencies.size, part.sentences.vectors.shape[1]) != table.states.shape:
                raise ValueError("the token table and the sentences are not of one model")
        frequencies, n_passages = base.frequencies.astype(np.int64), len(base)
        if tail is not None and row_map is not None:
            gone = np.flatnonzero(row_map.base_rows < 0)
            frequencies += tail.frequencies - base.frequencies_of(gone)
            n_passages = row_map.stored.size
        self._weights = idf(frequencies, n_passages)

    def signals(self, query: QueryTokens, rows: RowArray) -> dict[str, FloatArray]:
        """The sentence family of some rows, shape (n,) each; see `signals.sentences`.

        A piece of the query weighs ln(1 + (n − df + ½) / (df + ½)), where df of n passages have
        it. All signals are NaN for a row without a piece, and for a query without one.

        Raises:
            ConfigurationError: the query was encoded by another model.
        """
        n_vocabulary, d = self.table.states.shape
        pieces, states = query.pieces, query.states
        is_known = ((pieces >= 0) & (pieces < n_vocabulary)).all()
        if states.shape != (pieces.size, d) or not is_known:
            raise ConfigurationError(
                f"the query's {pieces.size} word pieces, with states of shape {states.shape}, are "
                f"not those of the index's model ({n_vocabulary} pieces, length {d}): encode the "
                "query with the index's embedder"
            )
        loops = _loops()
        found = np.full((rows.size, len(loops.NAMES)), np.nan)
        if pieces.size:
            states, weights = loops.weighted_pieces(states, self._weights[pieces])
            for at, part, part_rows in self._split(rows):
                found[at] = loops.sentence_signals(
                    states, weights, self.table.states, *part.sentences, part_rows
                )
        return dict(zip(loops.NAMES, np.ascontiguousarray(found.T), strict=True))

    def taken(self, rows: RowArray) -> SentenceIndex:
        """The sentences of some rows, each once, in their order."""
        parts, new_rows = [], []
        for at, part, part_rows in self._split(rows):
            new = np.full(len(part), -1)
            new[part_rows] = np.arange(rows.size)[at]
            parts.append(part)
            new_rows.append(new)
        return SentenceIndex.joined(parts, new_rows)

    def _split(
        self, rows: RowArray
    ) -> Iterator[tuple[NDArray[np.bool_] | slice, SentenceIndex, RowArray]]:
        """The rows by part: their positions, the part, and its rows."""
        if self._tail is None or self._row_map is None:
            yield slice(None), self._base, rows
            return
        stored = self._row_map.stored[rows]
        in_tail = stored >= len(self._base)
        yield ~in_tail, self._base, stored[~in_tail]
        yield in_tail, self._tail, stored[in_tail] - len(self._base)


def _taken(sentences: Sentences, rows: RowArray) -> Sentences:
    """The sentences of some rows, in their order."""
    vectors, lengths, pieces, starts = sentences
    begin, sizes = starts[rows], (starts[1:] - starts[:-1])[rows]
    new_starts = np.zeros((rows.size + 1, 2), np.int64)
    np.cumsum(sizes, axis=0, out=new_starts[1:])
    shift = begin - new_starts[:-1]
    sentence, piece = (
        np.repeat(shift[:, at], sizes[:, at]) + np.arange(new_starts[-1, at]) for at in (0, 1)
    )
    return Sentences(vectors[sentence], lengths[sentence], pieces[piece], new_starts)


def _check(sentences: Sentences, frequencies: NDArray[np.int32]) -> None:
    """Refuse arrays with which the compiled loops would read outside of them.

    Digests are not checked on every load.
    """
    vectors, lengths, pieces, starts = sentences
    dtypes = [str(array.dtype) for array in (vectors, lengths, starts, frequencies, pieces)]
    if dtypes[:-1] != ["int8", "uint8", "int64", "int32"] or dtypes[-1] not in {"uint16", "int32"}:
        raise ValueError(f"the sentences are of {', '.join(dtypes)}")
    dimensions = [array.ndim for array in (vectors, lengths, pieces, starts, frequencies)]
    if dimensions != [2, 1, 1, 2, 1] or starts.shape[0] < 1 or starts.shape[1] != 2:
        raise ValueError(f"the sentences' arrays have {dimensions} dimensions")
    ends = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    if (
        len(vectors) != lengths.size
        or starts[0].any()
        or (np.diff(starts[:, 0]) < 0).any()
        or starts[-1].tolist() != [lengths.size, pieces.size]
        or (ends[starts[:, 0]] != starts[:, 1]).any()
    ):
        raise ValueError("the sentences, their pieces and the passages do not belong together")
    if pieces.size and not 0 <= pieces.min() <= pieces.max() < frequencies.size:
        raise ValueError(f"a word piece is none of those from 0 to {frequencies.size - 1}")
    if frequencies.size and not 0 <= frequencies.min() <= frequencies.max() < len(starts):
        raise ValueError("more passages have a word piece than there are")


def _file(name: str) -> str:
    return f"sentences.{name}.npy"


@cache
def _kernels() -> Any:
    return require("ctxguard.retrieval.index.kernels", "embedded")


@cache
def _loops() -> Any:
    return require("ctxguard.retrieval.signals.sentences", "embedded")
