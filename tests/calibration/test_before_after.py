"""Questions before and after: answers kept, gained and lost, and the questions that are shown."""

import numpy as np
import pytest
from simulated_pools import calibrated

from calibration.report.before_after import BeforeAfter


@pytest.mark.parametrize(
    ("before", "after", "gain", "shown"),
    [
        # The gain is the median of those that gain an answer, or the highest without any.
        ([0, 0, 0, 1], [1, 1, 1, 1], [0.9, 0.5, 0.2, 2.0], {"gains": 1, "typical": 0, "loses": 2}),
        ([1, 1, 0], [1, 1, 0], [0.1, 0.4, 0.2], {"gains": 1, "loses": 0}),
        # Gains of those with an answer: -3, 0.1, 0.2, 0.3; the third gains its answer.
        ([1, 1, 0, 0, 1], [1, 1, 1, 0, 0], [0.3, 0.1, 0.2, 9.0, -3.0], {"gains": 2, "loses": 4}),
        ([1], [1], [0.5], {"gains": 0}),
    ],
)
def test_median_questions_are_shown_once(
    before: list[int], after: list[int], gain: list[float], shown: dict[str, int]
) -> None:
    answered = np.array(before) > 0, np.array(after) > 0
    assert BeforeAfter(answered, (0, 0), (0, 0), np.array(gain)).shown() == shown


def test_answers_are_kept_gained_and_lost() -> None:
    answered = np.array([True, True, False, False]), np.array([True, False, True, False])
    found = BeforeAfter(answered, (0, 0), (0, 0), np.zeros(4))
    assert found.answers == {"kept": 1, "gained": 1, "lost": 1}


def test_counts_are_of_contexts() -> None:
    outcome = next(iter(calibrated(120, noise=0.25, unanswerable=0.1).outcomes.values()))
    found = BeforeAfter.of(outcome)
    assert found.irrelevant[0] < 5 * 120
    recall = outcome.today.metrics["recall"]
    assert int((np.nan_to_num(recall) > 0).sum()) == int(found.answered[0].sum())
    assert found.answers["kept"] + found.answers["lost"] == int(found.answered[0].sum())
