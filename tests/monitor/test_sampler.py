"""Sampling: which requests are chosen, and where every sample is at any time."""

import os
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from contexts import make_context
from hypothesis import given
from hypothesis import strategies as st

from ctxguard._support.fork_safety import reset_in_children
from ctxguard.errors import ConfigurationError
from ctxguard.monitor.sampling.sampler import Sampler, Tally
from ctxguard.monitor.store import LostReason


def share(sampler: Sampler, n: int) -> float:
    return sum(sampler.draw(f"request-{i}") > 0.0 for i in range(n)) / n


@given(st.text(), st.text())
def test_a_rate_of_zero_selects_nothing_and_a_rate_of_one_everything(
    request_id: str, seed: str
) -> None:
    assert Sampler(0.0, seed=seed).draw(request_id) == 0.0
    assert Sampler(1.0, seed=seed).draw(request_id) == 1.0


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_the_share_selected_is_the_rate(rate: float) -> None:
    n = 40_000
    found = share(Sampler(rate, seed="share"), n)
    assert abs(found - rate) < 4 * (rate * (1 - rate) / n) ** 0.5


def test_selection_does_not_depend_on_order_or_on_what_was_asked_before() -> None:
    ids = [f"request-{i}" for i in range(2_000)]
    once = {request_id for request_id in ids if Sampler(0.2).draw(request_id)}
    random.Random(1).shuffle(ids)
    sampler = Sampler(0.2)
    assert {request_id for request_id in [*ids, *ids] if sampler.draw(request_id)} == once


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_what_a_rate_selects_every_higher_rate_selects_too(
    request_id: str, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    assert not Sampler(low).draw(request_id) or Sampler(high).draw(request_id)


def test_seeds_select_independently() -> None:
    n = 20_000
    one, other = Sampler(0.3, seed="1"), Sampler(0.3, seed="2")
    both = sum(one.draw(str(i)) > 0 and other.draw(str(i)) > 0 for i in range(n))
    assert both / n == pytest.approx(0.09, abs=0.01)


def test_a_lone_surrogate_in_a_request_id_can_be_sampled() -> None:
    assert Sampler(1.0).draw("request \ud800") == 1.0


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_that_is_no_probability_is_refused(rate: float) -> None:
    with pytest.raises(ConfigurationError, match="must lie in"):
        Sampler(rate)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="capacity 0"):
        Sampler(0.1, capacity=0)
    with pytest.raises(ConfigurationError, match=r"max_per_second 0\.0"):
        Sampler(0.1, max_per_second=0.0)


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

    def test_light_traffic_is_sampled_at_the_full_rate(self) -> None:
        drawn = self.draws(per_second=10, seconds=50)
        assert {rate for second in drawn for rate in second} == {0.0, 0.5}

    def test_no_second_has_many_more_samples_than_the_cap(self) -> None:
        drawn = self.draws(per_second=5_000, seconds=20)
        counts = [sum(rate > 0 for rate in second) for second in drawn]
        assert max(counts) <= 20 + 13  # the logarithm of 5,000, to base 2
        assert sum(counts[1:]) / 19 > 10

    def test_samples_weighted_by_their_rates_stand_for_all_requests(self) -> None:
        drawn = self.draws(per_second=2_000, seconds=60)
        stood_for = sum(1 / rate for second in drawn for rate in second if rate)
        assert stood_for == pytest.approx(120_000, rel=0.15)


def test_samples_are_drained_oldest_first_up_to_the_limit() -> None:
    sampler, context = Sampler(1.0), make_context(["a"], 1)
    for second in range(5):
        sampler.offer(context, 0.25, float(second))
    assert sampler.drain(3) == [(context, 0.25, second) for second in (0.0, 1.0, 2.0)]
    assert [sample.time_seconds for sample in sampler.drain(3)] == [3.0, 4.0]
    assert sampler.drain(3) == []


def test_a_full_queue_drops_the_newest_and_counts_it() -> None:
    sampler = Sampler(1.0, capacity=2)
    context = make_context(["a"], 1)
    offered = [sampler.offer(context, 1.0, float(i)) for i in range(4)]
    assert offered == [True, True, False, False]
    assert sampler.sampled() == 4
    assert sampler.lost()[LostReason.QUEUE_FULL] == 2


def test_every_sample_is_accounted_for_while_threads_offer_and_one_drains() -> None:
    sampler, context = Sampler(1.0, capacity=50), make_context(["a"], 1)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            offers = [
                pool.submit(lambda: sum(sampler.offer(context, 1.0, 0.0) for _ in range(4_000)))
                for _ in range(8)
            ]
            drained = 0
            while not all(one.done() for one in offers):
                drained += len(sampler.drain(7))
    finally:
        sys.setswitchinterval(interval)
    queued = sum(one.result() for one in offers)
    assert drained + sampler.waiting == queued
    assert (sampler.sampled(), sampler.sampled_by_hour()) == (32_000, {0: 32_000})
    assert sampler.lost()[LostReason.QUEUE_FULL] == 32_000 - queued


def test_what_waits_when_the_sampler_is_closed_is_counted_as_lost() -> None:
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
def test_a_forked_child_starts_empty_and_the_parent_keeps_its_samples() -> None:
    sampler = Sampler(1.0, capacity=3)
    context = make_context(["a"], 1)
    for second in range(5):
        sampler.offer(context, 1.0, float(second))
    sampler.drain(1)
    reading, writing = os.pipe()
    # Held over the fork, as another thread's drain might hold it.
    with sampler._lock:
        child = os.fork()
        if child == 0:
            before = sampler.sampled()
            sampler.offer(context, 1.0, 9.0)
            message = f"{before} {sampler.sampled()} {len(sampler.drain(9))}"
            os.write(writing, message.encode())
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100) == b"0 1 1"
    os.close(reading)
    os.close(writing)
    assert (sampler.sampled(), len(sampler.drain(9))) == (5, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_cannot_start_afresh_in_a_child_leaves_no_other_behind() -> None:
    class Thing:
        def __init__(self, *, fails: bool) -> None:
            self.fails, self.is_fresh = fails, False
            reset_in_children(self)

        def _reset_after_fork(self) -> None:
            if self.fails:
                raise OSError("no space")
            self.is_fresh = True

    things = [Thing(fails=n % 2 == 0) for n in range(10)]
    child = os.fork()
    if child == 0:
        os._exit(0 if all(thing.is_fresh for thing in things[1::2]) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_tally_loses_no_count_of_any_thread_while_it_is_read() -> None:
    tally = Tally()
    threads = [
        threading.Thread(target=lambda: [tally.add() for _ in range(20_000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    seen = [tally.total() for _ in range(200)]
    for thread in threads:
        thread.join()
    assert seen == sorted(seen)
    assert tally.total() == tally.total() == 80_000
