"""Turns verdicts and labels into metrics with confidence intervals.

reduce   a sample and its verdicts to one judged request
terms    the contribution of a judged request to each metric, as one row
sums     the terms added up over independent clusters
ratio    a metric and its interval from these sums, for an exact judge
ppi      the same for a judge that errs, corrected by human labels (PPI++)
live     every metric of a store, over the recent window and over all that is retained
"""
