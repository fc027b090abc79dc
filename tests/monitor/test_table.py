"""Judged requests as columns: the same sums as one by one, and nothing lost in bytes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.errors import DataError
from ctxguard.monitor.estimates import JudgedRequest, Metric, ratio_sums
from ctxguard.monitor.table import (
    ROW,
    request_of,
    served_bytes,
    session_number,
    summary,
    sums_of,
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
        pool_probability=draw(_SHARES),
        unanswered_probability=draw(_SHARES),
        session_id=draw(st.sampled_from([None, "s1", "s2"])),
        recall_loss=draw(st.none() | st.floats(0, 1)),
        missed_relevant=draw(st.none() | st.floats(0, 9)),
        audit_probability=draw(_SHARES),
        pool_found=draw(st.sampled_from([None, 0, 2])),
    )


def valid(request: JudgedRequest) -> bool:
    """Whether a pool was judged only where it could be."""
    return request.pool_probability > 0 or request.pool_relevant is None


@given(st.lists(requests().filter(valid), max_size=20), st.sampled_from(list(Metric)))
def test_columns_give_the_sums_of_the_requests(judged: list[JudgedRequest], metric: Metric) -> None:
    one_by_one = ratio_sums(metric, judged)
    columns = sums_of(metric, table_of([summary(request) for request in judged]))
    assert columns.n == one_by_one.n
    for part in ("a", "b", "aa", "ab", "bb", "seen"):
        expected = getattr(one_by_one, part)
        assert math.isclose(getattr(columns, part), expected, rel_tol=1e-9, abs_tol=1e-9), part


@given(requests())
def test_a_request_comes_back_from_its_bytes(request: JudgedRequest) -> None:
    packed = summary(request)
    (row,) = table_of(packed)
    again = request_of(row, served_bytes(request))
    assert len(packed) == ROW.itemsize
    assert (again.session_id is None) == (request.session_id is None)
    assert again.grades == request.grades
    assert again.utilities == request.utilities
    assert again.dropped_relevant == request.dropped_relevant
    assert again.pool_relevant == request.pool_relevant
    assert again.recall_loss == request.recall_loss


def test_bytes_of_another_size_are_refused() -> None:
    with pytest.raises(DataError, match="another release"):
        table_of(b"abc")


def test_a_session_is_never_mistaken_for_none() -> None:
    assert session_number(None) == 0
    assert all(session_number(str(i)) != 0 for i in range(1_000))
