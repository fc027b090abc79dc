"""Removes secrets from a text before it is written.

``redactor`` applies the rules and fails closed; ``patterns`` has the rules for personal data,
``keys`` those for keys, tokens and passwords.
"""

from ctxguard.monitor.redaction.redactor import Redactor, redact, redacted, redacted_once

__all__ = ["Redactor", "redact", "redacted", "redacted_once"]
