"""The ranker's weights: where they come from, and how they are told apart."""

from ctxguard.retrieval.signals.ranker import INPUTS, Ranker

FLAT = Ranker(dict.fromkeys(INPUTS, 0.5), ("a", "b"))


def test_the_shipped_ranker_names_its_collections_and_is_read_once() -> None:
    shipped = Ranker.default()
    assert shipped is Ranker.default()
    assert shipped.trained_on


def test_the_digest_is_that_of_the_weights_alone() -> None:
    assert Ranker(FLAT.weights).digest() == FLAT.digest()
    assert Ranker({**FLAT.weights, "dense.z": 0.25}).digest() != FLAT.digest()
