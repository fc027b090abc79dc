"""A collection made larger from its own parts, so that a search of any size is timed in seconds.

Encoding 100,000 real passages takes half an hour. Here each passage beyond the collection is one of
its own with half of its sentences exchanged for those of others; its vector has half of another's
added.
Lengths, sentences and words are those of the collection. Nothing is learned from these about
quality.
"""

import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ctxguard.core.types import Passage
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index import storage
from ctxguard.retrieval.index.dense import unit_rows
from ctxguard.retrieval.protocols import (
    Embedder,
    Float32Array,
    Progress,
    TokenEncoder,
    token_encoder_of,
)

_EXCHANGED = 0.5
_SENTENCE_END = re.compile(r"[.!?…]+\s+|\n+")


def recycled(
    retriever: HybridRetriever, embedder: Embedder, n: int, cache: Path
) -> HybridRetriever:
    """The index of a larger collection, from the cache if it is there.

    Args:
        retriever: The collection.
        embedder: The model that it was encoded with.
        n: Passages, at least as many as there are.
        cache: Where the index is kept.
    """
    index = retriever.generation
    folder = cache / f"recycled-{index.corpus_digest[:12]}-{storage.SCHEMA_VERSION}-{n}"
    if not folder.exists():
        given = _Given(retriever, embedder, n)
        HybridRetriever.build(_passages(retriever, n), embedder=given).save(folder)
    return HybridRetriever.load(folder, embedder=embedder)


class _Given:
    """An embedder of recycled vectors."""

    def __init__(self, retriever: HybridRetriever, embedder: Embedder, n: int) -> None:
        index = retriever.generation
        rng, rows = np.random.default_rng(0), np.arange(n) % len(retriever)
        self.name, self.dimension = embedder.name, embedder.dimension
        self.fingerprint, self.encode_query = embedder.fingerprint, embedder.encode_query
        own = index.dense.vectors[rows]
        other = index.dense.vectors[rng.integers(len(retriever), size=n)]
        is_new = np.arange(n)[:, np.newaxis] >= len(retriever)
        vectors = own + np.float32(_EXCHANGED) * other * is_new
        self.vectors = unit_rows(vectors, [str(row) for row in rows])
        self._encoder = token_encoder_of(embedder)

    def encode_passages(
        self,
        texts: Sequence[str],
        progress: Progress | None = None,  # noqa: ARG002
    ) -> Float32Array:
        return self.vectors[: len(texts)]

    def token_encoder(self) -> TokenEncoder | None:
        return self._encoder


def _passages(retriever: HybridRetriever, n: int) -> list[Passage]:
    own = [retriever.passage(passage_id) for passage_id in retriever.passage_ids]
    sentences = [
        [sentence for sentence in _SENTENCE_END.split(passage.text) if sentence.strip()]
        for passage in own
    ]
    every = [sentence for of_passage in sentences for sentence in of_passage]
    chance, made = random.Random(0), []
    for row in range(n):
        at, is_new = row % len(own), row >= len(own)
        text = ". ".join(
            chance.choice(every) if is_new and chance.random() < _EXCHANGED else sentence
            for sentence in sentences[at]
        )
        made.append(Passage(f"{row:07d}", text, own[at].title))
    return made
