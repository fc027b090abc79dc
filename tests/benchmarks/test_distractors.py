"""The benchmark of a second threshold: what each pair of thresholds serves, and is worth."""

import numpy as np
import pytest
from simulated_pools import labelled, ranking_of

from benchmarks._collection import View
from benchmarks.distractors import (
    DEEPEST,
    LEAST_RELEVANT,
    MOST_DISTRACTING,
    misleading,
    utilities,
)


def test_a_passage_above_the_second_threshold_is_passed_over() -> None:
    pools, labels = labelled(
        [ranking_of([3.0, 2.0, 1.0])],
        [{"p0": 1, "p1": 0, "p2": 1}],
        distractors=[{"p1": "distractor"}],
    )
    assert misleading(labels).relevant[0, :3].tolist() == [False, True, False]
    view = View(pools, labels)
    padding = [np.nan] * (pools.scores.shape[1] - 3)
    relevant = np.array([[0.9, 0.8, 0.25, *padding]])
    distracting = np.array([[0.1, 0.6, 0.2, *padding]])

    worth = utilities(view, relevant, distracting)[0]

    assert worth.shape == (DEEPEST, len(LEAST_RELEVANT), len(MOST_DISTRACTING))
    everything, without = MOST_DISTRACTING.index(1.0), MOST_DISTRACTING.index(0.5)
    none, some = LEAST_RELEVANT.index(0.0), LEAST_RELEVANT.index(0.3)
    third, second = 1 / np.log2(4), 1 / np.log2(3)
    assert worth[4, none, everything] == pytest.approx(1.0 - second + third)
    assert worth[4, none, without] == pytest.approx(1.0 + second)
    assert worth[4, some, without] == pytest.approx(1.0)
    assert worth[0, none, everything] == pytest.approx(1.0)
