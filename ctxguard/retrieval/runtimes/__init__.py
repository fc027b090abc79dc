"""Runtimes that serve models faster than torch, with torch's own answers.

A model is exported once and kept; what serves it is chosen when it is opened.
"""

from ctxguard.retrieval.runtimes.choice import EMBEDDING, RERANKING, Model, Runtime, Served
from ctxguard.retrieval.runtimes.encoder import Encoder

__all__ = ["EMBEDDING", "RERANKING", "Encoder", "Model", "Runtime", "Served"]
