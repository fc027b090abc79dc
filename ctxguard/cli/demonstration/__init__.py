"""The demonstration corpus: this Python's own documentation, and questions labelled on it."""

from ctxguard.cli.demonstration.corpus import passages
from ctxguard.cli.demonstration.labelled_questions import questions

__all__ = ["passages", "questions"]
