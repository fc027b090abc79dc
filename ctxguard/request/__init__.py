"""Answers one request: its input, the profile in force, the built context, and the counters."""
