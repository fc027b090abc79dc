"""Estimates: what each metric counts, and that the intervals hold what they claim."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_rows import ratio_sums, sums
from scipy import stats

from ctxguard.monitor.estimation.ratio import Estimate, estimate, t_quantile
from ctxguard.monitor.estimation.sums import RatioSums
from ctxguard.monitor.estimation.terms import JudgedRequest, Metric


def request(
    grades: Sequence[int], dropped: int = 0, *, weight: float = 1.0, session: str | None = None
) -> JudgedRequest:
    """A request whose whole pool was judged."""
    return JudgedRequest(
        probability=1.0 / weight,
        grades=tuple(grades),
        utilities=tuple(1.0 if grade else -0.5 for grade in grades),
        dropped_relevant=float(dropped),
        dropped_probability=1.0,
        pool_relevant=sum(grade > 0 for grade in grades) + dropped,
        full_pool_probability=1.0,
        session_id=session,
    )


def test_a_few_heavy_requests_count_as_few() -> None:
    """Fifty requests of which five stand for nearly all of the traffic are about five."""
    light = [request([n % 2], weight=1.0) for n in range(45)]
    heavy = [request([n % 2], weight=100.0) for n in range(5)]
    found = estimate(Metric.PRECISION, ratio_sums(Metric.PRECISION, light + heavy))
    assert found.value is None
    assert found.n == 50
    assert found.n_effective == pytest.approx(545**2 / 50_045)
    assert found.n_needed == math.ceil(30 * 50 / found.n_effective)


requests_strategy = st.lists(
    st.builds(
        request,
        st.lists(st.integers(0, 2), max_size=5),
        st.integers(0, 3),
        weight=st.sampled_from([1.0, 2.0, 10.0]),
    ),
    max_size=12,
)


@given(requests_strategy, st.sampled_from(list(Metric)))
def test_the_value_lies_in_its_interval_and_ratios_lie_between_zero_and_one(
    requests: list[JudgedRequest], metric: Metric
) -> None:
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
    assert estimate(Metric.UDCG, RatioSums()) == Estimate(None, None, None, 0, "none", 30)


def test_below_the_least_n_there_is_no_value() -> None:
    few = ratio_sums(Metric.PRECISION, [request([1, 0]), request([1, 1])] * 14)
    assert estimate(Metric.PRECISION, few).value is None
    assert estimate(Metric.PRECISION, few, 28).value is not None


def test_where_all_requests_are_alike_a_rare_other_kind_is_still_allowed_for() -> None:
    found = estimate(Metric.PRECISION, ratio_sums(Metric.PRECISION, [request([1])] * 100))
    # The share of another kind that would go unseen in 100 requests with probability 2.5%.
    assert found.lower == pytest.approx(0.025 ** (1 / 100))
    assert (found.value, found.upper) == (1.0, 1.0)


def test_a_recall_of_one_allows_for_what_sampling_the_dropped_may_have_missed() -> None:
    requests = [replace(request([1]), dropped_probability=0.1)] * 100
    found = estimate(Metric.POOLED_RECALL, ratio_sums(Metric.POOLED_RECALL, requests))
    assert found.lower == pytest.approx(0.025 ** (1 / 10))


def test_udcg_without_any_spread_has_no_interval() -> None:
    alike = ratio_sums(Metric.UDCG, [request([1])] * 100)
    assert estimate(Metric.UDCG, alike).value is None


@pytest.mark.parametrize(("p", "df"), [(0.975, 6), (0.975, 29), (0.995, 9), (0.95, 1000)])
def test_the_quantile_of_t_is_scipys(p: float, df: int) -> None:
    assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-3)


class Traffic:
    """Requests of easy and hard queries, each with its whole truth."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def draw(self) -> tuple[tuple[int, ...], int]:
        """Grades of what is served, and how many relevant passages are dropped."""
        rng = self._rng
        hard = rng.random() < 0.3
        served = rng.randint(1, 5)
        chance = 0.15 if hard else 0.6
        grades = tuple(
            int(rng.random() < chance / math.sqrt(rank)) for rank in range(1, served + 1)
        )
        dropped = sum(rng.random() < (0.04 if hard else 0.01) for _ in range(20 - served))
        return grades, dropped

    def judged(self, dropped_rate: float, pool_rate: float) -> JudgedRequest:
        """The same as the monitor sees it: dropped passages sampled, some pools whole."""
        grades, dropped = self.draw()
        pool = pool_rate if any(grades) else 0.5
        whole = self._rng.random() < pool
        probability = pool + (1 - pool) * dropped_rate
        seen = sum(whole or self._rng.random() < dropped_rate for _ in range(dropped))
        full = request(grades, dropped)
        return replace(
            full,
            dropped_relevant=seen / probability,
            dropped_probability=probability,
            pool_relevant=full.pool_relevant if whole else None,
            full_pool_probability=pool,
        )


def truths(traffic: Traffic, n: int) -> dict[Metric, float]:
    everything = sums([request(*traffic.draw()) for _ in range(n)])
    ratios = {metric: everything.ratio(metric) for metric in Metric}
    return {metric: ratio.a / ratio.b for metric, ratio in ratios.items() if ratio.b}


def coverage(
    draw: Callable[[], JudgedRequest], truth: dict[Metric, float], *, n: int, repeats: int
) -> dict[Metric, float]:
    """Share of the intervals that hold the truth, of those that were given."""
    held, given_ = dict.fromkeys(Metric, 0), dict.fromkeys(Metric, 0)
    for _ in range(repeats):
        drawn = sums([draw() for _ in range(n)])
        for metric in Metric:
            found = estimate(metric, drawn.ratio(metric))
            if found.value is not None:
                given_[metric] += 1
                held[metric] += found.lower <= truth[metric] <= found.upper
    return {metric: held[metric] / given_[metric] for metric in Metric if given_[metric]}


def test_intervals_cover_the_truth_when_dropped_passages_are_sampled() -> None:
    truth = truths(Traffic(random.Random(7)), 60_000)
    traffic = Traffic(random.Random(8))
    covered = coverage(lambda: traffic.judged(0.2, 0.05), truth, n=150, repeats=400)
    for metric in (Metric.SERVED_MRR, Metric.UDCG, Metric.GAIN, Metric.HARM, Metric.PRECISION):
        assert 0.92 <= covered[metric] <= 0.985, (metric, covered)
    assert covered[Metric.POOLED_RECALL] >= 0.91, covered


def test_intervals_cover_the_truth_when_whole_pools_are_judged() -> None:
    truth = truths(Traffic(random.Random(9)), 60_000)
    traffic = Traffic(random.Random(10))
    covered = coverage(lambda: request(*traffic.draw()), truth, n=60, repeats=400)
    assert min(covered.values()) >= 0.91, covered


def test_sessions_that_are_ignored_make_intervals_too_narrow_and_clusters_mend_it() -> None:
    rng = random.Random(11)

    def sessions(name: bool) -> list[JudgedRequest]:
        requests = []
        for session in range(40):
            chance = rng.choice((0.1, 0.9))
            requests += [
                request([int(rng.random() < chance)], session=str(session) if name else None)
                for _ in range(8)
            ]
        return requests

    def covered(name: bool) -> float:
        found = [
            estimate(Metric.PRECISION, ratio_sums(Metric.PRECISION, sessions(name)))
            for _ in range(300)
        ]
        return sum(one.lower <= 0.5 <= one.upper for one in found) / 300

    assert covered(name=False) < 0.8
    assert covered(name=True) >= 0.91
