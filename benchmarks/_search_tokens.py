"""Word pieces of generated texts, so that the default search has all its signals.

A word is one piece, or two if it is long, by its hash; each piece has a random unit vector in a
table of the size of all-MiniLM-L6-v2's. The state of a query's piece lies between the piece's and
the query's vector.
"""

import re
from collections.abc import Sequence
from functools import cache
from zlib import crc32

import numpy as np

from benchmarks._search_data import DIMENSION
from ctxguard.retrieval.protocols import Float32Array, QueryStates, RowArray

N_PIECES = 30_522
_PIECE = re.compile(r"\w{1,7}|[^\w\s]")


def pieces_of(text: str) -> RowArray:
    """The number of each word piece of a text."""
    found = [crc32(piece.lower().encode()) % N_PIECES for piece in _PIECE.findall(text)]
    return np.array(found, np.int64)


@cache
def piece_table() -> Float32Array:
    """The vector of every piece by itself."""
    drawn = np.random.default_rng(0).standard_normal((N_PIECES, DIMENSION), dtype=np.float32)
    return _unit(drawn)


def _unit(vectors: Float32Array) -> Float32Array:
    unit: Float32Array = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


def query_states(queries: Sequence[str], vectors: Float32Array) -> list[QueryStates]:
    """Each query with its vector, as a model would read it."""
    made = []
    for query, vector in zip(queries, vectors, strict=True):
        pieces = pieces_of(query)
        made.append(QueryStates(vector, pieces, _unit(piece_table()[pieces] + vector)))
    return made


class GivenTokens:
    """Generated pieces, as a `TokenEncoder` has them."""

    def query(self, text: str) -> QueryStates:
        raise RuntimeError(f"the word pieces of {text!r} were not given")

    def pieces(self, texts: Sequence[str]) -> list[RowArray]:
        return list(map(pieces_of, texts))

    @property
    def piece_table(self) -> Float32Array:
        return piece_table()
