"""The one table of results: means, paired differences and what they mean."""

from typing import ClassVar

import numpy as np
import pytest

from calibration.answers import ANSWER_METRICS
from calibration.evaluate import DESCRIPTIONS
from calibration.results import (
    COMPARED,
    LOWER_IS_BETTER,
    NEITHER_IS_BETTER,
    Difference,
    differences,
    tabulate,
)
from ctxguard.core.types import FloatArray
from ctxguard.measure.interval import Interval, bootstrap_ratio


def paired(metric: str, these: FloatArray, those: FloatArray, seed: int = 0) -> Difference:
    return differences({metric: these}, {metric: those}, (metric,), seed=seed)[metric]


def metrics(**columns: list[float]) -> dict[str, FloatArray]:
    return {name: np.array(own) for name, own in columns.items()}


class TestDifference:
    def test_interval_over_0_is_noise(self) -> None:
        these = np.array([0.0, 1.0, 0.0, 1.0, 0.5, 1.0])
        those = np.array([1.0, 0.0, 0.0, 1.0, 0.5, 0.5])
        assert paired("recall", these, those).outcome == "within noise"
        assert paired("recall", these, these).outcome == "within noise"

    @pytest.mark.parametrize(
        ("metric", "outcome"), [("recall", "better"), ("harm", "worse"), ("kept", "higher")]
    )
    def test_more_is_as_metric_says(self, metric: str, outcome: str) -> None:
        found = paired(metric, np.array([1.0, 2.0, 3.0]), np.array([0.0, 1.0, 1.0]))
        assert found.outcome == outcome

    def test_undefined_is_no_pair(self) -> None:
        found = paired("recall", np.array([1.0, np.nan, 0.5]), np.array([0.0, 1.0, np.nan]))
        assert (found.value, found.n, found.outcome) == (1.0, 1, "no data")
        assert not found.is_regression()

    @pytest.mark.parametrize(("metric", "change"), [("recall", -0.1), ("harm", 0.1)])
    def test_tolerance_accepts_small_loss(self, metric: str, change: float) -> None:
        found = paired(metric, np.full(9, 0.8 + change), np.full(9, 0.8))
        assert found.is_regression()
        assert found.is_regression(tolerance=0.09)
        assert not found.is_regression(tolerance=0.11)

    def test_alike_systems_rarely_differ(self) -> None:
        random = np.random.default_rng(11)
        apart = 0
        for seed in range(300):
            skill = random.random(60)
            these, those = (random.random((2, 60)) < skill).astype(float)
            apart += paired("recall", these, those, seed).outcome != "within noise"
        assert apart / 300 <= 0.09


class TestTable:
    MEASURED: ClassVar = {
        "today": metrics(recall=[1, 0, 0.5, np.nan], harm=[1, 1, 2, 1.0]),
        "chosen": metrics(recall=[1, 1, 1.0, np.nan], harm=[0, 0, 1, 0.0]),
    }

    def test_policy_has_mean_and_difference(self) -> None:
        table = tabulate(self.MEASURED)
        assert (table.policies, table.metrics) == (("today", "chosen"), ("recall", "harm"))
        assert table.of("today", "recall").difference is None
        recall = table.of("chosen", "recall")
        assert (recall.mean.value, recall.mean.n) == (1.0, 3)
        assert recall.difference.value == pytest.approx(0.5)
        assert recall.difference.n == 3
        assert table.of("chosen", "harm").difference == Difference(-1.0, -1.0, -1.0, 4, "better")
        part = table.only(["chosen"], ["harm", "nothing"])
        assert part.rows == (table.of("chosen", "harm"),)
        other = tabulate(self.MEASURED, ("harm",), reference="chosen")
        assert other.of("today", "harm").difference == Difference(1.0, 1.0, 1.0, 4, "worse")

    def test_lacking_metrics_are_left_out(self) -> None:
        measured = {**self.MEASURED, "bare": metrics(harm=[0.0] * 4)}
        assert tabulate(measured).metrics == ("harm",)

    def test_metrics_have_direction_or_none(self) -> None:
        assert {*DESCRIPTIONS, *ANSWER_METRICS} >= LOWER_IS_BETTER | NEITHER_IS_BETTER
        assert not LOWER_IS_BETTER & NEITHER_IS_BETTER
        assert set(COMPARED) <= set(DESCRIPTIONS)


class TestRatio:
    def test_it_is_of_the_sums(self) -> None:
        ratio = bootstrap_ratio(np.array([0.0, 2.0, 0.0]), np.array([1.0, 4.0, 3.0]))
        assert (ratio.value, ratio.n) == (0.25, 3)
        assert 0.0 <= ratio.bounds[0] < 0.25 < ratio.bounds[1] <= 1.0

    def test_ratio_without_whole_is_undefined(self) -> None:
        assert bootstrap_ratio(np.zeros(2), np.zeros(2)) == Interval.undefined()

    def test_interval_holds_as_it_says(self) -> None:
        random = np.random.default_rng(3)
        held = 0
        for seed in range(200):
            gain, harm = random.exponential(1.0, 80), random.exponential(0.5, 80)
            share = bootstrap_ratio(harm, gain + harm, seed=seed)
            held += share.bounds[0] <= 1 / 3 <= share.bounds[1]
        assert 0.90 <= held / 200 <= 0.98
