"""LangChain: EnsembleRetriever over BM25Retriever (rank-bm25) and FAISS (flat)."""

from collections.abc import Mapping
from time import perf_counter
from typing import Any, ClassVar

import faiss
from langchain_classic.retrievers import EnsembleRetriever
from langchain_community.retrievers import BM25Retriever
from langchain_community.vectorstores import FAISS
from langchain_core.embeddings import Embeddings

from benchmarks._search_data import Corpus
from benchmarks._search_peers.base import DEPTH, K, Legs, SearchPeer, Surroundings


class _GivenVectors(Embeddings):  # type: ignore[misc]
    def __init__(self, vectors: Mapping[str, list[float]]) -> None:
        self._vectors = vectors

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        raise RuntimeError(f"the vectors of {len(texts)} texts were not given")

    def embed_query(self, text: str) -> list[float]:
        return self._vectors[text]


class LangChain(SearchPeer):
    """Both legs in one process; its lexical leg scores every passage in plain Python and numpy."""

    packages: ClassVar = ("langchain-classic", "langchain-community", "rank-bm25", "faiss-cpu")
    setting = "EnsembleRetriever: BM25Retriever, FAISS flat"

    def build(self, corpus: Corpus, around: Surroundings) -> dict[str, float]:
        faiss.omp_set_num_threads(around.threads)
        texts = corpus.texts()
        metadata = [{"row": row} for row in range(len(texts))]
        vectors = dict(zip(corpus.queries, corpus.query_vectors.tolist(), strict=True))
        started = perf_counter()
        self._lexical = BM25Retriever.from_texts(texts, metadatas=metadata, k=DEPTH)
        lexical = perf_counter()
        store = FAISS.from_embeddings(
            zip(texts, corpus.vectors, strict=True), _GivenVectors(vectors), metadatas=metadata
        )
        self._dense = store.as_retriever(search_kwargs={"k": DEPTH})
        self._ensemble = EnsembleRetriever(
            retrievers=[self._lexical, self._dense], weights=[0.5, 0.5], id_key="row"
        )
        self._queries = corpus.queries
        return {"bm25": lexical - started, "dense": perf_counter() - lexical}

    def search(self, at: int) -> list[int]:
        return _rows(self._ensemble.invoke(self._queries[at])[:K])

    def legs(self, at: int) -> Legs:
        query = self._queries[at]
        return _rows(self._lexical.invoke(query)), _rows(self._dense.invoke(query))


def _rows(documents: list[Any]) -> list[int]:
    return [document.metadata["row"] for document in documents]
