"""Statistics and inputs that several benchmarks share."""

import numpy as np

from benchmarks._collection import RANKERS, unseen_ranker
from benchmarks._gains import gain
from benchmarks._live_traffic import _answer
from benchmarks.turns import of_turns
from ctxguard.retrieval.signals import Ranker


def test_mean_weighs_sets_alike() -> None:
    found = gain([np.full(1_000, 1.0), np.full(10, 0.0)], seed=0)
    assert (found.mean, found.lower, found.upper, found.n) == (0.5, 0.5, 0.5, 2)


TURNS = 15


def test_interval_lies_between_order_statistics() -> None:
    former = [100.0] * TURNS
    here = [100.0 + turn for turn in range(TURNS)]
    ratio = of_turns(here, former)
    assert ratio.median == 1.07
    # Of 15 ordered values the 4th and the 12th hold the median with a chance of 96.5%.
    assert (ratio.lower, ratio.upper) == (1.03, 1.11)


def test_interval_covers_median_95_percent() -> None:
    chance = np.random.default_rng(0)
    held = [
        (found := of_turns(chance.lognormal(0.0, 0.2, TURNS).tolist(), [1.0] * TURNS)).lower
        <= 1.0
        <= found.upper
        for _ in range(2_000)
    ]
    assert np.mean(held) >= 0.95


def test_passages_are_no_copies() -> None:
    """Copies share one grade, and a dropped relevant passage would be none."""
    decision, _ = _answer(0)
    ranking = decision.ranking
    texts = [ranking.passages[place].text for place in range(len(ranking))]
    assert len({*texts}) == len(texts)


def test_ranker_has_not_seen_collection() -> None:
    shipped = Ranker.default()
    assert {file.stem for file in RANKERS.glob("*.json")} == set(shipped.trained_on)
    for name in shipped.trained_on:
        assert set(unseen_ranker(name).trained_on) == set(shipped.trained_on) - {name}
    assert unseen_ranker("scifact") == shipped
