"""A collection made larger from its own parts, so that a search of any size is timed in seconds.

Encoding 100,000 real passages takes half an hour. Here each passage beyond the collection is one of
its own with half of its sentences exchanged for those of others, in the text and, drawn
independently, in the sentence vectors and word pieces; its vector has half of another's added.
Lengths, sentences and words are those of the collection. Nothing is learned from these about
quality.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctxguard.core.types import Passage
from ctxguard.retrieval.analysers.reading import SENTENCE_END
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index import storage
from ctxguard.retrieval.index.dense import unit_rows
from ctxguard.retrieval.protocols import (
    Embedder,
    Float32Array,
    Progress,
    RowArray,
    Sentences,
    token_encoder_of,
)

_EXCHANGED = 0.5


def recycled(
    retriever: HybridRetriever, embedder: Embedder, n: int, cache: Path
) -> HybridRetriever:
    """The index of a larger collection, from the cache if it is there.

    Args:
        retriever: The collection, with sentences.
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
        assert index.sentences is not None
        rng, rows = np.random.default_rng(0), np.arange(n) % len(retriever)
        self.name, self.dimension = embedder.name, embedder.dimension
        self.fingerprint, self.encode_query = embedder.fingerprint, embedder.encode_query
        own = index.dense.vectors_at(rows)
        other = index.dense.vectors_at(rng.integers(len(retriever), size=n))
        is_new = np.arange(n)[:, np.newaxis] >= len(retriever)
        vectors = own + np.float32(_EXCHANGED) * other * is_new
        self.vectors = unit_rows(vectors, [str(row) for row in rows])
        every = np.arange(len(retriever))
        self.sentences = _exchanged(index.sentences.taken(every), rows, rng)
        self._encoder: Any = token_encoder_of(embedder)
        self._n_given = 0

    def given(self, n: int) -> tuple[Float32Array, Sentences]:
        """The next n passages: an index is encoded part by part, in the order of its ids."""
        rows = np.arange(self._n_given, self._n_given + n)
        self._n_given += n
        return self.vectors[rows], self.sentences.at(rows)

    def encode_passages(
        self,
        texts: Sequence[str],
        progress: Progress | None = None,  # noqa: ARG002
    ) -> Float32Array:
        return self.given(len(texts))[0]

    def token_encoder(self) -> "_GivenSentences":
        return _GivenSentences(self, self._encoder)


class _GivenSentences:
    """Its sentences."""

    def __init__(self, given: _Given, encoder: Any) -> None:
        self._given = given
        self.encode_query, self.token_table = encoder.encode_query, encoder.token_table

    def encode_passages(
        self,
        texts: Sequence[str],
        progress: Progress | None = None,  # noqa: ARG002
    ) -> tuple[Float32Array, Sentences]:
        return self._given.given(len(texts))


def _exchanged(own: Sentences, rows: RowArray, rng: np.random.Generator) -> Sentences:
    """The sentences of some rows, half of those after the collection's own exchanged."""
    first, last = own.starts[:-1, 0][rows], own.starts[1:, 0][rows]
    ends = np.cumsum(last - first)
    taken = np.repeat(last - ends, last - first) + np.arange(ends[-1])
    is_exchanged = rng.random(taken.size) < _EXCHANGED
    is_exchanged[: own.lengths.size] = False
    taken[is_exchanged] = rng.integers(own.lengths.size, size=int(is_exchanged.sum()))
    ended = np.concatenate(([0], np.cumsum(own.lengths, dtype=np.int64)))
    each = own._replace(starts=np.stack((np.arange(ended.size), ended), axis=1)).at(taken)
    firsts = np.concatenate(([0], ends))
    return each._replace(starts=np.stack((firsts, each.starts[firsts, 1]), axis=1))


def _passages(retriever: HybridRetriever, n: int) -> list[Passage]:
    own = [retriever.passage(passage_id) for passage_id in retriever.passage_ids]
    sentences = [
        [sentence for sentence in SENTENCE_END.split(passage.text) if sentence.strip()]
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
