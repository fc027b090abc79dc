"""Models that encode and rerank, and the runtimes that serve them."""
