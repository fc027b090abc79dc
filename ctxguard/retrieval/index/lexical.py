"""Searches the lexical leg: terms of passages, and BM25 as in bm25s (the default) or rank-bm25.

Word pieces of a model are kept and weighed as terms are. Pure; `RankBm25Index` needs rank-bm25.
"""

from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard.core.types import FloatArray
from ctxguard.retrieval.protocols import Analyser, Float32Array, LegHits, RowArray

LexicalEngine = Literal["bm25s", "rank-bm25"]

K1 = 1.5
B = 0.75

_BLOCK = 256
"""How many passages are read and scored at once."""

_PART = 2**20
"""How many terms are counted at once."""


class SparseRows(NamedTuple):
    """The distinct terms of passages, one passage after another.

    Attributes:
        numbers: The number of each term, ascending in a passage, shape (n_entries,).
        counts: How often its passage has it, same shape.
        starts: Row i is from ``starts[i]`` to ``starts[i + 1]``, shape (n_rows + 1,).
    """

    numbers: NDArray[np.int32]
    counts: NDArray[np.uint16]
    starts: RowArray

    @classmethod
    def counted(cls, numbers: NDArray[np.int32], lengths: NDArray[np.integer]) -> "SparseRows":
        """Count the terms of one passage after another, from terms with repetitions, and lengths.

        >>> SparseRows.counted(np.array([5, 2, 5, 7], np.int32), np.array([3, 1])).counts.tolist()
        [1, 2, 1]
        """
        n_terms = int(numbers.max(initial=-1)) + 1
        row = np.repeat(np.arange(lengths.size), lengths)
        pairs, counts = np.unique(row * n_terms + numbers, return_counts=True)
        sizes = np.bincount(pairs // max(n_terms, 1), minlength=lengths.size)
        return cls(
            (pairs % max(n_terms, 1)).astype(np.int32),
            np.minimum(counts, np.iinfo(np.uint16).max).astype(np.uint16),
            np.concatenate(([0], np.cumsum(sizes))),
        )

    @classmethod
    def of(cls, rows: Sequence[NDArray[np.int32]]) -> "SparseRows":
        """Count the terms of each passage."""
        numbers = np.concatenate([np.zeros(0, np.int32), *rows])
        return cls.counted(numbers, np.array([len(row) for row in rows], np.int64))

    @property
    def row_of_each(self) -> RowArray:
        """The row of each entry."""
        return np.repeat(np.arange(self.starts.size - 1), np.diff(self.starts))

    def taken(self, rows: RowArray) -> "tuple[SparseRows, RowArray]":
        """Copy some rows, in their order; also return where their entries are in this table."""
        begin = self.starts[rows]
        starts = np.zeros(rows.size + 1, np.int64)
        np.cumsum(self.starts[rows + 1] - begin, out=starts[1:])
        at = np.arange(starts[-1]) + np.repeat(begin - starts[:-1], np.diff(starts))
        return SparseRows(self.numbers[at], self.counts[at], starts), at

    def between(self, begin: int, end: int) -> "SparseRows":
        """Return the rows from ``begin`` to before ``end``, without copying their entries."""
        starts = self.starts[begin : end + 1]
        at = slice(starts[0], starts[-1])
        return SparseRows(self.numbers[at], self.counts[at], starts - starts[0])

    def followed_by(self, others: "SparseRows") -> "SparseRows":
        """Append rows."""
        return SparseRows(
            np.concatenate((self.numbers, others.numbers)),
            np.concatenate((self.counts, others.counts)),
            np.concatenate((self.starts, self.starts[-1] + others.starts[1:])),
        )


class Terms(NamedTuple):
    """The terms of passages, one row each.

    Attributes:
        vocabulary: The number of each term, counted from 0 in the mapping's order.
        rows: The distinct terms of each passage with their counts.
        lengths: The number of terms of each passage, shape (n_passages,).
    """

    vocabulary: dict[str, int]
    rows: SparseRows
    lengths: NDArray[np.int32]

    @classmethod
    def read(cls, texts: Iterable[str], analyser: Analyser) -> "Terms":
        """Analyse texts, one per row."""
        vocabulary: dict[str, int] = {}
        number, analyse, each = vocabulary.setdefault, analyser.analyse, iter(texts)
        numbers, counts, lengths = array("i"), array("H"), array("i")
        starts = [np.zeros(1, np.int64)]
        while block := [analyse(text) for text in islice(each, _BLOCK)]:
            words = chain.from_iterable(block)
            found = array("i", [number(term, len(vocabulary)) for term in words])
            sizes = np.fromiter(map(len, block), np.int32, len(block))
            rows = SparseRows.counted(np.frombuffer(found, np.int32), sizes)
            starts.append(len(numbers) + rows.starts[1:])
            numbers.frombytes(rows.numbers.tobytes())
            counts.frombytes(rows.counts.tobytes())
            lengths.frombytes(sizes.tobytes())
        own = SparseRows(
            np.frombuffer(numbers, np.int32),
            np.frombuffer(counts, np.uint16),
            np.concatenate(starts),
        )
        return cls(vocabulary, own, np.frombuffer(lengths, np.int32))

    def joined(self, new: "Terms", rows: RowArray) -> "Terms":
        """Take rows from both, numbered consecutively, without unused terms."""
        vocabulary = dict(self.vocabulary)
        number_of = [vocabulary.setdefault(term, len(vocabulary)) for term in new.vocabulary]
        theirs = np.array(number_of, np.int32)[new.rows.numbers]
        both, _ = self.rows.followed_by(new.rows._replace(numbers=theirs)).taken(rows)
        lengths = np.concatenate((self.lengths, new.lengths))[rows]
        used = occurrences(both.numbers, len(vocabulary)) > 0
        numbers = (np.cumsum(used) - 1).astype(np.int32)[both.numbers]
        kept = [term for term, is_used in zip(vocabulary, used.tolist(), strict=True) if is_used]
        return Terms(
            {term: at for at, term in enumerate(kept)}, both._replace(numbers=numbers), lengths
        )


class Weights(NamedTuple):
    """BM25's weight of each term in each passage: raw by term, and at unit length by passage.

    Attributes:
        rows: The passages of each term, ascending, one term after the other, shape (n_entries,).
        scores: The BM25 score of each, same shape.
        starts: Where each term begins, shape (n_terms + 1,).
        unit: In the order of `Terms.rows`, each passage's at unit length, shape (n_entries,).
    """

    rows: NDArray[np.int32]
    scores: Float32Array
    starts: RowArray
    unit: Float32Array

    @classmethod
    def of(cls, terms: Terms) -> "Weights":
        """Compute the weights of passages' terms, a block of rows at a time."""
        rows, n = terms.rows, terms.lengths.size
        passages_with = occurrences(rows.numbers, len(terms.vocabulary))
        rarity, norms = idf(passages_with, n), length_norms(terms.lengths)
        starts = np.concatenate(([0], np.cumsum(passages_with)))
        free = starts[:-1].copy()
        weights = cls(
            np.empty(rows.numbers.size, np.int32),
            np.empty(rows.numbers.size, np.float32),
            starts,
            np.empty(rows.numbers.size, np.float32),
        )
        for begin in range(0, n, _BLOCK):
            block = rows.between(begin, min(begin + _BLOCK, n))
            own = block.row_of_each
            counts = block.counts.astype(np.float64)
            scores = rarity[block.numbers] * counts / (counts + norms[begin + own])
            at = slice(rows.starts[begin], rows.starts[begin] + own.size)
            weights.unit[at] = unit_weights(block, scores)
            # Each term's entries go behind those of the blocks before.
            order = np.argsort(block.numbers, kind="stable")
            numbers, first, sizes = np.unique(
                block.numbers[order], return_index=True, return_counts=True
            )
            place = np.arange(own.size) + np.repeat(free[numbers] - first, sizes)
            weights.rows[place] = begin + own[order]
            weights.scores[place] = scores[order]
            free[numbers] += sizes
        return weights


class Bm25sIndex:
    """BM25 in Lucene's form, as in bm25s: one sparse matrix of scores by term.

    Lucene's form is idf · count / (count + k1 (1 − b + b · length / mean length)), with
    idf = ln(1 + (n − df + ½) / (df + ½)), where df passages of n have the word (Kamphuis et al.,
    ECIR 2020). ``engine`` names the library whose scores these are.
    """

    engine: ClassVar[LexicalEngine] = "bm25s"

    def __init__(self, analyser: Analyser, terms: Terms, weights: Weights | None = None) -> None:
        self.analyser, self.terms = analyser, terms
        self.weights = Weights.of(terms) if weights is None else weights

    @classmethod
    def build(cls, texts: Iterable[str], analyser: Analyser) -> "Bm25sIndex":
        """Analyse and score texts, one per row."""
        return cls(analyser, Terms.read(texts, analyser))

    def term_vectors(self, rows: RowArray) -> tuple[SparseRows, Float32Array]:
        """Return the terms of rows with their BM25 weights, each row at unit length."""
        terms, at = self.terms.rows.taken(rows)
        return terms, self.weights.unit[at]

    def search(self, query: str, k: int, allowed: RowArray | None = None) -> LegHits:
        """Find at most the ``k`` ≥ 1 best rows that share a word with a query.

        Only rows of ``allowed``, which ascend, are returned; None allows all. Scores do not depend
        on it: document frequencies count all passages.
        """
        scores = self.scores(query)
        rows = best_first(scores if allowed is None else scores[allowed], k)
        rows = rows if allowed is None else allowed[rows]

        def scores_of(rows: RowArray) -> FloatArray:
            return scores[rows].astype(np.float64)

        return LegHits(rows, scores_of(rows), scores_of)

    def scores(self, query: str) -> Float32Array:
        """Compute the BM25 score of every row, ≥ 0, shape (n_passages,)."""
        rows, weights, starts, _ = self.weights
        scores = np.zeros(self.terms.lengths.size, np.float32)
        for term in self.analyser.analyse(query):
            number = self.terms.vocabulary.get(term)
            if number is not None:
                own = slice(starts[number], starts[number + 1])
                scores[rows[own]] += weights[own]
        return scores

    @property
    def fingerprint(self) -> str:
        """The engine, the analyser and their parameters."""
        return f"bm25s lucene k1={K1} b={B}; {self.analyser.fingerprint}"


class RankBm25Index(Bm25sIndex):
    """BM25 as rank-bm25's ``BM25Okapi`` scores it, one pass over all passages per query.

    Its inverse document frequency is negative for terms that most passages have. Negative scores
    become zero here, because scores of kind ``ratio`` are never negative.
    """

    engine = "rank-bm25"

    @cached_property
    def _okapi(self) -> Any:
        """The library's index; None without terms, since it divides by their number."""
        rows, names = self.terms.rows, list(self.terms.vocabulary)
        if not rows.numbers.size:
            return None
        passages: list[list[str]] = [[] for _ in self.terms.lengths]
        entries = zip(
            rows.row_of_each.tolist(), rows.numbers.tolist(), rows.counts.tolist(), strict=True
        )
        for row, number, count in entries:
            passages[row] += [names[number]] * count
        return require("rank_bm25", "embedded").BM25Okapi(passages, k1=K1, b=B, epsilon=0.25)

    def scores(self, query: str) -> Float32Array:
        words = self.analyser.analyse(query)
        if self._okapi is None or not words:
            return np.zeros(self.terms.lengths.size, np.float32)
        scores: Float32Array = np.maximum(self._okapi.get_scores(words), 0.0).astype(np.float32)
        return scores

    @property
    def fingerprint(self) -> str:
        return f"rank-bm25 okapi k1={K1} b={B} epsilon=0.25; {self.analyser.fingerprint}"


def best_first(scores: Float32Array | FloatArray, k: int) -> RowArray:
    """Return at most ``k`` rows with the highest scores above 0, best first, ties by row."""
    rows = np.flatnonzero(scores > 0.0)
    found = scores[rows]
    if rows.size > k:
        # Every row that equals the last one kept, so that the order decides between them.
        kept = found >= np.partition(found, rows.size - k)[rows.size - k]
        rows, found = rows[kept], found[kept]
    return rows[np.argsort(-found, kind="stable")[:k]]


def occurrences(numbers: NDArray[np.int32], n_terms: int) -> NDArray[np.int64]:
    """Count each term, a part at a time, because numpy copies its input to 64 bits."""
    counts = np.zeros(n_terms, np.int64)
    for at in range(0, numbers.size, _PART):
        counts += np.bincount(numbers[at : at + _PART], minlength=n_terms)
    return counts


def unit_weights(rows: SparseRows, weights: FloatArray) -> Float32Array:
    """Scale the weights of each row's entries to unit length; a row of zeros stays as it is."""
    row = rows.row_of_each
    lengths = np.sqrt(np.bincount(row, np.square(weights), rows.starts.size - 1))
    unit: Float32Array = (weights / np.where(lengths > 0.0, lengths, 1.0)[row]).astype(np.float32)
    return unit


def idf(passages_with: NDArray[np.int64], n_passages: int) -> FloatArray:
    """Compute Lucene's inverse document frequency from how many of n passages have each word."""
    return np.log1p((n_passages - passages_with + 0.5) / (passages_with + 0.5))


def length_norms(lengths: NDArray[np.number]) -> FloatArray:
    """Compute k1 (1 − b + b · length / mean length) of passages from their numbers of terms."""
    mean = float(lengths.sum()) / max(lengths.size, 1)
    norms: FloatArray = K1 * (1.0 - B + B / (mean or 1.0) * lengths.astype(np.float64))
    return norms


LEXICAL_INDEXES = {each.engine: each for each in (Bm25sIndex, RankBm25Index)}
