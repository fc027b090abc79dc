"""What a retriever and its parts must do; anything that does it can take their place."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ctxguard.types import DEFAULT_DEPTH, FloatArray, Ranking

Float32Array = NDArray[np.float32]
RowArray = NDArray[np.int64]

Progress = Callable[[int], None]
"""Told how many passages are done so far."""


@runtime_checkable
class Retriever(Protocol):
    """Finds candidates for a query."""

    def retrieve(self, query: str, *, depth: int = DEFAULT_DEPTH) -> Ranking:
        """At most ``depth`` candidates, best first."""
        ...


class Embedder(Protocol):
    """Turns text into vectors. Safe to call from several threads at once."""

    @property
    def name(self) -> str:
        """The model's name, as its users know it."""
        ...

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        ...

    def encode_query(self, text: str) -> Float32Array:
        """One vector, shape (dimension,)."""
        ...

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        """One vector per text, shape (n, dimension)."""
        ...

    def fingerprint(self) -> str:
        """A digest of the weights: two models of one name and size give no error when swapped."""
        ...


class LexicalHits(NamedTuple):
    """What a lexical search found.

    Attributes:
        rows: The best rows that score above zero, best first, ties by row.
        scores: Theirs, shape as ``rows``.
        every: The score of every row of the index, shape (n,); a search computes them all, and
            the hybrid retriever looks up those of the dense leg's candidates.
    """

    rows: RowArray
    scores: FloatArray
    every: Float32Array


class LexicalIndex(Protocol):
    """Scores passages, known by their row, by the words that they share with a query.

    Scores are of kind ``ratio``: zero means no word in common. Safe to search from several
    threads at once.
    """

    @property
    def fingerprint(self) -> str:
        """The engine, the analyser and their parameters."""
        ...

    def __len__(self) -> int:
        """How many passages it holds."""
        ...

    def search(self, query: str, k: int) -> LexicalHits:
        """The at most ``k`` best rows, and every row's score."""
        ...

    def save(self, folder: Path) -> None:
        """Write the index into a folder as plain files whose names start with ``lexical``."""
        ...


class Reranker(Protocol):
    """Scores query and passage together. Safe to call from several threads at once."""

    @property
    def fingerprint(self) -> str:
        """Name, digest of the weights, and activation."""
        ...

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        """One logit per text, shape (n,), higher is better."""
        ...
