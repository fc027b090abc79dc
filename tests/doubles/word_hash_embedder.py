"""Embedders for tests that need vectors without a model."""

import hashlib
import re
from collections.abc import Sequence
from functools import cache

import numpy as np

from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.protocols import Float32Array, QueryStates, RowArray

_N_PIECES = 997
_WORD = re.compile(r"\w+|[.,;:!?]")


class WordHashEmbedder:
    """An embedder without a model: each word adds a direction that its hash chooses.

    Texts that share words are near each other; a text without words has the zero vector. Another
    salt makes another model.
    """

    def __init__(self, dimension: int = 64, salt: str = "") -> None:
        self.name = "word-hash"
        self.dimension = dimension
        self._salt = salt

    def encode_query(self, text: str) -> Float32Array:
        vector = np.zeros(self.dimension, np.float32)
        for word in ENGLISH.analyse(text):
            vector += _direction(self._salt + word, self.dimension)
        length = float(np.linalg.norm(vector))
        return vector / np.float32(length) if length > 0.0 else vector

    def encode_passages(self, texts: Sequence[str]) -> Float32Array:
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in enumerate(texts):
            vectors[row] = self.encode_query(text)
        return vectors

    def fingerprint(self) -> str:
        return f"word-hash {self.dimension} {self._salt}"


class WordTokenEmbedder(WordHashEmbedder):
    """A `WordHashEmbedder` that also gives states of words, which a passage's pieces match.

    A word's piece is its hash. Its state is its own direction plus half of its text's, which is
    the mean of all.
    """

    def query(self, text: str) -> QueryStates:
        """Return a query's vector and its words."""
        (pieces,) = self.pieces([text])
        states = self.piece_table[pieces]
        if pieces.size:
            states = states + np.float32(0.5) * states.mean(axis=0)
        return QueryStates(self.encode_query(text), pieces, _unit(states))

    def pieces(self, texts: Sequence[str]) -> list[RowArray]:
        """Return the piece of each word."""
        return [
            np.array([_piece(word.lower()) for word in _WORD.findall(text)], np.int64)
            for text in texts
        ]

    @property
    def piece_table(self) -> Float32Array:
        """Return the direction of every word."""
        return _directions(self.dimension)


class CountedEmbedder(WordTokenEmbedder):
    """Notes what it encodes, and is interrupted before passage number ``until``."""

    def __init__(self, until: float = float("inf"), salt: str = "") -> None:
        super().__init__(salt=salt)
        self.encoded: list[str] = []
        self._until = until

    def encode_passages(self, texts: Sequence[str]) -> Float32Array:
        if len(self.encoded) + len(texts) > self._until:
            raise KeyboardInterrupt
        self.encoded += texts
        return super().encode_passages(texts)


@cache
def _direction(word: str, dimension: int) -> Float32Array:
    seed = hashlib.sha256(word.encode()).digest()
    rng = np.random.default_rng(np.frombuffer(seed, np.uint32))
    return rng.standard_normal(dimension, dtype=np.float32)


@cache
def _piece(word: str) -> int:
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:4]) % _N_PIECES


@cache
def _directions(dimension: int) -> Float32Array:
    rng = np.random.default_rng(0)
    return _unit(rng.standard_normal((_N_PIECES, dimension), dtype=np.float32))


def _unit(vectors: Float32Array) -> Float32Array:
    unit: Float32Array = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit
