"""Offline calibration: from labelled queries to a profile.

    data             labels: read, adjudicated, frozen, checked for coverage
    settings         how a policy is chosen, for the command and in Python
    calibrate        the whole way, for every route of a retriever
      retrievers       any retriever a guard accepts, or a recorded run
      replay           every query through the retriever once
      pools            the candidates with their labels
      fit              fusion weight, temperature, P(relevant)
      grid             every policy of a family at once
      certify          the policies that pass, and the one chosen
      evaluate         metrics by query, means with intervals
      calibrate_route  these steps for one route
    from_store       the same from judged samples, of questions or of live traffic
      asked_questions    the questions of a log, or written ones, as samples
      judged_candidates  a policy fitted to them, and the table by k
    hard_negatives   passages ranked high but labelled not relevant
    compare          ways to rank and to cut side by side
    answers          a reader asked with today's contexts and with the guard's
    report           the evidence as one HTML page

Arguments of these names mean the same everywhere, so that functions describe them only where
they say more:

    dataset     labelled queries, or the labels of the pools
    pools       the replay of one route: the candidates of each query
    policy      what is kept; utilities: the worth of a passage
    serving_k   how many passages are served today
    depth       candidates per query
    seed        random seed of every split, shuffle and bootstrap
    passes      reports progress, by passes over the queries

What serves requests never imports this package.
"""
