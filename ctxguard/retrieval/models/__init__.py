"""Runs the models that encode and rerank."""
