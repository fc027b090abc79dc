"""Holds the HTTP service: the rerank protocol, decisions on scored candidates, and the console."""
