"""Indexes in engines that others run: PostgreSQL, Qdrant and Milvus."""
