"""The benchmark of the assessor: answers of known worth, and bars that can be missed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks._served import Answers, mean_figures
from benchmarks.assessor import Assessor, bars

SHAPE = (200, 50)
IDS = [f"p{column}" for column in range(SHAPE[1])]


def values_of(answers: Answers) -> np.ndarray[Any, Any]:
    return np.stack(
        [answers.assess(f"q{row}", IDS)[answers.fingerprint] for row in range(SHAPE[0])]
    )


@pytest.fixture
def collection() -> Any:
    relevant = np.random.default_rng(0).random(SHAPE) < 0.3
    return SimpleNamespace(
        pools=SimpleNamespace(relevant=relevant, passage_ids=[IDS] * SHAPE[0]),
        texts=[f"q{row}" for row in range(SHAPE[0])],
    )


@pytest.mark.parametrize("d", [0.0, 1.0, 1.6])
def test_answers_shift_by_set_deviations(collection: Any, d: float) -> None:
    values, relevant = values_of(Assessor(d).answers(collection, 1)), collection.pools.relevant
    assert values[relevant].mean() - values[~relevant].mean() == pytest.approx(d, abs=0.1)
    assert values[relevant].std() == pytest.approx(1.0, abs=0.05)


def test_equal_seeds_give_equal_answers(collection: Any) -> None:
    first, again, other = (values_of(Assessor(1.0).answers(collection, s)) for s in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_one_that_refuses_leaves_answers_out(collection: Any) -> None:
    values = values_of(Assessor(1.0, refusing=0.2).answers(collection, 1))
    assert np.isnan(values).mean() == pytest.approx(0.2, abs=0.02)


def test_bars_can_be_met_and_missed() -> None:
    run = {"net": 0.5, "forecast": 0.5, "share": 0.4, "enforced": 1.0, "unlike": 0.0}
    run |= {"misleading": -0.5, "recall": 0.1}
    silent = {**run, "net": 0.0, "share": 0.0, "enforced": 0.0}
    poor = {**run, "net": -0.1, "unlike": 1.0, "misleading": -0.3}
    for worthy, worthless, holds in ((run, silent, True), (poor, poor, False)):
        found = bars(
            {
                "d′ 0": {"musique": mean_figures([worthless])},
                "d′ 1.6": {"demo": mean_figures([worthy])},
            }
        )
        assert len(found) == 5
        assert all(kept is holds for _, kept in found.values())
