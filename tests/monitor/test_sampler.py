"""Sampling: which requests are chosen, and where every sample is at any time."""

import os
import random
import sys
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.context import Context
from ctxguard.errors import ConfigurationError
from ctxguard.monitor.sampler import Accounts, LostReason, Sampler

MakeContext = Callable[..., Context]


def balanced(accounts: Accounts) -> bool:
    return accounts.sampled == accounts.drained + accounts.pending + sum(accounts.lost.values())


@given(st.text(), st.text())
def test_a_rate_of_zero_selects_nothing_and_a_rate_of_one_everything(
    request_id: str, seed: str
) -> None:
    assert not Sampler(0.0, seed=seed).selects(request_id)
    assert Sampler(1.0, seed=seed).selects(request_id)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_the_share_selected_is_the_rate(rate: float) -> None:
    sampler = Sampler(rate, seed="share")
    n = 40_000
    selected = sum(sampler.selects(f"request-{i}") for i in range(n))
    assert abs(selected / n - rate) < 4 * (rate * (1 - rate) / n) ** 0.5


def test_selection_does_not_depend_on_order_or_on_what_was_asked_before() -> None:
    ids = [f"request-{i}" for i in range(2_000)]
    once = {request_id for request_id in ids if Sampler(0.2).selects(request_id)}
    random.Random(1).shuffle(ids)
    sampler = Sampler(0.2)
    assert {request_id for request_id in [*ids, *ids] if sampler.selects(request_id)} == once


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_what_a_rate_selects_every_higher_rate_selects_too(
    request_id: str, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    assert not Sampler(low).selects(request_id) or Sampler(high).selects(request_id)


def test_seeds_select_independently() -> None:
    n = 20_000
    one, other = Sampler(0.3, seed="1"), Sampler(0.3, seed="2")
    both = sum(one.selects(str(i)) and other.selects(str(i)) for i in range(n))
    assert both / n == pytest.approx(0.09, abs=0.01)


def test_a_lone_surrogate_in_a_request_id_can_be_sampled() -> None:
    assert Sampler(1.0).selects("request \ud800")


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_that_is_no_probability_is_refused(rate: float) -> None:
    with pytest.raises(ConfigurationError, match="must lie in"):
        Sampler(rate)


def test_a_capacity_below_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="capacity 0"):
        Sampler(0.1, capacity=0)


def test_a_sample_carries_its_probability_time_and_mark(make_context: MakeContext) -> None:
    sampler = Sampler(0.25)
    context = make_context(["a"], 1)
    sampler.offer(context, 12.5)
    sampler.offer(context, 13.5, forced=True)
    first, second = sampler.drain(10)
    assert (first.context, first.probability, first.time_seconds) == (context, 0.25, 12.5)
    assert (first.forced, second.forced) == (False, True)


def test_samples_are_drained_oldest_first_up_to_the_limit(make_context: MakeContext) -> None:
    sampler = Sampler(1.0)
    for second in range(5):
        sampler.offer(make_context(["a"], 1), float(second))
    assert [sample.time_seconds for sample in sampler.drain(3)] == [0.0, 1.0, 2.0]
    assert [sample.time_seconds for sample in sampler.drain(3)] == [3.0, 4.0]
    assert sampler.drain(3) == []


def test_a_full_queue_drops_the_newest_and_counts_it(make_context: MakeContext) -> None:
    sampler = Sampler(1.0, capacity=2)
    context = make_context(["a"], 1)
    assert [sampler.offer(context, float(i)) for i in range(4)] == [True, True, False, False]
    accounts = sampler.accounts()
    assert (accounts.sampled, accounts.pending) == (4, 2)
    assert accounts.lost[LostReason.QUEUE_FULL] == 2
    assert balanced(accounts)


def test_what_waits_when_the_sampler_is_closed_is_counted_as_lost(
    make_context: MakeContext,
) -> None:
    sampler = Sampler(1.0)
    context = make_context(["a"], 1)
    for second in range(3):
        sampler.offer(context, float(second))
    sampler.drain(1)
    sampler.close()
    assert not sampler.offer(context, 3.0)
    accounts = sampler.accounts()
    assert (accounts.drained, accounts.pending, accounts.lost[LostReason.CLOSED]) == (1, 0, 3)
    assert balanced(accounts)


def test_every_sample_is_accounted_for_under_threads(make_context: MakeContext) -> None:
    sampler = Sampler(1.0, capacity=50)
    context = make_context(["a"], 1)
    n_threads, n_offers = 8, 4_000
    queued, drained, seen = [0] * n_threads, [0], list[Accounts]()
    done = threading.Event()

    def offer(thread: int) -> None:
        queued[thread] = sum(sampler.offer(context, 0.0) for _ in range(n_offers))

    def drain() -> None:
        while not done.is_set() or sampler.accounts().pending:
            drained[0] += len(sampler.drain(7))
            seen.append(sampler.accounts())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        drainer = threading.Thread(target=drain)
        offerers = [threading.Thread(target=offer, args=(i,)) for i in range(n_threads)]
        for thread in (drainer, *offerers):
            thread.start()
        for thread in offerers:
            thread.join()
        done.set()
        drainer.join()
    finally:
        sys.setswitchinterval(interval)

    accounts = sampler.accounts()
    assert accounts.sampled == n_threads * n_offers
    assert accounts.drained == drained[0] == sum(queued)
    assert accounts.lost[LostReason.QUEUE_FULL] == n_threads * n_offers - sum(queued)
    assert all(balanced(moment) for moment in seen)
    totals = [moment.sampled for moment in seen]
    assert totals == sorted(totals)
    assert max(moment.pending for moment in seen) <= 50 + n_threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_empty_and_the_parent_keeps_its_samples(
    make_context: MakeContext,
) -> None:
    sampler = Sampler(1.0, capacity=3)
    context = make_context(["a"], 1)
    for second in range(5):
        sampler.offer(context, float(second))
    sampler.drain(1)
    reading, writing = os.pipe()
    # Held over the fork, as another thread's drain might hold it.
    with sampler._lock:
        child = os.fork()
        if child == 0:
            before = sampler.accounts()
            sampler.offer(context, 9.0)
            after = sampler.accounts()
            os.write(writing, f"{before.sampled} {after.sampled} {after.pending}".encode())
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100) == b"0 1 1"
    os.close(reading)
    os.close(writing)
    accounts = sampler.accounts()
    assert (accounts.sampled, accounts.drained, accounts.pending) == (5, 1, 2)
    assert balanced(accounts)
