"""The forward index: the words of each passage in order, with sentence starts, and their stems.

A search reads the candidates' words from it, which to split anew would take tens of milliseconds.
A word takes four bytes. Its stem, and the number of passages that have it, are computed when an
index is built or opened: edits change them.
"""

from array import array
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import repeat
from math import log, log1p
from pathlib import Path
from typing import NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.analysers.reading import Reading
from ctxguard.retrieval.index import kernels
from ctxguard.retrieval.index.growing import Growing, blocks, collected
from ctxguard.retrieval.index.lexical import K1, B, idf
from ctxguard.retrieval.index.part_files import (
    PartFiles,
    check_numbers,
    check_starts,
    read_only,
    write_texts,
)
from ctxguard.retrieval.index.rows import Rows
from ctxguard.retrieval.protocols import Analyser, RowArray
from ctxguard.retrieval.signals.text import NAMES, PassageWords, QueryWords, text_signals

_WORDS, _STARTS = "forward.words.npy", "forward.starts.npy"
_VOCABULARY = "forward.vocabulary.json"

_HELD = 2**18
"""Words that are numbered before they are written."""

NumberArray = NDArray[np.int64]

Known = Callable[[Collection[str]], tuple[NumberArray, FloatArray]]
"""Gives the number of each term, −1 for none, and its weight."""


class Ordered(NamedTuple):
    """The words of passages, one passage after the other.

    Attributes:
        words: The number of each word; of the first of a sentence its complement ``~number``, shape
            (n_words,).
        starts: The words of row i are those from ``starts[i]`` to ``starts[i + 1]``, shape
            (n_passages + 1,).
    """

    words: NDArray[np.int32]
    starts: NumberArray


class _Words:
    """The words of a segment's passages.

    Attributes:
        vocabulary: The number of each word, from 0 in its own order.
        ordered: The words of each passage, read-only.
        stems: The number of each stem, from 0 in its own order.
        stem_of: The number of each word's stem, shape (n_words,).
        words_with: The number of passages that have each word, same shape.
        stems_with: The number of passages that have each stem, shape (n_stems,).
    """

    def __init__(self, reading: Reading, vocabulary: Mapping[str, int], ordered: Ordered) -> None:
        self.vocabulary = vocabulary
        self.ordered = _read_only(ordered)
        self.stems: dict[str, int] = {}
        stems = reading.stems(list(vocabulary))
        numbers = [self.stems.setdefault(stem, len(self.stems)) for stem in stems]
        self.stem_of: NDArray[np.int32] = read_only(np.array(numbers, np.int32))
        every = np.arange(self.ordered.starts.size - 1)
        self.words_with, self.stems_with = self.passages_with(every)

    def passages_with(self, rows: RowArray) -> tuple[NumberArray, NumberArray]:
        """Count how many of some rows have each word, and each stem."""
        itself = read_only(np.arange(self.stem_of.size, dtype=np.int32))
        count, (words, starts) = kernels.rows_with, self.ordered
        with_word: NumberArray = count(words, starts, rows, itself, itself.size)
        return with_word, count(words, starts, rows, self.stem_of, len(self.stems))


