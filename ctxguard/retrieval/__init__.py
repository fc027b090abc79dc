"""The embedded hybrid retriever, and the protocols that any retriever keeps.

Importing this package is cheap: faiss, bm25s, numba and sentence-transformers come with the
extra ``embedded`` and are imported where they are used.
"""

from ctxguard.retrieval.hybrid import HybridRetriever
from ctxguard.retrieval.protocols import Embedder, LexicalIndex, Reranker, Retriever

__all__ = ["Embedder", "HybridRetriever", "LexicalIndex", "Reranker", "Retriever"]
