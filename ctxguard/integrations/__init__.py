"""Adapters of frameworks and engines, each behind its own extra."""
