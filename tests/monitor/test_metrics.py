"""Judged requests as rows: their terms are those of the definitions, and add up in any parts."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_rows import GAIN, HARM, Judged, numbers, ratio_sums, rows_of, sums, sums_of

from ctxguard.errors import DataError
from ctxguard.measure.metrics import Metric, udcg
from ctxguard.measure.rows import MISSING, PASSAGE, REQUEST, YES, Rows, session_number, to_blocks

_VERDICTS = st.integers(0, 2)


@st.composite
def judged_requests(draw: st.DrawFn) -> Judged:
    """Any request that judging may give."""
    chance = draw(st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0]))
    return Judged(
        served=draw(st.lists(_VERDICTS, max_size=5)),
        dropped=draw(st.lists(_VERDICTS, max_size=5)) if chance else (),
        weight=draw(st.sampled_from([1.0, 3.0, 100.0])),
        session=draw(st.sampled_from([None, "s1", "s2"])),
        dropped_chance=chance,
        pool_chance=draw(st.sampled_from([None, 0.05, 1.0])),
        n_first=draw(st.none() | st.integers(0, 5)),
    )


def defined(request: Judged, metric: Metric) -> tuple[float, float, float] | None:
    """A metric's numerator, denominator and inclusion probability, as they are defined."""
    kept, found, first = (
        sum(verdict == YES for verdict in verdicts)
        for verdicts in (request.served, request.dropped, request.dropped[: request.n_first])
    )
    if metric is Metric.RECALL:
        chance = request.pool_chance
        if chance is None or MISSING in (*request.served, *request.dropped) or not kept + found:
            return None
        return kept / (kept + found) / chance, 1.0 / chance, chance
    if metric is Metric.POOLED_RECALL:
        chance = request.dropped_chance
        return (kept, kept + found / chance, chance) if chance and kept + found else None
    if metric is Metric.SERVED_MRR:
        return (defined_rr(request.served), 1.0, 1.0) if request.served else None
    if metric is Metric.RECALL_LOSS:
        is_defined = request.n_first is not None and kept + first
        return (first / (kept + first), 1.0, 1.0) if is_defined else None
    own = np.array([[(-HARM, GAIN, 0.0)[verdict] for verdict in request.served]])
    [gain], [harm] = udcg(own)
    value = {
        Metric.UDCG: gain - harm,
        Metric.GAIN: gain,
        Metric.HARM: harm,
        Metric.PRECISION: kept / len(request.served) if request.served else None,
    }[metric]
    return None if value is None else (value, 1.0, 1.0)


def defined_rr(served: Sequence[int]) -> float:
    return next((1.0 / rank for rank, verdict in enumerate(served, start=1) if verdict == YES), 0.0)


def one_by_one(metric: Metric, requests: Sequence[Judged]) -> list[float]:
    """The ``numbers`` of a metric, request by request and session by session."""
    clusters: dict[object, tuple[float, float, float]] = {}
    for position, request in enumerate(requests):
        found = defined(request, metric)
        if found is not None:
            key = position if request.session is None else request.session
            a, b, inclusion = clusters.get(key, (0.0, 0.0, 0.0))
            clusters[key] = (
                a + found[0] * request.weight,
                b + found[1] * request.weight,
                max(inclusion, found[2]),
            )
    sums = np.array([*clusters.values()]).reshape(-1, 3)
    (a, b, n_observable), products = sums.sum(axis=0), sums[:, :2].T @ sums[:, :2]
    return [len(clusters), n_observable, a, b, *products.ravel()]


some_requests = st.lists(judged_requests(), max_size=20)


@given(some_requests)
def test_row_sums_follow_definitions(judged: list[Judged]) -> None:
    found = sums(judged)
    for metric in Metric:
        expected = one_by_one(metric, judged)
        assert numbers(found.ratio(metric)) == pytest.approx(expected, rel=1e-9, abs=1e-9), metric


@given(some_requests, st.integers(1, 7))
def test_requests_add_up_in_parts(judged: list[Judged], size: int) -> None:
    """Requests add up in any parts though a session lies in several."""
    whole, parts = sums(judged), sums_of(rows_of(judged), size)
    for metric in Metric:
        expected = numbers(whole.ratio(metric))
        assert numbers(parts.ratio(metric)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def block_of(judged: Judged) -> bytes:
    [block] = to_blocks(judged.rows())
    return block


@given(some_requests)
def test_blocks_read_the_same_either_way(judged: list[Judged]) -> None:
    """Blocks are read as they were written in one go or one by one."""
    rows = rows_of(judged)
    assert to_blocks(rows) == [block_of(one) for one in judged]
    assert rows.request.tolist() == sorted(rows.request.tolist())


def test_human_rows_use_grades() -> None:
    """A passage that nobody graded has none."""
    judged = Judged([1, 1, 0, 0], [1], grades=[2, 0, 1, None, None])
    by_people = rows_of([judged]).by_people()
    expected = Judged([1, 0, 1, MISSING], [MISSING])
    for metric in Metric:
        found = sums_of(by_people).ratio(metric)
        if metric is not Metric.RECALL:
            assert numbers(found) == pytest.approx(numbers(ratio_sums(metric, [expected])))


@pytest.mark.parametrize("cut", [3, REQUEST.itemsize - 1, REQUEST.itemsize + 1])
def test_bytes_of_another_size_are_refused(cut: int) -> None:
    with pytest.raises(DataError, match="another release"):
        Rows.read([block_of(Judged([1, 0]))[:cut]])


def test_block_lacking_passages_is_refused() -> None:
    with pytest.raises(DataError, match="truncated"):
        Rows.read([block_of(Judged([1, 0]))[: -PASSAGE.itemsize]])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("worth", 1e30),
        ("people_worth", -math.inf),
        ("probability", 1e-200),
        ("size", 0.5),
        ("asked_probability", math.nan),
        ("dropped_probability", -1.0),
    ],
)
def test_impossible_number_is_refused_by_name(name: str, value: float) -> None:
    """Its square would overflow the sums of all requests."""
    rows = rows_of([Judged([1, 0], [1])])
    requests, passages = rows.requests.copy(), rows.passages.copy()
    (requests if name in REQUEST.names else passages)[name] = value
    with pytest.raises(DataError, match=f"impossible {name}"):
        Rows.read(to_blocks(Rows.of(requests, passages)))


def test_session_is_never_none() -> None:
    assert session_number(None) == 0
    assert all(session_number(str(i)) != 0 for i in range(1_000))
