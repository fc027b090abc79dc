"""What judged questions say of the first k: by hand, and intervals with the coverage they claim."""

import numpy as np
import pytest

from calibration.judged_table import KS, LEAST_GRADED, JudgedTable, judged_table
from ctxguard.core.interval import Interval
from ctxguard.core.metrics import DEFAULT_UTILITIES

Questions = dict[str, list[int | None]]


def table(verdicts: Questions, people: Questions | None = None) -> JudgedTable:
    return judged_table(
        verdicts, people or {}, DEFAULT_UTILITIES, top_grade=3, top_grade_of_people=3
    )


def ends(found: Interval) -> tuple[float, float]:
    assert found.bounds is not None
    return found.bounds


def test_the_judges_own_view_is_the_mean_of_its_verdicts_and_has_no_interval() -> None:
    found = table({"a": [0, 3, None, 1], "b": [0, 0]})
    assert [row.k for row in found.rows] == list(KS)
    first, third, *_ = found.rows
    assert first.precision.value == 0.0
    assert third.precision.value == pytest.approx((1 / 2 + 0) / 2)
    assert (third.mrr.value, third.mrr.n) == (1 / 2, 1)
    assert third.recall.value == 1 / 2
    assert found.rows[-1].recall.value == 1.0
    discounts = 1 / np.log2(np.arange(2, 5))
    of_a = np.array([-0.5, 1.0, DEFAULT_UTILITIES.unjudged]) @ discounts
    of_b = np.array([-0.5, -0.5]) @ discounts[:2]
    assert third.udcg.value == pytest.approx((of_a + of_b) / 2)
    assert {each.bounds for row in found.rows for each in (row.precision, row.udcg)} == {None}
    assert found.in_words.startswith("the judge's own view, uncorrected")


def test_a_few_graded_questions_correct_nothing() -> None:
    verdicts: Questions = {f"q{row}": [row % 2 * 3, 0] for row in range(30)}
    few = {f"q{row}": verdicts[f"q{row}"] for row in range(LEAST_GRADED - 1)}
    assert not table(verdicts, few).is_corrected
    enough = {f"q{row}": verdicts[f"q{row}"] for row in range(LEAST_GRADED)}
    found = table(verdicts, enough)
    assert found.is_corrected
    assert found.rows[0].precision.bounds is not None
    assert f"corrected by people's grades of {LEAST_GRADED}" in found.in_words


def test_where_all_agree_an_interval_leaves_room_for_what_was_not_graded() -> None:
    verdicts: Questions = {f"q{row}": [3] for row in range(30)}
    graded = {name: verdicts[name] for name in list(verdicts)[:20]}
    lower, upper = ends(table(verdicts, graded).rows[0].precision)
    assert lower < 0.9
    assert upper == 1.0


def test_without_a_relevant_passage_mrr_and_recall_are_undefined() -> None:
    verdicts: Questions = {f"q{row}": [0, 0] for row in range(20)}
    for found in (table(verdicts), table(verdicts, verdicts)):
        assert found.rows[0].mrr.value is found.rows[0].recall.value is None
        assert found.rows[0].precision.value == 0.0


@pytest.mark.parametrize(("sensitivity", "specificity"), [(0.87, 0.56), (0.85, 0.21)])
def test_intervals_hold_the_truth_with_a_judge_that_says_yes_too_often(
    sensitivity: float, specificity: float
) -> None:
    """The judge's own precision is off by far; 20 graded questions of 200 mend it."""
    rng = np.random.default_rng(5)
    held, above = dict.fromkeys(("precision", "mrr", "udcg", "recall"), 0), 0.0

    def drawn(n: int) -> tuple[Questions, Questions]:
        hardness = rng.beta(1.0, 2.0, size=(n, 1))
        relevant = rng.random((n, 6)) < hardness / np.sqrt(np.arange(1, 7))
        yes = rng.random(relevant.shape) < np.where(relevant, sensitivity, 1 - specificity)
        said, true = (
            {f"q{row}": (3 * own).tolist() for row, own in enumerate(each)}
            for each in (yes, relevant)
        )
        return said, true

    truth = table(drawn(4_000)[1]).rows[1]
    for _ in range(60):
        said, true = drawn(60)
        graded = {name: true[name] for name in list(true)[:20]}
        found = table(said, graded).rows[1]
        above += (table(said).rows[1].precision.value or 0.0) / 60
        for name in held:
            lower, upper = ends(getattr(found, name))
            held[name] += lower <= getattr(truth, name).value <= upper
    assert above > (truth.precision.value or 0.0) + 0.2
    # Of 60 intervals of 95%, fewer than 52 hold the truth once in 500 times.
    assert min(held.values()) >= 52, held
