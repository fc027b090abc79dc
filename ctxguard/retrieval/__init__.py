"""The embedded hybrid retriever, and the protocols of retrievers.

Names are imported on first use. faiss, bm25s and sentence-transformers come with the extra
``embedded`` and are imported where they are used.
"""

from typing import TYPE_CHECKING

from ctxguard._support.lazy_names import lazy_names

if TYPE_CHECKING:
    from ctxguard.retrieval.hybrid.retriever import HybridRetriever
    from ctxguard.retrieval.protocols import (
        Analyser,
        AsyncRetriever,
        Embedder,
        FilteringRetriever,
        Reranker,
        Retriever,
        RetrieverFunction,
        SwappingRetriever,
    )

__all__ = [
    "Analyser",
    "AsyncRetriever",
    "Embedder",
    "FilteringRetriever",
    "HybridRetriever",
    "Reranker",
    "Retriever",
    "RetrieverFunction",
    "SwappingRetriever",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        globals(),
        {
            "ctxguard.retrieval.hybrid.retriever": "HybridRetriever",
            "ctxguard.retrieval.protocols": "Analyser AsyncRetriever Embedder FilteringRetriever "
            "Reranker Retriever RetrieverFunction SwappingRetriever",
        },
    )
