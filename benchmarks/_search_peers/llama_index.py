"""LlamaIndex: QueryFusionRetriever over its BM25 retriever (bm25s) and its own vector store."""

from collections.abc import Mapping
from time import perf_counter
from typing import Any, ClassVar

from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import TextNode
from llama_index.retrievers.bm25 import BM25Retriever
from pydantic import PrivateAttr

from benchmarks._search_data import Corpus
from benchmarks._search_peers.base import DEPTH, K, Legs, SearchPeer, Surroundings


class _GivenVectors(BaseEmbedding):  # type: ignore[misc]
    _vectors: Mapping[str, list[float]] = PrivateAttr()

    def __init__(self, vectors: Mapping[str, list[float]]) -> None:
        super().__init__(model_name="given")
        self._vectors = vectors

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._vectors[query]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._vectors[query]

    def _get_text_embedding(self, text: str) -> list[float]:
        raise RuntimeError(f"the vector of {text!r} was not given")


class LlamaIndex(SearchPeer):
    """Everything as nodes in memory, vectors as lists of numbers."""

    packages: ClassVar = ("llama-index-core", "llama-index-retrievers-bm25", "bm25s")
    setting = "QueryFusionRetriever: BM25Retriever, SimpleVectorStore"

    def build(self, corpus: Corpus, around: Surroundings) -> dict[str, float]:  # noqa: ARG002
        texts = corpus.texts()
        vectors = dict(zip(corpus.queries, corpus.query_vectors.tolist(), strict=True))
        started = perf_counter()
        nodes = [TextNode(text=text, id_=str(row)) for row, text in enumerate(texts)]
        self._lexical = BM25Retriever.from_defaults(nodes=nodes, similarity_top_k=DEPTH)
        lexical = perf_counter()
        nodes = [
            TextNode(text=text, id_=str(row), embedding=corpus.vectors[row].tolist())
            for row, text in enumerate(texts)
        ]
        index = VectorStoreIndex(nodes, embed_model=_GivenVectors(vectors))
        self._dense = index.as_retriever(similarity_top_k=DEPTH)
        self._fusion = QueryFusionRetriever(
            [self._lexical, self._dense],
            llm=MockLLM(),
            mode="reciprocal_rerank",
            similarity_top_k=K,
            num_queries=1,
            use_async=False,
        )
        self._queries = corpus.queries
        return {"bm25": lexical - started, "dense": perf_counter() - lexical}

    def search(self, at: int) -> list[int]:
        return _rows(self._fusion.retrieve(self._queries[at]))

    def legs(self, at: int) -> Legs:
        query = self._queries[at]
        return _rows(self._lexical.retrieve(query)), _rows(self._dense.retrieve(query))


def _rows(found: list[Any]) -> list[int]:
    return [int(each.node.node_id) for each in found]
