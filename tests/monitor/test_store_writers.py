"""What workers write to a store: batches, their counts, and that they are alive."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from storing import DAY, NOW, Clock, OpenStore, entry, fill

from ctxguard.monitor.sampling.sampler import HOUR_SECONDS, LostReason
from ctxguard.monitor.store import Batch, LabelRow, SampleStore, State

NOTHING_LOST = dict.fromkeys(LostReason, 0)


class TestWriters:
    def test_batch_and_counts_are_one(self, store: SampleStore) -> None:
        store.append("w", Batch([entry(1), entry(2)], 5, {LostReason.QUEUE_FULL: 3}))
        store.append("w", Batch([entry(3)], 2, {LostReason.QUEUE_FULL: 1}))
        found = store.accounts(worker_id="w")
        assert (found.sampled, found.stored, found.pending) == (7, 3, 0)
        assert found.lost == {**NOTHING_LOST, LostReason.QUEUE_FULL: 4}

    def test_unwritable_batch_leaves_nothing(self, store: SampleStore) -> None:
        from sqlalchemy.exc import IntegrityError

        store.append("w", Batch([entry(1)], 1))
        spoilt = entry(3, label_order=None, payload=b"a secret")
        with pytest.raises(IntegrityError) as caught:
            store.append("w", Batch([entry(2), spoilt], 3))
        assert "a secret" not in str(caught.value)
        assert (store.accounts().stored, sum(store.states().values())) == (1, 1)
        assert store.accounts().sampled == 1

    def test_unholdable_id_is_found_again(self, store: SampleStore) -> None:
        odd = "r\0 \ud800 ünï \U0001f600"
        [sample_id] = fill(store, 1, request_id=odd)
        fill(store, 1, request_id="r\0 \ud801")
        assert store.find([odd]) == [sample_id]
        assert store.add_labels([LabelRow(odd, "\0", 1, None, "\ud800", NOW)]) == (1, 0, [])
        assert [found for found, _ in store.labels()] == [sample_id]

    @pytest.mark.parametrize("any_store_url", ["sqlite", "memory", "postgresql"], indirect=True)
    def test_threads_may_share_a_store(self, store: SampleStore) -> None:
        def work(thread: int) -> None:
            for n in range(10):
                entries = [entry(n, request_id=f"{thread}-{n}-{i}") for i in range(5)]
                store.append(f"w{thread}", Batch(entries, 5))
                store.waiting(3)
                store.states()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert [store.accounts(worker_id=f"w{n}").stored for n in range(4)] == [50] * 4
        assert store.states()[State.PENDING] == 200


class TestBatches:
    def test_resent_batch_changes_nothing(self, store: SampleStore) -> None:
        lost = {LostReason.CLOSED: 1}
        earlier = {int(NOW // HOUR_SECONDS) - 1: 4}
        first = Batch([entry(1), entry(2)], 4, lost, pending=1, earlier=earlier, number=1)
        assert store.append("w", first)
        assert not store.append("w", first)
        assert store.append("w", Batch([entry(3)], 0, number=2))
        assert not store.append("w", first)
        found = store.accounts()
        assert (found.sampled, found.stored, found.pending, found.unaccounted) == (8, 3, 0, 4)
        assert sum(store.states().values()) == 3

    def test_doubly_sent_batch_is_stored_once(
        self, any_store_url: str, open_store: OpenStore
    ) -> None:
        stores = [open_store(any_store_url) for _ in range(4)]

        def send(store: SampleStore) -> None:
            for batch in range(1, 11):
                store.append("w", Batch([entry(batch)], 1, number=batch))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(send, stores))
        found = stores[0].accounts()
        assert found.sampled == found.stored == sum(stores[0].states().values()) == 10


class TestSilence:
    """Processes that end without a word, on hosts that nobody can ask."""

    def pending(self, store: SampleStore) -> tuple[int, int]:
        found = store.accounts()
        return found.pending, found.unaccounted

    def test_silent_processs_hold_is_unaccounted(self, store: SampleStore, clock: Clock) -> None:
        """What a silent process held is unaccounted for in the second hour."""
        store.append("gone", Batch([entry(1)], 6, {LostReason.QUEUE_FULL: 2}, pending=3))
        store.append("alive", Batch([entry(2)], 5, pending=4))
        clock.now += HOUR_SECONDS
        store.append("alive", Batch([], 0, pending=4))
        assert self.pending(store) == (7, 0)
        clock.now += HOUR_SECONDS
        assert self.pending(store) == (4, 3)

    def test_returning_process_accounts_for_hold(self, store: SampleStore, clock: Clock) -> None:
        store.append("w", Batch([entry(1)], 6, pending=5, number=1))
        clock.now += 2 * HOUR_SECONDS
        assert self.pending(store) == (0, 5)
        store.append("w", Batch([entry(2), entry(3)], 1, pending=4, number=2))
        assert self.pending(store) == (4, 0)


class TestOld:
    def test_old_processes_add_up_by_hour(self, store: SampleStore, clock: Clock) -> None:
        for day in range(4):
            for n in range(5):
                own = entry(10 * day + n, time_seconds=clock.now)
                store.append(f"w{n}", Batch([own], n + 2, {LostReason.CLOSED: n}, pending=1))
                clock.now += DAY / 5
        before = store.accounts()
        assert (before.sampled, before.stored) == (80, 20)
        assert store.fold_accounts() == 10
        assert store.fold_accounts() == 0
        after = store.accounts()
        assert (after.sampled, after.stored, after.lost) == (80, 20, before.lost)
        assert store.accounts(worker_id="w0").sampled == 4

    def test_adding_again_reuses_the_row(self, store: SampleStore, clock: Clock) -> None:
        for n in range(3):
            store.append(f"w{n}", Batch([], 5, {LostReason.CLOSED: 5}, hour=1))
            assert store.fold_accounts() == 1
        found = store.accounts()
        assert (found.sampled, found.lost[LostReason.CLOSED]) == (15, 15)
