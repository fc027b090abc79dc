"""The lexical indexes: BM25 as bm25s scores it (the default) or as rank-bm25 does."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice, pairwise, repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError, IndexFolderError
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.index import kernels
from ctxguard.retrieval.index.growing import Growing, blocks, collected
from ctxguard.retrieval.index.kernels import Postings
from ctxguard.retrieval.index.part_files import (
    ALTERED,
    PartFiles,
    check_numbers,
    check_starts,
    read_only,
    write_texts,
)
from ctxguard.retrieval.index.rows import Rows
from ctxguard.retrieval.protocols import Analyser, Float32Array, LexicalHits, RowArray

LexicalEngine = Literal["bm25s", "rank-bm25"]

K1 = 1.5
B = 0.75

_MAX_COUNT = np.iinfo(np.uint16).max
"""Words that a passage has more often count as often as this: their score differs by 1e-5."""

_VOCABULARY = "lexical.vocabulary.json"

_HELD = 2**18
"""Words that are counted together: each takes some tens of bytes meanwhile."""

_POSTING_BYTES = 32
"""Memory that a posting takes while it is sorted."""


class Counted(NamedTuple):
    """How often each passage has each word, by word, and how long the passages are.

    Attributes:
        counts: How often, shape (n_postings,).
        rows: In which passage, ascending for each word, shape (n_postings,).
        starts: The postings of word w are those from ``starts[w]`` to ``starts[w + 1]``.
        lengths: Words of each passage, shape (n_passages,).
    """

    counts: NDArray[np.uint16]
    rows: NDArray[np.int32]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]


class _PartPostings(NamedTuple):
    """Postings by word, to be joined with others.

    Attributes:
        numbers: The new number of each word, −1 for one without a posting, shape (n_words,).
        starts: As for `Counted`, like the next two.
        rows: The former row of each posting.
        counts: How often.
        order: Words in the order of their numbers; None if they are in it.
        new_rows: The row of each former row, −1 where it was deleted; None for the same.
    """

    numbers: NDArray[np.integer]
    starts: NDArray[np.integer]
    rows: NDArray[np.int32]
    counts: NDArray[np.uint16]
    order: RowArray | None = None
    new_rows: RowArray | None = None


class _Terms:
    """The terms of a segment's passages, read-only.

    Attributes:
        vocabulary: The number of each term, from 0 in its own order.
        scores: The BM25 score of each posting among the segment's own passages, shape
            (n_postings,).
        rows: As for `Counted`, like the next two.
        starts: The postings of each word.
        lengths: Words of each passage.
    """

    def __init__(
        self,
        vocabulary: dict[str, int],
        scores: Float32Array,
        rows: NDArray[np.int32],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int32],
    ) -> None:
        self.vocabulary = vocabulary
        self.scores, self.rows = read_only(scores), read_only(rows)
        self.starts, self.lengths = read_only(starts), read_only(lengths)

    @property
    def postings(self) -> Postings:
        """The scores and rows of all terms, one after the other, and the start of each."""
        return self.scores, self.rows, self.starts

    @cached_property
    def counts(self) -> NDArray[np.uint16]:
        """How often each posting's passage has its word, as its score tells, read-only.

        Only edits ask for it. Exact up to 1,000; above, the score that it gives is within 1e-7.
        """
        weights, norms = idf(np.diff(self.starts), self.lengths.size), length_norms(self.lengths)
        counts = kernels.posting_counts(self.scores, self.rows, self.starts, weights, norms)
        return collected(np.uint16, counts)


class Bm25sIndex:
    """BM25 in Lucene's form, as bm25s scores it, searched by this package's loops.

    Lucene's form is idf · count / (count + k1 (1 − b + b · length / mean length)), with
    idf = ln(1 + (n − df + ½) / (df + ½)), where df passages of n have the word (Kamphuis et al.,
    ECIR 2020).

    The scores of one segment are computed when it is built. With several, or deleted passages, how
    rare each word is and how long passages are on the mean is counted anew, and each posting's
    score is computed when it is read: it is that of an index built anew.

    Args:
        analyser: Splits passages and queries into terms.
        segments: The terms of each segment.
        rows: Their rows.

    Attributes:
        analyser: As given.
        postings: The scores and rows of all terms; None if there is more than one plain segment.
    """

    def __init__(self, analyser: Analyser, segments: Sequence[_Terms], rows: Rows) -> None:
        self.analyser = analyser
        self._segments, self._rows = segments, rows
        self.postings = segments[0].postings if rows.is_plain else None
        if self.postings is None:
            lengths = np.concatenate([each.lengths for each in segments])
            self._norms = read_only(length_norms(lengths[rows.stored]))
            self._passages_with = [
                kernels.passages_with(each.rows, each.starts, there)
                for each, there in zip(segments, rows.of_segments, strict=True)
            ]

    @classmethod
    def _of(cls, analyser: Analyser, vocabulary: dict[str, int], counted: Counted) -> Self:
        """Score the postings of one segment."""
        counts, rows, starts, lengths = counted
        scores = kernels.posting_scores(
            counts, rows, starts, idf(np.diff(starts), lengths.size), length_norms(lengths)
        )
        segment = _Terms(vocabulary, collected(np.float32, scores), rows, starts, lengths)
        return cls(analyser, [segment], Rows.whole(lengths.size))

    @classmethod
    def build(cls, texts: Iterable[str], analyser: Analyser = ENGLISH) -> Self:
        """Analyse and score texts, one per row."""
        vocabulary: dict[str, int] = {}
        columns = [Growing(dtype) for dtype in (np.int32, np.int32, np.int32, np.uint16)]
        ends, lengths, n_rows = [np.zeros(4, np.int64)], list[NDArray[np.int64]](), 0
        for words, own_lengths in _term_ids(texts, analyser, vocabulary):
            n = max(own_lengths.size, 1)
            row_of_word = np.repeat(np.arange(own_lengths.size), own_lengths)
            # One number for each pair of word and row, so that sorting counts the pairs.
            pairs, counts = np.unique(words * n + row_of_word, return_counts=True)
            numbers, starts = np.unique(pairs // n, return_index=True)
            part = (numbers, np.append(starts, pairs.size), n_rows + pairs % n, counts)
            for column, each in zip(columns, part, strict=True):
                column.extend(np.minimum(each, _MAX_COUNT) if each is counts else each)
            ends.append(ends[-1] + [each.size for each in part])
            lengths.append(own_lengths)
            n_rows += own_lengths.size
        arrays = [column.array() for column in columns]
        parts = [
            _PartPostings(*[array[a:b] for array, a, b in zip(arrays, *each, strict=True)])
            for each in pairwise(ends)
        ]
        counted = _joined(parts, np.concatenate(lengths), len(vocabulary))
        return cls._of(analyser, vocabulary, counted)

    @classmethod
    def over(cls, indexes: "Sequence[Bm25sIndex]", rows: Rows) -> Self:
        """Search segments as one index."""
        segments = [each for index in indexes for each in index._segments]
        return cls(indexes[0].analyser, segments, rows)

    def merged(self) -> Self:
        """Store the terms as one segment, without analysing anything."""
        vocabulary: dict[str, int] = {}
        lengths = np.zeros(len(self), np.int64)
        parts = []
        for segment, new in zip(self._segments, self._rows.of_segments, strict=True):
            rows, starts, own_lengths = segment.rows, segment.starts, segment.lengths
            try:
                check_numbers("the rows", rows, new.size)
            except ValueError as error:
                raise IndexFolderError(f"{_array('rows')} {ALTERED}") from error
            lengths[new[new >= 0]] = own_lengths[new >= 0]
            terms, numbers = list(segment.vocabulary), np.full(len(segment.vocabulary), -1)
            for number in np.flatnonzero(kernels.passages_with(rows, starts, new)).tolist():
                numbers[number] = vocabulary.setdefault(terms[number], len(vocabulary))
            order = np.argsort(numbers, kind="stable")
            parts.append(_PartPostings(numbers, starts, rows, segment.counts, order, new))
        return self._of(self.analyser, vocabulary, _joined(parts, lengths, len(vocabulary)))

    def __len__(self) -> int:
        return len(self._rows)

    def search(self, query: str, k: int) -> LexicalHits:
        """Find the at most ``k`` best rows; also return every row's score."""
        k = min(k, len(self))
        if self.postings is not None:
            return LexicalHits(
                *kernels.search_postings(self.words(query), self.postings, len(self), k)
            )
        terms = self.analyser.analyse(query)
        frequencies = np.zeros(len(terms), np.int64)
        numbers = []
        for segment, passages_with in zip(self._segments, self._passages_with, strict=True):
            words = np.array([segment.vocabulary.get(term, -1) for term in terms], np.int64)
            frequencies[words >= 0] += passages_with[words[words >= 0]]
            numbers.append(words)
        all_scores, weights = np.zeros(len(self), np.float32), idf(frequencies, len(self))
        for segment, words, rows in zip(
            self._segments, numbers, self._rows.of_segments, strict=True
        ):
            counts, stored, starts = segment.counts, segment.rows, segment.starts
            kernels.add_scores(
                all_scores, words, weights, counts, stored, starts, rows, self._norms
            )
        best = kernels.best_first(all_scores, k, 0.0)
        return LexicalHits(best, all_scores[best].astype(np.float64), all_scores)

    def words(self, query: str) -> NDArray[np.int64]:
        """Return the numbers of a query's terms in the one segment, −1 for one that it lacks."""
        terms = self.analyser.analyse(query)
        numbers = map(self._segments[0].vocabulary.get, terms, repeat(-1))
        return np.fromiter(numbers, np.int64, len(terms))

    @property
    def fingerprint(self) -> str:
        """The engine, the analyser and their parameters."""
        return f"bm25s lucene k1={K1} b={B}; {self.analyser.fingerprint}"

    def save(self, folder: Path) -> None:
        """Write the postings of one segment as arrays and its vocabulary as JSON."""
        (segment,) = self._segments
        for name in ("scores", "rows", "starts", "lengths"):
            np.save(folder / _array(name), getattr(segment, name))
        write_texts(folder / _VOCABULARY, segment.vocabulary)

    @classmethod
    def load(cls, files: PartFiles, analyser: Analyser = ENGLISH) -> Self:
        """Read the files of ``save``."""
        scores = files.large_array(_array("scores"), "float32")
        rows = files.large_array(_array("rows"), "int32")
        starts = files.array(_array("starts"), "int64")
        lengths = files.array(_array("lengths"), "int32")
        vocabulary = files.vocabulary(_VOCABULARY)
        check_starts("the postings of words", starts, len(vocabulary), rows.size)
        if scores.size != rows.size:
            raise ValueError("the lexical postings do not belong together")
        check_numbers("the passages of lexical postings", rows, lengths.size)
        if (lengths < 0).any():
            raise ValueError("a passage has a negative length")
        segment = _Terms(vocabulary, scores, rows, starts, lengths)
        return cls(analyser, [segment], Rows.whole(lengths.size))


