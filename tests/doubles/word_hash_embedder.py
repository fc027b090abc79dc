"""Embedders for tests that need vectors without a model."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.models.sentences import (
    sentence_lengths,
    sentences_of,
    unit_states,
)
from ctxguard.retrieval.nibbles import packed
from ctxguard.retrieval.protocols import (
    Float32Array,
    NibbleArray,
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
        # The empty text has no sentence; without it there might be no text at all.
        found = [self._words(text) for text in ("", *texts)]
        lengths = [
            sentence_lengths(text, starts)
            for text, (starts, _, _) in zip(("", *texts), found, strict=True)
        ]
        sums = [
            np.add.reduceat(states, np.cumsum(sizes, dtype=np.int64) - sizes, axis=0)
            for sizes, (_, _, states) in zip(lengths, found, strict=True)
            if sizes.size
        ]
        none = np.zeros((0, _STATE_LENGTH), np.float32)
        pieces = np.concatenate([each for _, each, _ in found])
        sentences = sentences_of(np.concatenate([none, *sums]), lengths, pieces, _N_PIECES)
        return (
            self.embedder.encode_passages(texts, progress),
            sentences._replace(starts=sentences.starts[1:]),
        )

    def token_table(self) -> NibbleArray:
        """Return the direction of every word."""
        return _table()

    def _words(self, text: str) -> tuple[list[int], RowArray, Float32Array]:
        """Return the start of each word, its piece, and its state."""
        words = list(_WORD.finditer(text))
        digests = [hashlib.sha256(word[0].lower().encode()).digest() for word in words]
        pieces = np.array([int.from_bytes(each[:4]) % _N_PIECES for each in digests], np.int64)
        states = _directions()[pieces]
        if pieces.size:
            states = states + np.float32(0.5) * states.mean(axis=0)
        return [word.start() for word in words], pieces, states


@cache
def _table() -> NibbleArray:
    return packed(_directions())


def _directions() -> Float32Array:
    rng = np.random.default_rng(0)
    return unit_states(rng.standard_normal((_N_PIECES, _STATE_LENGTH), dtype=np.float32))