class ForwardIndex:
    """The words of passages in order, by row, and the signals that they give for a query.

    Words and stems that the first segment does not have are numbered behind its own. All signals
    are those of an index built anew.

    Args:
        analyser: Splits passages and queries; see `Reading.of`.
        segments: The words of each segment.
        rows: Their rows.

    Attributes:
        analyser: As given.
        vocabulary: The number of each word.
        stems: The number of each stem.
        words_with: The number of passages that have each word, shape (n_words,).
        stems_with: The number of passages that have each stem, shape (n_stems,).
        stem_weights: The inverse document frequency of each stem, same shape.

    Raises:
        MissingExtraError: a library that it needs is not installed.
    """

    def __init__(self, analyser: Analyser, segments: Sequence[_Words], rows: Rows) -> None:
        self.analyser = analyser
        self._reading = Reading.of(analyser)
        self._segments, self._rows = segments, rows
        first = segments[0]
        self.vocabulary: Mapping[str, int] = first.vocabulary
        self.stems: Mapping[str, int] = first.stems
        self._stem_of, self._ordered = first.stem_of, [each.ordered for each in segments]
        self.words_with, self.stems_with = first.words_with, first.stems_with
        if not rows.is_plain:
            self._number_and_count()
        n_words = int(self._lengths(rows.stored).sum())
        self._norm = bm25_norm(n_words / len(self) if len(self) else 0.0)
        self.stem_weights = read_only(idf(self.stems_with, len(self)))
        # Ready for queries; the last is that of an unknown one.
        self._of_words = word_weights(np.append(self.words_with, 0), len(self))
        self._of_stems = stem_weights(np.append(self.stems_with, 0), len(self))

    def _number_and_count(self) -> None:
        """Number the words of all segments as one, and count the passages that are there."""
        numbers = []
        for segment in self._segments:
            self.vocabulary, words = _extended(self.vocabulary, segment.vocabulary)
            self.stems, stems = _extended(self.stems, segment.stems)
            numbers.append((words, stems))
        stem_of = np.empty(len(self.vocabulary), np.int32)
        self.words_with = np.zeros(len(self.vocabulary), np.int64)
        self.stems_with = np.zeros(len(self.stems), np.int64)
        for at, (segment, (words, stems)) in enumerate(zip(self._segments, numbers, strict=True)):
            deleted = np.flatnonzero(self._rows.of_segments[at] < 0)
            words_gone, stems_gone = segment.passages_with(deleted)
            stem_of[words] = stems[segment.stem_of]
            self.words_with[words] += segment.words_with - words_gone
            self.stems_with[stems] += segment.stems_with - stems_gone
            # The first segment, which may be mapped, keeps its numbers.
            if at:
                old, starts = segment.ordered
                parts = (old[rows[0] : rows[-1] + 1] for rows in blocks(np.full(old.size, 4)))
                renumbered = (kernels.renumbered(part, words) for part in parts)
                self._ordered[at] = Ordered(collected(np.int32, renumbered), starts)
        self._stem_of = read_only(stem_of)

    @classmethod
    def build(cls, texts: Iterable[str], analyser: Analyser = ENGLISH) -> Self:
        """Read texts, one per row."""
        reading = Reading.of(analyser)
        vocabulary: dict[str, int] = {}
        number, starts = vocabulary.setdefault, array("q", [0])
        words, held = Growing(np.int32), array("i")
        for text in texts:
            before = len(held)
            for sentence in reading.sentences(text):
                at = len(held)
                held.extend([number(word, len(vocabulary)) for word in sentence])
                held[at] = ~held[at]
            starts.append(starts[-1] + len(held) - before)
            if len(held) > _HELD:
                words.extend(held.tobytes())
                held = array("i")
        words.extend(held.tobytes())
        ordered = Ordered(words.array(), np.array(starts, np.int64))
        return cls._of(analyser, vocabulary, ordered)

    @classmethod
    def _of(cls, analyser: Analyser, vocabulary: Mapping[str, int], ordered: Ordered) -> Self:
        segment = _Words(Reading.of(analyser), vocabulary, ordered)
        return cls(analyser, [segment], Rows.whole(ordered.starts.size - 1))

    @classmethod
    def over(cls, indexes: "Sequence[ForwardIndex]", rows: Rows) -> Self:
        """Read segments as one index."""
        segments = [each for index in indexes for each in index._segments]
        return cls(indexes[0].analyser, segments, rows)

    def merged(self) -> Self:
        """Store the words as one segment, the same as one that was built from the texts."""
        names, itself = list(self.vocabulary), np.arange(len(self.vocabulary), dtype=np.int32)
        numbers, vocabulary = np.full(len(names), -1, np.int32), dict[str, int]()
        lengths, words = self._lengths(self._rows.stored), Growing(np.int32)
        for rows in blocks(4 * lengths):
            # Only numbers of words: a mapped file may have been altered.
            own = kernels.renumbered(self._gathered(rows).words, itself)
            # Numbers by first appearance, without the words that are gone.
            there, first = np.unique(np.where(own < 0, ~own, own), return_index=True)
            for number in there[np.argsort(first)].tolist():
                numbers[number] = vocabulary.setdefault(names[number], len(vocabulary))
            words.extend(kernels.renumbered(own, numbers))
        ordered = Ordered(words.array(), np.cumsum(np.append(0, lengths)))
        return self._of(self.analyser, vocabulary, ordered)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def ordered(self) -> Ordered:
        """The words of each passage, read-only."""
        return self._ordered[0] if self._rows.is_plain else self._gathered(np.arange(len(self)))

    def text_signals(self, query: str, rows: RowArray) -> dict[str, FloatArray]:
        """Compute the text family of some rows, shape (n,) each; see `signals.text`."""
        return named_signals(self.passage_words(rows), self.query_words(query), self._places(rows))

    def query_words(self, query: str) -> QueryWords:
        """Weigh the words of a query."""
        return query_words(
            self._reading,
            query,
            partial(_known, self.vocabulary, self._of_words),
            partial(_known, self.stems, self._of_stems),
        )

    def passage_words(self, rows: RowArray) -> PassageWords:
        """Return the words of some rows: of all rows where they are one plain segment."""
        ordered = self._ordered[0] if self._rows.is_plain else self._gathered(rows)
        return PassageWords(*ordered, self._stem_of, self.stem_weights.size, *self._norm)

    def _places(self, rows: RowArray) -> RowArray:
        """Return where the words of rows are in `passage_words`."""
        return rows if self._rows.is_plain else np.arange(rows.size)

    def _gathered(self, rows: RowArray) -> Ordered:
        """Copy the words of some rows, in their order."""
        every, taken, places = np.arange(rows.size), [], []
        for (at, stored), ordered in zip(self._rows.split(rows), self._ordered, strict=True):
            taken.append(kernels.taken(*ordered, stored))
            places.append(every[at])
        starts = np.cumsum(np.concatenate([[0], *[np.diff(starts) for _, starts in taken]]))
        words = np.concatenate([words for words, _ in taken])
        return Ordered(*kernels.taken(words, starts, np.argsort(np.concatenate(places))))

    def _lengths(self, stored: RowArray) -> NumberArray:
        """Count the words of stored rows, same shape."""
        return np.concatenate([np.diff(each.starts) for each in self._ordered])[stored]

    def save(self, folder: Path) -> None:
        """Write the words of one segment as arrays and its vocabulary as JSON."""
        np.save(folder / _WORDS, self.ordered.words)
        np.save(folder / _STARTS, self.ordered.starts)
        write_texts(folder / _VOCABULARY, self.vocabulary)

    @classmethod
    def load(cls, files: PartFiles, analyser: Analyser = ENGLISH) -> Self | None:
        """Read the files of ``save``; return None if there are none.

        Raises:
            ValueError, OSError: files that ``save`` did not write together.
        """
        if _WORDS not in files:
            return None
        words, starts = files.large_array(_WORDS, "int32"), files.array(_STARTS, "int64")
        vocabulary = files.vocabulary(_VOCABULARY)
        check_starts("the words of passages", starts, starts.size - 1, words.size)
        check_numbers("the words", words, len(vocabulary), least=-len(vocabulary))
        return cls._of(analyser, vocabulary, Ordered(words, starts))


