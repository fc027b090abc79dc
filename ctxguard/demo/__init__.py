"""The demonstration corpus: this Python's own documentation, and questions labelled on it."""

from ctxguard.demo.labels import passages, questions

__all__ = ["passages", "questions"]
