"""The price of a passage that is not relevant, by a reader's simulated answers."""

import numpy as np
import pytest

from calibration.passage_price import irrelevant_utility


def answers(
    n: int, gain: float, utility: float, seed: int, *, most: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Marks of two contexts a question less each other, and what the contexts differ in."""
    rng = np.random.default_rng([seed, n])
    base = rng.uniform(0.2, 0.4, n)
    relevant, others = rng.integers(0, most + 1, (2, n)), rng.integers(0, 8, (2, n))
    chance = np.clip(base + gain * relevant + gain * utility * others, 0.0, 1.0)
    marks = rng.random((2, n)) < chance
    return tuple(each[1] * 1.0 - each[0] for each in (marks, relevant, others))


@pytest.mark.parametrize("n", [100, 300])
@pytest.mark.parametrize("gain", [0.35, 0.5])
@pytest.mark.parametrize("utility", [0.0, -0.05, -0.1])
def test_the_interval_covers_the_truth(n: int, gain: float, utility: float) -> None:
    found = [irrelevant_utility(*answers(n, gain, utility, seed)) for seed in range(300)]
    told = [each.bounds for each in found if each.bounds is not None]
    covered = np.mean([lower <= utility <= upper for lower, upper in told])
    assert len(told) > 0.9 * len(found)
    assert 0.91 <= covered <= 0.985
    values = [each.value for each in found if each.value is not None]
    assert np.median(values) == pytest.approx(utility, abs=0.015)


@pytest.mark.parametrize("gain", [0.0, 0.01])
def test_without_a_gain_no_price_is_told(gain: float) -> None:
    found = [irrelevant_utility(*answers(150, gain, -0.1, seed)) for seed in range(100)]
    assert np.mean([each.value is not None for each in found]) < 0.1


@pytest.mark.parametrize(("n", "same"), [(0, ()), (1, ()), (50, ()), (99, ()), (150, (1, 2))])
def test_few_questions_tell_no_price(n: int, same: tuple[int, ...]) -> None:
    """Nor do many whose contexts are mostly the same."""
    found = list(answers(n, 0.5, -0.1, 1))
    for column in same:
        found[column][:125] = 0.0
    price = irrelevant_utility(*found)
    assert (price.value, price.n) == (None, n)


@pytest.mark.parametrize("column", [1, 2])
def test_what_never_differs_tells_no_price(column: int) -> None:
    found = list(answers(150, 0.5, -0.1, 1))
    found[column][:] = 0.0
    assert irrelevant_utility(*found).value is None


def test_unmarked_answers_are_left_out() -> None:
    correct, relevant, others = answers(150, 0.5, -0.1, 1)
    own = irrelevant_utility(correct[:140], relevant[:140], others[:140])
    correct[140:] = np.nan
    assert irrelevant_utility(correct, relevant, others) == own
