"""Frameworks and engines that people run, each behind an extra of its own."""
