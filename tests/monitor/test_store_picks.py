"""Random picks of samples to label: which are taken, and with what probability."""

import math
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray
from storing import OpenStore, entry, judged, label

from ctxguard.monitor.store import LabelDepth, PickedSample, SampleStore, WorkerCounts

SERVED, POOL = LabelDepth.SERVED, LabelDepth.POOL


def weight_of(summaries: bytes) -> NDArray[np.float64]:
    """Each summary is one number, the weight."""
    return np.frombuffer(summaries, "<f8").astype(np.float64)


def add_judged(
    store: SampleStore,
    orders: Sequence[float],
    weights: Sequence[float] | None = None,
    series: str = "judge",
) -> list[int]:
    """Judged samples with these label orders, and weights as their summaries; their ids."""
    before = store.accounts().stored
    entries = [entry(before + n, label_order=order) for n, order in enumerate(orders)]
    store.append("w", entries, WorkerCounts(len(entries)))
    ids = [one.sample_id for one in store.claim("m", len(entries), lease_seconds=60.0)]
    summaries = [struct.pack("<d", weight) for weight in weights or [1.0] * len(ids)]
    store.finish(
        series, [judged(one, summary=text) for one, text in zip(ids, summaries, strict=True)]
    )
    return ids


class TestPick:
    def test_the_lowest_are_taken_with_the_first_that_is_left_as_the_threshold(
        self, store: SampleStore
    ) -> None:
        ids = add_judged(store, [0.5, 0.1, 0.9, 0.3])
        assert store.pick_for_labels("judge", 2) == [ids[1], ids[3]]
        assert store.picked("judge", SERVED) == {ids[1]: 0.5, ids[3]: 0.5}
        assert store.picked("judge", POOL) == {}
        assert store.picked("another", SERVED) == {}

    def test_what_was_picked_is_listed_with_how_often_it_was_labelled(
        self, store: SampleStore
    ) -> None:
        ids = add_judged(store, [0.5, 0.1, 0.9])
        store.pick_for_labels("judge", 1, depth=POOL)
        store.pick_for_labels("judge", 1)
        store.add_labels([label(1), label(1, passage="q"), label(2)])
        expected = [PickedSample(ids[0], "r0", 0), PickedSample(ids[1], "r1", 2)]
        assert store.picked_samples("judge", SERVED) == expected
        assert store.picked_samples("judge", POOL) == expected[1:]
        assert store.picked_samples("another", SERVED) == []

    def test_nothing_is_picked_twice_and_all_that_there_is_has_probability_1(
        self, store: SampleStore
    ) -> None:
        ids = add_judged(store, [0.5, 0.1, 0.9, 0.3])
        store.pick_for_labels("judge", 1)
        assert store.pick_for_labels("judge", 9) == [ids[3], ids[0], ids[2]]
        assert set(store.picked("judge", SERVED).values()) == {1.0}
        assert store.pick_for_labels("judge", 9) == []
        assert store.pick_for_labels("another", 9) == []

    def test_a_later_pick_raises_the_probabilities_of_an_earlier_one(
        self, store: SampleStore
    ) -> None:
        first = add_judged(store, [0.2, 0.4, 0.6])
        store.pick_for_labels("judge", 1)
        assert store.picked("judge", SERVED) == {first[0]: 0.4}
        later = add_judged(store, [0.5, 0.7])
        assert store.pick_for_labels("judge", 2) == [first[1], later[0]]
        assert store.picked("judge", SERVED) == dict.fromkeys([*first[:2], later[0]], 0.6)

    def test_a_later_pick_of_lower_threshold_lowers_none(self, store: SampleStore) -> None:
        first = add_judged(store, [0.2, 0.8, 0.9])
        store.pick_for_labels("judge", 1)
        later = add_judged(store, [0.1, 0.3, 0.5])
        assert store.pick_for_labels("judge", 1) == [later[0]]
        assert store.picked("judge", SERVED) == {first[0]: 0.8, later[0]: 0.3}

    def test_a_weight_divides_the_order_and_multiplies_the_probability(
        self, store: SampleStore
    ) -> None:
        ids = add_judged(store, [0.3, 0.5, 0.2, 0.9], weights=[1.0, 2.0, 1.0, 2.0])
        assert store.pick_for_labels("judge", 2, weigh=weight_of) == [ids[2], ids[1]]
        assert store.picked("judge", SERVED) == {ids[2]: 0.3, ids[1]: 0.6}

    def test_weighted_and_equal_picks_mix(self, store: SampleStore) -> None:
        ids = add_judged(store, [0.1, 0.3, 0.5, 0.9], weights=[1.0, 1.0, 2.0, 1.0])
        store.pick_for_labels("judge", 1)
        assert store.pick_for_labels("judge", 1, weigh=weight_of) == [ids[2]]
        assert store.picked("judge", SERVED) == {ids[0]: 0.3, ids[2]: 0.6}

    def test_a_pick_of_whole_pools_starts_with_the_same_and_counts_for_what_was_served(
        self, store: SampleStore
    ) -> None:
        ids = add_judged(store, [0.1, 0.2, 0.3, 0.4])
        store.pick_for_labels("judge", 2)
        assert store.pick_for_labels("judge", 1, depth=POOL) == [ids[0]]
        assert store.picked("judge", SERVED) == {ids[0]: 0.3, ids[1]: 0.3}
        assert store.picked("judge", POOL) == {ids[0]: 0.2}
        assert store.pick_for_labels("judge", 2, depth=POOL) == [ids[1], ids[2]]
        assert store.picked("judge", SERVED) == dict.fromkeys(ids[:3], 0.4)
        assert store.picked("judge", POOL) == dict.fromkeys(ids[:3], 0.4)

    def test_a_look_ahead_picks_nothing(self, store: SampleStore) -> None:
        ids = add_judged(store, [0.5, 0.1])
        assert store.next_for_labels("judge", 1) == [ids[1]]
        assert store.picked("judge", SERVED) == {}

    def test_what_an_alarm_asked_for_is_picked_like_all_others(self, store: SampleStore) -> None:
        ids = add_judged(store, [0.5, 0.1])
        store.queue_labels([ids[1]], reason="recall_loss")
        assert store.pick_for_labels("judge", 1) == [ids[1]]

    def test_picks_at_the_same_time_take_different_samples(
        self, shared_store_url: str, open_store: OpenStore
    ) -> None:
        stores = [open_store(shared_store_url) for _ in range(4)]
        ids = add_judged(stores[0], (np.arange(40) / 40.0).tolist())
        with ThreadPoolExecutor(4) as pool:
            picks = list(pool.map(lambda store: store.pick_for_labels("judge", 8), stores))
        assert sorted(one for pick in picks for one in pick) == ids[:32]
        assert set(stores[0].picked("judge", SERVED).values()) == {32 / 40.0}


