"""The embedded hybrid retriever: BM25 and vectors, fused, and reranked if asked."""
