"""Turns grades and labels into metrics with confidence intervals.

metrics             rows of judged requests and passages, and what they add to each metric
judged_request      makes these rows of a sample, its grades and people's grades
ratio               sums over independent clusters, a metric and its interval from them
prediction_powered  predicts relevance for all requests, corrected by people's grades
sampling_design     which passages people grade, and with what probability
live                every metric of a store, over the recent window and over all that is retained
"""
