"""Indexes in engines that others run: PostgreSQL, Qdrant, Milvus, Elasticsearch and OpenSearch."""
