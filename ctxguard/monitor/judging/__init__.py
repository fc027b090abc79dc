"""From a stored sample to stored verdicts.

worker        claims waiting samples, has them judged, and stores the results
sample_judge  which passages of a sample the judge grades, which verdicts are valid, the counts
judging_again what people graded is judged again, also to see whether the judge has changed
budget        how much judging may take
"""
