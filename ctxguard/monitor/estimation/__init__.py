"""Computes a store's figures from the rows of its samples (``ctxguard.measure``).

sampling_design  which passages people grade, and with what probability
live             the report: every metric, over the recent window and over all that is retained
"""
