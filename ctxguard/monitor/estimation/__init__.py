"""Computes a store's figures from the rows of its samples (``ctxguard.measure``).

sampling_design  which passages people grade, and with what probability
live             every metric of a store, over the recent window and over all that is retained
"""
