"""Fits the utility of passages to one reader, from its answers marked right or wrong."""
