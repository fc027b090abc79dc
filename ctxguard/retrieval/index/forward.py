"""The forward index: the words of each passage in order, with sentence starts, and their stems.

A search reads the candidates' words from it, which to split anew would take tens of milliseconds.
A word takes four bytes. Which stem a word has, and how many passages have it, is computed when an
index is built or opened: in an edited index it changes with every edit.
"""

import json
from array import array
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from math import log, log1p
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard.core.types import FloatArray
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.analysers.reading import Reading
from ctxguard.retrieval.index.lexical import K1, B, idf, read_only
from ctxguard.retrieval.index.part_files import PartFiles
from ctxguard.retrieval.index.row_map import RowMap
from ctxguard.retrieval.protocols import Analyser, RowArray

if TYPE_CHECKING:
    from ctxguard.retrieval.signals.text import CandidateWords, QueryWords

_WORDS, _STARTS = "forward.words.npy", "forward.starts.npy"
_VOCABULARY = "forward.vocabulary.json"

NumberArray = NDArray[np.int64]

Known = Callable[[list[str]], tuple[NumberArray, NumberArray]]
"""The number of each term, −1 for none, and how many passages have it."""


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


class ForwardIndex:
    """The words of passages in order, by row, and what they say of a query.

    Args:
        analyser: Splits passages and queries; see `Reading.of`.
        vocabulary: The number of each word, from 0 in its own order.
        ordered: The words of each passage.

    Attributes:
        analyser: As given.
        vocabulary: As given.
        ordered: As given, read-only.
        stems: The number of each stem.
        stem_of: The number of each word's stem, shape (n_words,).
        words_with: How many passages have each word, same shape.
        stems_with: How many passages have each stem, shape (n_stems,).

    Raises:
        MissingExtraError: a library that it needs is not installed.
    """

    def __init__(self, analyser: Analyser, vocabulary: Mapping[str, int], ordered: Ordered) -> None:
        self.analyser = analyser
        self.vocabulary = vocabulary
        # Read-only whether built or mapped, so that numba compiles one variant of each loop.
        self.ordered = _read_only(ordered)
        self._reading = Reading.of(analyser)
        stems: dict[str, int] = {}
        of_words = self._reading.stems(list(vocabulary))
        numbers = [stems.setdefault(stem, len(stems)) for stem in of_words]
        self.stems: Mapping[str, int] = stems
        self.stem_of = read_only(np.array(numbers, np.int32))
        self.words_with, self.stems_with = _passages_with(self.ordered, self.stem_of, len(stems))
        self._count(self.ordered.starts.size - 1, self.ordered.words.size)
        self._tail, self._stored = _NO_WORDS, _NO_ROWS

    def _count(self, n_passages: int, n_words: int) -> None:
        """Set what BM25 needs to know of all passages."""
        self._n_passages = n_passages
        self._norm = bm25_norm(n_words / n_passages if n_passages else 0.0)
        self._stem_weights = read_only(idf(self.stems_with, n_passages))

    @classmethod
    def build(cls, texts: Iterable[str], analyser: Analyser = ENGLISH) -> Self:
        """Read texts, one per row."""
        reading = Reading.of(analyser)
        vocabulary: dict[str, int] = {}
        number, words, starts = vocabulary.setdefault, array("i"), array("q", [0])
        for text in texts:
            for sentence in reading.sentences(text):
                at = len(words)
                words.extend([number(word, len(vocabulary)) for word in sentence])
                words[at] = ~words[at]
            starts.append(len(words))
        ordered = Ordered(np.array(words, np.int32), np.array(starts, np.int64))
        return cls(analyser, vocabulary, ordered)

    @classmethod
    def joined(cls, indexes: "Sequence[ForwardIndex]", rows: Sequence[RowArray]) -> "ForwardIndex":
        """One index of several, without reading any text; arguments as for `Segment.joined`.

        It is the same as one that was built from their texts.
        """
        kernels, words, lengths = _kernels(), [], []
        vocabulary: dict[str, int] = {}
        for index in indexes:
            numbers = [vocabulary.setdefault(word, len(vocabulary)) for word in index.vocabulary]
            words.append(kernels.renumbered(index.ordered.words, np.array(numbers, np.int32)))
            lengths.append(np.diff(index.ordered.starts))
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))))
        new = np.concatenate(rows)
        order = np.empty(int((new >= 0).sum()), np.int64)
        order[new[new >= 0]] = np.flatnonzero(new >= 0)
        stored = _read_only(Ordered(np.concatenate(words), starts))
        taken = Ordered(*kernels.taken(stored, order))
        # Numbers by first appearance, without the words that are gone.
        numbers_there = np.where(taken.words < 0, ~taken.words, taken.words)
        there, first = np.unique(numbers_there, return_index=True)
        there = there[np.argsort(first)]
        new_numbers = np.full(len(vocabulary), -1, np.int32)
        new_numbers[there] = np.arange(there.size)
        names = list(vocabulary)
        return cls(
            indexes[0].analyser,
            {names[number]: at for at, number in enumerate(there.tolist())},
            Ordered(kernels.renumbered(taken.words, new_numbers), taken.starts),
        )

    def __len__(self) -> int:
        return self._n_passages

    def text_signals(self, query: str, rows: RowArray) -> dict[str, FloatArray]:
        """The text family of some rows, shape (n,) each; see `ctxguard.retrieval.signals.text`."""
        terms = query_words(
            self._reading,
            query,
            partial(_known, self.vocabulary, self.words_with),
            partial(_known, self.stems, self.stems_with),
            len(self),
        )
        return named_signals(self._candidates(rows), terms)

    def term_cosines(self, rows: RowArray) -> FloatArray:
        """The cosines of rows' term vectors, shape (n, n); see `signals.term_vectors`."""
        return term_cosines(self._candidates(rows), self._stem_weights)

    def _candidates(self, rows: RowArray) -> "CandidateWords":
        candidates: CandidateWords = _text().CandidateWords(
            *_kernels().candidate_words(
                rows,
                self._stored,
                self.ordered,
                self._tail,
                self.stem_of,
                self._norm,
            )
        )
        return candidates

    def save(self, folder: Path) -> None:
        """Write the words as arrays and the vocabulary as JSON."""
        np.save(folder / _WORDS, self.ordered.words)
        np.save(folder / _STARTS, self.ordered.starts)
        text = json.dumps(list(self.vocabulary), ensure_ascii=False)
        (folder / _VOCABULARY).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, files: PartFiles, analyser: Analyser = ENGLISH) -> Self | None:
        """Read what ``save`` wrote; None where it wrote nothing.

        Raises:
            ValueError, OSError: files that ``save`` did not write together.
        """
        if _WORDS not in files:
            return None
        words, starts = files.large_array(_WORDS), files.array(_STARTS)
        vocabulary = {word: number for number, word in enumerate(files.texts(_VOCABULARY))}
        _check(Ordered(words, starts), len(vocabulary))
        return cls(analyser, vocabulary, Ordered(words, starts))


