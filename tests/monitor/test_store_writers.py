"""What workers write to a store: batches, their counts, and that they are alive."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from storing import DAY, NOW, Clock, OpenStore, entry, fill

from ctxguard.monitor.store import LabelRow, SampleStore, State, WorkerCounts
from ctxguard.monitor.store.database import Database
from ctxguard.monitor.store.workers import SILENT_SECONDS


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


class TestBatches:
    def test_a_batch_that_is_sent_again_changes_nothing(self, store: SampleStore) -> None:
        assert store.append("w", [entry(1), entry(2)], WorkerCounts(2), batch=1) == 2
        assert store.append("w", [entry(1), entry(2)], WorkerCounts(9), batch=1) == 2
        assert store.append("w", [entry(3)], WorkerCounts(3), batch=2) == 3
        assert store.append("w", [entry(1), entry(2)], WorkerCounts(2), batch=1) == 3
        [worker] = store.workers()
        assert (worker.sampled, worker.stored) == (3, 3)
        assert sum(store.states().values()) == 3

    def test_a_batch_that_two_connections_send_at_once_is_stored_once(
        self, shared_store_url: str, open_store: OpenStore
    ) -> None:
        stores = [open_store(shared_store_url) for _ in range(4)]

        def send(store: SampleStore) -> None:
            for batch in range(1, 11):
                store.append("w", [entry(batch)], WorkerCounts(batch), batch=batch)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(send, stores))
        assert stores[0].stored_count("w") == sum(stores[0].states().values()) == 10


class TestSettling:
    """Processes that end without a word, on hosts that nobody can ask."""

    @pytest.fixture
    def lease_clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        """The clock of leases, which the test sets."""
        lease_clock = Clock()
        monkeypatch.setattr(Database, "lease_clock", lambda _: sa.literal(lease_clock.now))
        return lease_clock

    def totals(self, store: SampleStore) -> tuple[int, int, int, dict[str, int]]:
        totals = store.worker_totals()
        return totals.sampled, totals.stored, totals.pending, dict(totals.lost)

    def test_what_a_silent_process_had_pending_is_lost(
        self, store: SampleStore, lease_clock: Clock
    ) -> None:
        store.append("gone", [entry(1)], WorkerCounts(6, {"queue_full": 2}, pending=3))
        store.append("alive", [entry(2)], WorkerCounts(5, pending=4))
        lease_clock.now += SILENT_SECONDS - 1.0
        store.append("alive", [], WorkerCounts(5, pending=4))
        assert store.settle_silent_workers() == 0
        lease_clock.now += 2.0
        assert store.settle_silent_workers() == 1
        assert self.totals(store) == (11, 2, 4, {"queue_full": 2, "killed": 3})
        assert store.settle_silent_workers() == 0

    def test_who_writes_again_is_counted_as_before(
        self, store: SampleStore, lease_clock: Clock
    ) -> None:
        store.append("w", [entry(1)], WorkerCounts(6, pending=5), batch=1)
        lease_clock.now += SILENT_SECONDS + 1.0
        store.settle_silent_workers()
        assert self.totals(store) == (6, 1, 0, {"killed": 5})
        store.append("w", [entry(2), entry(3)], WorkerCounts(7, {}, pending=4), batch=2)
        assert self.totals(store) == (7, 3, 4, {})

    def test_final_counts_that_are_found_later_replace_what_was_reported(
        self, store: SampleStore, lease_clock: Clock
    ) -> None:
        store.append("w", [entry(1)], WorkerCounts(6, pending=5), batch=1)
        lease_clock.now += SILENT_SECONDS + 1.0
        store.settle_silent_workers()
        store.close_worker("w", WorkerCounts(9, {"queue_full": 1}, pending=9))
        assert self.totals(store) == (9, 1, 0, {"queue_full": 1, "killed": 7})

    @pytest.mark.parametrize("back", [1e6, 0.0])
    def test_a_clock_that_begins_anew_settles_no_living_process(
        self, store: SampleStore, lease_clock: Clock, back: float
    ) -> None:
        """As a host's monotonic clock does when it restarts; 0: never heard of before."""
        store.append("w", [entry(1)], WorkerCounts(3, pending=2))
        if back:
            lease_clock.now -= back
        else:
            store._database.write(
                lambda open_one: open_one.exec_driver_sql(
                    "UPDATE ctxguard_workers SET heard_at = NULL"
                )
            )
        assert store.settle_silent_workers() == 0
        lease_clock.now += SILENT_SECONDS - 1.0
        assert store.settle_silent_workers() == 0
        lease_clock.now += 2.0
        assert store.settle_silent_workers() == 1

    def test_a_count_that_nobody_can_explain_is_not_explained_away(
        self, store: SampleStore, lease_clock: Clock
    ) -> None:
        store.append("w", [entry(1)], WorkerCounts(9, pending=2))
        lease_clock.now += SILENT_SECONDS + 1.0
        store.settle_silent_workers()
        assert self.totals(store) == (9, 1, 0, {"killed": 2})


class TestEnded:
    def test_processes_that_ended_a_day_ago_are_added_up(
        self, store: SampleStore, clock: Clock
    ) -> None:
        for n in range(12):
            store.append(f"w{n}", [entry(n)] if n < 3 else [], WorkerCounts(n))
            if n % 2 == 0:
                store.close_worker(f"w{n}", WorkerCounts(n, {"closed": 1, "killed": n}))
        before = store.worker_totals()
        assert (before.sampled, before.stored) == (66, 3)
        assert store.fold_ended_workers() == 0
        clock.now += DAY + 1.0
        store.append("w1", [], WorkerCounts(1))
        assert store.fold_ended_workers() == 6
        assert store.worker_totals() == before
        assert len(store.workers()) == 6
        assert not any(worker.closed for worker in store.workers())

    def test_many_are_added_up_in_many_transactions(
        self, store: SampleStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ctxguard.monitor.store.workers._BATCH_WORKERS", 2)
        for n in range(7):
            store.close_worker(f"w{n}", WorkerCounts(n, {"killed": n}))
        clock.now += DAY + 1.0
        assert store.fold_ended_workers() == 7
        assert store.worker_totals().lost == {"killed": 21}

    def test_folding_again_adds_to_the_same_row(self, store: SampleStore, clock: Clock) -> None:
        for day in range(3):
            store.close_worker(f"w{day}", WorkerCounts(5, {"killed": 5}))
            clock.now += DAY + 1.0
            assert store.fold_ended_workers() == 1
        assert store.workers() == []
        totals = store.worker_totals()
        assert (totals.sampled, dict(totals.lost)) == (15, {"killed": 15})
