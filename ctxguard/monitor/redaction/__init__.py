"""Redaction: secrets removed from a text before it is written, and how much of the text is kept.

``redactor`` applies the rules and fails closed; ``patterns`` has the rules for personal data,
``keys`` those for keys, tokens and passwords.
"""

from ctxguard.monitor.redaction.patterns import Kind
from ctxguard.monitor.redaction.redactor import (
    PatternRedactor,
    Redactor,
    Text,
    hash_text,
    is_hash,
    kept,
    redact,
    redacted,
    redacted_once,
)

__all__ = [
    "Kind",
    "PatternRedactor",
    "Redactor",
    "Text",
    "hash_text",
    "is_hash",
    "kept",
    "redact",
    "redacted",
    "redacted_once",
]
