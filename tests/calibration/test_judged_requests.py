"""What judged requests say: by hand, and intervals with the coverage that they claim."""

from dataclasses import replace

import numpy as np
import pytest
from simulated_pools import labelled, ranking_of

from benchmarks.judged_lists import rows_of
from calibration.fit import fold_numbers
from calibration.judged_requests import (
    KS,
    JudgedRequests,
    decided,
    decided_by_others,
    fitted_policy,
    table_by_k,
)
from calibration.pools import Pools
from calibration.settings import Settings
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.scores import discounts
from ctxguard.core.types import FloatArray
from ctxguard.errors import CalibrationError
from ctxguard.measure.interval import Interval
from ctxguard.measure.rows import UNGRADED, IntArray
from ctxguard.measure.worth import READERS, STRICT

SERVED = 3
GAIN, COST = READERS.relevant, READERS.irrelevant


def judged(
    scores: FloatArray,
    yes: FloatArray,
    truth: FloatArray | None = None,
    chance: float = 0.0,
    seed: int = 0,
) -> JudgedRequests:
    """Judge all candidates, shape (n, k) each; people grade each by a coin."""
    n, k = yes.shape
    pools = labelled([ranking_of(row.tolist()) for row in scores], [{"p0": 1}] * n, depth=k)
    rows, stands_for = rows_of(yes, SERVED, READERS), np.zeros(n)
    if truth is not None:
        stands_for[:] = 1.0
        taken = np.random.default_rng(seed).random(n * k) < chance
        rows.passages["people_grade"] = np.where(taken, truth.ravel(), UNGRADED)
        rows.passages["people_worth"] = np.where(truth.ravel() > 0, GAIN, COST)
        rows.passages["asked_probability"] = np.where(taken, chance, 0.0)
    return JudgedRequests(rows, fold_numbers(pools.query_ids), stands_for, pools)


def ranked(rng: np.random.Generator, n: int) -> tuple[FloatArray, FloatArray]:
    """Scores of ten candidates of each question, best first, and which are relevant."""
    hardness = rng.beta(1.0, 1.5, size=(n, 1))
    truth = (rng.random((n, 10)) < hardness) * 1.0
    scores = np.exp(rng.normal(size=truth.shape) + truth)
    order = np.argsort(-scores, axis=1)
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(truth, order, axis=1)


def drawn(
    rng: np.random.Generator, n: int, chance: float, judge: tuple[float, float] = (0.87, 0.56)
) -> tuple[JudgedRequests, FloatArray]:
    """Questions of differing hardness, ten candidates each; scores tell which are relevant."""
    scores, truth = ranked(rng, n)
    sensitivity, specificity = judge
    yes = rng.random(truth.shape) < np.where(truth > 0, sensitivity, 1.0 - specificity)
    return judged(scores, yes * 1.0, truth, chance, int(rng.integers(2**31))), truth


def first_k(pools: Pools, k: int) -> IntArray:
    return decided(pools, RatioPolicy(k=k))


def udcg(ranks: IntArray, truth: FloatArray) -> float:
    worth, depth = np.where(truth > 0, GAIN, COST), truth.shape[1]
    by_rank = np.concatenate([[0.0], discounts(depth)])
    return float((by_rank[ranks[:, :depth]] * worth).sum(axis=1).mean())


def holds(found: Interval, truth: float) -> bool:
    return found.bounds[0] <= truth <= found.bounds[1]


