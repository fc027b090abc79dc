"""Judged requests as rows: their terms are those of the definitions, and add up in any parts."""

import math
import struct
from collections.abc import Sequence
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_rows import ratio_sums, sums, sums_of, table

from ctxguard.core.metrics import precision_at_k, udcg
from ctxguard.errors import DataError
from ctxguard.monitor.estimation.sums import RatioSums
from ctxguard.monitor.estimation.terms import (
    ROW,
    JudgedRequest,
    Metric,
    session_number,
    table_of,
)

_SHARES = st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0])


@st.composite
def requests(draw: st.DrawFn) -> JudgedRequest:
    """Any request that judging may give."""
    grades = tuple(draw(st.lists(st.integers(0, 3), max_size=5)))
    found = sum(grade > 0 for grade in grades) + draw(st.integers(0, 3))
    return JudgedRequest(
        probability=draw(st.sampled_from([0.01, 0.3, 1.0])),
        grades=grades,
        utilities=tuple(1.0 if grade else draw(st.sampled_from([-1.0, -0.5])) for grade in grades),
        dropped_relevant=draw(st.none() | st.floats(0, 50)),
        dropped_probability=draw(_SHARES),
        pool_relevant=draw(st.sampled_from([None, found])),
        full_pool_probability=draw(_SHARES),
        session_id=draw(st.sampled_from([None, "s1", "s2"])),
        recall_loss=draw(st.none() | st.floats(0, 1)),
        partial_pool_relevant=draw(st.sampled_from([None, 0, 2])),
        recall=draw(st.sampled_from([None, 0.0, 0.5, 1.0])),
    )


def valid(request: JudgedRequest) -> bool:
    """Whether a pool was judged only where it could be."""
    found = (request.pool_relevant, request.partial_pool_relevant, request.recall)
    was_judged = request.dropped_probability > 0 or request.dropped_relevant is None
    return was_judged and (request.full_pool_probability > 0 or found == (None, None, None))


def defined(request: JudgedRequest, metric: Metric) -> tuple[float, float, float] | None:
    """A metric's numerator, denominator and inclusion probability, as they are defined."""
    kept, dropped = request.kept_relevant, request.dropped_relevant
    if metric is Metric.RECALL:
        chance = request.full_pool_probability
        share = request.recall
        return None if share is None else (share / chance, 1.0 / chance, chance)
    if metric is Metric.POOLED_RECALL:
        return None if dropped is None else (kept, kept + dropped, request.dropped_probability)
    if metric is Metric.SERVED_MRR:
        return (defined_rr(request), 1.0, 1.0) if request.grades else None
    value = {
        Metric.UDCG: udcg(request.utilities).value,
        Metric.GAIN: udcg(request.utilities).gain,
        Metric.HARM: udcg(request.utilities).harm,
        Metric.PRECISION: precision_at_k(request.grades),
        Metric.RECALL_LOSS: request.recall_loss,
    }[metric]
    return None if value is None else (value, 1.0, 1.0)


def defined_rr(request: JudgedRequest) -> float:
    for rank, grade in enumerate(request.grades, start=1):
        if grade > 0:
            return 1.0 / rank
    return 0.0


def one_by_one(metric: Metric, requests: Sequence[JudgedRequest]) -> RatioSums:
    """The sums of a metric, request by request and session by session."""
    clusters: dict[object, tuple[float, float, float]] = {}
    for position, request in enumerate(requests):
        found = defined(request, metric)
        if found is not None:
            key = position if request.session_id is None else request.session_id
            a, b, inclusion = clusters.get(key, (0.0, 0.0, 0.0))
            clusters[key] = (
                a + found[0] / request.probability,
                b + found[1] / request.probability,
                max(inclusion, found[2]),
            )
    weighted = [cluster for cluster in clusters.values() if cluster[1] > 0.0]
    return RatioSums(
        n=len(weighted),
        a=math.fsum(a for a, _, _ in weighted),
        b=math.fsum(b for _, b, _ in weighted),
        aa=math.fsum(a * a for a, _, _ in weighted),
        ab=math.fsum(a * b for a, b, _ in weighted),
        bb=math.fsum(b * b for _, b, _ in weighted),
        n_observable=math.fsum(inclusion for _, _, inclusion in weighted),
    )


some_requests = st.lists(requests().filter(valid), max_size=20)


@given(some_requests, st.sampled_from(list(Metric)))
def test_the_sums_of_rows_are_those_of_the_definitions(
    judged: list[JudgedRequest], metric: Metric
) -> None:
    found = astuple(ratio_sums(metric, judged))
    assert found == pytest.approx(astuple(one_by_one(metric, judged)), rel=1e-9, abs=1e-9)


@given(some_requests, st.integers(1, 7))
def test_requests_add_up_in_any_parts_though_a_session_lies_in_several(
    judged: list[JudgedRequest], size: int
) -> None:
    parts = sums_of(table(judged), size)
    for metric in Metric:
        expected = astuple(sums(judged).ratio(metric))
        assert astuple(parts.ratio(metric)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_row_has_one_size_and_tells_none_from_zero() -> None:
    request = JudgedRequest(1.0, (), (), None, 0.0, None, 0.0)
    row = request.to_row()
    assert len(row) == ROW.itemsize
    (found,) = table_of(row)
    assert math.isnan(found["precision"])
    assert math.isnan(found["dropped_relevant"])
    assert found["gain"] == 0.0


def test_bytes_of_another_size_are_refused() -> None:
    with pytest.raises(DataError, match="another release"):
        table_of(b"abc")


@pytest.mark.parametrize(("number", "value"), [(3, 1e200), (4, float("-inf")), (0, 1e-200)])
def test_a_number_that_no_request_has_is_refused_by_its_name(number: int, value: float) -> None:
    """Its square would overflow the sums of all requests."""
    row = bytearray(JudgedRequest(1.0, (1,), (1.0,), 1.0, 0.0, None, 0.0).to_row())
    struct.pack_into("<d", row, 8 * number, value)
    with pytest.raises(DataError, match=f"impossible {ROW.names[number]}"):
        table_of(bytes(row))


def test_a_session_is_never_mistaken_for_none() -> None:
    assert session_number(None) == 0
    assert all(session_number(str(i)) != 0 for i in range(1_000))
