"""Defines the protocols of retrievers, and of the parts of the embedded retriever.

Any object with these methods will do; no base class is needed. Pure.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import FloatArray, Hit, Ranking

Float32Array = NDArray[np.float32]
RowArray = NDArray[np.int64]
BuildProgress = Callable[[int, int], None]
"""Called with the number of passages encoded so far, and the number to encode."""


Retrieval = Ranking | Iterable[Hit]
"""What a retriever returns. The guard must be told the ``score_kind`` of plain hits."""


@runtime_checkable
class Retriever(Protocol):
    """Finds candidates for a query. Safe to call from several threads at once.

    The guard also uses these, where they exist: ``fingerprint() -> Mapping[str, str]``, which
    identifies the system for profiles; ``corpus_sketch() -> CorpusSketch``, which tells how much of
    the corpus has changed; ``with_fusion(fusion)``, the same retriever under another fusion; and
    ``concurrency``, for a retriever that computes in this process: the most calls at once that are
    worth a thread each.
    """

    def retrieve(self, query: str, /, *, depth: int) -> Retrieval:
        """Find at most ``depth`` candidates, best first.

        Raises:
            QueryError: the query cannot be searched. Any other error counts as an outage.
        """
        ...


@runtime_checkable
class AsyncRetriever(Protocol):
    """Finds candidates for a query without blocking the event loop.

    ``ContextGuard.aretrieve`` awaits it; ``ContextGuard.retrieve`` needs a `Retriever`, which the
    same object may be too.
    """

    def aretrieve(self, query: str, /, *, depth: int) -> Awaitable[Retrieval]: ...


class AwaitableRetriever(Protocol):
    """An object with only an asynchronous ``retrieve``; see `AsyncRetriever`."""

    def retrieve(self, query: str, /, *, depth: int) -> Awaitable[Retrieval]: ...


class RetrieverFunction(Protocol):
    """A function that finds candidates for a query; plain or asynchronous."""

    def __call__(self, query: str, /, *, depth: int) -> Retrieval | Awaitable[Retrieval]: ...


@runtime_checkable
class FilteringRetriever(Protocol):
    """A `Retriever` that also takes a filter on metadata; requests with a filter require it."""

    def retrieve(self, query: str, /, *, depth: int, where: Where | None = None) -> Retrieval:
        """Find at most ``depth`` candidates among the passages that ``where`` allows.

        The returned passages must have their metadata: the guard checks each against ``where``.
        """
        ...


@runtime_checkable
class ProbedRetriever(Protocol):
    """A `Retriever` that says how similar its model finds a query and a text.

    Calibration keeps its answers for a few fixed texts in the profile, and the guard asks again
    when it is made and at each ``ContextGuard.probe``. That reveals an embedder or reranker that
    was swapped behind its URL.
    """

    def similarities(self, query: str, texts: Sequence[str], /) -> FloatArray:
        """Compare a query with texts, shape (n,): by cosine, or by the reranker's scores.

        An embedder gives ``encode_passages(texts) @ encode_query(query)``.
        """
        ...


@runtime_checkable
class SwappingRetriever(Protocol):
    """A `Retriever` whose index may be replaced while it serves.

    Each request is answered from one generation, and the guard compares its profile with every
    new one.
    """

    @property
    def generation(self) -> object:
        """The index being searched: a new object after every change. May be an attribute."""
        ...

    def pinned(self) -> Retriever:
        """Return this retriever fixed to the current generation."""
        ...

    def retrieve(self, query: str, /, *, depth: int) -> Retrieval: ...


AnyRetriever = Retriever | AsyncRetriever | AwaitableRetriever | RetrieverFunction
"""What a guard can wrap. A `FilteringRetriever` or a `SwappingRetriever` is a `Retriever` too."""


class Embedder(Protocol):
    """Turns text into vectors. Safe to call from several threads at once.

    It may be a `TokenEncoder` too. ``name`` is the model's, as its users know it, and ``dimension``
    the length of a vector.
    """

    @property
    def name(self) -> str: ...

    @property
    def dimension(self) -> int: ...

    def encode_query(self, text: str) -> Float32Array:
        """Return one vector, shape (dimension,)."""
        ...

    def encode_passages(self, texts: Sequence[str]) -> Float32Array:
        """Return one vector per text, shape (n, dimension)."""
        ...

    def fingerprint(self) -> str:
        """Return a digest of the weights, as another model may have the same name and size."""
        ...


class QueryStates(NamedTuple):
    """A query as a model encodes it: its vector, and the state of each of its word pieces.

    Attributes:
        vector: As from `Embedder.encode_query`, shape (dimension,).
        piece_ids: The number of each word piece in the model's vocabulary, without the model's own
            marks and its prompt, shape (m,).
        states: Unit vectors, the model's last hidden state of each, shape (m, dimension).
    """

    vector: Float32Array
    piece_ids: NDArray[np.integer]
    states: Float32Array


class TokenEncoder(Protocol):
    """Returns word pieces and their states. Safe to call from several threads at once."""

    def query(self, text: str) -> QueryStates:
        """Return a query's vector and its word pieces, from one pass through the model."""
        ...

    def pieces(self, texts: Sequence[str]) -> Sequence[NDArray[np.integer]]:
        """Return the numbers of each text's word pieces, without the model's own marks."""
        ...

    @property
    def piece_table(self) -> Float32Array:
        """The unit vector of each word piece alone, (n_pieces, dimension), used for queries."""
        ...


