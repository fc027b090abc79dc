"""What is read back of judged samples: windows of blocks, series, single samples."""

import numpy as np
import pytest
from storing import GRADES, NOW, OpenStore, entry, fill, graded, judge_all, judged, label, weights

from ctxguard.measure.rows import hash_number
from ctxguard.monitor.store import Batch, SampleStore, State, judgments
from tests.stored import all_judged, samples_in


class TestJudged:
    def test_window_holds_since_until_by_time(self, store: SampleStore) -> None:
        times = [NOW + second for second in (3.0, 1.0, 2.0, 0.0)]
        ids = [fill(store, 1, time_seconds=time)[0] for time in times]
        store.finish(
            "judge",
            [
                judged(sample_id, weight=1.0 + time - NOW)
                for sample_id, time in zip(ids, times, strict=True)
            ],
        )
        rows = all_judged(store, "judge", since=NOW + 1.0, until=NOW + 3.0)
        assert samples_in(rows) == [ids[1], ids[2]]
        assert rows.requests["time_seconds"].tolist() == [NOW + 1.0, NOW + 2.0]
        assert weights(rows) == [2.0, 3.0]
        assert samples_in(all_judged(store, "judge")) == [ids[3], ids[1], ids[2], ids[0]]

    def test_another_judge_begins_another_series(self, store: SampleStore) -> None:
        ids = fill(store, 2)
        store.finish("judge 2", [judged(ids[0])])
        store.finish("judge 10", [judged(ids[1])])
        assert store.series() == ["judge 2", "judge 10"]
        assert samples_in(all_judged(store, "judge 10")) == [ids[1]]
        assert store.grades("judge 10", ids) == {ids[1]: GRADES}

    def test_profiles_rows_are_read_alone(self, store: SampleStore) -> None:
        ids = fill(store, 2)
        ends = [judged(one) for one in ids]
        ends[1].rows.requests["profile"] = hash_number("new")
        store.finish("judge", ends)
        assert samples_in(all_judged(store, "judge", profile_id="new")) == ids[1:]
        assert store.first_loss_seconds("judge", "new", since=NOW) == NOW
        assert store.first_loss_seconds("judge", "old", since=None) is None

    def test_many_pages_are_read_whole(
        self, any_store_url: str, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(judgments, "PAGE_ROWS", 500)
        store = open_store(any_store_url)
        n = 1_200
        for start in range(0, n, 400):
            batch = [entry(i, request_id=f"r{i}") for i in range(start, start + 400)]
            store.append("w", Batch(batch, 400))
        ids = list(store.waiting(n))
        done = [judged(one, weight=one) for one in ids]
        assert store.finish("judge", done) == {}
        assert [len(page.requests) for page in store.judged_pages("judge")] == [500, 500, 200]
        rows = all_judged(store, "judge")
        assert np.round(weights(rows)).tolist() == ids
        assert samples_in(rows) == ids
        assert len(store.grades("judge", ids)) == n
        store.close()

    def test_newest_samples_are_paged(self, store: SampleStore) -> None:
        ids = fill(store, 5)
        judge_all(store)
        seen: list[int] = []
        while page := store.newest_samples(2, before=seen[-1] if seen else None):
            assert all(one.state is State.JUDGED and one.series == "judge" for one in page)
            seen += [one.sample_id for one in page]
        assert seen == ids[::-1]
        assert store.newest_samples(2, before=ids[0]) == []

    def test_sample_counts_in_first_series(self, store: SampleStore) -> None:
        """A graded sample that another series judges again counts in the first alone."""
        [sample_id] = fill(store, 1)
        judge_all(store, "first")
        store.save_again("second", sample_id, {}, 0)
        store.add_labels([label(0)])
        [(_, newest)] = store.to_grade("second").items()
        for number in (1, 2):
            store.save_graded("second", graded(sample_id, newest, weight=8.0 * number))
        assert weights(all_judged(store, "first")) == [1.0]
        assert (weights(all_judged(store, "second")), store.to_pick("second")[0]) == ([], [])
        assert weights(store.graded("second")) == [16.0]
        assert weights(store.graded("first")) == []
        assert (store.to_grade("second"), store.to_grade("first")) == ({}, {sample_id: newest})
        assert [one.series for one in store.samples_of("r0")] == ["first"]