POPULATION, EARLY, LABELS = 300, 30, 20
"""Requests; those that there were at the first export; labels of each export."""


@pytest.mark.parametrize(
    "ways",
    [(None, None), (weight_of, weight_of), (None, weight_of), (weight_of, None)],
    ids=["equal", "weighted", "equal, then weighted", "weighted, then equal"],
)
def test_labels_of_several_exports_are_one_sample_with_known_probabilities(
    open_store: OpenStore, ways: Sequence[Callable[[bytes], NDArray[np.float64]] | None]
) -> None:
    """At 10% of the traffic and at its end; early requests fare better, and so do light ones."""
    store = open_store("sqlite://")
    rng = np.random.default_rng(7)
    errors, naive_errors = [], []
    for repeat in range(40):
        series = f"judge {repeat}"
        weights = np.where(rng.random(POPULATION) < 0.4, 2.0, 1.0)
        is_early = np.arange(POPULATION) < EARLY
        values = rng.random(POPULATION) < np.where(is_early, 0.9, 0.4) / weights
        orders = rng.random(POPULATION)
        value_of: dict[int, bool] = {}
        for part, weigh in zip((is_early, ~is_early), ways, strict=True):
            ids = add_judged(store, orders[part].tolist(), weights[part].tolist(), series)
            value_of |= zip(ids, values[part].tolist(), strict=True)
            store.pick_for_labels(series, LABELS, weigh=weigh)
        picked = store.picked(series, SERVED)
        labelled = np.array([value_of[one] for one in picked])
        chances = np.array(list(picked.values()))
        errors.append(np.average(labelled, weights=1.0 / chances) - values.mean())
        naive_errors.append(labelled.mean() - values.mean())
    noise = np.std(errors) / math.sqrt(len(errors))
    # A ratio of two estimates is biased by about 1/n.
    assert abs(np.mean(errors)) < 3.0 * noise + 0.01
    assert abs(np.mean(naive_errors)) > 0.06
