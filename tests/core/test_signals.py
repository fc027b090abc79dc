"""Signals: what a model sees of a candidate, and P(relevant) from plain coefficients."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.signals import PER_LEG, feature_names, features
from ctxguard.core.types import FloatArray, Leg, ScoreKind
from ctxguard.errors import ConfigurationError

N_BOTH = len(feature_names(["dense", "lexical"]))


def leg(*scores: float, kind: ScoreKind = ScoreKind.COSINE) -> Leg:
    return Leg(np.array(scores, dtype=np.float64), kind)


def by_name(legs: dict[str, Leg]) -> dict[str, list[float]]:
    return dict(zip(feature_names(list(legs)), features(legs).tolist(), strict=True))


def model_of(*coefficients: float, legs: tuple[str, ...] = ("dense",)) -> RelevanceModel:
    n = len(feature_names(legs))
    given = (*coefficients, *[0.0] * (n - len(coefficients)))
    return RelevanceModel(legs, given, (0.0,) * n, (1.0,) * n, 0.0)


finite_scores = st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=30)


class TestSignals:
    def test_each_leg_gives_its_value_gap_z_rank_and_top(self) -> None:
        found = by_name({"dense": leg(0.5, 0.9, 0.1)})
        assert found["dense.value"] == [0.5, 0.9, 0.1]
        assert found["dense.gap"] == pytest.approx([-0.4, 0.0, -0.8])
        assert found["dense.z"] == pytest.approx([0.0, math.sqrt(1.5), -math.sqrt(1.5)])
        assert found["dense.log_rank"] == pytest.approx([math.log(2), 0.0, math.log(3)])
        assert found["dense.top"] == [0.9, 0.9, 0.9]

    def test_several_legs_add_their_reciprocal_ranks_and_whether_all_matched(self) -> None:
        found = by_name({"dense": leg(0.9, 0.5), "lexical": leg(0.0, 3.0, kind=ScoreKind.RATIO)})
        assert found["reciprocal_ranks"] == pytest.approx([1 / 61 + 1 / 62] * 2)
        assert found["in_all_legs"] == [0.0, 1.0]

    def test_one_leg_has_nothing_across_legs(self) -> None:
        assert features({"dense": leg(0.9)}).shape == (len(PER_LEG), 1)

    def test_the_order_of_the_legs_does_not_matter(self) -> None:
        dense, lexical = leg(0.9, 0.5), leg(1.0, 3.0, kind=ScoreKind.RATIO)
        one = features({"dense": dense, "lexical": lexical})
        other = features({"lexical": lexical, "dense": dense})
        assert np.array_equal(one, other)

    def test_lexical_scores_are_taken_by_their_logarithm(self) -> None:
        found = by_name({"lexical": leg(0.0, math.e - 1.0, kind=ScoreKind.RATIO)})
        assert found["lexical.value"] == pytest.approx([0.0, 1.0])

    def test_probabilities_are_taken_by_their_log_odds_and_stay_finite(self) -> None:
        found = by_name({"rerank": leg(0.5, 1.0, 0.0, kind=ScoreKind.PROBABILITY)})
        assert found["rerank.value"][0] == pytest.approx(0.0)
        assert found["rerank.value"][1] == pytest.approx(-found["rerank.value"][2])
        assert np.isfinite(found["rerank.value"]).all()

    def test_equal_scores_share_the_better_rank(self) -> None:
        assert by_name({"dense": leg(0.5, 0.5, 0.1)})["dense.log_rank"] == pytest.approx(
            [0.0, 0.0, math.log(3)]
        )

    @given(st.floats(-1.0, 1.0), st.integers(1, 50))
    def test_equal_scores_have_no_spread_whatever_the_rounding(self, score: float, n: int) -> None:
        assert by_name({"dense": leg(*[score] * n)})["dense.z"] == [0.0] * n

    @given(finite_scores, st.data())
    def test_signals_follow_their_candidate_not_its_place(
        self, scores: list[float], data: st.DataObject
    ) -> None:
        order = data.draw(st.permutations(range(len(scores))))
        moved = features({"dense": leg(*[scores[i] for i in order])})
        assert moved == pytest.approx(features({"dense": leg(*scores)})[:, order], abs=1e-6)

    def test_no_candidates_and_no_legs(self) -> None:
        assert features({"dense": leg(), "lexical": leg()}).shape == (N_BOTH, 0)
        assert features({}).shape == (0, 0)

    def test_rank_only_scores_give_no_signal(self) -> None:
        with pytest.raises(ConfigurationError, match="order only"):
            features({"fused": leg(0.1, kind=ScoreKind.RANK)})

    @pytest.mark.parametrize("kind", [kind for kind in ScoreKind if kind is not ScoreKind.RANK])
    @pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, -3.4e38])
    def test_garbage_is_missing_without_a_warning(self, kind: ScoreKind, garbage: float) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = by_name({"leg": leg(0.5, garbage, 0.2, kind=kind)})
        assert math.isnan(found["leg.value"][1])
        assert np.isnan(found["leg.gap"]).all()


class TestRelevanceModel:
    def test_probability_is_the_logistic_of_the_standardised_signals(self) -> None:
        model = RelevanceModel(
            legs=("dense",),
            coefficients=(2.0, 0.0, 0.0, 0.0, 0.0),
            means=(0.5, 0.0, 0.0, 0.0, 0.0),
            scales=(0.1, 1.0, 1.0, 1.0, 1.0),
            intercept=-1.0,
        )
        found = model.probabilities({"dense": leg(0.6, 0.5)})
        assert found is not None
        assert found.tolist() == pytest.approx([1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(1.0))])

    @pytest.mark.parametrize("seed", range(5))
    def test_it_agrees_with_scikit_learn_on_the_same_coefficients(self, seed: int) -> None:
        linear_model = pytest.importorskip("sklearn.linear_model")
        random = np.random.default_rng(seed)
        legs = {
            "dense": Leg(random.uniform(-1, 1, 40), ScoreKind.COSINE),
            "lexical": Leg(random.exponential(5.0, 40), ScoreKind.RATIO),
        }
        table: FloatArray = features(legs).T
        means, scales = table.mean(axis=0), table.std(axis=0)
        scales[scales < 1e-12] = 1.0  # the top is the same for all
        standardised = (table - means) / scales
        theirs = linear_model.LogisticRegression()
        theirs.fit(standardised, random.random(40) < 0.5)
        ours = RelevanceModel(
            legs=("dense", "lexical"),
            coefficients=tuple(theirs.coef_[0].tolist()),
            means=tuple(means.tolist()),
            scales=tuple(scales.tolist()),
            intercept=float(theirs.intercept_[0]),
        )
        found = ours.probabilities(legs)
        assert found is not None
        expected = theirs.predict_proba(standardised)[:, 1]
        assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-12)

    def test_extreme_log_odds_saturate_without_a_warning(self) -> None:
        found = model_of(1e6).probabilities({"dense": leg(1.0, -1.0)})
        assert found is not None
        assert found.tolist() == [1.0, 0.0]

    @pytest.mark.parametrize(
        "legs",
        [
            {},
            {"lexical": leg(1.0, kind=ScoreKind.RATIO)},
            {"dense": leg(0.9), "lexical": leg(1.0, kind=ScoreKind.RATIO)},
        ],
    )
    def test_other_legs_than_its_own_give_no_probability(self, legs: dict[str, Leg]) -> None:
        assert model_of(1.0).probabilities(legs) is None

    @pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, -3.4e38])
    def test_a_missing_or_garbage_score_gives_no_probability(self, garbage: float) -> None:
        assert model_of(1.0).probabilities({"dense": leg(0.9, garbage)}) is None

    def test_a_leg_that_carries_rank_only_gives_no_probability(self) -> None:
        assert model_of(1.0).probabilities({"dense": leg(0.9, kind=ScoreKind.RANK)}) is None

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"legs": ("lexical", "dense")}, "sorted"),
            ({"legs": ()}, "sorted"),
            ({"legs": ("dense", "dense")}, "distinct"),
            ({"means": (0.0,) * 4}, "means has 4 numbers for 5 features"),
            ({"scales": (1.0, 1.0, 1.0, 1.0, 0.0)}, "scale 0.0 must be > 0"),
            ({"coefficients": (math.nan, 0.0, 0.0, 0.0, 0.0)}, "coefficients .* finite"),
            ({"scales": (math.inf, 1.0, 1.0, 1.0, 1.0)}, "scales .* finite"),
            ({"intercept": math.inf}, "intercept inf"),
        ],
    )
    def test_a_model_that_cannot_work_is_refused(
        self, change: dict[str, object], message: str
    ) -> None:
        settings: dict[str, object] = {
            "legs": ("dense",),
            "coefficients": (0.0,) * 5,
            "means": (0.0,) * 5,
            "scales": (1.0,) * 5,
            "intercept": 0.0,
        }
        with pytest.raises(ConfigurationError, match=message):
            RelevanceModel(**{**settings, **change})  # type: ignore[arg-type]
