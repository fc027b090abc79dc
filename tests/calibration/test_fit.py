"""Fitting: fusion weight, temperature, P(relevant); what they find, and what they refuse."""

import math
from dataclasses import replace

import numpy as np
import pytest
from simulated_pools import labelled, ranking_of, simulate

from calibration.data.dataset import Dataset
from calibration.fit import (
    fit_fusion,
    fit_relevance,
    fit_temperature,
    folds,
    out_of_fold,
    predicted,
)
from calibration.pools import LabelledPools, label
from calibration.replay import replay
from ctxguard.core.decision import decide
from ctxguard.core.policies import ExpectedUtilityPolicy
from ctxguard.core.types import FloatArray, Leg, Ranking, ScoreKind
from ctxguard.errors import CalibrationError


def replayed(n: int, **settings: object) -> LabelledPools:
    retriever, dataset = simulate(n, **settings)  # type: ignore[arg-type]
    return label(replay(retriever, dataset.queries, depth=20), dataset)


def two_legs(dense: list[float], lexical: list[float]) -> Ranking:
    return ranking_of(
        [float(len(dense) - i) for i in range(len(dense))],
        legs={
            "dense": Leg(np.array(dense), ScoreKind.COSINE),
            "lexical": Leg(np.array(lexical), ScoreKind.RATIO),
        },
    )


GOOD_DENSE = two_legs([0.9, 0.1, 0.0], [0.0, 1.0, 5.0])
GOOD_LEXICAL = two_legs([-0.5, 0.1, 0.9], [5.0, 1.0, 0.0])


class TestFusion:
    @pytest.mark.parametrize(
        ("rankings", "qrels", "least", "most"),
        [
            ([GOOD_DENSE] * 3, [{"p0": 1}] * 3, 0.51, 1.0),
            ([GOOD_LEXICAL] * 3, [{"p0": 1}] * 3, 0.0, 0.49),
            # The middle of a plateau.
            ([two_legs([0.9, 0.1], [5.0, 1.0])], [{"p0": 1}], 0.5, 0.5),
            # Queries without an answer have no say.
            ([GOOD_DENSE, *[GOOD_LEXICAL] * 5], [{"p0": 1}, *[{}] * 5], 0.51, 1.0),
        ],
    )
    def test_weight_goes_to_better_leg(
        self, rankings: list[Ranking], qrels: list[dict[str, int]], least: float, most: float
    ) -> None:
        found = fit_fusion(labelled(rankings, qrels))
        assert found.method == "convex"
        assert least <= found.weight <= most

    def test_nothing_to_fit_without_any(self) -> None:
        pools = labelled([two_legs([0.9], [1.0])] * 2, [{"p0": 1}, {}])
        with pytest.raises(CalibrationError, match="no fusion can be fitted"):
            fit_fusion(pools.subset(["q1"]))


class TestTemperature:
    @pytest.mark.parametrize("kind", [ScoreKind.RATIO, ScoreKind.RANK])
    def test_share_of_top_stays_plain(self, kind: ScoreKind) -> None:
        pools = labelled([ranking_of([9.0, 2.0], kind=kind)], [{"p0": 1}])
        assert fit_temperature(pools) == 1.0

    def test_median_tenth_scores_a_tenth(self) -> None:
        rankings = [
            ranking_of([10.0 - gap * i / 9 for i in range(10)], kind=ScoreKind.LOGIT)
            for gap in (2.0, 3.0, 50.0)
        ]
        pools = labelled(rankings, [{"p0": 1}] * 3)
        assert math.exp(-3.0 / fit_temperature(pools)) == pytest.approx(0.1, rel=0.01)

    def test_probabilities_are_measured_in_log_odds(self) -> None:
        odds = [4.0 - 0.3 * i for i in range(10)]
        logits = labelled([ranking_of(odds, kind=ScoreKind.LOGIT)], [{"p0": 1}])
        shares = labelled(
            [ranking_of([1 / (1 + math.exp(-o)) for o in odds], kind=ScoreKind.PROBABILITY)],
            [{"p0": 1}],
        )
        assert fit_temperature(shares) == fit_temperature(logits)

    @pytest.mark.parametrize("scores", [[], [0.5], [0.5] * 10])
    def test_without_any_gap_it_is_one(self, scores: list[float]) -> None:
        pools = labelled([ranking_of(scores, kind=ScoreKind.COSINE)], [{"p0": 1}])
        assert fit_temperature(pools) == 1.0


