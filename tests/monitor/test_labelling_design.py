"""What a month's grades give, against a known truth; and how they teach the model."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.labelling import CASES, Case, month, outcomes
from ctxguard.measure.corrected import FOLDS, Model
from ctxguard.measure.rows import NO, PASSAGE, REQUEST, YES, Rows

SEEDS = range(100, 140)
LEAST_COVERAGE = 1.0 - 6 / len(SEEDS)
"""An interval of 95% misses the truth in more than 6 of 40 months once in 300 times."""

BY_NAME = {case.name: case for case in (*CASES, Case("no judge", sensitivity=0.5, specificity=0.5))}


@pytest.mark.parametrize(
    ("name", "bars"),
    [
        (
            "good judge",
            {"precision": 0.05, "udcg": 0.21, "served_mrr": 0.05, "pooled_recall": 0.12},
        ),
        (
            "20% misunderstood",
            {"precision": 0.065, "udcg": 0.26, "served_mrr": 0.06, "pooled_recall": 0.15},
        ),
        ("good judge, scores", {"precision": 0.05, "udcg": 0.2, "served_mrr": 0.05}),
        ("precision .97", {}),
        ("all relevant", {}),
        ("precision .15", {"grades": 1.2 * 400}),
        ("perfect judge", {"precision": 0.02, "served_mrr": 0.03}),
        ("no judge", {}),
    ],
)
def test_intervals_are_true_narrow_unbiased(name: str, bars: dict[str, float]) -> None:
    """Intervals hold the truth and are as narrow as promised without bias."""
    months = [month(BY_NAME[name], seed) for seed in SEEDS]
    for metric, found in outcomes(BY_NAME[name], months).items():
        if found.shown > 0.5:
            assert found.coverage >= LEAST_COVERAGE, (metric, found)
        assert found.shown == 1.0 or metric not in bars, (metric, found)
        assert (found.half_width or 0.0) <= bars.get(metric, 1.0), (metric, found)
        if found.bias is not None and found.shown == 1.0:
            assert abs(found.bias) <= 4.0 * found.deviation / len(SEEDS) ** 0.5 + 1e-9, metric
    most = bars.get("grades", 1.06 * BY_NAME[name].grades)
    assert np.mean([one.grades for one in months]) <= most


def test_hundred_grades_show_their_worth() -> None:
    """Of 28 requests: too few runs from the top, and too few dropped passages."""
    case = BY_NAME["100 grades"]
    found = outcomes(case, [month(case, seed) for seed in SEEDS])
    assert {metric for metric, one in found.items() if one.shown == 1.0} == {"precision", "udcg"}
    assert min(found[metric].coverage for metric in ("precision", "udcg")) >= LEAST_COVERAGE


def test_many_parts_beat_few_wholes() -> None:
    """Parts of many requests tell more than a few whole ones for the same grades."""
    case = BY_NAME["20% misunderstood"]
    parts, whole = (
        outcomes(one, [month(one, seed) for seed in SEEDS[:25]])
        for one in (case, replace(case, whole=True))
    )
    for metric, share in (("precision", 0.75), ("udcg", 0.75), ("served_mrr", 0.5)):
        ratio = (parts[metric].half_width or 1.0) / (whole[metric].half_width or 1.0)
        assert ratio**2 <= share, metric


def graded(verdicts: np.ndarray, relevant: np.ndarray, scores: np.ndarray | None = None) -> Rows:
    """Requests of one graded passage each, the first of five that were served."""
    n = len(verdicts)
    requests, passages = np.zeros(n, REQUEST), np.zeros(n, PASSAGE)
    requests["n_passages"], requests["n_served"], requests["run_probability"] = 1, 5, 1.0
    passages["rank"] = passages["asked_probability"] = 1
    passages["judge_grade"], passages["people_grade"] = verdicts, relevant
    passages["score"] = 0.0 if scores is None else scores
    passages["people_worth"] = np.where(relevant, 1.0, -0.5)
    return Rows.of(requests, passages)


def fold(rows: Rows) -> np.ndarray:
    return np.arange(len(rows.requests)) % FOLDS


def test_few_grades_move_alike_predictions() -> None:
    relevant = np.concatenate([np.arange(100) % 10 == 0, np.arange(100) % 10 > 3])
    rows = graded(np.repeat([NO, YES], 100), relevant)
    found = Model.fitted(rows, fold(rows)).of(rows)
    assert found[:100] == pytest.approx(0.1, abs=0.05)
    assert found[100:] == pytest.approx(0.6, abs=0.05)


def test_scores_move_predictions_when_confirmed() -> None:
    """The score of a judge moves predictions as far as people confirm it."""
    rng, yes = np.random.default_rng(4), np.full(400, YES)
    scores = rng.normal(2.0, 2.0, 400)
    by_score, by_chance = rng.random(400) < 1.0 / (1.0 + np.exp(-scores)), rng.random(400) < 0.6
    two = graded(np.full(2, YES), np.zeros(2), np.array([0.0, 4.0]))
    for relevant, least, most in ((by_score, 0.3, 1.0), (by_chance, -0.15, 0.15)):
        rows = graded(yes, relevant, scores)
        low, high = Model.fitted(rows, fold(rows)).of(two)
        assert least < high - low < most


def test_unasked_passages_teach_nothing() -> None:
    rows = graded(np.full(100, YES), np.zeros(100))
    rows.passages["asked_probability"] = 0.0
    taught, untaught = (
        Model.fitted(each, fold(each)) for each in (rows, rows.take(fold(rows) > 9))
    )
    assert taught.of(rows).tolist() == untaught.of(rows).tolist()
