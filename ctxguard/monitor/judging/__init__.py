"""From a stored sample to stored grades.

worker        has waiting samples judged, and stores the results
sample_judge  which passages of a sample the judge grades, which grades are valid, the counts
judging_again what people graded is judged again, also to see whether the judge has changed
budget        how much judging may take
"""
