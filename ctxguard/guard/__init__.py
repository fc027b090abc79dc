"""The guard: one request from its input to its context, and the files that change meanwhile.

retrieve (``wrapped_retriever``) → decide → ask (``assess``) → build (``build_context``) → account
(``telemetry``, ``observers``), by the ``bound_profile`` in force; ``context_guard`` is its face.
"""

from typing import TYPE_CHECKING

from ctxguard._support.lazy_names import lazy_names

if TYPE_CHECKING:
    from ctxguard.guard.context_guard import ContextGuard
    from ctxguard.guard.observers import Tracing

__all__ = ["ContextGuard", "Tracing"]

# Imported when they are used: each module of this room is imported by itself elsewhere.
__getattr__, __dir__ = lazy_names(
    __name__,
    globals(),
    {"ctxguard.guard.context_guard": "ContextGuard", "ctxguard.guard.observers": "Tracing"},
)