def idf(passages_with: NDArray[np.int64], n_passages: int) -> FloatArray:
    """Compute Lucene's inverse document frequency of words that so many of n passages have."""
    return np.log1p((n_passages - passages_with + 0.5) / (passages_with + 0.5))


def length_norms(lengths: NDArray[np.int32]) -> FloatArray:
    """k1 (1 − b + b · length / mean length) of each passage, same shape."""
    mean = float(lengths.sum()) / lengths.size if lengths.any() else 1.0
    norms: FloatArray = K1 * (1.0 - B + B / mean * lengths.astype(np.float64))
    return norms


def _joined(parts: Sequence[_PartPostings], lengths: NDArray[np.integer], n_words: int) -> Counted:
    """Sort the postings of several parts by new word and row, some words at a time."""
    sizes, totals = np.zeros(n_words, np.int64), np.zeros(n_words + 1, np.int64)
    for part in parts:
        there = part.numbers >= 0
        sizes[part.numbers[there]] += np.diff(part.starts)[there]
    rows, counts = Growing(np.int32), Growing(np.uint16)
    for block in blocks(sizes * _POSTING_BYTES):
        found = []
        for part in parts:
            bounds = (block[0], block[-1] + 1)
            own = np.arange(*np.searchsorted(part.numbers, bounds, "left", part.order))
            own = own if part.order is None else part.order[own]
            old, starts = kernels.taken(part.rows, part.starts, own)
            row = old.astype(np.int64) if part.new_rows is None else part.new_rows[old]
            # A word times the number of passages does not fit 32 bits.
            word = np.repeat(part.numbers[own].astype(np.int64), np.diff(starts))
            count, _ = kernels.taken(part.counts, part.starts, own)
            found.append([each[row >= 0] for each in (word, row, count)])
        word, row, count = map(np.concatenate, zip(*found, strict=True))
        order = np.argsort(word * max(lengths.size, 1) + row, kind="stable")
        rows.extend(row[order])
        counts.extend(count[order])
        totals[block + 1] = np.bincount(word - block[0], minlength=block.size)
    return Counted(counts.array(), rows.array(), np.cumsum(totals), lengths.astype(np.int32))


