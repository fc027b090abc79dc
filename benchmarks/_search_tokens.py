"""Word pieces and sentences of generated texts, so that the default search has all its signals.

A word is one piece, or two if it is long, by its hash; each piece has a random unit vector in a
table of the size of all-MiniLM-L6-v2's. A sentence's vector is its passage's with noise, and the
state of a query's piece lies between the piece's and the query's vector.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from zlib import crc32

import numpy as np

from benchmarks._search_data import DIMENSION
from ctxguard.retrieval.models.sentences import sentence_lengths, sentences_of, unit_states
from ctxguard.retrieval.nibbles import packed
from ctxguard.retrieval.protocols import (
    Float32Array,
    NibbleArray,
    Progress,
    QueryTokens,
    RowArray,
    Sentences,
)

N_PIECES = 30_522
_PIECE = re.compile(r"\w{1,7}|[^\w\s]")


def pieces_of(text: str) -> tuple[list[int], RowArray]:
    """The start and the number of each word piece of a text."""
    found = list(_PIECE.finditer(text))
    numbers = [crc32(piece[0].lower().encode()) % N_PIECES for piece in found]
    return [piece.start() for piece in found], np.array(numbers, np.int64)


@cache
def token_table() -> NibbleArray:
    """The vector of every piece by itself, packed."""
    return packed(_directions())


def _directions() -> Float32Array:
    drawn = np.random.default_rng(0).standard_normal((N_PIECES, DIMENSION), dtype=np.float32)
    return unit_states(drawn)


def query_tokens(queries: Sequence[str], vectors: Float32Array) -> list[QueryTokens]:
    """Each query with its vector, as a model would read it."""
    directions, made = _directions(), []
    for query, vector in zip(queries, vectors, strict=True):
        _, pieces = pieces_of(query)
        made.append(QueryTokens(vector, unit_states(directions[pieces] + vector), pieces))
    return made


class GivenTokens:
    """A `TokenEncoder` of vectors that a function of the texts gives."""

    def __init__(self, vectors_of: Callable[[Sequence[str]], Float32Array]) -> None:
        self._vectors_of = vectors_of

    def encode_query(self, text: str) -> QueryTokens:
        raise RuntimeError(f"the word pieces of {text!r} were not given")

    def encode_passages(
        self,
        texts: Sequence[str],
        progress: Progress | None = None,  # noqa: ARG002  it takes seconds
    ) -> tuple[Float32Array, Sentences]:
        vectors, rng = self._vectors_of(texts), np.random.default_rng(1)
        read = [pieces_of(text) for text in texts]
        lengths = [
            sentence_lengths(text, starts) for text, (starts, _) in zip(texts, read, strict=True)
        ]
        of_sentences = np.repeat(vectors, list(map(len, lengths)), axis=0)
        noise = rng.standard_normal(of_sentences.shape, dtype=np.float32)
        return vectors, sentences_of(
            of_sentences + noise / np.float32(DIMENSION**0.5),
            lengths,
            np.concatenate([pieces for _, pieces in read]),
            N_PIECES,
        )

    def token_table(self) -> NibbleArray:
        return token_table()
