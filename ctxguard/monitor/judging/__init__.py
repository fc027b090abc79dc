"""From a stored sample to stored verdicts.

worker        claims waiting samples, has them judged, and stores the results
sample_judge  which passages of a sample the judge grades, which verdicts are valid, and when again
budget        how much judging may take
counters      what one process has counted
"""
