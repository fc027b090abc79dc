"""From a stored sample to stored verdicts.

worker        claims waiting samples, has them judged, and stores the results
sample_judge  which passages of a sample the judge grades, and which verdicts are valid
again         what people graded is judged again by a new judge, and to see whether a judge changed
budget        how much judging may take
counters      what one process has counted
"""