def query_words(reading: Reading, query: str, words_known: Known, stems_known: Known) -> QueryWords:
    """Weigh the words of a query."""
    read = reading.words(query)
    positions: dict[str, int] = {}
    counts: dict[str, int] = {}
    order = [positions.setdefault(word, len(positions)) for word in read]
    for stem in reading.stems(read):
        counts[stem] = counts.get(stem, 0) + 1
    words, weights = words_known(positions)
    stems, of_stems = stems_known(counts)
    return QueryWords(
        words,
        weights,
        np.array(order, np.int64),
        stems,
        of_stems,
        np.array([*counts.values()], np.float64),
    )


def named_signals(
    passages: PassageWords, query: QueryWords, rows: RowArray
) -> dict[str, FloatArray]:
    """Compute the text family by name, shape (n,) each."""
    return dict(zip(NAMES, text_signals(passages, query, rows), strict=True))


def bm25_norm(mean_length: float) -> tuple[float, float]:
    """Return the addend of BM25's counts for a passage without words, and for each word."""
    return K1 * (1.0 - B), K1 * B / (mean_length or 1.0)


def word_weights(passages_with: NumberArray, n_passages: int) -> FloatArray:
    """Weigh words by inverse document frequency; ln(n + 1.5) for one that no passage has."""
    return np.where(passages_with > 0, idf(passages_with, n_passages), log(n_passages + 1.5))


def stem_weights(passages_with: NumberArray, n_passages: int) -> FloatArray:
    """Weigh stems by inverse document frequency; ln(n + 1) for one that no passage has."""
    return np.where(passages_with > 0, idf(passages_with, n_passages), log1p(n_passages))


def _known(
    numbers: Mapping[str, int], weights: FloatArray, terms: Collection[str]
) -> tuple[NumberArray, FloatArray]:
    found = np.fromiter(map(numbers.get, terms, repeat(-1)), np.int64, len(terms))
    return found, weights[found]


def _extended(
    first: Mapping[str, int], second: Mapping[str, int]
) -> tuple[Mapping[str, int], NDArray[np.int32]]:
    """Number two vocabularies as one; also return the numbers of the second's terms in it."""
    if first is second:
        return first, np.arange(len(first), dtype=np.int32)
    new: dict[str, int] = {}
    for term in second:
        if term not in first:
            new[term] = len(first) + len(new)
    both = ChainMap(new, cast(MutableMapping[str, int], first))
    return both, np.array([both[term] for term in second], np.int32)


def _read_only(ordered: Ordered) -> Ordered:
    return Ordered(read_only(ordered.words), read_only(ordered.starts))
