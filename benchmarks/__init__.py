"""Measurements of the project's claims, each a command: ``python -m benchmarks.<name>``."""
