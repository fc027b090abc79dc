"""Turns requests into stored samples: selection, record, redaction, writing."""
