"""Judged requests as the rows that estimates are made from."""

import math
from collections.abc import Iterable

from ctxguard.monitor.estimation.sums import RatioSums, TermSums, sums_of
from ctxguard.monitor.estimation.terms import JudgedRequest, Metric, Table, table_of, term


def table(requests: Iterable[JudgedRequest]) -> Table:
    return table_of([request.to_row() for request in requests])


def sums(requests: Iterable[JudgedRequest]) -> TermSums:
    return sums_of(table(requests))


def ratio_sums(metric: Metric, requests: Iterable[JudgedRequest]) -> RatioSums:
    return sums(requests).ratio(metric)


def term_of(metric: Metric, request: JudgedRequest) -> tuple[float, float] | None:
    """Numerator and denominator before weighting; None where the metric is undefined."""
    found = term(metric, table([request]))
    pair = float(found.numerator[0]), float(found.denominator[0])
    return None if any(map(math.isnan, pair)) else pair
