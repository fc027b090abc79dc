"""Models that encode and rerank."""
