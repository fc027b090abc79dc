"""The benchmark of the pooled ranker compares by family and holds its bars."""

import numpy as np
import pytest
from rich.console import Console

from benchmarks.ranker import report
from ctxguard.core.types import FloatArray
from ctxguard.retrieval.signals.ranker import INPUTS


def measured(gain: float, n: int = 50) -> dict[str, FloatArray]:
    """Queries whose nDCG@10 is higher by the ranker by ``gain`` each."""
    before = np.linspace(0.2, 0.8, n)
    return {"reciprocal_rank": before, "ranker": before + gain}


def test_each_family_has_the_same_weight_in_the_mean() -> None:
    families = {"small": measured(0.1, n=10), "large": measured(0.0, n=500)}
    results = report(dict.fromkeys(INPUTS, families), 0, Console(quiet=True))
    for level in INPUTS:
        assert results["levels"][level]["mean_gain"]["mean"] == pytest.approx(0.05)
        assert results["levels"][level]["families"]["large"]["queries"] == 500
    assert all(results["bars"].values())


@pytest.mark.parametrize(
    ("gains", "missed"), [((0.02, 0.02), "on the mean"), ((0.1, -0.02), "no family below")]
)
def test_a_bar_that_is_missed_is_told(gains: tuple[float, float], missed: str) -> None:
    families = {str(at): measured(gain) for at, gain in enumerate(gains)}
    bars = report(dict.fromkeys(INPUTS, families), 0, Console(quiet=True))["bars"]
    assert {bar for bar, met in bars.items() if not met} == {bar for bar in bars if missed in bar}
