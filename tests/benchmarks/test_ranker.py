"""The benchmark of the ranker trains by its formula, compares by family and holds its bars."""

import math

import numpy as np
import pytest

from benchmarks.ranker import Lists, report, train
from ctxguard.core.types import FloatArray
from ctxguard.retrieval.signals import INPUTS


def lists(inputs: FloatArray, relevant: int, queries: int = 1) -> Lists:
    """Queries with the same candidates, one of them relevant; the other inputs are 0."""
    whole = np.zeros((queries, len(INPUTS), inputs.size))
    whole[:, 0] = inputs
    shares = np.tile(np.arange(inputs.size) == relevant, (queries, 1)).astype(float)
    return Lists(whole, shares, np.ones_like(shares, bool))


def test_the_weights_minimise_the_loss() -> None:
    """One input that is 1 for the relevant candidate and 0 for the other: −ln σ(a) + λ a²."""
    weights = train([lists(np.array([1.0, 0.0]), 0)], penalty=0.1)
    a = weights[0]
    assert 2.0 * 0.1 * a == pytest.approx(1.0 / (1.0 + math.exp(a)))
    assert not weights[1:].any()


def test_set_counts_by_query_root() -> None:
    for_it, against = lists(np.array([1.0, 0.0]), 0, queries=9), lists(np.array([1.0, 0.0]), 1)
    a = train([for_it, against], penalty=0.1)[0]
    right = 1.0 / (1.0 + math.exp(a))
    assert 2.0 * 0.1 * a == pytest.approx(0.75 * right - 0.25 * (1.0 - right))


def measured(gain: float, n: int = 50) -> dict[str, FloatArray]:
    """Queries whose nDCG@10 is higher by the ranker by ``gain`` each."""
    before = np.linspace(0.2, 0.8, n)
    return {"reciprocal_rank": before, "ranker": before + gain}


def test_mean_weighs_families_alike() -> None:
    families = {"small": measured(0.1, n=10), "large": measured(0.0, n=500)}
    results = report(families, 0)
    assert results["mean_gain"]["mean"] == pytest.approx(0.05)
    assert results["families"]["large"]["queries"] == 500
    assert all(results["bars"].values())


@pytest.mark.parametrize(
    ("gains", "missed"), [((0.02, 0.02), "on the mean"), ((0.1, -0.02), "no family below")]
)
def test_missed_bar_is_told(gains: tuple[float, float], missed: str) -> None:
    families = {str(at): measured(gain) for at, gain in enumerate(gains)}
    bars = report(families, 0)["bars"]
    assert {bar for bar, met in bars.items() if not met} == {bar for bar in bars if missed in bar}
