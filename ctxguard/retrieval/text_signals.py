"""The text family of signals for passages that are in no index of ctxguard.

A wrapped retriever's passages are split when they are first seen, which takes 5 to 46 ms for 100 of
them, and kept by their ids, as many as fit.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.fork_safety import OfProcess
from ctxguard.core.types import FloatArray, Hit, Passage
from ctxguard.errors import ConfigurationError, DataError
from ctxguard.retrieval.analysers import as_analyser
from ctxguard.retrieval.analysers.reading import Reading
from ctxguard.retrieval.index.forward import (
    NumberArray,
    bm25_norm,
    named_signals,
    query_words,
    stem_weights,
    word_weights,
)
from ctxguard.retrieval.index.kernels import rows_with
from ctxguard.retrieval.index.passages import searchable_text
from ctxguard.retrieval.protocols import Analyser
from ctxguard.retrieval.signals.text import PassageWords, renumbered

MAX_WORDS = 2_000_000
"""Words that are kept, at 16 bytes each."""

_Weigh = Callable[[NumberArray, int], FloatArray]

_NON_NEGATIVE = np.int64(2**63 - 1)
_NO_WORDS: NumberArray = np.zeros(0, np.int64)


class _PassagesWith:
    """How many passages of a corpus have each term."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        numbers = _numbers(counts)
        order = np.argsort(numbers)
        self._numbers = numbers[order]
        self._counts = np.array(list(counts.values()), np.int64)[order]

    def __call__(self, numbers: NumberArray) -> NumberArray:
        """The counts of some numbers, same shape; 0 for one that no passage has."""
        at = np.searchsorted(self._numbers, numbers)
        at[at == self._numbers.size] = 0
        is_there = self._numbers[at] == numbers if self._numbers.size else np.zeros(at.shape, bool)
        return np.where(is_there, self._counts[at], 0)


@dataclass(frozen=True, slots=True)
class _Corpus:
    """What is counted over a corpus.

    Attributes:
        words_with: How many passages have each word.
        stems_with: How many passages have each stem.
        n_passages: How many there are.
        mean_length: Words of a passage on the mean.
    """

    words_with: _PassagesWith
    stems_with: _PassagesWith
    n_passages: int
    mean_length: float


@dataclass(frozen=True, slots=True)
class _Read:
    """A passage as it was read: its text's hash, its words and their stems, shape (n_words,)."""

    text: int
    words: NumberArray
    stems: NumberArray

    @property
    def size(self) -> int:
        """Its words, and as much as what is kept beside them takes."""
        return self.words.size + 32


