"""Compares ways to rank and to cut on the same labelled queries.

candidates           the compared settings
curve                UDCG by the size of the context
comparison           compare(): what each would serve, with its risk SAFE, RISKY or DANGEROUS
saved_comparison     comparisons saved as JSON, and regressions against them
"""
