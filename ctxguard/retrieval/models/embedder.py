"""Gives an encoder the methods of an embedder."""

from collections.abc import Sequence

from ctxguard.retrieval.models.encoder import Encoder
from ctxguard.retrieval.protocols import Float32Array, Progress, TokenEncoder


class SentenceTransformerEmbedder(Encoder):
    """An encoder as an `Embedder`, with the states of word pieces."""

    def encode_query(self, text: str) -> Float32Array:
        """Encode a query as one unit vector, shape (dimension,)."""
        return self.query(text).vector

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        """Encode each text as a unit vector, shape (n, dimension)."""
        return self.encode(texts, progress)

    def token_encoder(self) -> TokenEncoder | None:
        """Return what gives the states of word pieces: the encoder itself."""
        return self


def named_embedder(name: str) -> SentenceTransformerEmbedder:
    """Return the embedder that a saved index names."""
    return SentenceTransformerEmbedder.of_index(name)
