"""The draw of passages that people grade, and estimates from it, against a known truth."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.labelling import CASES, Case, judged, month, outcomes, traffic
from ctxguard.monitor.estimation import draw, joint
from ctxguard.monitor.estimation.joint import Population
from ctxguard.monitor.estimation.relevance import (
    FOLDS,
    NO,
    YES,
    JudgedPassages,
    Model,
)

MONTHS = 40
"""An interval of 95% misses the truth in more than 6 of them once in 300 times."""
LEAST_COVERAGE = 1.0 - 6 / MONTHS

BY_NAME = {case.name: case for case in CASES}
NONE = np.zeros(0, np.intp)
PRIOR = Model.fitted(JudgedPassages(NONE, NONE, NONE, NONE, np.zeros(0)), NONE, np.zeros(0))


@pytest.mark.parametrize(
    ("name", "bars"),
    [
        (
            "good judge",
            {"precision": 0.05, "udcg": 0.21, "served_mrr": 0.05, "pooled_recall": 0.12},
        ),
        (
            "20% misunderstood",
            {"precision": 0.06, "udcg": 0.24, "served_mrr": 0.06, "pooled_recall": 0.13},
        ),
        (
            "good judge, scores",
            {"precision": 0.045, "udcg": 0.18, "served_mrr": 0.05, "pooled_recall": 0.115},
        ),
        ("20% misunderstood, scores", {"served_mrr": 0.06, "pooled_recall": 0.125}),
        ("precision .97", {}),
        ("all relevant", {}),
        ("perfect judge", {"precision": 0.02, "served_mrr": 0.03}),
        ("misguided pilot", {"pooled_recall": 0.14}),
    ],
)
def test_intervals_hold_the_truth_and_are_as_narrow_as_promised(
    name: str, bars: dict[str, float]
) -> None:
    months = [month(BY_NAME[name], seed) for seed in range(MONTHS)]
    for metric, found in outcomes(BY_NAME[name], months).items():
        assert (found.coverage or 1.0) >= LEAST_COVERAGE, (metric, found)
        assert found.shown == 1.0 or metric not in bars, (metric, found)
        assert (found.half_width or 0.0) <= bars.get(metric, 1.0), (metric, found)
    assert np.mean([one.grades for one in months]) <= 1.06 * BY_NAME[name].grades
    assert np.mean([one.questions for one in months]) <= 170


def test_sixty_grades_show_what_they_suffice_for() -> None:
    """Of 25 requests: too few runs from the top, and too few dropped passages."""
    case = BY_NAME["60 grades"]
    found = outcomes(case, [month(case, seed) for seed in range(MONTHS)])
    assert {metric for metric, one in found.items() if one.shown > 0.5} == {"precision", "udcg"}
    assert all((one.coverage or 1.0) >= LEAST_COVERAGE for one in found.values())


def test_single_passages_tell_more_than_whole_requests_for_the_same_grades() -> None:
    case = BY_NAME["20% misunderstood"]
    joint_design, whole = (
        outcomes(one, [month(one, seed) for seed in range(25)])
        for one in (case, replace(case, whole=True))
    )
    for metric, share in (("precision", 0.75), ("udcg", 0.60), ("served_mrr", 0.45)):
        ratio = (joint_design[metric].half_width or 1.0) / (whole[metric].half_width or 1.0)
        assert ratio**2 <= share, metric


def population(n: int = 500, case: Case = CASES[0]) -> Population:
    rng = np.random.default_rng(2)
    return judged(case, traffic(case, n, rng), rng)[1]


def test_a_budget_is_spent_and_not_exceeded_by_more_than_a_twentieth() -> None:
    requests, model = population(), PRIOR
    m = draw.worth(requests, model)
    for budget in (20, 100, 400):
        plan = draw.plan(requests, model, m, budget)
        assert plan.expected + plan.n_singles == pytest.approx(budget, rel=0.05)
        assert plan.n_opened == pytest.approx(draw.OPENED_SHARE * budget, abs=1)


def test_where_service_is_poor_whole_lists_are_graded() -> None:
    """A run from the top that costs more than three and a half passages teaches too little."""
    never = np.tile([-3.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], (FOLDS, 1))
    requests, model = population(), Model(never)
    plan = draw.plan(requests, model, draw.worth(requests, model), 400)
    assert (plan.go_on, plan.coin) == (1.0, 1.0)


def test_a_passage_is_drawn_in_proportion_to_what_its_grade_can_change() -> None:
    """A verdict that leaves more open is asked about more often."""
    requests, model = population(), PRIOR
    m = draw.worth(requests, model)
    units = draw.units(requests, m, np.zeros(500, np.bool_), 100)
    assert units["probability"].sum() == pytest.approx(100.0)
    assert (units["rank"] != 1).all()
    taken = np.zeros(len(units["probability"]))
    for start in np.linspace(0.0, 0.999, 200):
        taken[draw.systematic(units["probability"], start)] += 1
    np.testing.assert_allclose(taken / 200, units["probability"], atol=0.01)


def test_grades_of_a_few_move_the_prediction_of_all_alike_verdicts() -> None:
    graded = JudgedPassages(
        verdict=np.repeat([NO, YES], 100),
        group=np.zeros(200, np.intp),
        n_served=np.full(200, 5),
        n_yes=np.full(200, 3),
        score=np.zeros(200),
    )
    relevant = np.concatenate([np.arange(100) % 10 == 0, np.arange(100) % 10 > 3], dtype=np.float64)
    found = Model.fitted(graded, np.arange(200) % FOLDS, relevant).of(graded)
    assert found[:100] == pytest.approx(0.1, abs=0.05)
    assert found[100:] == pytest.approx(0.6, abs=0.05)


def test_a_prediction_without_a_fold_knows_nothing_of_its_grades() -> None:
    rng, ones = np.random.default_rng(4), np.ones(50, np.intp)
    graded = JudgedPassages(ones, 0 * ones, 5 * ones, 3 * ones, rng.normal(size=50))
    fold, relevant = np.arange(50) % FOLDS, (rng.random(50) < 0.5).astype(np.float64)
    other = np.where(fold == 2, 1.0 - relevant, relevant)
    one, two = (Model.fitted(graded, fold, each).of(graded, fold) for each in (relevant, other))
    assert one[fold == 2].tolist() == two[fold == 2].tolist()
    assert one[fold == 1].tolist() != two[fold == 1].tolist()


def test_the_score_of_a_judge_moves_predictions_as_far_as_people_confirm_it() -> None:
    rng, ones = np.random.default_rng(4), np.ones(400, np.intp)
    graded = JudgedPassages(ones, 0 * ones, 5 * ones, 3 * ones, rng.normal(2.0, 2.0, 400))
    fold, by_score = np.arange(400) % FOLDS, rng.random(400) < 1.0 / (1.0 + np.exp(-graded.score))
    two = graded._replace(score=np.array([0.0, 4.0] * 200))
    low, high = Model.fitted(graded, fold, by_score.astype(np.float64)).of(two)[:2]
    assert high - low > 0.3
    by_chance = (rng.random(400) < 0.6).astype(np.float64)
    low, high = Model.fitted(graded, fold, by_chance).of(two)[:2]
    assert abs(high - low) < 0.15


def test_without_spread_the_predictions_have_no_say() -> None:
    """If all that people graded is relevant, that is the estimate, whatever the judge said."""
    cell, request = np.zeros(20, np.intp), np.random.default_rng(1).random((20, 1))
    means, power, residuals = joint.regressed(
        cell, np.array([50.0]), np.ones(20), np.ones((20, 1)), request
    )
    assert (means[0, 0], power[0]) == (1.0, 0.0)
    assert not residuals.any()


def test_served_and_dropped_passages_never_share_a_cell() -> None:
    verdict, group = np.array([0] * 20 + [1]), np.array([0] * 20 + [4])
    cells = joint.joined_cells(verdict, group)
    assert set(cells[:, :3].ravel().tolist()).isdisjoint(cells[:, 3:].ravel().tolist())
    assert (joint.joined_cells(verdict[:20], group[:20])[:, 3:] == -1).all()
