"""What every store does, on SQLite in a file, SQLite in memory, and PostgreSQL."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.store import (
    Entry,
    FeedbackRow,
    Finished,
    LabelRow,
    Limits,
    SampleStore,
    State,
    WorkerCounts,
)

OpenStore = Callable[..., SampleStore]
Limited = Callable[..., SampleStore]
DAY = 86_400.0
NOW = 1.8e9


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(any_store_url: str, clock: Clock, open_store: OpenStore) -> SampleStore:
    return open_store(any_store_url, limits=Limits(reserve_bytes=0), clock=clock)


def entry(
    n: int,
    *,
    request_id: str | None = None,
    time_seconds: float = NOW,
    probability: float = 0.5,
    label_order: float = 0.5,
    payload: bytes = b"payload",
) -> Entry:
    return Entry(
        request_id=request_id or f"r{n}",
        time_seconds=time_seconds,
        probability=probability,
        session_id=f"s{n}" if n % 2 else None,
        label_order=label_order,
        payload=payload,
    )


def fill(store: SampleStore, n: int, **columns: object) -> list[int]:
    """Store n samples; their ids, oldest first."""
    entries = [entry(i, **columns) for i in range(n)]  # type: ignore[arg-type]
    before = store.stored_count("w")
    store.append("w", entries, WorkerCounts(before + n))
    return [store.find(one.request_id)[-1] for one in entries]


def judged(sample_id: int, *, time_seconds: float = NOW, summary: bytes = b"summary.") -> Finished:
    return Finished(
        sample_id,
        time_seconds,
        State.JUDGED,
        '{"p": 1}',
        summary,
        b"grades",
        (("p", "why", "raw"),),
    )


def judge_all(store: SampleStore, series: str = "judge") -> list[int]:
    claimed = store.claim("m", 1_000, lease_seconds=60.0)
    store.finish(series, [judged(one.sample_id, time_seconds=one.time_seconds) for one in claimed])
    return [one.sample_id for one in claimed]


def label(
    n: int, grade: int = 1, *, annotator: str = "ann", time_seconds: float = NOW, passage: str = "p"
) -> LabelRow:
    return LabelRow(f"r{n}", passage, grade, None, annotator, time_seconds)


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


class TestQueue:
    def test_the_samples_that_came_first_are_claimed_first_whatever_the_clock_said(
        self, store: SampleStore
    ) -> None:
        for step in (0.0, DAY, -DAY):
            store.append("w", [entry(0, time_seconds=NOW + step)], WorkerCounts(1))
        times = [one.time_seconds for one in store.claim("m", 3, lease_seconds=60.0)]
        assert times == [NOW, NOW + DAY, NOW - DAY]

    def test_a_claimed_sample_is_as_it_was_written(self, store: SampleStore) -> None:
        payload = random.Random(0).randbytes(300_000)
        store.append("w", [Entry("r", 1.25, 0.0625, "session", 0.1, payload)], WorkerCounts(1))
        [one] = store.claim("m", 5, lease_seconds=60.0)
        assert (one.request_id, one.session_id) == ("r", "session")
        assert (one.time_seconds, one.probability, one.attempts) == (1.25, 0.0625, 0)
        assert one.payload == payload

    def test_a_sample_put_in_by_hand_is_stored_and_never_claimed(self, store: SampleStore) -> None:
        [sample_id] = fill(store, 1, probability=0.0)
        assert store.claim("m", 5, lease_seconds=60.0) == []
        assert store.states()[State.FORCED] == 1
        assert store.payloads([sample_id]) == {sample_id: b"payload"}
        assert store.finish("judge", [judged(sample_id)]) == 0

    def test_nobody_else_gets_a_sample_within_its_lease(self, store: SampleStore) -> None:
        ids = fill(store, 3)
        assert [one.sample_id for one in store.claim("a", 2, lease_seconds=60.0)] == ids[:2]
        assert [one.sample_id for one in store.claim("b", 3, lease_seconds=60.0)] == ids[2:]
        assert store.claim("a", 3, lease_seconds=60.0) == []

    def test_a_sample_whose_lease_ran_out_is_claimed_again_and_the_attempt_counted(
        self, store: SampleStore
    ) -> None:
        fill(store, 1)
        store.claim("a", 1, lease_seconds=0.0)
        [again] = store.claim("b", 1, lease_seconds=60.0)
        assert again.attempts == 1

    @pytest.mark.parametrize("step", [DAY, -DAY])
    def test_a_clock_step_neither_ends_a_lease_nor_prolongs_it(
        self, store: SampleStore, clock: Clock, step: float
    ) -> None:
        ids = fill(store, 2)
        store.claim("a", 1, lease_seconds=60.0)
        store.claim("a", 1, lease_seconds=0.0)
        clock.now += step
        assert [one.sample_id for one in store.claim("b", 2, lease_seconds=60.0)] == ids[1:]

    def test_claimants_at_work_at_once_share_the_samples_out(
        self, shared_store_url: str, open_store: OpenStore
    ) -> None:
        stores = [open_store(shared_store_url) for _ in range(4)]
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
        second = judged(sample_id, time_seconds=NOW + 1.0, summary=b"another.")
        assert store.finish("judge", [first, second]) == 1
        assert store.finish("judge", [second]) == 0
        assert store.finish("another judge", [second]) == 0
        assert store.judged("judge").summaries == b"summary."
        assert store.rejected([sample_id]) == {sample_id: (("p", "why", "raw"),)}
        assert store.states()[State.JUDGED] == 1

    def test_of_two_monitors_that_finish_at_once_one_is_accepted(
        self, shared_store_url: str, open_store: OpenStore
    ) -> None:
        stores = [open_store(shared_store_url) for _ in range(2)]
        ids = fill(stores[0], 60)
        ready = threading.Barrier(2)

        def finish(store: SampleStore) -> int:
            ready.wait()
            order = random.Random(id(store)).sample(ids, len(ids))
            return sum(
                store.finish("judge", [judged(some) for some in order[i : i + 6]])
                for i in range(0, 60, 6)
            )

        with ThreadPoolExecutor(2) as pool:
            accepted = list(pool.map(finish, stores))
        assert sum(accepted) == 60
        assert len(stores[0].judged("judge")) == 60

    def test_a_sample_may_end_without_a_judgment(self, store: SampleStore) -> None:
        ids = fill(store, 2)
        kept = (("p", "not JSON", "raw"),)
        ends = [
            Finished(ids[0], NOW, State.INCOMPLETE, '{"p": null}', rejected=kept),
            Finished(ids[1], NOW, State.FAILED),
        ]
        assert store.finish("judge", ends) == 2
        assert len(store.judged("judge")) == 0
        assert store.verdicts("judge", ids) == {ids[0]: '{"p": null}'}
        assert store.rejected(ids) == {ids[0]: kept}

    def test_what_does_not_end_a_sample_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="cannot be finished as"):
            Finished(1, NOW, State.PENDING)
        with pytest.raises(ConfigurationError, match="summary of 0 bytes"):
            Finished(1, NOW, State.JUDGED)

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
        assert store.states()[State.FAILED] == 1
        assert store.claim("m", 1, lease_seconds=60.0) == []

    def test_giving_back_what_is_finished_changes_nothing(self, store: SampleStore) -> None:
        ids = fill(store, 1)
        judge_all(store)
        assert store.give_back(ids, max_attempts=1) == 0
        assert store.states()[State.JUDGED] == 1

    def test_the_queue_tells_its_length_and_its_age(self, store: SampleStore, clock: Clock) -> None:
        assert store.oldest_pending_seconds() is None
        fill(store, 3)
        clock.now += 40.0
        assert store.oldest_pending_seconds() == 40.0
        clock.now -= DAY
        assert store.oldest_pending_seconds() == 0.0
        store.claim("m", 1, lease_seconds=60.0)
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
        self, shared_store_url: str, open_store: OpenStore
    ) -> None:
        stores = [open_store(shared_store_url) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            leads = list(pool.map(lambda n: stores[n].lead(f"m{n}", lease_seconds=60.0), range(4)))
        assert sum(leads) == 1

    def test_values_are_kept_for_other_monitors(self, store: SampleStore) -> None:
        assert store.get_state("key") is None
        store.set_state("key", "one")
        store.set_state("key", "two")
        assert store.get_state("key") == "two"


class TestJudged:
    def test_a_window_holds_since_but_not_until_ordered_by_time(self, store: SampleStore) -> None:
        times = [NOW + second for second in (3.0, 1.0, 2.0, 0.0)]
        ids = [fill(store, 1, time_seconds=time)[0] for time in times]
        store.finish(
            "judge",
            [
                judged(sample_id, time_seconds=time, summary=f"{time - NOW:<8}".encode())
                for sample_id, time in zip(ids, times, strict=True)
            ],
        )
        rows = store.judged("judge", since=NOW + 1.0, until=NOW + 3.0)
        assert rows.sample_ids.tolist() == [ids[1], ids[2]]
        assert rows.time_seconds.tolist() == [NOW + 1.0, NOW + 2.0]
        assert rows.summaries == b"1.0     2.0     "
        assert rows.grades is None
        everything = store.judged("judge", with_grades=True)
        assert everything.sample_ids.tolist() == [ids[3], ids[1], ids[2], ids[0]]
        assert everything.grades == [b"grades"] * 4

    def test_grades_stay_with_their_request(self, store: SampleStore) -> None:
        ids = fill(store, 3)
        for sample_id, grades in zip(ids, (b"a", b"", b"ccc"), strict=True):
            one = Finished(sample_id, NOW, State.JUDGED, summary=b"s", grades=grades)
            store.finish("judge", [one])
        assert store.judged("judge", with_grades=True).grades == [b"a", b"", b"ccc"]

    def test_a_series_that_has_not_begun_is_empty(self, store: SampleStore) -> None:
        rows = store.judged("judge", with_grades=True)
        assert (len(rows), rows.summaries, rows.grades) == (0, b"", [])
        assert rows.sample_ids.dtype == np.int64
        assert store.series() == []

    def test_another_judge_begins_another_series(self, store: SampleStore) -> None:
        ids = fill(store, 2)
        store.finish("judge 2", [judged(ids[0])])
        store.finish("judge 10", [judged(ids[1])])
        assert store.series() == ["judge 2", "judge 10"]
        assert store.judged("judge 10").sample_ids.tolist() == [ids[1]]
        assert store.verdicts("judge 10", ids) == {ids[1]: '{"p": 1}'}

    def test_summaries_of_another_size_are_refused_and_nothing_is_finished(
        self, store: SampleStore
    ) -> None:
        ids = fill(store, 2)
        store.finish("judge", [judged(ids[0], summary=b"12345678")])
        with pytest.raises(ConfigurationError, match="summaries of 8 bytes, not 3"):
            store.finish("judge", [judged(ids[1], summary=b"123")])
        assert store.states()[State.PENDING] == 1

    def test_more_rows_than_one_fetch_are_read_whole(
        self, any_store_url: str, open_store: OpenStore
    ) -> None:
        store = open_store(any_store_url)
        n = 2_500
        fill_ids = []
        for start in range(0, n, 500):
            batch = [entry(i, request_id=f"r{i}") for i in range(start, start + 500)]
            store.append("w", batch, WorkerCounts(start + 500))
        claimed = store.claim("m", n, lease_seconds=60.0)
        fill_ids = [one.sample_id for one in claimed]
        done = [judged(one, summary=np.int64(one).tobytes()) for one in fill_ids]
        assert store.finish("judge", done) == n
        rows = store.judged("judge", with_grades=True)
        assert np.frombuffer(rows.summaries, np.int64).tolist() == rows.sample_ids.tolist()
        assert rows.sample_ids.tolist() == fill_ids
        assert len(store.payloads(fill_ids)) == len(store.request_ids(fill_ids)) == n
        store.close()

    def test_what_is_known_of_single_samples_can_be_looked_up(self, store: SampleStore) -> None:
        first, second = fill(store, 1)[0], fill(store, 1)[0]
        assert store.find("r0") == [first, second]
        assert store.find("unknown") == []
        assert store.request_ids([first, 10**9]) == {first: "r0"}
        assert store.payloads([second, 10**9]) == {second: b"payload"}
        assert store.verdicts("judge", [first]) == store.rejected([first]) == {}


class TestPeople:
    def test_labels_are_found_with_their_samples(self, store: SampleStore) -> None:
        ids = fill(store, 2)
        rows = [label(1, 2), LabelRow("r0", "q", 0, "distractor", "ann", NOW, "import")]
        added = store.add_labels(rows)
        assert (added.added, added.duplicates, added.disagreeing, added.unknown) == (2, 0, 0, ())
        assert store.labels() == [(ids[1], rows[0]), (ids[0], rows[1])]
        assert store.labels([ids[0]]) == [(ids[0], rows[1])]
        assert store.labels([]) == []

    def test_labels_of_unknown_samples_are_left_out_and_named(self, store: SampleStore) -> None:
        fill(store, 1)
        added = store.add_labels([label(8), label(0), label(9), label(8, passage="q")])
        assert (added.added, added.unknown) == (1, ("r8", "r9"))
        assert len(store.labels()) == 1

    def test_the_same_label_twice_is_kept_once(self, store: SampleStore) -> None:
        fill(store, 1)
        added = store.add_labels([label(0), label(0)])
        assert (added.added, added.duplicates) == (1, 1)
        later = store.add_labels([label(0), label(0, time_seconds=NOW + 5.0)])
        assert (later.added, later.duplicates) == (0, 2)

    def test_labels_that_disagree_are_all_kept_and_counted(self, store: SampleStore) -> None:
        fill(store, 1)
        added = store.add_labels(
            [label(0, 2), label(0, 0, annotator="bob"), label(0, 2, annotator="cy")]
        )
        assert (added.added, added.disagreeing) == (3, 2)
        assert [row.grade for _, row in store.labels()] == [2, 0, 2]

    def test_an_annotator_may_return_to_an_earlier_opinion(self, store: SampleStore) -> None:
        """Else the second opinion would stand as the latest."""
        fill(store, 1)
        opinions = [label(0, grade, time_seconds=NOW + n) for n, grade in enumerate((2, 0, 2))]
        for row in opinions:
            assert store.add_labels([row]).added == 1
        assert store.add_labels(opinions).duplicates == 3
        assert [row.grade for _, row in store.labels()] == [2, 0, 2]

    def test_a_request_that_was_sampled_twice_has_its_labels_twice(
        self, store: SampleStore
    ) -> None:
        ids = [*fill(store, 1), *fill(store, 1)]
        store.add_labels([label(0)])
        assert store.labels() == [(sample_id, label(0)) for sample_id in ids]

    def test_importers_at_work_at_once_add_a_label_once(
        self, shared_store_url: str, open_store: OpenStore
    ) -> None:
        stores = [open_store(shared_store_url) for _ in range(4)]
        fill(stores[0], 30)
        rows = [label(n) for n in range(30)]
        with ThreadPoolExecutor(4) as pool:
            added = list(pool.map(lambda store: store.add_labels(rows).added, stores))
        assert sum(added) == len(stores[0].labels()) == 30

    def test_a_random_pick_takes_judged_unlabelled_samples_of_lowest_order(
        self, store: SampleStore
    ) -> None:
        orders = [0.5, 0.1, 0.9, 0.3, 0.2]
        entries = [
            entry(n, time_seconds=NOW + n, label_order=order) for n, order in enumerate(orders)
        ]
        store.append("w", entries, WorkerCounts(5))
        ids = [store.find(f"r{n}")[0] for n in range(5)]
        store.finish("judge", [judged(ids[n], time_seconds=NOW + n) for n in range(4)])
        store.add_labels([label(1)])
        assert store.pick_for_labels("judge", 2) == [ids[3], ids[0]]
        assert store.pick_for_labels("judge", 9) == [ids[3], ids[0], ids[2]]
        assert store.pick_for_labels("judge", 9, since=NOW + 2.0) == [ids[3], ids[2]]
        assert store.pick_for_labels("another", 9) == []

    def test_samples_asked_for_wait_in_order_until_they_are_labelled(
        self, store: SampleStore
    ) -> None:
        ids = fill(store, 3)
        assert store.queue_labels([ids[2], ids[0], ids[2], 10**9], why="alarm") == 2
        assert store.queue_labels([ids[0], ids[1]], why="later") == 1
        assert store.label_queue() == [(ids[2], "alarm"), (ids[0], "alarm"), (ids[1], "later")]
        store.add_labels([label(0)])
        assert store.label_queue() == [(ids[2], "alarm"), (ids[1], "later")]

    def test_feedback_is_kept_apart_from_labels(self, store: SampleStore) -> None:
        ids = fill(store, 2)
        rows = [
            FeedbackRow("r0", "cited", ("p", "q"), NOW),
            FeedbackRow("r1", "thumb_down", (), NOW),
        ]
        added = store.add_feedback([*rows, FeedbackRow("gone", "thumb_up", (), NOW)])
        assert (added.added, added.unknown) == (2, ("gone",))
        assert store.feedback() == [(ids[0], rows[0]), (ids[1], rows[1])]
        assert store.feedback([ids[1]]) == [(ids[1], rows[1])]
        assert store.labels() == []

    def test_feedback_of_another_kind_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="'shrug' is unknown"):
            FeedbackRow("r", "shrug", (), NOW)


class TestRetention:
    @pytest.fixture
    def limited(self, clock: Clock, open_store: OpenStore) -> Callable[..., SampleStore]:
        def opened(url: str, **limits: float | None) -> SampleStore:
            kept = Limits(reserve_bytes=0, **limits)  # type: ignore[arg-type]
            return open_store(url, limits=kept, clock=clock)

        return opened

    def test_old_samples_go_with_all_that_belongs_to_them(
        self, any_store_url: str, clock: Clock, limited: Limited
    ) -> None:
        store = limited(any_store_url, max_age_seconds=DAY)
        ids = fill(store, 2)
        judge_all(store)
        store.add_feedback([FeedbackRow("r0", "thumb_up", (), NOW)])
        store.queue_labels(ids, why="alarm")
        clock.now += 0.9 * DAY
        young = fill(store, 1, time_seconds=clock.now)
        clock.now += 0.2 * DAY
        cleaned = store.clean()
        assert (cleaned.expired, cleaned.by_size, cleaned.unjudged) == (2, 0, 0)
        assert store.find("r0") == young
        assert store.payloads(ids) == store.verdicts("judge", ids) == store.rejected(ids) == {}
        assert len(store.judged("judge")) == 0
        assert store.feedback(ids) == store.label_queue() == []
        assert store.feedback(young) != []  # the same request was sampled again

    def test_labelled_samples_lose_their_text_and_keep_what_was_paid_for(
        self, any_store_url: str, clock: Clock, limited: Limited
    ) -> None:
        store = limited(any_store_url, max_age_seconds=DAY)
        ids = fill(store, 3)
        judge_all(store)
        store.add_labels([label(1)])
        clock.now += 2.0 * DAY
        assert store.clean().expired == 3
        assert store.clean().expired == 0
        assert store.labels() == [(ids[1], label(1))]
        kept = store.judged("judge", with_grades=True)
        assert (kept.sample_ids.tolist(), kept.grades) == ([ids[1]], [b"grades"])
        assert store.payloads(ids) == store.verdicts("judge", ids) == store.rejected(ids) == {}

    def test_a_labelled_sample_without_a_payload_is_not_claimed(
        self, any_store_url: str, clock: Clock, limited: Limited
    ) -> None:
        store = limited(any_store_url, max_age_seconds=DAY)
        fill(store, 1)
        store.add_labels([label(0)])
        clock.now += 2.0 * DAY
        assert store.clean().unjudged == 1
        assert store.claim("m", 1, lease_seconds=60.0) == []
        assert store.states()[State.FAILED] == 1

    def test_over_the_size_limit_the_oldest_payloads_go_and_judged_rows_stay(
        self, any_store_url: str, clock: Clock, limited: Limited
    ) -> None:
        store = limited(any_store_url, max_bytes=5_000)
        ids = fill(store, 8, payload=bytes(1_000))
        judge_all(store)
        assert store.size_bytes() == 8_000
        cleaned = store.clean()
        assert (cleaned.expired, cleaned.by_size, cleaned.unjudged) == (0, 3, 0)
        assert store.size_bytes() == 5_000
        assert sorted(store.payloads(ids)) == ids[3:]
        assert sorted(store.verdicts("judge", ids)) == ids[3:]
        assert store.judged("judge").sample_ids.tolist() == ids
        assert sorted(store.pick_for_labels("judge", 99)) == ids[3:]

    def test_over_the_size_limit_what_nobody_judged_goes_whole_and_is_counted(
        self, any_store_url: str, clock: Clock, limited: Limited
    ) -> None:
        store = limited(any_store_url, max_bytes=5_000)
        ids = fill(store, 8, payload=bytes(1_000))
        cleaned = store.clean()
        assert (cleaned.by_size, cleaned.unjudged) == (3, 3)
        claimed = store.claim("m", 99, lease_seconds=60.0)
        assert [one.sample_id for one in claimed] == ids[3:]

    def test_without_limits_nothing_goes(
        self, any_store_url: str, clock: Clock, limited: Limited
    ) -> None:
        store = limited(any_store_url, max_age_seconds=None, max_bytes=None)
        fill(store, 2)
        clock.now += 1_000.0 * DAY
        store.clean()
        assert store.states()[State.PENDING] == 2

    def test_the_id_of_a_deleted_sample_never_comes_back(
        self, any_store_url: str, clock: Clock, limited: Limited
    ) -> None:
        """A monitor that finishes late must not judge another sample by it."""
        store = limited(any_store_url, max_age_seconds=DAY)
        [old] = fill(store, 1)
        store.claim("slow", 1, lease_seconds=60.0)
        clock.now += 2.0 * DAY
        store.clean()
        [new] = fill(store, 1, time_seconds=clock.now)
        assert new > old
        assert store.finish("judge", [judged(old)]) == 0
        assert store.states()[State.PENDING] == 1

    def test_what_a_worker_stored_stays_counted_when_its_samples_go(
        self, any_store_url: str, clock: Clock, limited: Limited
    ) -> None:
        store = limited(any_store_url, max_age_seconds=DAY)
        fill(store, 3)
        clock.now += 2.0 * DAY
        store.clean()
        assert store.stored_count("w") == 3

    def test_more_than_one_batch_is_cleaned(
        self, any_store_url: str, clock: Clock, limited: Limited
    ) -> None:
        store = limited(any_store_url, max_bytes=1_000)
        store.append("w", [entry(n, payload=bytes(10)) for n in range(700)], WorkerCounts(700))
        assert store.clean().by_size == 600
        assert store.size_bytes() == 1_000

    def test_a_sqlite_file_shrinks(self, tmp_path: Path, clock: Clock, limited: Limited) -> None:
        file = tmp_path / "samples.db"
        store = limited(f"sqlite:///{file}", max_bytes=50_000)
        fill(store, 60, payload=random.Random(0).randbytes(50_000))
        store.close()
        before = file.stat().st_size
        store.clean()
        store.close()
        assert file.stat().st_size < 0.2 * before

    def test_deleted_text_is_not_left_in_a_sqlite_file(
        self, tmp_path: Path, clock: Clock, limited: Limited
    ) -> None:
        file = tmp_path / "samples.db"
        store = limited(f"sqlite:///{file}", max_age_seconds=DAY)
        fill(store, 1, payload=b"a secret of the user's")
        clock.now += 2.0 * DAY
        fill(store, 1, time_seconds=clock.now)
        store.clean()
        store.close()
        assert b"a secret" not in file.read_bytes()

    @pytest.mark.parametrize(
        "limits", [{"max_age_seconds": 0.0}, {"max_bytes": 0}, {"reserve_bytes": -1}]
    )
    def test_a_limit_out_of_range_is_refused(self, limits: dict[str, float]) -> None:
        with pytest.raises(ConfigurationError, match="must be"):
            Limits(**limits)  # type: ignore[arg-type]


class TestExport:
    def read(self, path: Path) -> list[dict[str, object]]:
        parquet = pytest.importorskip("pyarrow.parquet")
        rows: list[dict[str, object]] = parquet.read_table(path).to_pylist()
        return rows

    def test_everything_can_be_exported(self, store: SampleStore, tmp_path: Path) -> None:
        ids = fill(store, 3)
        store.finish("judge", [judged(ids[1])])
        store.add_labels([label(2, 3)])
        path = tmp_path / "export.parquet"
        assert store.export_parquet(path, "samples") == 3
        samples = self.read(path)
        assert [row["sample_id"] for row in samples] == ids
        assert samples[1]["payload"] == b"payload"
        assert samples[1]["state"] == "judged"
        assert store.export_parquet(path, "judged") == 1
        [row] = self.read(path)
        assert (row["series"], row["request_id"], row["probability"]) == ("judge", "r1", 0.5)
        assert (row["summary"], row["grades"]) == (b"summary.", b"grades")
        assert store.export_parquet(path, "labels") == 1
        [row] = self.read(path)
        assert (row["request_id"], row["grade"], row["negative"]) == ("r2", 3, None)
        assert list(tmp_path.glob("*.partial")) == []

    def test_an_empty_store_gives_an_empty_file_with_its_columns(
        self, store: SampleStore, tmp_path: Path
    ) -> None:
        parquet = pytest.importorskip("pyarrow.parquet")
        assert store.export_parquet(tmp_path / "export.parquet", "samples") == 0
        assert "payload" in parquet.read_table(tmp_path / "export.parquet").column_names

    def test_more_rows_than_one_batch_are_exported(
        self, store: SampleStore, tmp_path: Path
    ) -> None:
        store.append("w", [entry(n) for n in range(2_300)], WorkerCounts(2_300))
        assert store.export_parquet(tmp_path / "export.parquet", "samples") == 2_300
        ids = [row["request_id"] for row in self.read(tmp_path / "export.parquet")]
        assert ids == [f"r{n}" for n in range(2_300)]

    def test_what_cannot_be_exported_is_refused(self, store: SampleStore, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="cannot export 'all'"):
            store.export_parquet(tmp_path / "x", "all")  # type: ignore[arg-type]


def run(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcomes(processes: Sequence["subprocess.Popen[str]"]) -> list[str]:
    found = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        found.append(out.strip())
    return found


class TestProcesses:
    def test_processes_that_begin_a_store_together_make_its_tables_once(
        self, shared_store_url: str, open_store: OpenStore
    ) -> None:
        program = """
            import sys
            from ctxguard.monitor.store import Entry, SampleStore, WorkerCounts
            store = SampleStore.open(sys.argv[1])
            for n in range(20):
                store.append(sys.argv[2], [Entry("r", 0.0, 1.0, None, 0.0, b"")], WorkerCounts(n))
        """
        outcomes([run(program, shared_store_url, f"w{n}") for n in range(4)])
        store = open_store(shared_store_url)
        assert [worker.stored for worker in store.workers()] == [20] * 4
        assert store.states()[State.PENDING] == 80

    def test_a_killed_writer_s_count_is_what_the_store_holds(
        self, shared_store_url: str, open_store: OpenStore
    ) -> None:
        store = open_store(shared_store_url)
        program = """
            import sys
            from ctxguard.monitor.store import Entry, SampleStore, WorkerCounts
            store = SampleStore.open(sys.argv[1])
            batch = [Entry("r", 0.0, 1.0, None, 0.0, bytes(1_000)) for _ in range(7)]
            for n in range(1_000_000):
                store.append(sys.argv[2], batch, WorkerCounts(7 * n + 7))
                print(7 * n + 7, flush=True)
        """
        for n in range(3):
            writer = run(program, shared_store_url, f"w{n}")
            assert writer.stdout is not None
            assert writer.stdout.readline()
            # Somewhere in the midst of an append.
            threading.Event().wait(random.Random(n).uniform(0.0, 0.05))
            os.kill(writer.pid, signal.SIGKILL)
            acknowledged = int((["7", *writer.communicate()[0].split()])[-1])
            assert store.stored_count(f"w{n}") >= acknowledged
        stored = sum(worker.stored for worker in store.workers())
        assert stored == store.states()[State.PENDING]
        assert stored % 7 == 0

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_a_store_can_be_used_on_both_sides_of_a_fork(
        self, shared_store_url: str, open_store: OpenStore
    ) -> None:
        program = """
            import os, signal, sys, threading
            from ctxguard.monitor.store import Entry, SampleStore, WorkerCounts
            store = SampleStore.open(sys.argv[1])
            def append(worker):
                for n in range(30):
                    store.append(worker, [Entry(worker, 0.0, 1.0, None, 0.0, b"")], WorkerCounts(n))
            append("before")
            busy = threading.Thread(target=append, args=("thread",))
            busy.start()
            children = []
            for n in range(5):
                child = os.fork()
                if child == 0:
                    signal.alarm(30)
                    append(f"child {n}")
                    sys.exit(0)
                children.append(child)
            append("after")
            busy.join()
            print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
        """
        assert outcomes([run(program, shared_store_url)]) == ["[0, 0, 0, 0, 0]"]
        store = open_store(shared_store_url)
        stored = {worker.worker_id: worker.stored for worker in store.workers()}
        names = ["after", "before", "thread", *(f"child {n}" for n in range(5))]
        assert stored == dict.fromkeys(names, 30)
        assert store.states()[State.PENDING] == 240

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_what_a_child_writes_stays_when_its_parent_closes_the_store(
        self, shared_store_url: str, open_store: OpenStore
    ) -> None:
        program = """
            import os, sys
            from ctxguard.monitor.store import Entry, SampleStore, WorkerCounts
            store = SampleStore.open(sys.argv[1])
            def append():
                store.append("w", [Entry("r", 0.0, 1.0, None, 0.0, b"")], WorkerCounts(0))
            append()
            to_parent, to_child = os.pipe(), os.pipe()
            child = os.fork()
            if child == 0:
                append()
                os.write(to_parent[1], b".")
                os.read(to_child[0], 1)
                append()
                os._exit(0)
            os.read(to_parent[0], 1)
            store.close()
            os.write(to_child[1], b".")
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
        assert outcomes([run(program, shared_store_url)]) == ["0"]
        assert open_store(shared_store_url).stored_count("w") == 3

    def test_the_types_import_without_the_database_library(self) -> None:
        program = """
            import sys
            from ctxguard.monitor.store import Entry, WorkerCounts
            print("sqlalchemy" in sys.modules, "psycopg" in sys.modules)
        """
        assert outcomes([run(program)]) == ["False False"]
