"""Judged requests as the rows that estimates are made from."""

import math
from collections.abc import Iterable

from ctxguard.monitor.estimation.sums import Accumulator, RatioSums, TermSums, request_terms
from ctxguard.monitor.estimation.terms import JudgedRequest, Metric, Table, table_of, term


def table(requests: Iterable[JudgedRequest]) -> Table:
    return table_of([request.to_row() for request in requests])


def sums_of(rows: Table) -> TermSums:
    """Sums of the terms of some requests, clustered by session."""
    whole = Accumulator()
    whole.add(request_terms(rows), rows["session"])
    return whole.sums()


def sums(requests: Iterable[JudgedRequest]) -> TermSums:
    return sums_of(table(requests))


def ratio_sums(metric: Metric, requests: Iterable[JudgedRequest]) -> RatioSums:
    return sums(requests).ratio(metric)


def term_of(metric: Metric, request: JudgedRequest) -> tuple[float, float] | None:
    """Numerator and denominator before weighting; None where the metric is undefined."""
    found = term(metric, table([request]))
    pair = float(found[0][0]), float(found[1][0])
    return None if any(map(math.isnan, pair)) else pair
