"""An embedder for tests that need vectors and no model."""

import hashlib
from collections.abc import Sequence

import numpy as np

from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.protocols import Float32Array, Progress


class WordHashEmbedder:
    """An embedder without a model: each word adds a direction that its hash chooses.

    Texts that share words are near each other; a text without words has the zero vector.

    Args:
        dimension: Length of a vector.
        salt: Another salt is another model.
    """

    def __init__(self, dimension: int = 64, salt: str = "") -> None:
        self.name = "word-hash"
        self.dimension = dimension
        self._salt = salt

    def encode_query(self, text: str) -> Float32Array:
        """One unit vector, shape (dimension,)."""
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
        """One unit vector per text, shape (n, dimension)."""
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in enumerate(texts):
            vectors[row] = self.encode_query(text)
            if progress is not None:
                progress(row + 1)
        return vectors

    def fingerprint(self) -> str:
        """What the vectors depend on."""
        return f"word-hash {self.dimension} {self._salt}"
