"""Signals: evidence of relevance beside the scores, from a query and candidates' texts and vectors.

Each family is a module of pure functions, with its formulas, their source and their cost. All
give one number per candidate, by name; `ctxguard.core.signals` lists the transforms of each name
that a model may use.
"""
