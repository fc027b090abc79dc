"""Losses over a whole grid: one pass equals a naive loop over ``decide`` and the metrics."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from simulated_pools import labelled, ranking_of

from calibration.fit import pool_signals, probabilities
from calibration.labelling.datasets import Dataset, Query
from calibration.losses import (
    Labels,
    Survival,
    discounts,
    grid_means,
    label,
    losses_at,
    relative_values,
)
from calibration.replay import Pools
from calibration.select import Grid, ratio_grid, udcg_at, utility_grid
from ctxguard.errors import CalibrationError
from ctxguard.metrics import Negative, Utilities, strict_utilities, udcg
from ctxguard.policy import decide
from ctxguard.scores import is_relative, relative_score, within_domain
from ctxguard.signals import RelevanceModel
from ctxguard.types import Leg, ScoreKind

RANGES = {
    ScoreKind.RATIO: (0.0, 16.0),
    ScoreKind.COSINE: (-1.0, 1.0),
    ScoreKind.INNER_PRODUCT: (-16.0, 16.0),
    ScoreKind.LOGIT: (-8.0, 8.0),
    ScoreKind.DISTANCE: (-16.0, 0.0),
    ScoreKind.PROBABILITY: (0.0, 1.0),
    ScoreKind.RANK: (0.0, 1.0),
}
DEPTH = 8


class Case(NamedTuple):
    pools: Pools
    labels: Labels


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    kinds: Sequence[ScoreKind] = tuple(RANGES),
    legs: bool = False,
    strangers: bool = True,
) -> Case:
    """Random pools with many ties, labelled at random; some outside their kind's domain."""
    kind = draw(st.sampled_from(kinds))
    low, high = RANGES[kind]
    coarse = st.integers(0, 4).map(lambda step: low + (high - low) * step / 4)
    score = st.one_of(coarse, st.floats(low, high))
    if strangers:
        score = st.one_of(score, score, st.just(-40.0))
    rankings, qrels, distractors = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        scores = draw(st.lists(score, max_size=DEPTH))
        own = {
            "dense": Leg(np.array([draw(st.integers(-4, 4)) / 4 for _ in scores]), ScoreKind.COSINE)
        }
        rankings.append(ranking_of(scores, kind=kind, legs=own if legs else None))
        ids = st.sampled_from([f"p{i}" for i in range(DEPTH + 2)])
        qrels.append(draw(st.dictionaries(ids, st.integers(0, 2), max_size=5)))
        misleading = st.sampled_from(["hard_negative", "distractor"])
        distractors.append(draw(st.dictionaries(ids, misleading, max_size=2)))
    qrels[0]["p0"] = 2  # the labels hold a relevant passage, retrieved or not
    baseline_k = draw(st.sampled_from([None, 1, 3]))
    return Case(
        *labelled(rankings, qrels, depth=DEPTH, distractors=distractors, baseline_k=baseline_k)
    )


def naive(case: Case, grid: Grid, cell: tuple[int, int]) -> dict[str, list[float]]:
    """Strict UDCG, harm, recall loss and kept count of every query, one decision at a time."""
    pools, labels = case
    policy = grid.policy(cell)
    found: dict[str, list[float]] = {name: [] for name in ("udcg_strict", "harm", "loss", "kept")}
    for row, ranking in enumerate(pools.rankings()):
        kept = list(decide(ranking, policy).kept)
        grades = [int(labels.grades[row, position]) for position in kept]
        worth = udcg(
            strict_utilities(
                grades,
                top_grade=labels.top_grade,
                negatives=[labels.negatives[row][position] for position in kept],
            )
        )
        counted = [p for p in range(len(ranking)) if labels.in_baseline[row, p]]
        relevant = [p for p in counted if labels.grades[row, p] > 0]
        found["udcg_strict"].append(worth.value)
        found["harm"].append(worth.harm)
        found["kept"].append(float(len(kept)))
        found["loss"].append(
            1.0 - len(set(relevant) & set(kept)) / len(relevant) if relevant else math.nan
        )
    return found


def assert_equals_the_naive_loop(case: Case, grid: Grid) -> None:
    n_k, n_t = grid.survival.ks.size, grid.survival.thresholds.size
    cells = [(row_k, row_t) for row_k in range(n_k) for row_t in range(n_t)]
    means = grid_means(grid.labels, grid.survival)
    losses, harms = losses_at(grid.labels, grid.survival, cells)
    utility = udcg_at(grid, cells)
    for column, cell in enumerate(cells):
        expected = naive(case, grid, cell)
        assert means["udcg_strict"][cell] == pytest.approx(
            np.mean(expected["udcg_strict"]), abs=1e-9
        )
        assert means["harm"][cell] == pytest.approx(np.mean(expected["harm"]), abs=1e-9)
        assert means["kept"][cell] == pytest.approx(np.mean(expected["kept"]), abs=1e-9)
        defined = [loss for loss in expected["loss"] if not math.isnan(loss)]
        mean_loss = np.mean(defined) if defined else math.nan
        assert means["recall_loss"][cell] == pytest.approx(mean_loss, abs=1e-9, nan_ok=True)
        for found, name in ((losses, "loss"), (harms, "harm"), (utility, "udcg_strict")):
            assert found[:, column] == pytest.approx(expected[name], abs=1e-9, nan_ok=True)


