"""Offline calibration: from labelled queries to a profile.

    data             labels: read, adjudicated, frozen, checked for coverage
    settings         how a policy is chosen, for the command and in Python
    calibrate        the whole way, for every route of a retriever
      retrievers       any retriever a guard accepts, or a recorded run
      replay           every query through the retriever once
      pools            the candidates with their labels
      fit              fusion weight, temperature, P(relevant)
      grid             every policy of a family at once
      choice           the choice among them, by all queries or by four fifths
      verdict          whether the choice may be served
      certify          what held-out queries prove
      evaluate         metrics by query, means with intervals
      calibrate_route  these steps for one route
    from_store       the same from judged samples, of questions or of live traffic
      asked_questions    the questions of a log, or written ones, as samples
      judged_requests    the worth of any contexts, a policy fitted to them, the table by k
    hard_negatives   passages ranked high but labelled not relevant
    compare          ways to rank and to cut side by side
    answers          a reader asked with today's contexts and with the guard's
    report           the evidence as one HTML page

Arguments of these names mean the same everywhere: ``serving_k``, how many passages are served
today; ``depth``, candidates per query; ``utilities``, the worth of a passage; ``seed``, the random
seed of every split, shuffle and bootstrap; ``passes``, which reports passes over the queries.

What serves requests never imports this package.
"""
