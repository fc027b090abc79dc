"""The queue between those who sample and the one who judges, and how a sample ends."""

import os
import random
from dataclasses import replace
from typing import Any

import pytest
from storing import DAY, NOW, OpenStore, entry, fill, judged, weights

from ctxguard.errors import ConfigurationError, StoreLockedError
from ctxguard.monitor.judges import PeopleAlone
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.service import Monitor, let_people_grade
from ctxguard.monitor.store import Batch, SampleStore, State
from ctxguard.monitor.store import ownership as ownership_module
from tests.stored import all_judged, samples_in
from tests.timing import until


class TestQueue:
    def test_the_oldest_wait_first(self, store: SampleStore) -> None:
        """By their ids: whatever the clock said."""
        for step in (0.0, DAY, -DAY):
            store.append("w", Batch([entry(0, time_seconds=NOW + step)], 1))
        waiting = list(store.waiting(3))
        assert waiting == sorted(waiting)
        newest = store.newest_samples(3)
        assert [one.time_seconds for one in newest] == [NOW - DAY, NOW + DAY, NOW]
        assert [one.sample_id for one in newest] == waiting[::-1]
        assert list(store.waiting(1)) == waiting[:1]
        with pytest.raises(ConfigurationError, match="limit 0"):
            store.waiting(0)

    def test_sample_is_as_written(self, store: SampleStore) -> None:
        text = random.Random(0).randbytes(150_000).hex()
        fill(store, 1, time_seconds=1.25, probability=0.0625, query=text)
        [waiting] = store.waiting(5).values()
        assert isinstance(waiting, SampleRecord)
        assert waiting.query == text
        [stored] = store.samples_of("r0")
        assert (stored.time_seconds, stored.probability) == (1.25, 0.0625)

    def test_forced_samples_never_wait(self, store: SampleStore) -> None:
        [sample_id] = fill(store, 1, probability=0.0)
        assert store.waiting(5) == {}
        assert store.records([sample_id])[sample_id].probability == 0.0
        store.finish("judge", [judged(sample_id)])
        assert store.states()[State.FORCED] == 1

    def test_a_sample_is_finished_once(self, store: SampleStore) -> None:
        """Also within one call."""
        [sample_id] = fill(store, 1)
        first = judged(sample_id)
        second = judged(sample_id, weight=2.0)
        for series in ("judge", "judge", "another judge"):
            assert store.finish(series, [first, second]) == {}
            first = second
        assert weights(all_judged(store, "another judge")) == []
        assert weights(all_judged(store, "judge")) == [1.0]
        assert store.rejected([sample_id]) == {sample_id: (("p", "why", "raw"),)}
        assert store.states()[State.JUDGED] == 1

    def test_queue_tells_length_and_oldest(self, store: SampleStore) -> None:
        assert store.oldest_waiting() is None
        fill(store, 2, time_seconds=NOW + 40.0)
        fill(store, 1)
        assert store.oldest_waiting() == NOW
        assert store.states() == dict.fromkeys(State, 0) | {State.PENDING: 3}

    @pytest.mark.parametrize("spoilt", [{"grades": object()}, {"rows": {1: 2}}])
    def test_counts_are_stored_with_results(
        self, store: SampleStore, spoilt: dict[str, Any]
    ) -> None:
        """All of them or none, and they never fall; one that cannot be written holds no others."""
        ids = fill(store, 3)
        key = ("judged_samples", "external", "judged")
        ends = [replace(judged(one), counts={key: 1}) for one in ids]
        ends[1] = replace(ends[1], **spoilt)
        assert list(store.finish("judge", ends, {("judge_calls",): 2.0}, {"budget": "kept"})) == [
            ids[1]
        ]
        assert samples_in(all_judged(store, "judge")) == [ids[0], ids[2]]
        assert store.states()[State.PENDING] == 1
        assert store.counts("judge") == {key: 2.0, ("judge_calls",): 2.0}
        assert store.get_state("budget") == "kept"
        store.finish("judge", ends[:1], {("judge_calls",): 0.5})
        assert store.counts("judge") == {key: 2.0, ("judge_calls",): 2.5}
        assert store.counts("another") == {}

    def test_many_results_take_one_transaction(
        self, store: SampleStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun: list[object] = []
        transaction = SampleStore.transaction

        def counting(store: SampleStore, **how: bool) -> object:
            begun.append(how)
            return transaction(store, **how)

        ids = fill(store, 20)
        monkeypatch.setattr(SampleStore, "transaction", counting)
        assert store.finish("judge", [judged(one) for one in ids]) == {}
        assert store.finish("judge", []) == {}
        assert begun == [{"writes": True}]

    def test_a_snapshot_is_of_one_moment(self, any_store_url: str, open_store: OpenStore) -> None:
        one, other = (open_store(any_store_url) for _ in range(2))
        fill(one, 2)
        with one.snapshot():
            assert one.states()[State.PENDING] == 2
            fill(other, 3)
            assert one.states()[State.PENDING] == 2
            assert len(one.waiting(9)) == 2
        assert one.states()[State.PENDING] == 5


class TestOwnership:
    def test_one_owns_a_store(self, any_store_url: str, open_store: OpenStore) -> None:
        one, other = (open_store(any_store_url) for _ in range(2))
        assert one.own()
        assert one.own()
        assert not other.own()
        assert (one.is_owned, other.is_owned) == (True, False)
        fill(other, 2)
        assert other.accounts().stored == 2, "writers need no ownership"
        one.close()
        # A server may take a moment to see that a connection has ended.
        until(other.own)
        assert not one.own()

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_fork_leaves_it_to_parent(self, any_store_url: str, open_store: OpenStore) -> None:
        store, other = (open_store(any_store_url) for _ in range(2))
        assert store.own()
        child = os.fork()
        if child == 0:
            os._exit(int(store.own()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not other.own()
        assert store.own()

    def test_a_lost_connection_is_noticed(
        self, postgresql_url: str, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And the lock lies in a transaction, so that a pooler of transactions cannot part them."""
        import sqlalchemy as sa

        monkeypatch.setattr(ownership_module, "_CHECK_SECONDS", 0.0)
        one, other = (open_store(postgresql_url) for _ in range(2))
        assert one.own()
        query = sa.text(
            "SELECT pid, state FROM pg_stat_activity JOIN pg_locks USING (pid) "
            "WHERE locktype = 'advisory'"
        )
        with other.transaction(writes=False) as connection:
            [(pid, state)] = connection.execute(query).all()
        assert state == "idle in transaction"
        with other.transaction(writes=True) as connection:
            connection.execute(sa.text(f"SELECT pg_terminate_backend({pid})"))
        until(other.own)
        assert not one.own()
        other.disown()
        until(one.own)

    def test_second_monitor_waits_and_says(
        self, any_store_url: str, open_store: OpenStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        one, other = (open_store(any_store_url) for _ in range(2))
        first, second = Monitor(one, PeopleAlone()), Monitor(other, PeopleAlone())
        first.maintain()
        for work in (second.step, second.maintain):
            with pytest.raises(StoreLockedError, match="another monitor owns"):
                work()
        # It may look.
        assert Monitor(other, PeopleAlone()).report().estimates == first.report().estimates
        second.start(interval_seconds=0.005, refresh_seconds=0.005)
        until(lambda: "another monitor owns" in caplog.text)
        assert second.latest is None
        assert second.errors == 0
        one.close()
        until(lambda: second.latest is not None)
        assert second.stop()

    def test_people_grade_no_monitored_series(
        self, any_store_url: str, open_store: OpenStore
    ) -> None:
        one, other = (open_store(any_store_url) for _ in range(2))
        fill(one, 2)
        assert one.own()
        let_people_grade(other)
        assert other.states()[State.PENDING] == 2
        one.disown()

        def nobody_waits() -> bool:
            let_people_grade(other)
            return other.states()[State.PENDING] == 0

        until(nobody_waits)
        assert not other.is_owned
