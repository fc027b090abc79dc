"""What workers write to a store: batches, their counts, and that they are alive."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from storing import NOW, Clock, OpenStore, entry, fill

from ctxguard.monitor.store import LabelRow, SampleStore, State, WorkerCounts


class TestWriters:
    def test_what_was_stored_is_there_when_the_store_is_opened_again(
        self, shared_store_url: str, open_store: OpenStore
    ) -> None:
        with_one = open_store(shared_store_url)
        fill(with_one, 1)
        with_one.close()
        assert open_store(shared_store_url).states()[State.PENDING] == 1

    def test_a_batch_and_its_worker_s_counts_are_written_together(
        self, store: SampleStore, clock: Clock
    ) -> None:
        store.append("w", [entry(1), entry(2)], WorkerCounts(5, {"queue_full": 3}))
        clock.now += 10.0
        store.append("w", [entry(3)], WorkerCounts(7, {"queue_full": 4}))
        [worker] = store.workers()
        assert (worker.sampled, worker.stored, worker.lost) == (7, 3, {"queue_full": 4})
        assert (worker.started_seconds, worker.seen_seconds) == (NOW, NOW + 10.0)
        assert (worker.pid, worker.closed) == (os.getpid(), False)
        assert store.stored_count("w") == 3

    def test_a_batch_that_cannot_be_written_leaves_nothing_behind(self, store: SampleStore) -> None:
        from sqlalchemy.exc import IntegrityError

        store.append("w", [entry(1)], WorkerCounts(1))
        spoilt = entry(3, label_order=None)  # type: ignore[arg-type]
        with pytest.raises(IntegrityError):
            store.append("w", [entry(2), spoilt], WorkerCounts(3))
        assert (store.stored_count("w"), sum(store.states().values())) == (1, 1)
        assert store.workers()[0].sampled == 1

    def test_an_empty_batch_says_that_a_worker_is_alive(
        self, store: SampleStore, clock: Clock
    ) -> None:
        store.append("w", [], WorkerCounts(0))
        clock.now += 60.0
        store.append("w", [], WorkerCounts(0))
        [worker] = store.workers()
        assert (worker.stored, worker.seen_seconds) == (0, NOW + 60.0)

    def test_closing_a_worker_twice_changes_nothing_more(self, store: SampleStore) -> None:
        store.append("w", [entry(1)], WorkerCounts(1))
        for _ in range(2):
            store.close_worker("w", WorkerCounts(4, {"killed": 3}))
        [worker] = store.workers()
        assert worker.closed
        assert (worker.sampled, worker.stored, worker.lost) == (4, 1, {"killed": 3})

    def test_a_worker_that_stored_nothing_can_be_closed(self, store: SampleStore) -> None:
        store.close_worker("w", WorkerCounts(2, {"killed": 2}))
        assert store.workers()[0].closed
        assert store.stored_count("another") == 0

    def test_an_id_that_no_database_can_hold_is_found_again(self, store: SampleStore) -> None:
        odd = "r\0 \ud800 ünï \U0001f600"
        [sample_id] = fill(store, 1, request_id=odd)
        fill(store, 1, request_id="r\0 \ud801")
        assert store.find(odd) == [sample_id]
        assert store.add_labels([LabelRow(odd, "\0", 1, None, "\ud800", NOW)]).added == 1
        assert [found for found, _ in store.labels()] == [sample_id]

    def test_threads_may_share_a_store(self, store: SampleStore) -> None:
        def work(thread: int) -> None:
            for n in range(10):
                entries = [entry(n, request_id=f"{thread}-{n}-{i}") for i in range(5)]
                store.append(f"w{thread}", entries, WorkerCounts(5 * n + 5))
                store.claim(f"m{thread}", 3, lease_seconds=60.0)
                store.states()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert [worker.stored for worker in store.workers()] == [50] * 4
        assert store.states()[State.CLAIMED] == 120