class TestGridEqualsNaiveLoop:
    @settings(max_examples=60, deadline=None)
    @given(cases(), st.sampled_from([0.5, 1.0, 3.0]), st.integers(0, 3))
    def test_ratio_policies(self, case: Case, temperature: float, min_keep: int) -> None:
        # Not hundredths: there a power rounds to either side of the threshold.
        ratios = np.array([0.0, 0.1301, 0.4999, 0.7003, 0.9501])
        grid = ratio_grid(
            *case, temperature=temperature, ks=[1, 2, 3, 5, 8], ratios=ratios, min_keep=min_keep
        )
        assert_equals_the_naive_loop(case, grid)

    @settings(max_examples=60, deadline=None)
    @given(cases(kinds=[ScoreKind.RATIO], strangers=False))
    def test_at_temperature_one_a_ratio_scale_is_exact_even_at_the_threshold(
        self, case: Case
    ) -> None:
        ratios = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
        assert_equals_the_naive_loop(case, ratio_grid(*case, temperature=1.0, ratios=ratios))

    @settings(max_examples=60, deadline=None)
    @given(
        cases(legs=True),
        st.lists(st.floats(-2.0, 2.0), min_size=5, max_size=5),
        st.sampled_from([0.5, 1.0, 2.0]),
        st.integers(0, 3),
    )
    def test_expected_utility_policies(
        self, case: Case, coefficients: list[float], gain: float, min_keep: int
    ) -> None:
        model = RelevanceModel(("dense",), tuple(coefficients), (0.0,) * 5, (1.0,) * 5, -0.3)
        thresholds = np.array([0.0, 0.1, 0.3, 0.5, 0.8])
        values = probabilities(model, case.pools, pool_signals(case.pools))
        assume(not (np.abs(values[..., None] - thresholds) < 1e-6).any())
        grid = utility_grid(
            *case,
            values,
            model,
            gain=gain,
            ks=[1, 2, 3, 8],
            thresholds=thresholds,
            min_keep=min_keep,
        )
        assert_equals_the_naive_loop(case, grid)

    @settings(max_examples=30, deadline=None)
    @given(cases(), st.data())
    def test_part_of_the_queries(self, case: Case, data: st.DataObject) -> None:
        rows = np.array(data.draw(st.lists(st.integers(0, len(case.pools) - 1), min_size=1)))
        grid = ratio_grid(*case, ratios=np.array([0.0, 0.4999]))
        part = grid.rows(rows)
        cell = (1, grid.survival.thresholds.size - 1)
        expected = naive(case, grid, cell)
        assert part.means.udcg_strict[cell] == pytest.approx(
            np.mean(np.array(expected["udcg_strict"])[rows]), abs=1e-9
        )


class TestRelativeValues:
    @given(cases(), st.sampled_from([0.25, 1.0, 7.0]))
    def test_they_are_the_relative_scores_of_the_request_path(
        self, case: Case, temperature: float
    ) -> None:
        pools = case.pools
        values, outside = relative_values(pools, temperature)
        for row, ranking in enumerate(pools.rankings()):
            scores = [float(score or 0.0) for score in ranking.scores]
            assert np.isnan(values[row, len(scores) :]).all()
            if not scores:
                continue
            inside = is_relative(pools.kind) and within_domain(pools.kind, scores[-1], scores[0])
            assert outside[row] == (not inside)
            if inside:
                expected = [relative_score(pools.kind, scores[0], s, temperature) for s in scores]
                assert values[row, : len(scores)] == pytest.approx(expected, abs=1e-12)
            else:
                assert (values[row, : len(scores)] == 1.0).all()

    def test_on_a_ratio_scale_the_plain_share_of_the_top(self) -> None:
        pools, _ = labelled([ranking_of([10.0, 7.0, 0.0])], [{"p0": 1}], depth=3)
        assert relative_values(pools, 1.0)[0].tolist() == [[1.0, 0.7, 0.0]]

    def test_an_all_zero_ranking_has_no_worse_passage_than_its_top(self) -> None:
        pools, _ = labelled([ranking_of([0.0, 0.0])], [{"p0": 1}], depth=2)
        assert relative_values(pools, 2.0)[0].tolist() == [[1.0, 1.0]]


