"""The text family of signals for passages that are in no index of ctxguard.

A wrapped retriever's passages are split when they are first seen, which takes 5 to 46 ms for 100 of
them, and kept by their ids, as many as fit.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from ctxguard._support.extras import require
from ctxguard.core.types import FloatArray, Hit, Passage
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.analysers import as_analyser
from ctxguard.retrieval.analysers.reading import Reading
from ctxguard.retrieval.index.forward import (
    NumberArray,
    bm25_norm,
    named_signals,
    query_words,
    term_cosines,
)
from ctxguard.retrieval.index.lexical import idf
from ctxguard.retrieval.index.passages import searchable_text
from ctxguard.retrieval.protocols import Analyser

MAX_WORDS = 2_000_000
"""Words that are kept, at 16 bytes each."""

_NON_NEGATIVE = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _Corpus:
    """What is counted over a corpus.

    Attributes:
        words_with: How many passages have each word.
        stems_with: How many passages have each stem.
        n_passages: How many there are.
        mean_length: Words of a passage on the mean.
    """

    words_with: Mapping[int, int]
    stems_with: Mapping[int, int]
    n_passages: int
    mean_length: float


@dataclass(frozen=True, slots=True)
class _Read:
    """A passage as it was read: its text's hash, its words and their stems, shape (n_words,)."""

    text: int
    words: NumberArray
    stems: NumberArray


class TextSignals:
    """The text family of passages that are given with each query. Safe for several threads.

    Args:
        analyser: What splits passages and queries: a language code, or an analyser.
        corpus: What is counted for how rare each word is and how long passages are; read once.
            None to count the candidates of each query: a signal then depends on the others.
        max_words: How many words of passages are kept, those used last.

    Raises:
        ConfigurationError: an unknown language, or ``max_words`` below 1.
        MissingExtraError: a library that it needs is not installed.
    """

    def __init__(
        self,
        analyser: Analyser | str = "en",
        *,
        corpus: Iterable[Passage] | None = None,
        max_words: int = MAX_WORDS,
    ) -> None:
        if max_words < 1:
            raise ConfigurationError(f"max_words is {max_words!r}; it must be at least 1")
        self._kernels: Any = require("ctxguard.signals.text", "embedded")
        self._vectors: Any = require("ctxguard.signals.term_vectors", "embedded")
        self._reading = Reading.of(as_analyser(analyser))
        self._max_words = max_words
        # By passage id, those used last at the end.
        self._kept: OrderedDict[str, _Read] = OrderedDict()
        self._n_words = 0
        self._lock = Lock()
        self._corpus = None if corpus is None else self._counted(corpus)

    def text_signals(self, query: str, passages: Sequence[Passage | Hit]) -> dict[str, FloatArray]:
        """The text family of some passages, shape (n,) each; see `ctxguard.signals.text`."""
        candidates, n_passages = self._candidates(passages)
        known = [
            partial(self._known, terms, candidates.starts, corpus)
            for terms, corpus in (
                (candidates.words, self._corpus and self._corpus.words_with),
                (candidates.stems, self._corpus and self._corpus.stems_with),
            )
        ]
        return named_signals(candidates, query_words(self._reading, query, *known, n_passages))

    def term_cosines(self, passages: Sequence[Passage | Hit]) -> FloatArray:
        """The cosines of term vectors, shape (n, n); see `ctxguard.signals.term_vectors`."""
        candidates, n_passages = self._candidates(passages)
        stems, distinct = self._vectors.renumbered(candidates.stems)
        if self._corpus is None:
            with_stem = self._kernels.passages_with(candidates.stems, candidates.starts, distinct)
        else:
            with_stem = _looked_up(self._corpus.stems_with, distinct)
        return term_cosines(candidates._replace(stems=stems), idf(with_stem, n_passages))

    def _known(
        self,
        terms_there: NumberArray,
        starts: NumberArray,
        corpus: Mapping[int, int] | None,
        terms: list[str],
    ) -> tuple[NumberArray, NumberArray]:
        """As `ctxguard.retrieval.index.forward.Known`."""
        numbers = _numbers(terms)
        if corpus is None:
            return numbers, self._kernels.passages_with(terms_there, starts, numbers)
        return numbers, _looked_up(corpus, numbers)

    def _candidates(self, passages: Sequence[Passage | Hit]) -> tuple[Any, int]:
        """The `CandidateWords` of passages, and among how many passages words are rare."""
        read = [self._read(passage) for passage in passages]
        lengths = np.array([each.words.size for each in read], np.int64)
        mean = float(lengths.mean()) if self._corpus is None else self._corpus.mean_length
        base, per_word = bm25_norm(mean)
        candidates = self._kernels.CandidateWords(
            np.concatenate([each.words for each in read]),
            np.concatenate([each.stems for each in read]),
            np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))),
            base + per_word * lengths,
        )
        return candidates, len(read) if self._corpus is None else self._corpus.n_passages

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
            self._n_words += read.words.size - (0 if old is None else old.words.size)
            while self._n_words > self._max_words:
                _, gone = self._kept.popitem(last=False)
                self._n_words -= gone.words.size
        return read

    def _split(self, text: str) -> _Read:
        sentences = self._reading.sentences(text)
        words = [word for sentence in sentences for word in sentence]
        numbers = _numbers(words)
        first = np.cumsum([0, *map(len, sentences)])[:-1]
        numbers[first] = ~numbers[first]
        return _Read(hash(text), numbers, _numbers(self._reading.stems(words)))

    def _counted(self, corpus: Iterable[Passage]) -> _Corpus:
        words_with: Counter[int] = Counter()
        stems_with: Counter[int] = Counter()
        n_passages = n_words = 0
        for passage in corpus:
            words = self._reading.words(searchable_text(passage))
            words_with.update(set(map(_number, words)))
            stems_with.update(set(map(_number, self._reading.stems(words))))
            n_passages += 1
            n_words += len(words)
        return _Corpus(words_with, stems_with, n_passages, n_words / max(n_passages, 1))


def _number(term: str) -> int:
    """63 bits that identify a term in this process."""
    return hash(term) & _NON_NEGATIVE


def _numbers(terms: list[str]) -> NumberArray:
    return np.array([_number(term) for term in terms], np.int64)


def _looked_up(passages_with: Mapping[int, int], numbers: NumberArray) -> NumberArray:
    return np.array([passages_with.get(number, 0) for number in numbers.tolist()], np.int64)
