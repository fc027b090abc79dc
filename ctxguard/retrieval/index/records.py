"""Records: the data that signals read of a passage, as bytes for a store that is no index of ours.

A record holds a passage's words in order with their stems, and its sentences; a passage of 200
words takes 4 KB. Words and stems are numbered by a hash of 31 bits, so that writers need no common
vocabulary. How rare each is, `CorpusCounts` tells.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any, NamedTuple, Self
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.types import FloatArray
from ctxguard.retrieval.analysers.reading import Reading
from ctxguard.retrieval.index.forward import (
    NumberArray,
    bm25_norm,
    query_words,
    stem_weights,
    word_weights,
)
from ctxguard.retrieval.index.kernels import rows_with
from ctxguard.retrieval.index.lexical import K1, B, idf
from ctxguard.retrieval.index.sentences import (
    piece_frequencies,
    sentences_from_bytes,
    sentences_to_bytes,
)
from ctxguard.retrieval.protocols import Sentences
from ctxguard.retrieval.signals.text import PassageWords, QueryWords, TermArray, renumbered

MOST_WORDS = 2_048
"""Maximum number of a passage's words in its record: the first."""

MOST_TERMS = 2**20
"""Maximum number of words, and of stems, that `CorpusCounts` keeps: those of most passages."""

_SIZES = struct.Struct("<2i")
_TERM_BYTES = 4
_31_BITS = 2**31 - 1
_MERGED_FROM = 2**22


def numbers_of(terms: Iterable[str]) -> TermArray:
    """Number terms by a hash of 31 bits, the same in every process."""
    # Lone surrogates occur in texts of a user's own retriever.
    hashes = [crc32(term.encode("utf-8", "surrogatepass")) & _31_BITS for term in terms]
    return np.array(hashes, np.int32)


