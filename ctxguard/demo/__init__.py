"""The demonstration corpus: this Python's own documentation, and questions labelled on it."""

from ctxguard.demo.corpus import passages
from ctxguard.demo.labelled_questions import questions

__all__ = ["passages", "questions"]