class TextSignals:
    """The text family of passages that are given with each query. Safe for several threads.

    Args:
        analyser: What splits passages and queries: a language code, or an analyser.
        corpus: What is counted for how rare each word is and how long passages are; read once.
            None to count the candidates of each query: a signal then depends on the others.
        max_words: How many words of passages are kept, those used last.

    Raises:
        ConfigurationError: an unknown language, or ``max_words`` below 1.
        DataError: a corpus without passages.
        MissingExtraError: a library that it needs is not installed.
    """

    # By passage id, those used last at the end.
    _kept = OfProcess[OrderedDict[str, _Read]](OrderedDict)
    _size = OfProcess(int)
    _lock = OfProcess(Lock)

    def __init__(
        self,
        analyser: Analyser | str = "en",
        *,
        corpus: Iterable[Passage] | None = None,
        max_words: int = MAX_WORDS,
    ) -> None:
        if max_words < 1:
            raise ConfigurationError(f"max_words is {max_words!r}; it must be at least 1")
        analyser = as_analyser(analyser)
        self._analyser = analyser.fingerprint
        self._reading = Reading.of(analyser)
        self._max_words = max_words
        self._corpus = None if corpus is None else self._counted(corpus)

    @property
    def fingerprint(self) -> str:
        """What splits texts, and what rare words are counted in; two of equal ones agree.

        The passages of a corpus are counted, not compared: small changes change little.
        """
        counted_in = "its candidates" if self._corpus is None else "a corpus"
        return f"{self._analyser}, counted in {counted_in}"

    def text_signals(self, query: str, passages: Sequence[Passage | Hit]) -> dict[str, FloatArray]:
        """Compute the text family of some passages, shape (n,) each; see `signals.text`."""
        read, corpus = [self._read(passage) for passage in passages], self._corpus
        rows, starts = np.arange(len(read)), np.cumsum([0, *[each.words.size for each in read]])
        mean = int(starts[-1]) / max(len(read), 1) if corpus is None else corpus.mean_length
        numbered: list[tuple[NDArray[np.int32], int]] = []

        n_passages = len(read) if corpus is None else corpus.n_passages

        def known(
            given: list[NumberArray],
            counted: _PassagesWith | None,
            weigh: _Weigh,
            terms: Collection[str],
        ) -> tuple[NumberArray, FloatArray]:
            """Number the terms of passages and query together; as `Known`."""
            wanted, flat = _numbers(terms), np.concatenate([_NO_WORDS, *given])
            both, n = renumbered(np.concatenate((np.where(flat < 0, ~flat, flat), wanted)))
            there, asked = both[: flat.size], both[flat.size :].astype(np.int64)
            numbered.append((np.where(flat < 0, ~there, there), n))
            if counted is None:
                every = np.arange(n, dtype=np.int32)
                return asked, weigh(rows_with(there, starts, rows, every, n)[asked], n_passages)
            return asked, weigh(counted(wanted), n_passages)

        counts = (None, None) if corpus is None else (corpus.words_with, corpus.stems_with)
        of_words = partial(known, [each.words for each in read], counts[0], word_weights)
        of_stems = partial(known, [each.stems for each in read], counts[1], stem_weights)
        terms = query_words(self._reading, query, of_words, of_stems)
        (words, n_words), (stems, n_stems) = numbered
        stem_of = np.zeros(n_words, np.int32)
        stem_of[np.where(words < 0, ~words, words)] = stems
        there = PassageWords(words, starts, stem_of, n_stems, *bm25_norm(mean))
        return named_signals(there, terms, rows)

    def _read(self, passage: Passage | Hit) -> _Read:
        """Its words, kept or split now."""
        text = searchable_text(passage)
        digest = hash(text)
        with self._lock:
            kept = self._kept.get(passage.passage_id)
            if kept is not None and kept.text == digest:
                self._kept.move_to_end(passage.passage_id)
                return kept
        read = self._split(text)
        with self._lock:
            old = self._kept.pop(passage.passage_id, None)
            self._kept[passage.passage_id] = read
            self._size += read.size - (0 if old is None else old.size)
            while self._size > self._max_words:
                _, gone = self._kept.popitem(last=False)
                self._size -= gone.size
        return read

    def _split(self, text: str) -> _Read:
        sentences = self._reading.sentences(text)
        words = [word for sentence in sentences for word in sentence]
        numbers = _numbers(words)
        first = np.cumsum([0, *map(len, sentences)])[:-1]
        numbers[first] = ~numbers[first]
        return _Read(hash(text), numbers, _numbers(self._reading.stems(words)))

    def _counted(self, corpus: Iterable[Passage]) -> _Corpus:
        words_with: Counter[str] = Counter()
        stems_with: Counter[str] = Counter()
        n_passages = n_words = 0
        for passage in corpus:
            words = self._reading.words(searchable_text(passage))
            distinct = list(dict.fromkeys(words))
            words_with.update(distinct)
            stems_with.update(set(self._reading.stems(distinct)))
            n_passages += 1
            n_words += len(words)
        if n_passages == 0:
            raise DataError("the corpus is empty: there is nothing to count how rare words are in")
        counts = _PassagesWith(words_with), _PassagesWith(stems_with)
        return _Corpus(*counts, n_passages, n_words / n_passages)


def _numbers(terms: Collection[str]) -> NumberArray:
    """63 bits that identify each term in this process."""
    return np.array([hash(term) for term in terms], np.int64) & _NON_NEGATIVE
