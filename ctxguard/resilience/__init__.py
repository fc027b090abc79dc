"""Stages of the request path: each has its own threads, time limit and circuit breaker.

The guard uses one stage for a wrapped retriever; the embedded retriever uses one for each leg and
one for its reranker. See DESIGN.md §7.
"""
