"""Sampling: which requests are chosen, and where every sample is at any time."""

import math
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from contexts import make_context
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.sampling.sampler import LostReason, Sampler


def share(sampler: Sampler, n: int) -> float:
    return sum(sampler.draw(f"request-{i}") > 0.0 for i in range(n)) / n


@given(st.text() | st.just("request \ud800"), st.text())
def test_rate_zero_none_one_all(request_id: str, seed: str) -> None:
    """A rate of zero selects nothing and a rate of one everything."""
    assert Sampler(0.0, seed=seed).draw(request_id) == 0.0
    assert Sampler(1.0, seed=seed).draw(request_id) == 1.0


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_the_share_selected_is_the_rate(rate: float) -> None:
    n = 40_000
    found = share(Sampler(rate, seed="share"), n)
    assert abs(found - rate) < 4 * (rate * (1 - rate) / n) ** 0.5


def test_selection_has_no_memory() -> None:
    """Selection does not depend on order or on what was asked before."""
    ids = [f"request-{i}" for i in range(2_000)]
    once = {request_id for request_id in ids if Sampler(0.2).draw(request_id)}
    random.Random(1).shuffle(ids)
    sampler = Sampler(0.2)
    assert {request_id for request_id in [*ids, *ids] if sampler.draw(request_id)} == once


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_higher_rates_select_more(request_id: str, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert not Sampler(low).draw(request_id) or Sampler(high).draw(request_id)


def test_seeds_select_independently() -> None:
    n = 20_000
    one, other = Sampler(0.3, seed="1"), Sampler(0.3, seed="2")
    both = sum(one.draw(str(i)) > 0 and other.draw(str(i)) > 0 for i in range(n))
    assert both / n == pytest.approx(0.09, abs=0.01)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        *(({"rate": rate}, "must lie in") for rate in (-0.1, 1.1, math.nan)),
        ({"rate": 0.1, "capacity": 0}, "capacity 0"),
        ({"rate": 0.1, "max_per_second": 0.0}, r"max_per_second 0\.0"),
    ],
)
def test_unworkable_setting_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Sampler(**settings)


class TestCap:
    """Under heavy traffic the rate falls, and every sample knows by how much."""

    def draws(self, *, per_second: int, seconds: int) -> list[list[float]]:
        now = [0.0]
        sampler = Sampler(0.5, max_per_second=20, clock=lambda: now[0])
        drawn = []
        for second in range(seconds):
            drawn.append([])
            for i in range(per_second):
                now[0] = second + i / per_second
                drawn[-1].append(sampler.draw(f"{second}-{i}"))
        return drawn

    def test_light_traffic_is_fully_sampled(self) -> None:
        drawn = self.draws(per_second=10, seconds=50)
        assert {rate for second in drawn for rate in second} == {0.0, 0.5}

    def test_seconds_keep_about_the_cap(self) -> None:
        drawn = self.draws(per_second=5_000, seconds=20)
        counts = [sum(rate > 0 for rate in second) for second in drawn]
        assert max(counts) <= 20 + 13  # the logarithm of 5,000, to base 2
        assert sum(counts[1:]) / 19 > 10

    def test_weighted_samples_stand_for_all(self) -> None:
        drawn = self.draws(per_second=2_000, seconds=60)
        stood_for = sum(1 / rate for second in drawn for rate in second if rate)
        assert stood_for == pytest.approx(120_000, rel=0.15)


def test_samples_drain_oldest_first() -> None:
    """A full queue drops the newest."""
    sampler, context = Sampler(1.0, capacity=5), make_context(["a"], 1)
    offered = [sampler.offer(context, 0.25, float(second)) for second in range(7)]
    assert offered == [True] * 5 + [False] * 2
    assert sampler.drain(3) == [(context, 0.25, second) for second in (0.0, 1.0, 2.0)]
    assert [second for _, _, second in sampler.drain(3)] == [3.0, 4.0]
    assert sampler.drain(3) == []


def test_every_sample_is_accounted_for() -> None:
    sampler, context = Sampler(1.0, capacity=50), make_context(["a"], 1)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            offers = [
                pool.submit(lambda: sum(sampler.offer(context, 1.0, 0.0) for _ in range(4_000)))
                for _ in range(8)
            ]
            drained, counted = 0, [0]
            while not all(one.done() for one in offers):
                drained += len(sampler.drain(7))
                counted.append(sampler.sampled())
    finally:
        sys.setswitchinterval(interval)
    queued = sum(one.result() for one in offers)
    assert drained + sampler.waiting == queued
    assert counted == sorted(counted)
    assert (sampler.sampled(), sampler.sampled_by_hour()) == (32_000, {0: 32_000})
    assert sampler.lost()[LostReason.QUEUE_FULL] == 32_000 - queued


def test_closing_counts_the_waiting_lost() -> None:
    sampler = Sampler(1.0)
    context = make_context(["a"], 1)
    for second in range(3):
        sampler.offer(context, 1.0, float(second))
    sampler.drain(1)
    sampler.close()
    assert not sampler.offer(context, 1.0, 3.0)
    assert (sampler.sampled(), sampler.lost()[LostReason.CLOSED]) == (4, 3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_starts_empty() -> None:
    sampler = Sampler(1.0, capacity=3)
    context = make_context(["a"], 1)
    for second in range(5):
        sampler.offer(context, 1.0, float(second))
    sampler.drain(1)
    # Held over the fork, as another thread's drain might hold it.
    with sampler._lock:
        child = os.fork()
        if child == 0:
            before = sampler.sampled()
            sampler.offer(context, 1.0, 9.0)
            is_fresh = (before, sampler.sampled(), len(sampler.drain(9))) == (0, 1, 1)
            os._exit(0 if is_fresh else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (sampler.sampled(), len(sampler.drain(9))) == (5, 2)
