"""What people say of samples: labels, and the samples they are asked about."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from storing import NOW, OpenStore, fill, label

from ctxguard.monitor.store import LabelRow, SampleStore

Opinion = tuple[int | None, str, bool]
"""A grade, whose it is, and whether it is news. None takes it back."""

OPINIONS: dict[str, list[Opinion]] = {
    "repeated": [(1, "ann", True), (1, "ann", False)],
    "of several, who may agree": [(2, "ann", True), (2, "bob", True), (0, "cy", True)],
    # Else the second opinion would stand as the latest.
    "changed back": [(2, "ann", True), (0, "ann", True), (2, "ann", True)],
    "taken back and given again": [
        (None, "ann", False),
        (2, "ann", True),
        (None, "ann", True),
        (None, "ann", False),
        (2, "ann", True),
    ],
}


class TestPeople:
    def test_labels_are_found_with_their_samples(self, store: SampleStore) -> None:
        ids = fill(store, 2)
        rows = [label(1, 2), LabelRow("r0", "q", 0, "distractor", "ann", NOW)]
        assert store.add_labels(rows) == (2, 0, [])
        assert store.labels() == [(ids[1], rows[0]), (ids[0], rows[1])]
        assert store.labels([ids[0]]) == [(ids[0], rows[1])]
        assert store.labels([]) == []

    def test_labels_of_unknown_samples_are_named(self, store: SampleStore) -> None:
        fill(store, 1)
        rows = [label(8), label(0), label(9), label(8, passage="q")]
        assert store.add_labels(rows) == (1, 0, ["r8", "r9"])
        assert len(store.labels()) == 1

    @pytest.mark.parametrize("opinions", OPINIONS.values(), ids=OPINIONS)
    def test_only_news_is_kept(self, store: SampleStore, opinions: list[Opinion]) -> None:
        """Each opinion is given by itself, a second after the one before."""
        fill(store, 1)
        for second, (grade, annotator, is_new) in enumerate(opinions):
            row = label(0, annotator=annotator, time_seconds=NOW + second)
            added = store.add_labels([replace(row, grade=grade)])
            assert added == (is_new, not is_new, [])
        assert [row.grade for _, row in store.labels()] == [one for one, _, new in opinions if new]

    def test_repeats_in_one_file_are_kept_once(self, store: SampleStore) -> None:
        fill(store, 1)
        assert store.add_labels([label(0), label(0)]) == (1, 1, [])

    def test_twice_sampled_has_labels_twice(self, store: SampleStore) -> None:
        ids = [*fill(store, 1), *fill(store, 1)]
        store.add_labels([label(0)])
        assert store.labels() == [(sample_id, label(0)) for sample_id in ids]

    def test_concurrent_importers_add_once(self, any_store_url: str, open_store: OpenStore) -> None:
        stores = [open_store(any_store_url) for _ in range(4)]
        fill(stores[0], 30)
        rows = [label(n) for n in range(30)]
        with ThreadPoolExecutor(4) as pool:
            added = list(pool.map(lambda store: store.add_labels(rows)[0], stores))
        assert sum(added) == len(stores[0].labels()) == 30
