"""What people are asked to grade: draws that are saved once, and what they ask about."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from storing import OpenStore, entry, judged, label

from ctxguard.measure.rows import NO_PICK
from ctxguard.monitor.store import Batch, PickedPassage, PickedSample, PickKind, SampleStore
from tests.stored import all_judged


def add_judged(
    store: SampleStore, orders: Sequence[float], series: str = "judge", payload: bytes = b"payload"
) -> list[int]:
    """Judged samples with these label orders; their ids."""
    before = store.accounts().stored
    entries = [
        entry(before + n, label_order=order, payload=payload) for n, order in enumerate(orders)
    ]
    store.append("w", Batch(entries, len(entries)))
    ids = list(store.waiting(len(entries)))
    store.finish(series, [judged(one) for one in ids])
    return ids


def save(store: SampleStore, *passages: PickedPassage, series: str = "judge") -> bool:
    return store.save_pick(series, passages, store.to_pick(series)[1])


def run(sample_id: int) -> PickedPassage:
    return PickedPassage(sample_id, PickKind.RUN, -1, 1.0)


class TestPicks:
    def test_openable_are_judged_in_order(self, store: SampleStore) -> None:
        """What can be opened are the judged samples of the series in their order."""
        ids = add_judged(store, [0.5, 0.1])
        add_judged(store, [0.9], series="another")
        found = store.to_pick("judge")
        assert found == (ids[::-1], 0)
        assert store.to_pick("never begun")[0] == []

    def test_draw_is_read_back_numbered(self, store: SampleStore) -> None:
        ids = add_judged(store, [0.5, 0.1])
        coin = PickedPassage(ids[1], PickKind.COIN, 7, 0.25)
        assert save(store, run(ids[0]), coin)
        found = store.picked("judge")
        assert list(found) == ids
        assert found[ids[0]] == [replace(run(ids[0]), pick_id=1)]
        assert found[ids[1]] == [replace(coin, pick_id=1)]
        assert store.picked("judge", [ids[1]]) == {ids[1]: found[ids[1]]}
        assert store.picked("another") == {}
        assert store.to_pick("judge") == ([ids[1]], 1)

    def test_sample_knows_its_first_draw(self, store: SampleStore) -> None:
        """Each judged sample knows the first draw that could have taken it."""
        early = add_judged(store, [0.5, 0.1])
        save(store, run(early[0]))
        late = add_judged(store, [0.3])
        save(store, run(late[0]))
        never = add_judged(store, [0.2])
        found = all_judged(store, "judge")
        first = dict(found.requests[["sample_id", "first_pick"]].tolist())
        assert [first[one] for one in (*early, *late, *never)] == [1, 1, 2, NO_PICK]

    def test_one_of_simultaneous_draws_saves(
        self, any_store_url: str, open_store: OpenStore
    ) -> None:
        """Of draws at the same time one is saved and the others draw again."""
        stores = [open_store(any_store_url) for _ in range(4)]
        ids = add_judged(stores[0], (np.arange(8) / 8.0).tolist())
        with ThreadPoolExecutor(4) as pool:
            saves = [
                pool.submit(each.save_pick, "judge", [run(one)], 0)
                for each, one in zip(stores, ids, strict=False)
            ]
            saved = [one.result() for one in saves]
        assert sorted(saved) == [False, False, False, True]
        assert len(stores[0].picked("judge")) == 1

    def test_first_asking_file_is_remembered(self, store: SampleStore) -> None:
        ids = add_judged(store, [0.5, 0.1, 0.3])
        save(store, *map(run, ids))
        store.ask_for_labels(ids[:1], "tenant=a")
        store.ask_for_labels(ids[:2], "")
        found = store.picked("judge")
        assert [found[one][0].asked for one in ids] == ["tenant=a", "", None]

    def test_picked_are_listed_with_labels(self, store: SampleStore) -> None:
        ids = add_judged(store, [0.5, 0.1, 0.9])
        save(store, run(ids[0]), run(ids[1]), PickedPassage(ids[1], PickKind.COIN, 2, 0.5))
        store.add_labels([label(1), label(1, passage="q"), label(2)])
        expected = [PickedSample(ids[0], "r0", 0.0, 0), PickedSample(ids[1], "r1", 0.0, 2)]
        assert store.picked_samples("judge") == expected
        assert store.picked_samples("another") == []
