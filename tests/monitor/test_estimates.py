"""Estimates: what each metric counts, and that the intervals hold what they claim."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_rows import GAIN, HARM, Judged, ratio_sums, rows_of, sums_of
from scipy import stats

from benchmarks.labelling import Case, judged, traffic, truths
from ctxguard.measure.estimate import Estimate, Sums, estimate
from ctxguard.measure.interval import t_quantile
from ctxguard.measure.metrics import Metric
from ctxguard.measure.rows import YES, Rows


def test_heavy_requests_count_as_few() -> None:
    """Fifty requests of which five stand for nearly all of the traffic are about five."""
    light = [Judged([n % 2]) for n in range(45)]
    heavy = [Judged([n % 2], weight=100.0) for n in range(5)]
    found = estimate(Metric.PRECISION, ratio_sums(Metric.PRECISION, light + heavy))
    assert found.value is None
    assert found.n == 50
    assert found.n_effective == pytest.approx(545**2 / 50_045)
    assert found.n_needed == math.ceil(30 * 50 / found.n_effective)


requests_strategy = st.lists(
    st.builds(
        Judged,
        st.lists(st.integers(0, 1), max_size=5),
        st.lists(st.integers(0, 1), max_size=3),
        weight=st.sampled_from([1.0, 2.0, 10.0]),
    ),
    max_size=12,
)


@given(requests_strategy, st.sampled_from(list(Metric)))
def test_value_lies_in_its_interval(requests: list[Judged], metric: Metric) -> None:
    """The value lies in its interval and ratios lie between zero and one."""
    found = estimate(metric, ratio_sums(metric, requests), 2)
    if found.value is None:
        assert found.lower is None
        assert found.upper is None
        return
    assert found.lower <= found.value + 1e-9
    assert found.value <= found.upper + 1e-9
    if metric not in {Metric.UDCG, Metric.GAIN, Metric.HARM}:
        assert found.lower >= 0.0
        assert found.upper <= 1.0 + 1e-9


def test_no_data_is_no_value() -> None:
    assert estimate(Metric.UDCG, Sums.of(2)) == Estimate(None, None, None, 0, 30)


def test_too_few_give_no_value() -> None:
    few = ratio_sums(Metric.PRECISION, [Judged([1, 0]), Judged([1, 1])] * 14)
    assert estimate(Metric.PRECISION, few).value is None
    assert estimate(Metric.PRECISION, few, 28).value is not None


def test_alike_requests_allow_for_rare_kind() -> None:
    found = estimate(Metric.PRECISION, ratio_sums(Metric.PRECISION, [Judged([1])] * 100))
    # The share of another kind that would go unseen in 100 requests with probability 2.5%.
    assert found.lower == pytest.approx(0.025 ** (1 / 100))
    assert (found.value, found.upper) == (1.0, 1.0)


def test_recall_of_one_allows_for_missed() -> None:
    """A recall of one allows for what sampling the dropped may have missed."""
    requests = [Judged([1], dropped_chance=0.1)] * 100
    found = estimate(Metric.POOLED_RECALL, ratio_sums(Metric.POOLED_RECALL, requests))
    assert found.lower == pytest.approx(0.025 ** (1 / 10))


def test_udcg_without_spread_has_no_interval() -> None:
    alike = ratio_sums(Metric.UDCG, [Judged([1])] * 100)
    assert estimate(Metric.UDCG, alike).value is None


@pytest.mark.parametrize(("p", "df"), [(0.975, 6), (0.975, 29), (0.995, 9), (0.95, 1000)])
def test_the_quantile_of_t_is_scipys(p: float, df: int) -> None:
    assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-3)


@pytest.mark.parametrize(("pool_rate", "n"), [(0.05, 150), (1.0, 60)], ids=["in part", "wholly"])
def test_intervals_cover_judged_pools(
    pool_rate: float, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The truth is that of all requests, of which each interval knows n."""
    monkeypatch.setattr("benchmarks.labelling._POOL_RATE", pool_rate)
    case, rng = Case("perfect judge", sensitivity=1.0, specificity=1.0), np.random.default_rng(7)
    relevant = traffic(case, 400 * n, rng)
    rows, _ = judged(case, relevant, rng)
    passages, requests = rows.passages, rows.requests
    passages["worth"] = np.where(passages["judge_grade"] == YES, GAIN, -HARM)
    requests["has_recall"] = pool_rate == 1.0
    requests["pool_probability"] = pool_rate
    kept, pool = relevant[:, :5].sum(axis=1), relevant.sum(axis=1)
    truth = {**truths(case), Metric.RECALL: np.mean(kept[pool > 0] / pool[pool > 0])}
    held: dict[Metric, list[bool]] = {metric: [] for metric in truth}
    part = np.arange(len(rows.requests)) // n
    for one in range(400):
        drawn = sums_of(rows.take(part == one))
        for metric, value in truth.items():
            found = estimate(metric, drawn.ratio(metric))
            if found.value is not None:
                held[metric].append(found.lower <= value <= found.upper)
    coverage = {metric: np.mean(each) for metric, each in held.items() if each}
    assert len(coverage) == 5 - (pool_rate < 1.0)
    assert 0.92 <= min(coverage.values()) <= max(coverage.values()) <= 0.985, coverage


def test_clusters_mend_intervals_of_sessions() -> None:
    """Sessions that are ignored make intervals too narrow and clusters mend it."""
    rng, either = np.random.default_rng(11), rows_of([Judged([0]), Judged([1])])

    def covered(name: bool) -> float:
        held = 0
        for _ in range(300):
            chance = np.repeat(rng.choice((0.1, 0.9), 40), 8)
            relevant = (rng.random(320) < chance).astype(np.intp)
            rows = Rows.of(either.requests[relevant], either.passages[relevant])
            if name:
                rows.requests["session"] = np.repeat(np.arange(1, 41), 8)
            found = estimate(Metric.PRECISION, sums_of(rows).ratio(Metric.PRECISION))
            held += found.lower <= 0.5 <= found.upper
        return held / 300

    assert covered(name=False) < 0.8
    assert covered(name=True) >= 0.91
