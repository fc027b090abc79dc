"""The text family of signals for passages that are in no index of ctxguard.

A wrapped retriever's passages are split when they are first seen, which takes 5 to 46 ms for 100 of
them, and kept by their ids, as many as fit.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock

import numpy as np

from ctxguard._support.fork_safety import OfProcess
from ctxguard.core.types import FloatArray, Hit, Passage
from ctxguard.errors import ConfigurationError, DataError
from ctxguard.retrieval.analysers import as_analyser
from ctxguard.retrieval.analysers.reading import Reading
from ctxguard.retrieval.index.forward import named_signals
from ctxguard.retrieval.index.passages import searchable_text
from ctxguard.retrieval.index.records import CorpusCounts, Records, weighed_words
from ctxguard.retrieval.protocols import Analyser

MAX_WORDS = 2_000_000
"""Words that are kept, at 8 bytes each."""


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

    # The hash of a text and its record by passage id, those used last at the end.
    _kept = OfProcess[OrderedDict[str, tuple[int, Records]]](OrderedDict)
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
        read = [self._read(passage) for passage in passages]
        records = Records.of([each.words for each in read], [each.stems for each in read])
        found = weighed_words(records, query, self._reading, self._corpus)
        return named_signals(found.passages, found.query, np.arange(len(read)))

    def _read(self, passage: Passage | Hit) -> Records:
        """Its words, kept or split now."""
        text = searchable_text(passage)
        digest = hash(text)
        with self._lock:
            kept = self._kept.get(passage.passage_id)
            if kept is not None and kept[0] == digest:
                self._kept.move_to_end(passage.passage_id)
                return kept[1]
        read = self._split(text)
        with self._lock:
            old = self._kept.pop(passage.passage_id, None)
            self._kept[passage.passage_id] = digest, read
            self._size += _size(read) - (0 if old is None else _size(old[1]))
            while self._size > self._max_words:
                _, (_, gone) = self._kept.popitem(last=False)
                self._size -= _size(gone)
        return read

    def _counted(self, corpus: Iterable[Passage]) -> CorpusCounts:
        texts = map(searchable_text, corpus)
        counts = CorpusCounts.of(self._split(text) for text in texts)
        if counts.n_passages == 0:
            raise DataError("the corpus is empty: there is nothing to count how rare words are in")
        return counts

    def _split(self, text: str) -> Records:
        return Records.read(self._reading, [text], most_words=self._max_words)


def _size(record: Records) -> int:
    """A passage's words, and as much as what is kept beside them takes."""
    return record.words.size + 32