class Records(NamedTuple):
    """The words and sentences of passages, one passage after the other.

    Attributes:
        words: The number of each word; of the first of a sentence its complement ``~number``, shape
            (n_words,).
        stems: The number of each word's stem, same shape.
        starts: The words of row i are those from ``starts[i]`` to ``starts[i + 1]``, shape
            (n_passages + 1,).
        lengths: The number of terms that lexical search has of each passage, shape (n_passages,).
        sentences: The sentences of every row; None if they are not kept.
    """

    words: TermArray
    stems: TermArray
    starts: NumberArray
    lengths: NumberArray
    sentences: Sentences | None = None

    @classmethod
    def read(
        cls,
        reading: Reading,
        texts: Iterable[str],
        lengths: Sequence[int] = (),
        sentences: Sentences | None = None,
        *,
        most_words: int = MOST_WORDS,
    ) -> Self:
        """Read texts, one per row, each up to ``most_words`` words.

        Args:
            reading: Splits them.
            texts: Shape (n,).
            lengths: The number of terms of each, shape (n,); empty if nothing is searched.
            sentences: Their sentences; None if they are not kept.
            most_words: Words after these are not read.
        """
        words: list[TermArray] = []
        stems: list[TermArray] = []
        for text in texts:
            read = reading.sentences(text)
            flat = [word for sentence in read for word in sentence]
            first = np.cumsum([0, *map(len, read)])[:-1]
            numbers = numbers_of(flat)
            numbers[first] = ~numbers[first]
            words.append(numbers[:most_words])
            stems.append(numbers_of(reading.stems(flat[:most_words])))
        return cls.of(words, stems, lengths, sentences)

    @classmethod
    def of(
        cls,
        words: Sequence[TermArray],
        stems: Sequence[TermArray],
        lengths: Sequence[int] = (),
        sentences: Sentences | None = None,
    ) -> Self:
        """Join the words of each passage; arguments as for `read`."""
        starts = np.cumsum([0, *[each.size for each in words]])
        none = np.zeros(0, np.int32)
        return cls(
            np.concatenate([none, *words]),
            np.concatenate([none, *stems]),
            starts,
            np.array(lengths or [0] * len(words), np.int64),
            sentences,
        )

    def to_bytes(self) -> list[bytes]:
        """Write the record of each passage."""
        bounds = list(zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True))
        rest = [b""] * len(bounds) if self.sentences is None else sentences_to_bytes(self.sentences)
        return [
            b"".join(
                (
                    _SIZES.pack(end - start, length),
                    self.words[start:end].tobytes(),
                    self.stems[start:end].tobytes(),
                    of_sentences,
                )
            )
            for (start, end), length, of_sentences in zip(
                bounds, self.lengths.tolist(), rest, strict=True
            )
        ]

    @classmethod
    def from_bytes(cls, records: Sequence[bytes], *, with_sentences: bool) -> Self:
        """Read records that `to_bytes` wrote.

        Raises:
            ValueError: one is something else.
        """
        words, stems, lengths, rest = [], [], [], []
        for record in records:
            view = memoryview(record)
            if len(view) < _SIZES.size:
                raise ValueError("a record ends before its words")
            n_words, length = _SIZES.unpack_from(view)
            middle = _SIZES.size + _TERM_BYTES * n_words
            end = middle + _TERM_BYTES * n_words
            if n_words < 0 or end > len(view):
                raise ValueError(f"a record of {len(view)} bytes has {n_words} words")
            words.append(view[_SIZES.size : middle])
            stems.append(view[middle:end])
            lengths.append(length)
            rest.append(view[end:])
        return cls(
            np.frombuffer(b"".join(words), np.int32),
            np.frombuffer(b"".join(stems), np.int32),
            np.cumsum([0, *[len(each) // _TERM_BYTES for each in words]]),
            np.array(lengths, np.int64),
            sentences_from_bytes(rest) if with_sentences else None,
        )


class TermCounts(NamedTuple):
    """The number of passages that have each term of a corpus.

    Attributes:
        numbers: The terms' numbers, ascending, shape (n_terms,).
        passages: The number of passages that have each, same shape.
    """

    numbers: NDArray[np.int32]
    passages: NDArray[np.int32]

    @classmethod
    def summed(cls, parts: "Sequence[TermCounts]") -> "TermCounts":
        """Add the counts of parts of a corpus, of `MOST_TERMS` terms at most."""
        numbers, inverse = np.unique(
            np.concatenate([each.numbers for each in parts]), return_inverse=True
        )
        weights = np.concatenate([each.passages for each in parts])
        passages = np.bincount(inverse, weights, numbers.size).astype(np.int32)
        if numbers.size > MOST_TERMS:
            most = np.sort(np.argpartition(-passages, MOST_TERMS)[:MOST_TERMS])
            numbers, passages = numbers[most], passages[most]
        return cls(numbers, passages)

    def of(self, numbers: NDArray[np.integer]) -> NumberArray:
        """Return the counts of some numbers, same shape; 0 for one that no passage has."""
        if not self.numbers.size:
            return np.zeros(numbers.shape, np.int64)
        at = np.searchsorted(self.numbers, numbers.astype(np.int32))
        at[at == self.numbers.size] = 0
        return np.where(self.numbers[at] == numbers, self.passages[at], 0).astype(np.int64)


@dataclass(frozen=True, slots=True)
class CorpusCounts:
    """The counts over a corpus by which words and word pieces are weighed.

    Attributes:
        n_passages: Number of passages.
        n_words: Number of their words.
        words: The number of passages that have each word.
        stems: The number of passages that have each stem.
        pieces: The number of passages that have each word piece of the model, shape
            (n_vocabulary,); empty without sentences.
    """

    n_passages: int
    n_words: int
    words: TermCounts
    stems: TermCounts
    pieces: NDArray[np.int64]

    @classmethod
    def of(cls, pages: Iterable[Records], n_vocabulary: int = 0) -> Self:
        """Count the records of a corpus, which are read once.

        Args:
            pages: The records, some passages at a time.
            n_vocabulary: Number of word pieces of the model; 0 without sentences.
        """
        n_passages = n_words = n_terms = 0
        words, stems = [_NO_TERMS], [_NO_TERMS]
        pieces = np.zeros(n_vocabulary, np.int64)
        for page in pages:
            n_passages += page.starts.size - 1
            n_words += page.words.size
            if page.sentences is not None:
                every = np.arange(page.starts.size - 1)
                pieces += piece_frequencies(page.sentences, every, n_vocabulary)
            for counts, terms in ((words, page.words), (stems, page.stems)):
                counts.append(_counted(_without_marks(terms), page.starts))
                n_terms += counts[-1].numbers.size
                if n_terms > _MERGED_FROM:
                    words[:], stems[:] = [TermCounts.summed(words)], [TermCounts.summed(stems)]
                    n_terms = 0
        return cls(n_passages, n_words, TermCounts.summed(words), TermCounts.summed(stems), pieces)

    @property
    def mean_length(self) -> float:
        """Mean number of words of a passage; 0 without passages."""
        return self.n_words / max(self.n_passages, 1)

    def stem_weights(self, numbers: NumberArray) -> FloatArray:
        """Return the inverse document frequency of stems, same shape."""
        return idf(self.stems.of(numbers), self.n_passages)

    def piece_weights(self) -> FloatArray:
        """Return the inverse document frequency of each word piece, shape (n_vocabulary,)."""
        return idf(self.pieces, self.n_passages)

    def bm25(
        self, records: Records, reading: Reading, terms: Sequence[str], mean_length: float
    ) -> FloatArray:
        """Compute Lucene's BM25 of passages for the terms of a query, shape (n,).

        Args:
            records: Of the passages.
            reading: Of the analyser that split the query.
            terms: Each as often as it occurs.
            mean_length: Mean number of terms of a passage, > 0.
        """
        counted, there = self.words, _without_marks(records.words)
        if reading.terms_are_stems:
            counted, there = self.stems, records.stems
        rows = np.repeat(np.arange(records.lengths.size), np.diff(records.starts))
        norms = K1 * (1.0 - B + B / mean_length * records.lengths)
        asked, times = np.unique(numbers_of(terms), return_counts=True)
        scores = np.zeros(records.lengths.size)
        weights = times * idf(counted.of(asked), self.n_passages)
        for number, weight in zip(asked, weights, strict=True):
            counts = np.bincount(rows[there == number], minlength=scores.size)
            scores += weight * (counts / (counts + norms))
        return scores

    def to_bytes(self, sketch: CorpusSketch) -> bytes:
        """Write the counts, and the sketch of the corpus that was counted."""
        file = BytesIO()
        np.savez_compressed(
            file,
            sizes=np.array([self.n_passages, self.n_words, sketch.passages]),
            sketch=np.array(sketch.digests),
            words=np.stack(self.words),
            stems=np.stack(self.stems),
            pieces=self.pieces,
        )
        return file.getvalue()

    @classmethod
    def from_bytes(cls, stored: bytes) -> tuple[Self, CorpusSketch]:
        """Read the bytes of `to_bytes`.

        Raises:
            ValueError: it is something else.
        """
        try:
            with np.load(BytesIO(stored), allow_pickle=False) as file:
                found: dict[str, Any] = {name: file[name] for name in file.files}
            n_passages, n_words, sketched = found["sizes"].tolist()
            words, stems = [TermCounts(*found[name]) for name in ("words", "stems")]
            counts = cls(n_passages, n_words, words, stems, found["pieces"])
            return counts, CorpusSketch(sketched, str(found["sketch"]))
        except Exception as error:  # readers of archives and arrays raise any type
            raise ValueError(f"not counts of a corpus ({type(error).__name__}: {error})") from error


_NO_TERMS = TermCounts(np.zeros(0, np.int32), np.zeros(0, np.int32))


class WeighedWords(NamedTuple):
    """The words of passages and of a query, numbered together.

    Attributes:
        passages: The passages' words.
        query: The query's words.
        stems: The hash of each stem, by its number in ``passages``, shape (n_stems,).
    """

    passages: PassageWords
    query: QueryWords
    stems: NumberArray


def weighed_words(
    records: Records, query: str, reading: Reading, counts: CorpusCounts | None
) -> WeighedWords:
    """Number and weigh the words of records and of a query.

    Args:
        records: The candidates' records.
        query: The query's text.
        reading: Splits it.
        counts: Of the corpus; None to count the candidates.
    """
    starts, n_passages = records.starts, records.starts.size - 1
    mean = int(starts[-1]) / max(n_passages, 1) if counts is None else counts.mean_length
    numbered: list[tuple[TermArray, NumberArray]] = []

    def known(
        flat: TermArray, counted: TermCounts | None, weigh: Any, terms: list[str]
    ) -> tuple[NumberArray, FloatArray]:
        there, asked, distinct = _numbered(_without_marks(flat), numbers_of(terms))
        numbered.append((there, distinct))
        if counted is not None and counts is not None:
            return asked, weigh(counted.of(distinct[asked]), counts.n_passages)
        every = np.arange(distinct.size, dtype=np.int32)
        with_term = rows_with(there, starts, np.arange(n_passages), every, distinct.size)
        return asked, weigh(with_term[asked], n_passages)

    of_words, of_stems = (None, None) if counts is None else (counts.words, counts.stems)
    asked = query_words(
        reading,
        query,
        partial(known, records.words, of_words, word_weights),
        partial(known, records.stems, of_stems, stem_weights),
    )
    (words, distinct_words), (stems, distinct_stems) = numbered
    stem_of = np.zeros(distinct_words.size, np.int32)
    stem_of[words] = stems
    marked = np.where(records.words < 0, ~words, words)
    norm = bm25_norm(mean)
    passages = PassageWords(marked, starts, stem_of, distinct_stems.size, *norm)
    return WeighedWords(passages, asked, distinct_stems)


def _without_marks(words: TermArray) -> TermArray:
    return np.where(words < 0, ~words, words)


def _numbered(terms: TermArray, asked: TermArray) -> tuple[TermArray, NumberArray, NumberArray]:
    """Number the terms of passages and of a query together, from 0.

    Returns:
        The numbers of the passages' terms, those of the query's, and the hash of each number.
    """
    both = np.concatenate((terms, asked)).astype(np.int64)
    new, n = renumbered(both)
    distinct = np.empty(n, np.int64)
    distinct[new] = both
    return new[: terms.size], new[terms.size :].astype(np.int64), distinct


def _counted(terms: TermArray, starts: NumberArray) -> TermCounts:
    """Count how many rows have each term."""
    there, _, distinct = _numbered(terms, terms[:0])
    every = np.arange(distinct.size, dtype=np.int32)
    rows = rows_with(there, starts, np.arange(starts.size - 1), every, distinct.size)
    order = np.argsort(distinct)
    return TermCounts(distinct[order].astype(np.int32), rows[order].astype(np.int32))