class TestRelevance:
    def test_expected_relevant_is_right_overall(self) -> None:
        pools = replayed(200, noise=0.3)
        fresh = replayed(400, seed=1, noise=0.3)
        model = fit_relevance(pools)
        found = predicted(model, fresh)
        for low, high in ((0.0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 1.0)):
            inside = (found >= low) & (found < high)
            assert fresh.relevant[inside].mean() == pytest.approx(found[inside].mean(), abs=0.07)

    def test_short_coefficients_keep_probabilities(self) -> None:
        pools = replayed(30)
        model = fit_relevance(pools)
        for value in (*model.coefficients, *model.means, *model.scales, model.intercept):
            assert value == float(f"{value:.8g}")
        found = predicted(model, pools)
        for row, ranking in enumerate(pools.rankings()):
            decision = decide(ranking, ExpectedUtilityPolicy(model))
            assert decision.probabilities == pytest.approx(
                np.sort(found[row, : len(ranking)])[::-1], abs=1e-12
            )

    def test_pools_end_has_no_probability(self) -> None:
        rankings = [two_legs([0.9, 0.1], [5.0, 1.0]), two_legs([], []), two_legs([0.5], [2.0])]
        pools = labelled(rankings, [{"p0": 1}, {}, {}], depth=3)
        found = predicted(fit_relevance(pools), pools)
        assert np.isnan(found).tolist() == [[False, False, True], [True] * 3, [False, True, True]]

    def test_missing_signal_names_the_mend(self) -> None:
        lacking = two_legs([0.9, math.nan], [5.0, 1.0])
        pools = labelled([lacking], [{"p0": 1}])
        with pytest.raises(CalibrationError, match=r"lacks a leg's score.*policy = ratio"):
            fit_relevance(pools)

    @pytest.mark.parametrize(("qrels", "count"), [({"p0": 1, "p1": 1}, 2), ({"far": 1}, 0)])
    def test_uniform_labels_are_refused(self, qrels: dict[str, int], count: int) -> None:
        pools = labelled([two_legs([0.9, 0.2], [5.0, 1.0])], [qrels])
        with pytest.raises(CalibrationError, match=f"{count} of the 2 candidates of 1 queries"):
            fit_relevance(pools)


def unseen(pools: LabelledPools) -> FloatArray:
    return out_of_fold(pools, fit_relevance(pools))


class TestOutOfFold:
    def test_own_labels_move_no_probability(self) -> None:
        retriever, dataset = simulate(40)
        pools = replay(retriever, dataset.queries, depth=20)
        before = unseen(label(pools, dataset))
        query_id = pools.query_ids[7]
        flipped = Dataset(
            dataset.name, dataset.queries, {**dataset.qrels, query_id: {f"{query_id}-0": 1}}
        )
        after = unseen(label(pools, flipped))
        assert np.array_equal(np.isnan(before), np.isnan(pools.scores)), "each candidate has one"
        same_fold = next(inside for inside, _ in folds(pools.query_ids) if 7 in inside)
        assert np.allclose(before[same_fold], after[same_fold], rtol=1e-9, equal_nan=True)
        assert not np.allclose(before, after, rtol=1e-3, equal_nan=True)

    def test_empty_folds_use_everyones_model(self) -> None:
        pools = replayed(1)
        expected = predicted(fit_relevance(pools), pools)
        assert unseen(pools) == pytest.approx(expected, nan_ok=True)

    def test_order_of_queries_is_irrelevant(self) -> None:
        retriever, dataset = simulate(30)
        backwards = replace(dataset, queries=dataset.queries[::-1])
        one, other = (
            unseen(label(replay(retriever, each.queries, depth=20), each))
            for each in (dataset, backwards)
        )
        assert one == pytest.approx(other[::-1], abs=1e-6)
