"""The embedded hybrid retriever, and the protocols of retrievers.

Importing this package is cheap: faiss, bm25s and sentence-transformers come with the
extra ``embedded`` and are imported where they are used.
"""

from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.protocols import (
    Analyser,
    AsyncRetriever,
    Embedder,
    FilteringRetriever,
    LexicalIndex,
    Reranker,
    Retriever,
    RetrieverFunction,
    SwappingRetriever,
)
from ctxguard.retrieval.rerank_client import RerankClient

__all__ = [
    "Analyser",
    "AsyncRetriever",
    "Embedder",
    "FilteringRetriever",
    "HybridRetriever",
    "LexicalIndex",
    "RerankClient",
    "Reranker",
    "Retriever",
    "RetrieverFunction",
    "SwappingRetriever",
]
