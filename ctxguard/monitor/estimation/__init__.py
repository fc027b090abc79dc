"""Makes the rows of judged samples, and the figures of a store from them (``ctxguard.measure``).

judged_request   makes the rows of a sample, its grades and people's grades
sampling_design  which passages people grade, and with what probability
live             every metric of a store, over the recent window and over all that is retained
"""
