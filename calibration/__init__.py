"""Offline calibration: from labelled queries to a profile.

    data             labels: read, adjudicated, frozen, checked for coverage
    calibrate        the whole way, for every route of a retriever
      retrievers       anything that a guard takes, or a recorded run
      replay           every query through the retriever once
      pool_labels      the labels of every candidate
      fit              fusion weight, temperature, P(relevant)
      grid             every policy of a family at once
      risk             tests of a mean loss
      certify          the policies that pass, and the one chosen
      evaluate         metrics by query, means with intervals
      calibrate_route  these steps for one route
    from_traffic     the same from judged live traffic
    compare          ways to rank and to cut side by side
    reader           what passages are worth to one reader
    report           the evidence as one HTML page

What serves requests never imports this package.
"""
