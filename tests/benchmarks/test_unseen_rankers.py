"""Benchmarks rank a collection by a ranker that was not trained on it."""

from benchmarks._collection import RANKERS, unseen_ranker
from ctxguard.retrieval.signals import Ranker


def test_ranker_has_not_seen_collection() -> None:
    shipped = Ranker.default()
    assert {file.stem for file in RANKERS.glob("*.json")} == set(shipped.trained_on)
    for name in shipped.trained_on:
        assert set(unseen_ranker(name).trained_on) == set(shipped.trained_on) - {name}
    assert unseen_ranker("scifact") == shipped
