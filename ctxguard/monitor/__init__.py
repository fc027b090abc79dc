"""Monitors live traffic, outside the request path.

In the order in which they build on each other:

    store        samples, judgments and labels: SQLite or PostgreSQL
    sampling     which requests are stored, and what of them is judged
    judges       who grades passages: a language model, a cross-encoder, known labels
    labels       the labels of people, the files that they label in, and judged samples as rows
    alarms       when a metric has left what the profile promises
    explanation  what the store knows of one request
    mistakes     the requests of a day that lost relevant passages
    judging      the worker that has stored samples judged, and its budget
    estimation   from rows and counts to a report, its metrics with intervals
    service      Monitor, which does all of this
    export       Prometheus metrics, rules and the dashboard
"""
