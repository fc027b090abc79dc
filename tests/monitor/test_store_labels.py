"""What people say of samples: labels, and the samples they are asked about."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from storing import NOW, OpenStore, fill, label

from ctxguard.monitor.store import LabelRow, SampleStore


class TestPeople:
    def test_labels_are_found_with_their_samples(self, store: SampleStore) -> None:
        ids = fill(store, 2)
        rows = [label(1, 2), LabelRow("r0", "q", 0, "distractor", "ann", NOW)]
        added = store.add_labels(rows)
        assert (added.added, added.duplicates, added.unknown) == (2, 0, ())
        assert store.labels() == [(ids[1], rows[0]), (ids[0], rows[1])]
        assert store.labels([ids[0]]) == [(ids[0], rows[1])]
        assert store.labels([]) == []

    def test_labels_of_unknown_samples_are_named(self, store: SampleStore) -> None:
        fill(store, 1)
        added = store.add_labels([label(8), label(0), label(9), label(8, passage="q")])
        assert (added.added, added.unknown) == (1, ("r8", "r9"))
        assert len(store.labels()) == 1

    def test_repeated_label_is_kept_once(self, store: SampleStore) -> None:
        fill(store, 1)
        added = store.add_labels([label(0), label(0)])
        assert (added.added, added.duplicates) == (1, 1)
        later = store.add_labels([label(0), label(0, time_seconds=NOW + 5.0)])
        assert (later.added, later.duplicates) == (0, 2)

    def test_each_annotators_label_is_kept(self, store: SampleStore) -> None:
        """Of those who agree, too."""
        fill(store, 1)
        said = [label(0, 2), label(0, 2, annotator="bob"), label(0, 0, annotator="cy")]
        assert store.add_labels(said).added == 3
        assert [row.grade for _, row in store.labels()] == [2, 2, 0]

    def test_annotator_may_change_back(self, store: SampleStore) -> None:
        """Else the second opinion would stand as the latest."""
        fill(store, 1)
        opinions = [label(0, grade, time_seconds=NOW + n) for n, grade in enumerate((2, 0, 2))]
        for row in opinions:
            assert store.add_labels([row]).added == 1
        assert [row.grade for _, row in store.labels()] == [2, 0, 2]

    def test_withdrawn_label_can_return(self, store: SampleStore) -> None:
        fill(store, 1)
        given, taken_back = label(0, 2), replace(label(0, time_seconds=NOW + 1.0), grade=None)
        assert store.add_labels([taken_back]).duplicates == 1
        assert store.add_labels([given, taken_back]).added == 2
        assert store.add_labels([replace(taken_back, time_seconds=NOW + 2.0)]).duplicates == 1
        again = store.add_labels([label(0, 2, time_seconds=NOW + 3.0)])
        assert again.added == 1
        assert [row.grade for _, row in store.labels()] == [2, None, 2]

    def test_twice_sampled_has_labels_twice(self, store: SampleStore) -> None:
        ids = [*fill(store, 1), *fill(store, 1)]
        store.add_labels([label(0)])
        assert store.labels() == [(sample_id, label(0)) for sample_id in ids]

    def test_concurrent_importers_add_once(self, any_store_url: str, open_store: OpenStore) -> None:
        stores = [open_store(any_store_url) for _ in range(4)]
        fill(stores[0], 30)
        rows = [label(n) for n in range(30)]
        with ThreadPoolExecutor(4) as pool:
            added = list(pool.map(lambda store: store.add_labels(rows).added, stores))
        assert sum(added) == len(stores[0].labels()) == 30