def test_judges_view_has_no_interval() -> None:
    yes = np.array([[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    own = judged(np.tile([4.0, 3.0, 2.0, 1.0], (2, 1)), yes)
    table = table_by_k(own)
    assert tuple(table) == KS
    first, third = table[1], table[3]
    assert first["precision"].value == 0.0
    assert third["precision"].value == pytest.approx((2 / 3 + 0) / 2)
    assert third["mrr"].value == pytest.approx((1 / 2 + 0) / 2)
    assert (first["recall"].value, third["recall"].value) == (0.0, 1.0)
    discounts = 1 / np.log2(np.arange(2, 5))
    worth = np.where(yes[:, :3] > 0, GAIN, COST) @ discounts
    assert third["udcg"].value == pytest.approx(worth.mean())
    assert {each.bounds for row in table.values() for each in row.values()} == {None}
    assert own.in_words.startswith("the judge's own view, uncorrected")


def test_unjudgeable_candidate_is_unjudged() -> None:
    own = judged(np.tile([2.0, 1.0], (2, 1)), np.array([[1.0, np.nan], [1.0, np.nan]]))
    third = table_by_k(own)[3]
    assert third["precision"].value == 1.0
    assert third["udcg"].value == pytest.approx(GAIN + READERS.unjudged / np.log2(3))
    assert third["mrr"].value is None


def test_few_grades_correct_nothing() -> None:
    rng = np.random.default_rng(0)
    few, _ = drawn(rng, 12, 0.3)
    assert not few.is_corrected
    many, _ = drawn(rng, 60, 0.3)
    assert many.is_corrected
    assert "corrected with" in many.in_words
    assert many.lacking == 0
    assert all(row["precision"].bounds is not None for row in table_by_k(many).values())


def test_recall_takes_dropped_grades() -> None:
    """Without grades of dropped passages there is precision and UDCG, but no recall."""
    many, _ = drawn(np.random.default_rng(0), 60, 0.5)
    passages = many.rows.passages.copy()
    passages["asked_probability"][(passages["rank"] == 0) & (many.rows.request > 4)] = 0.0
    few = replace(many, rows=many.rows._replace(passages=passages))
    third = table_by_k(few)[3]
    assert few.is_corrected
    assert third["precision"].bounds is not None
    assert third["recall"].value is None
    assert few.lacking > 0 == many.lacking


def test_perfect_ranking_is_kept_worthwhile() -> None:
    rng = np.random.default_rng(1)
    own, truth = drawn(rng, 120, 0.4, judge=(1.0, 1.0))
    policy = fitted_policy(own, Settings(utilities=STRICT))
    kept = decided(own.pools, policy)[:, :10] > 0
    assert (kept * truth).sum() / kept.sum() > truth.mean() + 0.1


def test_without_scores_there_is_no_policy() -> None:
    own = judged(np.tile([2.0, 1.0], (20, 1)), np.ones((20, 2)))
    nowhere = replace(own)
    nowhere.__dict__["features"] = np.full((40, 1), np.nan)
    with pytest.raises(CalibrationError, match="no judged candidate has the scores"):
        fitted_policy(nowhere, Settings())


@pytest.mark.parametrize("judge", [(0.87, 0.56), (0.85, 0.21)])
def test_intervals_survive_yes_sayers(judge: tuple[float, float]) -> None:
    """The gain of serving the first 8 in place of the first 3, of all questions like these."""
    rng = np.random.default_rng(2)
    _, truth = ranked(rng, 20_000)
    one = labelled([ranking_of([1.0] * truth.shape[1])], [{"p0": 1}], depth=truth.shape[1])
    # Only their shape and length count.
    pools, n = one.rows(np.zeros(len(truth), np.int64)), 30
    true_gain = udcg(first_k(pools, 8), truth) - udcg(first_k(pools, SERVED), truth)
    true_precision = float(truth[:, :SERVED].mean())
    held = dict.fromkeys(("gain", "precision", "recall"), 0)
    above = 0.0
    true_recall = float(truth[:, :SERVED].sum() / truth.sum())
    for _ in range(n):
        own, _ = drawn(rng, 60, 0.35, judge)
        apart = own.gain(first_k(own.pools, 8), first_k(own.pools, SERVED))
        third = table_by_k(own)[3]
        held["gain"] += holds(apart["udcg"], true_gain)
        held["precision"] += holds(third["precision"], true_precision)
        held["recall"] += holds(third["recall"], true_recall)
        passages = own.rows.passages.copy()
        passages["asked_probability"] = 0.0
        bare = replace(own, rows=own.rows._replace(passages=passages))
        above += (table_by_k(bare)[3]["precision"].value or 0.0) / n
    assert above > true_precision + 0.1, "the judge's own view is off"
    # Of 30 intervals of 95%, fewer than 25 hold the truth once in 500 times.
    assert min(held.values()) >= 25, held


def test_uninvolved_policys_gain_is_real() -> None:
    rng = np.random.default_rng(3)
    n, held = 8, 0
    for _ in range(n):
        own, truth = drawn(rng, 60, 0.4)
        new, old = decided_by_others(own, Settings()), first_k(own.pools, SERVED)
        found = own.gain(new, old)
        held += holds(found["udcg"], udcg(new, truth) - udcg(old, truth))
    assert held >= n - 1
