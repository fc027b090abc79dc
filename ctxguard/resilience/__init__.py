"""Stages of the request path: each has its own threads, time limit and circuit breaker.

The guard uses one stage for a wrapped retriever; the embedded retriever uses one for each leg and
one for its reranker. See DESIGN.md §7.
"""

from ctxguard.resilience.bounded_caller import (
    DEFAULT_REQUEST_LIMITS,
    BoundedCaller,
    RequestLimits,
    cause_of,
    typed,
)
from ctxguard.resilience.breaker import Watcher
from ctxguard.resilience.deadlines import Budget, Deadlines
from ctxguard.resilience.stage import Stage, StageCall, UnansweredError, attempt, failure_of

__all__ = [
    "DEFAULT_REQUEST_LIMITS",
    "BoundedCaller",
    "Budget",
    "Deadlines",
    "RequestLimits",
    "Stage",
    "StageCall",
    "UnansweredError",
    "Watcher",
    "attempt",
    "cause_of",
    "failure_of",
    "typed",
]
