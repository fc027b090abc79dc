"""`ContextGuard`, and the watchers of profile and index files that change while it serves."""

from ctxguard.guard.context_guard import ContextGuard, Tracing

__all__ = ["ContextGuard", "Tracing"]
