"""Runtimes that compute models faster than torch, with torch's own results.

A model is exported once and kept on disk; its runtime is chosen whenever it is opened.
"""

from ctxguard.retrieval.models.runtimes.encoder import Encoder
from ctxguard.retrieval.models.runtimes.runtime_model import ModelTask, Runtime, RuntimeModel

__all__ = ["Encoder", "ModelTask", "Runtime", "RuntimeModel"]
