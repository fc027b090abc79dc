"""Helpers for every folder: optional libraries, files, fork safety, error texts."""
