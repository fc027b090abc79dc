"""Turns verdicts and labels into metrics with confidence intervals.

terms        the contribution of a judged request to each metric, as one row
reduce       a sample and its verdicts to such a row, and to the passages that people graded
sums         columns of numbers added up over independent clusters
ratio        a metric and its interval from these sums
relevance    predicts the relevance of judged passages from the grades of people
draw         which passages people grade, and with what probability
joint        the predictions for all requests, corrected by people's grades
judge_drift  whether a judge has changed, from labelled samples that it judges again
live         every metric of a store, over the recent window and over all that is retained
plan         draws passages in a store, and predicts what their labels will give
promotion    whether judged traffic lets a policy rise from shadow to enforce
whole_pools  judged requests that any policy can decide on again
"""
