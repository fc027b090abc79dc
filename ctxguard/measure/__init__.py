"""Measures contexts from labels, judged samples and traffic, all in the same rows.

worth      what a passage is worth to the reader, by its label
rows       judged requests and passages as rows, and their blocks
metrics    every formula, and what rows add to each metric
estimate   sums over clusters, and a metric with its interval from them
corrected  predicts relevance for all requests, corrected by people's grades
interval   one value with its ends; bootstrap and Student's t
betting    tests and bounds that may be looked at at any time
risk       upper bounds on the risk of a policy, for certificates

All of it is pure.
"""
