"""The ranker's weights: where they come from, and how they are told apart."""

from ctxguard.retrieval.signals.ranker import INPUTS, Ranker

FLAT = Ranker(dict.fromkeys(INPUTS, 0.5), ("a", "b"))


def test_shipped_ranker_names_collections_read_once() -> None:
    shipped = Ranker.default()
    assert shipped is Ranker.default()
    assert shipped.trained_on


def test_digest_covers_the_weights_alone() -> None:
    assert Ranker(FLAT.weights).digest() == FLAT.digest()
    assert Ranker({**FLAT.weights, "dense.z": 0.25}).digest() != FLAT.digest()
