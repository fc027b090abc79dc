"""Embedders for tests that need vectors without a model."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.models.sentences import (
    as_int8,
    sentence_lengths,
    sentence_vectors,
    unit_states,
)
from ctxguard.retrieval.protocols import (
    Float32Array,
    Int8Array,
    Progress,
    QueryTokens,
    RowArray,
    Sentences,
)

_N_PIECES = 997
_STATE_LENGTH = 32
_WORD = re.compile(r"\w+|[.,;:!?]")


class WordHashEmbedder:
    """An embedder without a model: each word adds a direction that its hash chooses.

    Texts that share words are near each other; a text without words has the zero vector.

    Args:
        dimension: Length of a vector.
        salt: Another salt makes another model.
    """

    def __init__(self, dimension: int = 64, salt: str = "") -> None:
        self.name = "word-hash"
        self.dimension = dimension
        self._salt = salt

    def encode_query(self, text: str) -> Float32Array:
        """Encode as one unit vector, shape (dimension,)."""
        vector = np.zeros(self.dimension, np.float32)
        for word in ENGLISH.analyse(text):
            seed = hashlib.sha256((self._salt + word).encode()).digest()
            rng = np.random.default_rng(np.frombuffer(seed, np.uint32))
            vector += rng.standard_normal(self.dimension, dtype=np.float32)
        length = float(np.linalg.norm(vector))
        return vector / np.float32(length) if length > 0.0 else vector

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        """Encode each text as a unit vector, shape (n, dimension)."""
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in enumerate(texts):
            vectors[row] = self.encode_query(text)
            if progress is not None:
                progress(row + 1)
        return vectors

    def fingerprint(self) -> str:
        """Return the dimension and the salt, which determine the vectors."""
        return f"word-hash {self.dimension} {self._salt}"


class WordTokenEmbedder(WordHashEmbedder):
    """A `WordHashEmbedder` that also gives states of words, so that an index keeps sentences.

    A word's piece is its hash. Its state is its own direction plus half of its text's, which is
    the mean of all.
    """

    def token_encoder(self) -> "_WordEncoder":
        """Return the encoder of the states."""
        return _WordEncoder(self)


@dataclass(frozen=True, slots=True)
class _WordEncoder:
    """See `TokenEncoder`."""

    embedder: WordTokenEmbedder

    def encode_query(self, text: str) -> QueryTokens:
        """Return a query's vector and its words."""
        _, pieces, states = self._words(text)
        return QueryTokens(self.embedder.encode_query(text), unit_states(states), pieces)

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> tuple[Float32Array, Sentences]:
        """Return one unit vector per text, and each text's sentences."""
        found = [self._sentences(text) for text in texts]
        none = Sentences(
            np.zeros((0, _STATE_LENGTH), np.int8),
            np.zeros(0, np.uint8),
            np.zeros(0, np.uint16),
            np.zeros((1, 2), np.int64),
        )
        return self.embedder.encode_passages(texts, progress), Sentences.of([none, *found])

    def token_table(self) -> Int8Array:
        """Return the direction of every word."""
        return as_int8(_directions())

    def _sentences(self, text: str) -> Sentences:
        starts, pieces, states = self._words(text)
        lengths = sentence_lengths(text, starts)
        return Sentences(
            sentence_vectors(states, lengths),
            lengths,
            pieces.astype(np.uint16),
            np.array([[0, 0], [lengths.size, pieces.size]]),
        )

    def _words(self, text: str) -> tuple[list[int], RowArray, Float32Array]:
        """Return the start of each word, its piece, and its state."""
        words = list(_WORD.finditer(text))
        digests = [hashlib.sha256(word[0].lower().encode()).digest() for word in words]
        pieces = np.array([int.from_bytes(each[:4]) % _N_PIECES for each in digests], np.int64)
        states = _directions()[pieces]
        if pieces.size:
            states = states + np.float32(0.5) * states.mean(axis=0)
        return [word.start() for word in words], pieces, states


def _directions() -> Float32Array:
    rng = np.random.default_rng(0)
    return unit_states(rng.standard_normal((_N_PIECES, _STATE_LENGTH), dtype=np.float32))
