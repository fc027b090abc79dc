"""What a store deletes by age and by size, and what it keeps whatever the limits."""

import random
from pathlib import Path

import pytest
from storing import DAY, Clock, OpenStore, entry, fill, graded, judge_all, judged, label, weights

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.store import Batch, Limits, SampleStore, State
from tests.stored import all_judged, samples_in


class TestRetention:
    def test_old_samples_go_entirely(self, store: SampleStore, clock: Clock) -> None:
        store.limits = Limits(max_age_seconds=DAY)
        ids = fill(store, 2)
        judge_all(store)
        store.add_labels([label(0), label(1)])
        clock.now += 0.9 * DAY
        young = fill(store, 1, time_seconds=clock.now)
        clock.now += 0.2 * DAY
        assert store.clean() == (2, 0)
        assert store.find(["r0"]) == young
        assert store.records(ids) == store.grades("judge", ids) == store.rejected(ids) == {}
        assert weights(all_judged(store, "judge")) == []
        # The same request was sampled again.
        assert store.labels() == [(young[0], label(0))]
        assert store.accounts().stored == 3

    def test_labelled_go_leaving_graded_block(self, store: SampleStore, clock: Clock) -> None:
        """Or the labelled ones alone would stand for a time that is over."""
        store.limits = Limits(max_age_seconds=DAY)
        ids = fill(store, 3)
        judge_all(store)
        store.add_labels([label(1)])
        [(sample_id, newest)] = store.to_grade("judge").items()
        store.save_graded("judge", graded(sample_id, newest, weight=8.0))
        clock.now += 2.0 * DAY
        assert store.clean() == (3, 0)
        assert store.clean() == (0, 0)
        assert store.labels() == []
        assert weights(all_judged(store, "judge")) == []
        assert store.records(ids) == store.grades("judge", ids) == store.rejected(ids) == {}
        left = store.graded("judge")
        assert (samples_in(left), weights(left)) == ([ids[1]], [8.0])

    def test_oversize_drops_oldest_payloads(self, store: SampleStore, clock: Clock) -> None:
        """Over the size limit the oldest payloads go and judged rows stay."""
        store.limits = Limits(max_bytes=5_000)
        ids = fill(store, 8, payload=bytes(1_000))
        judge_all(store)
        assert store.clean() == (0, 3)
        assert sorted(store.grades("judge", ids)) == ids[3:]
        assert samples_in(all_judged(store, "judge")) == ids
        assert store.to_pick("judge")[0] == ids[3:]

    def test_oversize_drops_unjudged_whole(self, store: SampleStore, clock: Clock) -> None:
        store.limits = Limits(max_bytes=5_000)
        ids = fill(store, 8, payload=bytes(1_000))
        assert store.clean() == (0, 3)
        assert list(store.waiting(99)) == ids[3:]

    def test_without_limits_nothing_goes(self, store: SampleStore, clock: Clock) -> None:
        store.limits = Limits(max_age_seconds=None, max_bytes=None)
        fill(store, 2)
        clock.now += 1_000.0 * DAY
        store.clean()
        assert store.states()[State.PENDING] == 2

    def test_deleted_id_never_returns(self, store: SampleStore, clock: Clock) -> None:
        """A monitor that finishes late must not judge another sample by it."""
        store.limits = Limits(max_age_seconds=DAY)
        [old] = fill(store, 1)
        clock.now += 2.0 * DAY
        store.clean()
        [new] = fill(store, 1, time_seconds=clock.now)
        assert new > old
        store.finish("judge", [judged(old)])
        assert store.states()[State.PENDING] == 1

    def test_more_than_one_batch_is_cleaned(self, store: SampleStore, clock: Clock) -> None:
        store.limits = Limits(max_bytes=1_000)
        store.append("w", Batch([entry(n, payload=bytes(10)) for n in range(700)], 700))
        assert store.clean() == (0, 600)

    def test_cleaning_shrinks_sqlite_file(
        self, tmp_path: Path, clock: Clock, open_store: OpenStore
    ) -> None:
        file = tmp_path / "samples.db"
        store = open_store(f"sqlite:///{file}", limits=Limits(max_bytes=50_000), clock=clock)
        fill(store, 60, payload=random.Random(0).randbytes(50_000))
        store.close()
        before = file.stat().st_size
        store.clean()
        store.close()
        assert file.stat().st_size < 0.2 * before

    def test_deleted_text_leaves_the_file(
        self, tmp_path: Path, clock: Clock, open_store: OpenStore
    ) -> None:
        file = tmp_path / "samples.db"
        store = open_store(f"sqlite:///{file}", limits=Limits(max_age_seconds=DAY), clock=clock)
        fill(store, 1, payload=b"a secret of the user's")
        clock.now += 2.0 * DAY
        fill(store, 1, time_seconds=clock.now)
        store.clean()
        store.close()
        assert b"a secret" not in file.read_bytes()

    @pytest.mark.parametrize("limits", [{"max_age_seconds": 0.0}, {"max_bytes": 0}])
    def test_limit_out_of_range_is_refused(self, limits: dict[str, float]) -> None:
        with pytest.raises(ConfigurationError, match="must be"):
            Limits(**limits)  # type: ignore[arg-type]
