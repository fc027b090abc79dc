"""Signals: what a query and its candidates' texts and vectors say of relevance beside the scores.

Each family is a module of pure functions, with its formulas, their source and what they cost. All
give one number a candidate, by name; `ctxguard.core.signals` has the transforms of each name that a
model may use.
"""