class EditedForwardIndex(ForwardIndex):
    """The forward index of an edited index, with the signals that a new one would give.

    Words and stems of the tail that the base does not have are numbered behind the base's.

    Args:
        base: The base's index.
        tail: The tail's index.
        row_map: Which of their passages are there.
    """

    def __init__(self, base: ForwardIndex, tail: ForwardIndex, row_map: RowMap) -> None:
        kernels = _kernels()
        self.analyser, self._reading, self.ordered = base.analyser, base._reading, base.ordered
        self.vocabulary, word_numbers = _extended(base.vocabulary, tail.vocabulary)
        self.stems, stem_numbers = _extended(base.stems, tail.stems)
        stem_of = np.empty(len(self.vocabulary), np.int32)
        stem_of[: base.stem_of.size] = base.stem_of
        stem_of[word_numbers] = stem_numbers[tail.stem_of]
        self.stem_of = read_only(stem_of)
        words = kernels.renumbered(tail.ordered.words, word_numbers)
        self._tail = _read_only(Ordered(words, tail.ordered.starts))
        self._stored = row_map.stored
        deleted = np.flatnonzero(row_map.base_rows < 0)
        gone = _read_only(Ordered(*kernels.taken(self.ordered, deleted)))
        counts = [
            _passages_with(part, self.stem_of, len(self.stems)) for part in (self._tail, gone)
        ]
        (self.words_with, self.stems_with), (words_gone, stems_gone) = counts
        self.words_with -= words_gone
        self.words_with[: base.words_with.size] += base.words_with
        self.stems_with -= stems_gone
        self.stems_with[: base.stems_with.size] += base.stems_with
        n_words = self.ordered.words.size + self._tail.words.size - gone.words.size
        self._count(self._stored.size, n_words)