def token_encoder_of(embedder: Embedder) -> TokenEncoder | None:
    """Return the embedder if it is a `TokenEncoder`."""
    # Asked for every query: isinstance of a protocol takes ten times as long.
    return cast(TokenEncoder, embedder) if hasattr(embedder, "pieces") else None


@runtime_checkable
class Analyser(Protocol):
    """Splits passages and queries into the terms that lexical search matches.

    Safe to use from several threads at once. Equal texts give equal terms.
    """

    @property
    def name(self) -> str:
        """The analyser's name in a saved index: a language code, or a name of your own."""
        ...

    @property
    def fingerprint(self) -> str:
        """The analyser's rules, with the versions of their sources.

        Change it whenever ``analyse`` changes: an index built before is then refused.
        """
        ...

    @property
    def scripts(self) -> frozenset[str] | None:
        """The scripts it supports, named by the first word of their letters' Unicode names.

        Such as ``LATIN`` or ``CJK``; None for all scripts.
        """
        ...

    def analyse(self, text: str) -> list[str]:
        """Return the terms of a text, each as often as it occurs."""
        ...


class LegHits(NamedTuple):
    """One leg's result.

    Attributes:
        rows: The best rows, best first, ties by row; of the lexical leg those above zero.
        scores: The score of each, same shape.
        scores_of: Returns the leg's scores of any rows, such as those that the other leg found.
    """

    rows: RowArray
    scores: FloatArray
    scores_of: Callable[[RowArray], FloatArray]


class Assessor(Protocol):
    """Answers questions about candidates of one query. Safe to call from several threads at once.

    ``names`` are those of its answers. It may have a ``ledger``, the ``Ledger`` of its calls and
    their cost.
    """

    @property
    def fingerprint(self) -> str:
        """Its model, form and questions; a calibration of its answers applies only to these."""
        ...

    @property
    def names(self) -> tuple[str, ...]: ...

    def assess(self, query: str, texts: Sequence[str]) -> Mapping[str, FloatArray]:
        """Answer for all texts in one call: numbers by name, shape (n,), NaN for a refusal.

        Higher means more of what the name says. Called once a request. Any error means that it
        could not answer at all.
        """
        ...


class Reranker(Protocol):
    """Scores a query and a passage together. Safe to call from several threads at once."""

    @property
    def fingerprint(self) -> str:
        """Name, digest of the weights, and activation."""
        ...

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        """Return one logit per text, shape (n,), higher is better."""
        ...
