"""Parts of a retriever that fail on request, for tests of code built on one."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ctxguard.core.types import FloatArray, Passage
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.hybrid_index import HybridIndex
from ctxguard.retrieval.protocols import Embedder, Float32Array
from tests.doubles.word_hash_embedder import WordHashEmbedder


class Fault:
    """Replaces the work of a faulty part.

    Attributes:
        instead: Called in place of the work, with the work as its argument: it may raise, hang,
            or spoil the result. None while the part works normally.

    >>> fault = Fault()
    >>> fault.run(lambda: 1)
    1
    >>> with fault.injected(lambda work: work() + 1):
    ...     fault.run(lambda: 1)
    2
    """

    def __init__(self) -> None:
        self.instead: Callable[[Callable[[], Any]], Any] | None = None

    @classmethod
    def of(cls, part: object, method: str) -> "Fault":
        """The fault of one method of a part, whose calls it replaces from now on."""
        fault, work = cls(), getattr(part, method)
        setattr(part, method, lambda *arguments: fault.run(lambda: work(*arguments)))
        return fault

    def run(self, work: Callable[[], Any]) -> Any:
        """Do the work, or call its replacement."""
        return work() if self.instead is None else self.instead(work)

    @contextmanager
    def injected(self, instead: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
        """Call ``instead`` in place of the work until the block ends."""
        self.instead = instead
        try:
            yield
        finally:
            self.instead = None


class FaultyEmbedder:
    """An embedder whose encoding of a query ``fault`` replaces."""

    def __init__(self, inner: Embedder | None = None) -> None:
        self._inner = WordHashEmbedder() if inner is None else inner
        self.fault = Fault()
        self.name = self._inner.name
        self.dimension = self._inner.dimension

    def encode_query(self, text: str) -> Float32Array:
        vector: Float32Array = self.fault.run(lambda: self._inner.encode_query(text))
        return vector

    def encode_passages(self, texts: Sequence[str]) -> Float32Array:
        return self._inner.encode_passages(texts)

    def fingerprint(self) -> str:
        return self._inner.fingerprint()


class FaultyReranker:
    """A reranker that prefers short texts, and whose scoring ``fault`` replaces."""

    fingerprint = "shortest first"

    def __init__(self) -> None:
        self.fault = Fault()

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        logits: FloatArray = self.fault.run(
            lambda: np.array([-float(len(text)) for text in texts], np.float64)
        )
        return logits


class FaultyRetriever:
    """A hybrid retriever whose stages can be made to fail while it serves.

    Its ``retriever`` has both legs, ``reranker`` is for its ``with_reranker``, and ``faults`` are
    those of the stages.

    >>> def down(work):
    ...     raise ConnectionError
    >>> faulty = FaultyRetriever([Passage("a", "a red fox")])
    >>> with faulty.faults["dense"].injected(down):
    ...     faulty.retriever.retrieve("red fox").route.value
    'lexical'
    """

    def __init__(self, passages: Iterable[Passage], embedder: Embedder | None = None) -> None:
        self.embedder, self.reranker = FaultyEmbedder(embedder), FaultyReranker()
        index = HybridIndex.build(passages, embedder=self.embedder, signals="none")
        self.retriever = HybridRetriever(index, embedder=self.embedder)
        self.faults = {
            # The lookup of a query's words is the first step of every search.
            "lexical": Fault.of(index.lexical, "scores"),
            "dense": self.embedder.fault,
            "rerank": self.reranker.fault,
        }
