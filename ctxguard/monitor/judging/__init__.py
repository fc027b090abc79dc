"""Turns stored samples into stored grades.

worker        has waiting samples judged, and stores the results
sample_judge  one sample: which passages the judge grades, which grades are valid; again
canaries      whether the judge has changed
budget        how much judging may take
counts        what is counted, with its labels
"""