def query_words(
    reading: Reading, query: str, words_with: Known, stems_with: Known, n_passages: int
) -> "QueryWords":
    """The words of a query with their weights among so many passages.

    A word weighs its inverse document frequency; one that no passage has weighs ln(n + 1.5), and
    such a stem ln(n + 1).
    """
    order = reading.words(query)
    positions = {word: at for at, word in enumerate(dict.fromkeys(order))}
    counts = Counter(reading.stems(order))
    words, with_word = words_with(list(positions))
    stems, with_stem = stems_with(list(counts))
    terms: QueryWords = _text().QueryWords(
        words,
        _weights(with_word, n_passages, log(n_passages + 1.5)),
        np.array([positions[word] for word in order], np.int64),
        stems,
        _weights(with_stem, n_passages, log1p(n_passages)),
        np.array(list(counts.values()), np.float64),
    )
    return terms


def named_signals(candidates: "CandidateWords", query: "QueryWords") -> dict[str, FloatArray]:
    """The text family by name, shape (n,) each."""
    text = _text()
    return dict(zip(text.NAMES, text.text_signals(candidates, query), strict=True))


def term_cosines(candidates: "CandidateWords", stem_weights: FloatArray) -> FloatArray:
    """The cosines of candidates' term vectors, shape (n, n)."""
    cosines: FloatArray = _term_vectors().term_cosines(candidates, stem_weights)
    return cosines


def bm25_norm(mean_length: float) -> tuple[float, float]:
    """What BM25 adds to the counts of a passage without words, and for each word."""
    return K1 * (1.0 - B), K1 * B / (mean_length or 1.0)


def _weights(passages_with: NumberArray, n_passages: int, unknown: float) -> FloatArray:
    return np.where(passages_with > 0, idf(passages_with, n_passages), unknown)


def _known(
    numbers: Mapping[str, int], passages_with: NumberArray, terms: list[str]
) -> tuple[NumberArray, NumberArray]:
    found = np.array([numbers.get(term, -1) for term in terms], np.int64)
    frequencies = np.zeros(found.size, np.int64)
    frequencies[found >= 0] = passages_with[found[found >= 0]]
    return found, frequencies


def _passages_with(
    ordered: Ordered, stem_of: NDArray[np.int32], n_stems: int
) -> tuple[NumberArray, NumberArray]:
    """How many passages have each word, and each stem."""
    itself = read_only(np.arange(stem_of.size, dtype=np.int32))
    with_word: NumberArray = _kernels().passages_with(ordered, itself, stem_of.size)
    return with_word, _kernels().passages_with(ordered, stem_of, n_stems)


def _extended(
    base: Mapping[str, int], tail: Mapping[str, int]
) -> tuple[Mapping[str, int], NDArray[np.int32]]:
    """The numbers of two vocabularies as one, and those of the second's terms in it."""
    new: dict[str, int] = {}
    for term in tail:
        if term not in base:
            new[term] = len(base) + len(new)
    both = ChainMap(new, dict(base))
    return both, np.array([both[term] for term in tail], np.int32)


def _read_only(ordered: Ordered) -> Ordered:
    return Ordered(read_only(ordered.words), read_only(ordered.starts))


def _check(ordered: Ordered, n_words: int) -> None:
    """Refuse arrays with which the compiled loops would read or write outside of them.

    Digests are not checked on every load.
    """
    words, starts = ordered
    if (str(words.dtype), str(starts.dtype)) != ("int32", "int64"):
        raise ValueError(f"the forward index is of {words.dtype} and {starts.dtype}")
    if words.ndim != 1 or starts.ndim != 1 or starts.size == 0 or starts[-1] != words.size:
        raise ValueError("the words of the forward index and their passages do not belong together")
    if starts[0] != 0 or (np.diff(starts) < 0).any():
        raise ValueError("the words of some passage of the forward index end before they begin")
    if words.size and not (words.min() >= -n_words and words.max() < n_words):
        raise ValueError("a word of the forward index is not in its vocabulary")


@cache
def _kernels() -> Any:
    return require("ctxguard.retrieval.index.forward_kernels", "embedded")


@cache
def _text() -> Any:
    return require("ctxguard.retrieval.signals.text", "embedded")


@cache
def _term_vectors() -> Any:
    return require("ctxguard.retrieval.signals.term_vectors", "embedded")


_NO_ROWS: RowArray = read_only(np.zeros(0, np.int64))
_NO_WORDS = _read_only(Ordered(np.zeros(0, np.int32), np.zeros(1, np.int64)))
