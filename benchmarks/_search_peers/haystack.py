"""Haystack: a pipeline of its two in-memory retrievers and a joiner."""

from time import perf_counter
from typing import Any, ClassVar

from haystack import Document, Pipeline
from haystack.components.joiners import DocumentJoiner
from haystack.components.retrievers.in_memory import (
    InMemoryBM25Retriever,
    InMemoryEmbeddingRetriever,
)
from haystack.document_stores.in_memory import InMemoryDocumentStore

from benchmarks._search_data import Corpus
from benchmarks._search_peers.base import DEPTH, K, Legs, SearchPeer, Surroundings


class Haystack(SearchPeer):
    """Its document store for development and small collections."""

    packages: ClassVar = ("haystack-ai",)
    setting = "Pipeline: InMemoryDocumentStore, reciprocal rank joiner"

    def build(self, corpus: Corpus, around: Surroundings) -> dict[str, float]:  # noqa: ARG002
        started = perf_counter()
        store = InMemoryDocumentStore(embedding_similarity_function="dot_product")
        store.write_documents(
            [
                Document(id=str(row), content=text, embedding=corpus.vectors[row].tolist())
                for row, text in enumerate(corpus.texts())
            ]
        )
        self._pipeline = Pipeline()
        self._pipeline.add_component("words", InMemoryBM25Retriever(store, top_k=DEPTH))
        self._pipeline.add_component("vectors", InMemoryEmbeddingRetriever(store, top_k=DEPTH))
        joiner = DocumentJoiner(join_mode="reciprocal_rank_fusion", top_k=K)
        self._pipeline.add_component("join", joiner)
        self._pipeline.connect("words", "join")
        self._pipeline.connect("vectors", "join")
        self._lexical = InMemoryBM25Retriever(store, top_k=DEPTH)
        self._dense = InMemoryEmbeddingRetriever(store, top_k=DEPTH)
        self._queries = corpus.queries
        self._vectors = corpus.query_vectors.tolist()
        return {"write": perf_counter() - started}

    def search(self, at: int) -> list[int]:
        found = self._pipeline.run(
            {
                "words": {"query": self._queries[at]},
                "vectors": {"query_embedding": self._vectors[at]},
            }
        )
        return _rows(found["join"])

    def legs(self, at: int) -> Legs:
        lexical = self._lexical.run(query=self._queries[at])
        return _rows(lexical), _rows(self._dense.run(query_embedding=self._vectors[at]))


def _rows(found: dict[str, Any]) -> list[int]:
    return [int(document.id) for document in found["documents"]]
