"""A whole grid in one pass equals a naive loop over ``decide`` and the metrics."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from simulated_pools import cases, labelled, part_of, ranking_of, served_today

from calibration.evaluate import contexts, per_query
from calibration.fit import predicted
from calibration.grid import (
    Grid,
    GridIndex,
    ratio_grid,
    relative_values,
    thresholds_reached,
    utility_grid,
)
from calibration.pools import LabelledPools
from ctxguard.core.passages import weight_of
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.scores import relative_scores, within_domain
from ctxguard.core.types import FloatArray, ScoreKind
from ctxguard.measure.worth import READERS, STRICT


def naive(case: LabelledPools, grid: Grid, index: GridIndex) -> dict[str, FloatArray]:
    """The figures of every query, one decision at a time."""
    return per_query(case, grid.policy(index))


def with_lengths(case: LabelledPools, seed: int) -> LabelledPools:
    """The same with tokens of every candidate, many of them alike."""
    scores = case.scores
    tokens = np.random.default_rng(seed).choice([0.0, 60.0, 100.0, 433.0], scores.shape)
    return replace(case, tokens=np.where(np.isnan(scores), np.nan, tokens))


def assert_equals_the_naive_loop(case: LabelledPools, grid: Grid) -> None:
    indices = [*np.ndindex(len(grid.ks), grid.thresholds.size)]
    for column, index in enumerate(indices):
        expected = naive(case, grid, index)
        both = zip(("udcg", "recall_loss"), grid.at(indices), grid.means, strict=True)
        for name, values, means in both:
            assert values[:, column] == pytest.approx(expected[name], abs=1e-9, nan_ok=True)
            defined = expected[name][~np.isnan(expected[name])]
            mean = defined.mean() if defined.size else np.nan
            assert means[index] == pytest.approx(mean, abs=1e-9, nan_ok=True)


class TestGridEqualsNaiveLoop:
    @settings(max_examples=25, deadline=None)
    @given(cases(), st.sampled_from([0.5, 1.0, 3.0]), st.integers(0, 3))
    def test_ratio_policies(self, case: LabelledPools, temperature: float, min_keep: int) -> None:
        # Not hundredths: there a power rounds to either side of the threshold.
        ratios = np.array([0.0, 0.1301, 0.4999, 0.7003, 0.9501])
        grid = ratio_grid(
            case, temperature=temperature, ks=[1, 2, 3, 5, 8], ratios=ratios, min_keep=min_keep
        )
        assert_equals_the_naive_loop(case, grid)

    @settings(max_examples=25, deadline=None)
    @given(cases(kinds=[ScoreKind.RATIO], strangers=False))
    def test_ratio_is_exact_at_threshold(self, case: LabelledPools) -> None:
        ratios = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
        assert_equals_the_naive_loop(case, ratio_grid(case, temperature=1.0, ratios=ratios))

    @settings(max_examples=40, deadline=None)
    @given(
        cases(legs=True, rules=(READERS, STRICT)),
        st.integers(0, 1_000),
        st.booleans(),
        st.lists(st.floats(-2.0, 2.0), min_size=5, max_size=5),
        st.integers(0, 3),
    )
    def test_expected_utility_policies(
        self, case: LabelledPools, seed: int, weighs: bool, coefficients: list[float], min_keep: int
    ) -> None:
        """Figures, and for every size the passages that are served, in their order."""
        case = with_lengths(case, seed)
        model = RelevanceModel(("dense",), tuple(coefficients), (0.0,) * 5, (1.0,) * 5, -0.3)
        thresholds = np.array([0.0, 0.1, 0.3, 0.5, 0.8])
        values = predicted(model, case)
        weighed = values * weight_of(np.nan_to_num(case.tokens)) if weighs else values
        assume(not (np.abs(weighed[..., None] - thresholds) < 1e-6).any())
        ks = [*range(1, values.shape[1] + 1)]
        asked: dict[str, Any] = {"ks": ks, "thresholds": thresholds, "min_keep": min_keep}
        grid = utility_grid(case, values, model, per_token=weighs, **asked)
        assert_equals_the_naive_loop(case, grid)
        for index in np.ndindex(len(ks), thresholds.size):
            policy = grid.policy(index)
            assert policy.per_token == weighs
            order, own = grid.contexts(index)
            expected, kept = contexts(case, policy)
            assert (own == kept).all()
            assert (order[kept] == expected[kept]).all()

    def test_without_tokens_nothing_is_weighed(self) -> None:
        case = labelled([ranking_of([0.9, 0.5])], [{"p0": 1}], depth=2)
        assert case.tokens is None
        model = RelevanceModel(("ranking",), (1.0,) * 5, (0.0,) * 5, (1.0,) * 5, 0.0)
        assert not utility_grid(case, np.array([[0.9, 0.5]]), model).policy((0, 0)).per_token

    @settings(max_examples=30, deadline=None)
    @given(cases(), st.data())
    def test_part_of_the_queries(self, case: LabelledPools, data: st.DataObject) -> None:
        rows = np.array(data.draw(st.lists(st.integers(0, len(case) - 1), min_size=1)))
        grid = ratio_grid(case, ratios=np.array([0.0, 0.4999]))
        part = part_of(grid, rows)
        index = (1, grid.thresholds.size - 1)
        expected = naive(case, grid, index)["udcg"][rows].mean()
        assert part.means[0][index] == pytest.approx(expected, abs=1e-9)


class TestBeyondToday:
    @settings(max_examples=30, deadline=None)
    @given(cases())
    def test_gain_by_labels_is_difference(self, case: LabelledPools) -> None:
        grid = ratio_grid(case, ks=[1, 3, 8], ratios=np.array([0.0, 0.4999]))
        indices = [(0, 0), (1, grid.thresholds.size - 1), (2, 0)]
        found = np.take_along_axis(grid.beyond_today, grid.kept(indices)[None], axis=2)
        baseline = (case.relevant & case.in_baseline).sum(axis=1)
        for column, index in enumerate(indices):
            own = naive(case, grid, index)
            recall = np.nan_to_num(own["recall"] - baseline / np.maximum(case.n_relevant, 1))
            assert found[0, :, column] == pytest.approx(recall, abs=1e-9)
            gain = own["udcg"] - served_today(case)
            assert found[1, :, column] == pytest.approx(gain, abs=1e-9)

    def test_half_by_probability_varies_less(self) -> None:
        chances = np.linspace(0.9, 0.05, 12)
        random = np.random.default_rng(0)
        drawn = random.random((2_000, 12)) < chances
        ranking = ranking_of(chances.tolist(), kind=ScoreKind.PROBABILITY)
        pools = labelled(
            [ranking] * len(drawn),
            [{f"p{i}": 1 for i in np.flatnonzero(row)} for row in drawn],
            depth=12,
            baseline_k=5,
        )
        model = RelevanceModel(("ranking",), (1.0,) * 5, (0.0,) * 5, (1.0,) * 5, 0.0)
        both = utility_grid(pools, np.tile(chances, (len(drawn), 1)), model)
        by_labels = replace(both, pools=pools)
        for n_kept in (2, 8):
            half, own = (grid.beyond_today[:, :, n_kept] for grid in (both, by_labels))
            assert half.mean(axis=1) == pytest.approx(own.mean(axis=1), abs=0.02)
            assert (half.std(axis=1)[:2] < 0.75 * own.std(axis=1)[:2]).all()
            # What a context costs needs no label.
            assert half[2].tolist() == own[2].tolist() == [n_kept - 5.0] * len(drawn)

    def test_today_counts_in_its_order(self) -> None:
        pools = labelled([ranking_of([0.9, 0.5, 0.1])], [{"p2": 1}], depth=3, baseline_k=2)
        model = RelevanceModel(("ranking",), (1.0,) * 5, (0.0,) * 5, (1.0,) * 5, 0.0)
        grid = utility_grid(pools, np.array([[0.0, 0.0, 1.0]]), model)
        recall, udcg, size = grid.beyond_today
        today = served_today(pools)[0]
        assert recall.tolist() == [[0.0, 1.0, 1.0, 1.0]]
        assert udcg[0, :2] == pytest.approx([-today, 1.0 - today])
        assert size.tolist() == [[-2.0, -1.0, 0.0, 1.0]]


@given(cases(), st.sampled_from([0.25, 1.0, 7.0]))
def test_relative_values_equal_request_paths(pools: LabelledPools, temperature: float) -> None:
    values, outside = relative_values(pools, temperature)
    for row, ranking in enumerate(pools.rankings()):
        scores = [float(score or 0.0) for score in ranking.scores]
        assert np.isnan(values[row, len(scores) :]).all()
        if not scores:
            continue
        compares = pools.kind is not ScoreKind.RANK
        inside = compares and within_domain(pools.kind, scores[-1], scores[0])
        assert outside[row] == (not inside)
        if inside:
            expected = relative_scores(pools.kind, scores, temperature)
            assert values[row, : len(scores)] == pytest.approx(expected, abs=1e-12)
        else:
            assert (values[row, : len(scores)] == 1.0).all()


class TestKept:
    def grid(self, values: list[list[float]], ks: list[int], **asked: Any) -> Grid:
        given = [ranking_of(row) for row in values]
        pools = labelled(given, [{"p0": 1}] * len(values), depth=len(values[0]))
        thresholds = np.array([0.0, 0.2, 0.7, 0.9])
        reached = thresholds_reached(np.array(values), thresholds, **asked)
        order = np.tile(np.arange(reached.shape[1]), (len(values), 1))
        return Grid(pools, ks, thresholds, reached, RatioPolicy, order)

    def test_kept_by_thresholds_or_min_keep(self) -> None:
        one = self.grid([[1.0, 0.7, 0.2, np.nan]], [1, 2, 3])
        assert one.reached.tolist() == [[4, 3, 2, -1]]
        assert one.kept([(2, 0), (2, 1), (2, 2), (2, 3), (0, 0)]).tolist() == [[3, 3, 2, 1, 1]]
        two = self.grid([[1.0, 0.7, 0.2, np.nan]], [1, 2, 3], min_keep=2)
        assert two.kept([(2, 3), (0, 3)]).tolist() == [[2, 1]]

    def test_without_thresholds_only_k(self) -> None:
        always = np.array([True, False])
        grid = self.grid([[0.1, 0.1], [0.1, 0.1]], [2], min_keep=0, always=always)
        assert grid.kept([(0, 1)]).tolist() == [[2], [0]]

    @pytest.mark.parametrize("ks", [[1, 2], [50]])
    def test_k_beyond_depth_keeps_all(self, ks: list[int]) -> None:
        assert self.grid([[1.0, 1.0]], ks).kept([(len(ks) - 1, 0)]) == 2
