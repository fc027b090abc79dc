"""Qdrant's client in its local mode: everything in memory, in Python and numpy."""

from collections import Counter
from time import perf_counter
from typing import Any, ClassVar

from qdrant_client import QdrantClient, models

from benchmarks._search_data import DIMENSION, Corpus
from benchmarks._search_peers.base import DEPTH, K, Legs, SearchPeer, Surroundings
from ctxguard.retrieval.analysers.english import ENGLISH

_BATCH = 1_000
_COLLECTION = "passages"
_K1 = 1.2
_B = 0.75


class Qdrant(SearchPeer):
    """Sparse vectors with BM25's weights and its own IDF, prefetched beside dense ones."""

    packages: ClassVar = ("qdrant-client",)
    setting = "local mode: sparse BM25 weights with IDF, dense, RRF"

    def build(self, corpus: Corpus, around: Surroundings) -> dict[str, float]:  # noqa: ARG002
        texts = corpus.texts()
        started = perf_counter()
        self._client = QdrantClient(":memory:")
        self._client.create_collection(
            _COLLECTION,
            vectors_config={
                "dense": models.VectorParams(size=DIMENSION, distance=models.Distance.DOT)
            },
            sparse_vectors_config={
                "words": models.SparseVectorParams(modifier=models.Modifier.IDF)
            },
        )
        words = [ENGLISH.analyse(text) for text in texts]
        mean_length = sum(map(len, words)) / len(words)
        numbers: dict[str, int] = {}
        for start in range(0, len(texts), _BATCH):
            points = []
            for row in range(start, min(start + _BATCH, len(texts))):
                counts = Counter(numbers.setdefault(word, len(numbers)) for word in words[row])
                length = _K1 * (1.0 - _B + _B * len(words[row]) / mean_length)
                indices = sorted(counts)
                weights = [counts[at] * (_K1 + 1.0) / (counts[at] + length) for at in indices]
                points.append(
                    models.PointStruct(
                        id=row,
                        vector={
                            "dense": corpus.vectors[row].tolist(),
                            "words": models.SparseVector(indices=indices, values=weights),
                        },
                        payload={"text": texts[row]},
                    )
                )
            self._client.upsert(_COLLECTION, points)
        self._vectors = corpus.query_vectors.tolist()
        self._words = []
        for query in corpus.queries:
            known = sorted({numbers[word] for word in ENGLISH.analyse(query) if word in numbers})
            self._words.append(models.SparseVector(indices=known, values=[1.0] * len(known)))
        return {"upsert": perf_counter() - started}

    def search(self, at: int) -> list[int]:
        return _rows(
            self._client.query_points(
                _COLLECTION,
                prefetch=[
                    models.Prefetch(query=self._words[at], using="words", limit=DEPTH),
                    models.Prefetch(query=self._vectors[at], using="dense", limit=DEPTH),
                ],
                query=models.FusionQuery(fusion=models.Fusion.RRF),
                limit=K,
                with_payload=True,
            )
        )

    def legs(self, at: int) -> Legs:
        lexical = self._leg("words", self._words[at])
        return lexical, self._leg("dense", self._vectors[at])

    def _leg(self, name: str, query: Any) -> list[int]:
        found = self._client.query_points(_COLLECTION, query=query, using=name, limit=DEPTH)
        return _rows(found)


def _rows(found: Any) -> list[int]:
    return [point.id for point in found.points]
