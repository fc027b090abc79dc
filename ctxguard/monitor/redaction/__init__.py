"""Redaction: what is taken out of a text before anything is written, and how much is kept of it.

``redactor`` applies the rules and fails closed; ``patterns`` finds what is personal, ``keys``
what opens doors.
"""

from ctxguard.monitor.redaction.patterns import Kind
from ctxguard.monitor.redaction.redactor import (
    PatternRedactor,
    Redactor,
    Text,
    hash_text,
    kept,
    redact,
    redacted,
)

__all__ = [
    "Kind",
    "PatternRedactor",
    "Redactor",
    "Text",
    "hash_text",
    "kept",
    "redact",
    "redacted",
]
