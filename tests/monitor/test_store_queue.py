"""The queue between those who sample and those who judge: claims, leases, and how a sample ends."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from storing import DAY, NOW, Clock, OpenStore, entry, fill, judged

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.store import Entry, Finished, SampleStore, State, WorkerCounts
from ctxguard.monitor.store.transactions import Transaction
from tests.stored import all_judged


class TestQueue:
    def test_the_samples_that_came_first_are_claimed_first_whatever_the_clock_said(
        self, store: SampleStore
    ) -> None:
        for step in (0.0, DAY, -DAY):
            store.append("w", [entry(0, time_seconds=NOW + step)], WorkerCounts(1))
        claimed = [one.sample_id for one in store.claim("m", 3, lease_seconds=60.0)]
        assert claimed == sorted(claimed)
        newest = store.newest_samples(3)
        assert [one.time_seconds for one in newest] == [NOW - DAY, NOW + DAY, NOW]
        assert [one.sample_id for one in newest] == claimed[::-1]

    def test_a_claimed_sample_is_as_it_was_written(self, store: SampleStore) -> None:
        payload = random.Random(0).randbytes(300_000)
        store.append("w", [Entry("r", 1.25, 0.0625, 0.1, payload)], WorkerCounts(1))
        [one] = store.claim("m", 5, lease_seconds=60.0)
        assert (one.attempts, one.payload) == (0, payload)
        [stored] = store.samples_of("r")
        assert (stored.time_seconds, stored.probability) == (1.25, 0.0625)

    def test_a_sample_put_in_by_hand_is_stored_and_never_claimed(self, store: SampleStore) -> None:
        [sample_id] = fill(store, 1, probability=0.0)
        assert store.claim("m", 5, lease_seconds=60.0) == []
        assert store.states()[State.FORCED] == 1
        assert store.payloads([sample_id]) == {sample_id: b"payload"}
        assert store.finish("judge", [judged(sample_id)]).accepted == set()

    def test_nobody_else_gets_a_sample_until_its_lease_ends_and_then_as_another_attempt(
        self, store: SampleStore
    ) -> None:
        ids = fill(store, 3)
        assert [one.sample_id for one in store.claim("a", 2, lease_seconds=60.0)] == ids[:2]
        assert [one.sample_id for one in store.claim("b", 3, lease_seconds=0.0)] == ids[2:]
        [again] = store.claim("c", 3, lease_seconds=60.0)
        assert (again.sample_id, again.attempts) == (ids[2], 1)

    @pytest.mark.parametrize("step", [DAY, -DAY])
    def test_a_clock_step_neither_ends_a_lease_nor_prolongs_it(
        self, store: SampleStore, clock: Clock, step: float
    ) -> None:
        ids = fill(store, 2)
        store.claim("a", 1, lease_seconds=60.0)
        store.claim("a", 1, lease_seconds=0.0)
        clock.now += step
        assert [one.sample_id for one in store.claim("b", 2, lease_seconds=60.0)] == ids[1:]

    def test_a_lease_from_before_its_clock_began_anew_binds_nobody(
        self, store: SampleStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a host's monotonic clock does when the host restarts."""
        fill(store, 1)
        now = [1e6]
        monkeypatch.setattr(Transaction, "lease_now", lambda _: now[0])
        for now[0], who in ((1e6, "before"), (10.0, "after")):
            assert len(store.claim(who, 1, lease_seconds=60.0)) == 1
            assert store.lead(who, lease_seconds=60.0)
        assert not store.claim("another", 1, lease_seconds=60.0)
        assert not store.lead("another", lease_seconds=60.0)

    def test_claimants_at_work_at_once_share_the_samples_out(
        self, any_store_url: str, open_store: OpenStore
    ) -> None:
        stores = [open_store(any_store_url) for _ in range(4)]
        ids = fill(stores[0], 200)

        def claim_all(store: SampleStore) -> list[int]:
            taken: list[int] = []
            while some := store.claim("m", 7, lease_seconds=60.0):
                taken += [one.sample_id for one in some]
            return taken

        with ThreadPoolExecutor(4) as pool:
            taken = list(pool.map(claim_all, stores))
        assert sorted(one for some in taken for one in some) == ids

    def test_a_sample_is_finished_once(self, store: SampleStore) -> None:
        """Also by a monitor whose lease ran out meanwhile, and within one call."""
        [sample_id] = fill(store, 1)
        store.claim("slow", 1, lease_seconds=0.0)
        store.claim("quick", 1, lease_seconds=60.0)
        first = judged(sample_id)
        second = judged(sample_id, block=b"another")
        assert store.finish("judge", [first, second]).accepted == {sample_id}
        assert store.finish("judge", [second]).accepted == set()
        assert store.finish("another judge", [second]).accepted == set()
        assert store.give_back([sample_id], max_attempts=1) == 0
        assert all_judged(store, "judge").blocks == (b"block",)
        assert store.rejected([sample_id]) == {sample_id: (("p", "why", "raw"),)}
        assert store.states()[State.JUDGED] == 1

    def test_of_two_monitors_that_finish_at_once_one_is_accepted(
        self, any_store_url: str, open_store: OpenStore
    ) -> None:
        stores = [open_store(any_store_url) for _ in range(2)]
        ids = fill(stores[0], 60)
        ready = threading.Barrier(2)

        def finish(store: SampleStore) -> int:
            ready.wait()
            order = random.Random(id(store)).sample(ids, len(ids))
            return sum(
                len(store.finish("judge", [judged(some) for some in order[i : i + 6]]).accepted)
                for i in range(0, 60, 6)
            )

        with ThreadPoolExecutor(2) as pool:
            accepted = list(pool.map(finish, stores))
        assert sum(accepted) == 60
        assert len(all_judged(stores[0], "judge")) == 60

    def test_a_sample_may_end_without_a_judgment(self, store: SampleStore) -> None:
        ids = fill(store, 2)
        kept = (("p", "not JSON", "raw"),)
        ends = [
            Finished(ids[0], State.INCOMPLETE, '{"p": null}', rejected=kept),
            Finished(ids[1], State.FAILED),
        ]
        assert len(store.finish("judge", ends).accepted) == 2
        assert len(all_judged(store, "judge")) == 0
        assert store.verdicts("judge", ids) == {ids[0]: '{"p": null}'}
        assert store.rejected(ids) == {ids[0]: kept}

    def test_what_does_not_end_a_sample_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="cannot be finished as"):
            Finished(1, State.PENDING)
        with pytest.raises(ConfigurationError, match="block of 0 bytes"):
            Finished(1, State.JUDGED)

    def test_a_sample_that_is_given_back_waits_again_until_it_was_tried_too_often(
        self, store: SampleStore
    ) -> None:
        [sample_id] = fill(store, 1)
        for attempts in range(2):
            [one] = store.claim("m", 1, lease_seconds=60.0)
            assert one.attempts == attempts
            assert store.give_back([sample_id], max_attempts=3) == 0
        store.claim("m", 1, lease_seconds=60.0)
        assert store.give_back([sample_id], max_attempts=3) == 1
        assert store.give_back([sample_id], max_attempts=1) == 0
        assert store.states()[State.FAILED] == 1
        assert store.claim("m", 1, lease_seconds=60.0) == []

    def test_the_queue_tells_its_length_and_its_oldest_request(self, store: SampleStore) -> None:
        assert store.oldest_waiting() is None
        fill(store, 2, time_seconds=NOW + 40.0)
        fill(store, 1)
        assert store.oldest_waiting() == NOW
        store.claim("m", 1, lease_seconds=60.0)
        assert store.oldest_waiting() == NOW
        assert store.states() == dict.fromkeys(State, 0) | {
            State.PENDING: 2,
            State.CLAIMED: 1,
        }

    def test_one_monitor_leads_until_its_lease_ends_or_it_steps_down(
        self, store: SampleStore
    ) -> None:
        assert store.lead("a", lease_seconds=60.0)
        assert not store.lead("b", lease_seconds=60.0)
        assert store.lead("a", lease_seconds=0.0)
        assert store.lead("b", lease_seconds=60.0)
        assert not store.lead("a", lease_seconds=60.0)

    def test_of_monitors_that_begin_at_once_one_leads(
        self, any_store_url: str, open_store: OpenStore
    ) -> None:
        stores = [open_store(any_store_url) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            leads = list(pool.map(lambda n: stores[n].lead(f"m{n}", lease_seconds=60.0), range(4)))
        assert sum(leads) == 1

    def test_values_are_kept_for_other_monitors(self, store: SampleStore) -> None:
        assert store.get_state("key") is None
        store.set_state("key", "one")
        store.set_state("key", "two")
        assert store.get_state("key") == "two"
