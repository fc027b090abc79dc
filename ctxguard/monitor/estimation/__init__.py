"""Turns verdicts and labels into metrics with confidence intervals.

reduce     a sample and its verdicts to one judged request
terms      the contribution of a judged request to each metric, as one row
sums       the terms added up over independent clusters
ratio      a metric and its interval from these sums
relevance  predicts the relevance of judged passages from the grades of people
draw       which passages people grade, and with what probability
joint      the predictions for all requests, corrected by people's grades
borrow     estimates without labels of their own, from the judge's error rates
graded     what people have graded, as rows that outlive the sample
live       every metric of a store, over the recent window and over all that is retained
plan       draws passages in a store, and predicts what their labels will give
rise       whether judged traffic lets a policy rise from shadow to enforce
"""
