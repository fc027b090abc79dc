"""Trees fitted by scikit-learn, as plain numbers."""

import numpy as np
import pytest

from calibration.trees import SETTINGS, fit_trees
from ctxguard.core.trees import MAX_LEAVES

ensemble = pytest.importorskip("sklearn.ensemble")


def sample(n: int = 400, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    values = random.normal(size=(n, 4))
    values[:, 3] = values[:, 3] > 0.0  # as whether every leg matched
    return values, values[:, 0] * values[:, 1] + values[:, 3] + random.normal(size=n) > 0.5


@pytest.mark.parametrize("weighted", [False, True])
def test_they_predict_what_scikit_learn_predicts(weighted: bool) -> None:
    values, relevant = sample()
    weights = np.linspace(0.5, 1.5, relevant.size) if weighted else None
    trees = fit_trees(values, relevant, weights)
    theirs = ensemble.HistGradientBoostingClassifier(**SETTINGS)
    theirs.fit(values, relevant, sample_weight=weights)
    fresh, _ = sample(seed=1)
    assert trees.log_odds(fresh.T) == pytest.approx(theirs.decision_function(fresh), abs=1e-6)
    assert len(trees.values) == SETTINGS["max_iter"]
    assert max(map(len, trees.values)) == MAX_LEAVES


def test_the_same_sample_gives_the_same_numbers() -> None:
    assert fit_trees(*sample(), None) == fit_trees(*sample(), None)


def test_too_few_to_split_give_trees_of_one_leaf() -> None:
    values, relevant = sample(30)
    trees = fit_trees(values, relevant, None)
    assert {len(own) for own in trees.values} == {1}
    assert np.unique(trees.log_odds(values.T)).size == 1