def _array(name: str) -> str:
    return f"lexical.{name}.npy"


class RankBm25Index(Bm25sIndex):
    """BM25 as rank-bm25's ``BM25Okapi`` scores it, one pass over all passages per query.

    Its inverse document frequency is negative for terms of most passages. A negative score becomes
    zero here, because scores of kind ``ratio`` are never negative. It is stored as `Bm25sIndex`,
    whose counts the library reads.
    """

    def __init__(self, analyser: Analyser, segments: Sequence[_Terms], rows: Rows) -> None:
        super().__init__(analyser, segments, rows)
        self.postings = None
        self._library = require("rank_bm25", "embedded")

    @cached_property
    def _okapi(self) -> Any:
        """The library's index; None without terms: it divides by their number."""
        passages: list[list[str]] = [[] for _ in range(len(self))]
        for segment, new in zip(self._segments, self._rows.of_segments, strict=True):
            postings = zip(new[segment.rows].tolist(), segment.counts.tolist(), strict=True)
            for term, n in zip(segment.vocabulary, np.diff(segment.starts).tolist(), strict=True):
                for row, count in islice(postings, n):
                    if row >= 0:
                        passages[row] += [term] * count
        if not any(passages):
            return None
        return self._library.BM25Okapi(passages, k1=K1, b=B, epsilon=0.25)

    def search(self, query: str, k: int) -> LexicalHits:
        words = self.analyser.analyse(query)
        if self._okapi is None or not words:
            return LexicalHits(np.zeros(0, np.int64), np.zeros(0), np.zeros(len(self), np.float32))
        all_scores = np.maximum(self._okapi.get_scores(words), 0.0).astype(np.float32)
        best = kernels.best_first(all_scores, k, 0.0)
        return LexicalHits(best, all_scores[best].astype(np.float64), all_scores)

    @property
    def fingerprint(self) -> str:
        return f"rank-bm25 okapi k1={K1} b={B} epsilon=0.25; {self.analyser.fingerprint}"


def _term_ids(
    texts: Iterable[str], analyser: Analyser, vocabulary: dict[str, int]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the numbers of the terms of some texts, one after the other, and each text's number.

    Args:
        texts: The texts.
        analyser: Splits them.
        vocabulary: The number of each term, to which new ones are added.
    """
    number, analyse = vocabulary.setdefault, analyser.analyse
    words, lengths = array("q"), array("q")
    for text in texts:
        terms = analyse(text)
        words.extend([number(term, len(vocabulary)) for term in terms])
        lengths.append(len(terms))
        if len(words) > _HELD:
            yield np.array(words, np.int64), np.array(lengths, np.int64)
            words, lengths = array("q"), array("q")
    yield np.array(words, np.int64), np.array(lengths, np.int64)


def lexical_index(engine: LexicalEngine) -> type[Bm25sIndex]:
    """Return the lexical index of an engine.

    Raises:
        ConfigurationError: an engine that does not exist.
    """
    if engine == "bm25s":
        return Bm25sIndex
    if engine == "rank-bm25":
        return RankBm25Index
    raise ConfigurationError(f"lexical engine {engine!r} is unknown; use 'bm25s' or 'rank-bm25'")
