"""Indexes in external engines: PostgreSQL, Qdrant and Milvus."""
