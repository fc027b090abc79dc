"""Judged requests as the rows that estimates are made from."""

from collections.abc import Iterable

from ctxguard.monitor.estimation.sums import RatioSums, Sums
from ctxguard.monitor.estimation.terms import (
    JudgedRequest,
    Metric,
    Table,
    request_terms,
    table_of,
)


def table(requests: Iterable[JudgedRequest]) -> Table:
    return table_of([request.to_row() for request in requests])


def sums_of(rows: Table, size: int | None = None) -> Sums:
    """Sums of the terms of some requests, added in parts, clustered by session."""
    found = Sums(2 * len(Metric))
    for start in range(0, len(rows), size or max(len(rows), 1)):
        part = rows[start : start + (size or len(rows))]
        values, inclusion = request_terms(part)
        found.add(values, part["session"], inclusion)
    return found.ended()


def sums(requests: Iterable[JudgedRequest]) -> Sums:
    return sums_of(table(requests))


def ratio_sums(metric: Metric, requests: Iterable[JudgedRequest]) -> RatioSums:
    return sums(requests).ratio(metric)
