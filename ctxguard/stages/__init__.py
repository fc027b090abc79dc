"""Stages of the request path: each with a pool of threads and a circuit breaker of its own.

DESIGN.md §7. Used by the guard for a wrapped retriever and by the embedded retriever for its
legs and its reranker. Knows nothing of either.
"""

from ctxguard.stages.asking import DEFAULT_MAX_IN_FLIGHT, Asking, cause_of, typed
from ctxguard.stages.breaker import Watcher
from ctxguard.stages.deadlines import Budget, Deadlines
from ctxguard.stages.stage import Pending, Stage, UnansweredError, failure_of

__all__ = [
    "DEFAULT_MAX_IN_FLIGHT",
    "Asking",
    "Budget",
    "Deadlines",
    "Pending",
    "Stage",
    "UnansweredError",
    "Watcher",
    "cause_of",
    "failure_of",
    "typed",
]