class TestLabels:
    DATASET = Dataset(
        "hand-made",
        (Query("q0", "question 0"),),
        {"q0": {"p0": 2, "p2": 1, "p3": 0, "far": 2}},
        {"q0": {"p1": "hard_negative", "p3": "distractor"}},
    )

    def of(self, **settings: object) -> Labels:
        pools, _ = labelled([ranking_of([5.0, 4.0, 3.0, 2.0, 1.0])], [{"p0": 1}], depth=6)
        return label(pools, self.DATASET, **settings)  # type: ignore[arg-type]

    def test_each_candidate_has_its_grade_its_worth_and_whether_it_was_judged(self) -> None:
        labels = self.of()
        assert labels.grades.tolist() == [[2, 0, 1, 0, 0, 0]]
        assert labels.judged.tolist() == [[True, True, True, True, False, False]]
        assert labels.utilities.tolist() == [[1.0, -0.5, 0.5, -1.0, -0.5, 0.0]]
        assert labels.negatives[0][1] is Negative.HARD_NEGATIVE
        assert labels.query_grades == ((2, 1, 0, 2),)
        assert labels.top_grade == 2
        assert labels.worst_utility == -1.0
        assert labels.n_answerable == 1

    def test_the_worst_worth_takes_a_map_of_grades_into_account(self) -> None:
        utilities = Utilities(by_grade={0: -3.0})
        assert self.of(utilities=utilities).worst_utility == -3.0

    def test_recall_loss_counts_what_the_baseline_would_have_served(self) -> None:
        shares, defined = self.of().recall_shares()
        assert shares.tolist() == [[0.5, 0, 0.5, 0, 0, 0]]
        assert defined.tolist() == [True]
        shares, _ = self.of(baseline_k=2).recall_shares()
        assert shares.tolist() == [[1.0, 0, 0, 0, 0, 0]]

    def test_recall_loss_is_undefined_where_the_baseline_serves_nothing_relevant(self) -> None:
        pools, labels = labelled([ranking_of([2.0, 1.0])], [{"p1": 1}], depth=2, baseline_k=1)
        assert labels.recall_shares()[1].tolist() == [False]
        assert np.isnan(ratio_grid(pools, labels).means.recall_loss).all()

    def test_labels_without_a_relevant_passage_calibrate_nothing(self) -> None:
        with pytest.raises(CalibrationError, match="no passage is labelled relevant"):
            labelled([ranking_of([1.0])], [{"p0": 0}])

    def test_a_query_without_labels_is_all_irrelevant_and_unjudged(self) -> None:
        _, labels = labelled([ranking_of([1.0]), ranking_of([1.0])], [{"p0": 1}, {}], depth=1)
        assert labels.utilities.tolist() == [[1.0], [-0.5]]
        assert labels.judged.tolist() == [[True], [False]]
        assert labels.n_answerable == 1


class TestSurvival:
    def test_a_candidate_survives_the_thresholds_it_reaches_and_everything_survives_min_keep(
        self,
    ) -> None:
        values = np.array([[1.0, 0.7, 0.2, np.nan]])
        thresholds = np.array([0.0, 0.2, 0.7, 0.9])
        survival = Survival.of(values, [1, 2, 3], thresholds)
        assert survival.reach.tolist() == [[4, 3, 2, -1]]
        assert survival.kept([(2, 0), (2, 1), (2, 2), (2, 3), (0, 0)]).tolist() == [[3, 3, 2, 1, 1]]
        two = Survival.of(values, [1, 2, 3], thresholds, min_keep=2)
        assert two.kept([(2, 3), (0, 3)]).tolist() == [[2, 1]]

    def test_where_no_threshold_applies_only_k_does(self) -> None:
        survival = Survival.of(
            np.array([[0.1, 0.1], [0.1, 0.1]]),
            [2],
            np.array([0.5]),
            min_keep=0,
            always=np.array([True, False]),
        )
        assert survival.kept([(0, 0)]).tolist() == [[2], [0]]

    @pytest.mark.parametrize("ks", [[1, 2], [50]])
    def test_a_k_beyond_the_depth_keeps_what_there_is(self, ks: list[int]) -> None:
        survival = Survival.of(np.array([[1.0, 1.0]]), ks, np.array([0.0]))
        kept = survival.mean_of_sums(np.ones((1, 2)), 1)
        assert kept[-1, 0] == 2.0


def test_discounts_are_those_of_the_measures() -> None:
    one_each: Callable[[int], list[float]] = lambda rank: [0.0] * (rank - 1) + [1.0]  # noqa: E731
    expected = [udcg(one_each(rank)).value for rank in range(1, 31)]
    assert discounts(30) == pytest.approx(expected)
