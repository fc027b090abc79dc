"""Compares ways of ranking and cutting on the same labelled queries.

candidates           the compared settings
comparison           compare(): what each would serve, UDCG by size, and a risk
saved_comparison     comparisons saved as JSON, and regressions against them
"""
