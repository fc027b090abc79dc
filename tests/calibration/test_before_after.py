"""Questions before and after: answers kept, gained and lost, and the questions that are shown."""

import numpy as np
from simulated_pools import calibrated

from calibration.report.before_after import BeforeAfter


def before_after(before: list[bool], after: list[bool], gain: list[float]) -> BeforeAfter:
    return BeforeAfter((np.array(before), np.array(after)), (0, 0), (0, 0), np.array(gain))


def test_answers_are_kept_gained_and_lost() -> None:
    found = before_after([True, True, False, False], [True, False, True, False], [0] * 4)
    assert found.answers == {"kept": 1, "gained": 1, "lost": 1}


def test_gain_shown_is_median_of_answers_gained() -> None:
    found = before_after(
        [False, False, False, True],
        [True, True, True, True],
        [0.9, 0.5, 0.2, 2.0],
    )
    assert found.shown()["gains"] == 1


def test_highest_gain_shown_without_answers_gained() -> None:
    found = before_after([True, True, False], [True, True, False], [0.1, 0.4, 0.2])
    assert found.shown()["gains"] == 1


def test_typical_question_is_median_of_answered() -> None:
    found = before_after(
        [True, True, False, False, True],
        [True, True, True, False, False],
        [0.3, 0.1, 0.2, 9.0, -3.0],
    )
    # Gains of those with an answer: -3, 0.1, 0.2, 0.3; the third gains its answer.
    assert found.shown() == {"gains": 2, "loses": 4}


def test_a_question_is_shown_once() -> None:
    found = before_after([True], [True], [0.5])
    assert found.shown() == {"gains": 0}


def test_counts_are_of_contexts() -> None:
    outcome = next(iter(calibrated(120, noise=0.25, unanswerable=0.1).outcomes.values()))
    found = BeforeAfter.of(outcome)
    assert found.irrelevant[0] < 5 * 120
    recall = outcome.today.metrics["recall"]
    assert int((np.nan_to_num(recall) > 0).sum()) == int(found.answered[0].sum())
    assert found.answers["kept"] + found.answers["lost"] == int(found.answered[0].sum())
