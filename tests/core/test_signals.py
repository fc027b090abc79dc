"""Features: what a model sees of a candidate's scores and of its named signals."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.core.signals import (
    PER_LEG,
    RANKING,
    TRANSFORMS,
    feature_names,
    features,
    legs_of,
    named_features,
    signal_of,
)
from ctxguard.core.types import Hit, Leg, Ranking, ScoreKind
from ctxguard.errors import ConfigurationError

N_BOTH = len(feature_names(["dense", "lexical"]))


def leg(*scores: float, kind: ScoreKind = ScoreKind.COSINE) -> Leg:
    return Leg(np.array(scores, dtype=np.float64), kind)


def by_name(legs: dict[str, Leg]) -> dict[str, list[float]]:
    return dict(zip(feature_names(list(legs)), features(legs).tolist(), strict=True))


finite_scores = st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=30)


class TestSignals:
    def test_leg_gives_value_gap_z_rank(self) -> None:
        found = by_name({"dense": leg(0.5, 0.9, 0.1)})
        assert found["dense.value"] == [0.5, 0.9, 0.1]
        assert found["dense.gap"] == pytest.approx([-0.4, 0.0, -0.8])
        assert found["dense.z"] == pytest.approx([0.0, math.sqrt(1.5), -math.sqrt(1.5)])
        assert found["dense.log_rank"] == pytest.approx([math.log(2), 0.0, math.log(3)])
        assert found["dense.top"] == [0.9, 0.9, 0.9]

    def test_legs_add_reciprocal_ranks_and_match(self) -> None:
        found = by_name({"dense": leg(0.9, 0.5), "lexical": leg(0.0, 3.0, kind=ScoreKind.RATIO)})
        assert found["reciprocal_ranks"] == pytest.approx([1 / 61 + 1 / 62] * 2)
        assert found["in_all_legs"] == [0.0, 1.0]

    def test_one_leg_has_nothing_across_legs(self) -> None:
        assert features({"dense": leg(0.9)}).shape == (len(PER_LEG), 1)

    def test_order_of_legs_does_not_matter(self) -> None:
        dense, lexical = leg(0.9, 0.5), leg(1.0, 3.0, kind=ScoreKind.RATIO)
        one = features({"dense": dense, "lexical": lexical})
        other = features({"lexical": lexical, "dense": dense})
        assert np.array_equal(one, other)

    def test_lexical_scores_go_by_logarithm(self) -> None:
        found = by_name({"lexical": leg(0.0, math.e - 1.0, kind=ScoreKind.RATIO)})
        assert found["lexical.value"] == pytest.approx([0.0, 1.0])

    def test_probabilities_go_by_finite_log_odds(self) -> None:
        found = by_name({"rerank": leg(0.5, 1.0, 0.0, kind=ScoreKind.PROBABILITY)})
        assert found["rerank.value"][0] == pytest.approx(0.0)
        assert found["rerank.value"][1] == pytest.approx(-found["rerank.value"][2])
        assert np.isfinite(found["rerank.value"]).all()

    @given(st.floats(-1.0, 1.0), st.integers(1, 50))
    def test_equal_scores_have_no_spread(self, score: float, n: int) -> None:
        assert by_name({"dense": leg(*[score] * n)})["dense.z"] == [0.0] * n
        found = named(freshness=[1e6 * score] * n)
        assert found["freshness.z"] == found["freshness.gap"] == [0.0] * n

    def test_no_candidates_and_no_legs(self) -> None:
        assert features({"dense": leg(), "lexical": leg()}).shape == (N_BOTH, 0)
        assert features({}).shape == (0, 0)

    def test_rank_only_scores_give_no_signal(self) -> None:
        with pytest.raises(ConfigurationError, match="only order"):
            features({"fused": leg(0.1, kind=ScoreKind.RANK)})

    @pytest.mark.parametrize("kind", [kind for kind in ScoreKind if kind is not ScoreKind.RANK])
    @pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, -3.4e38])
    def test_garbage_is_missing_without_a_warning(self, kind: ScoreKind, garbage: float) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = by_name({"leg": leg(0.5, garbage, 0.2, kind=kind)})
            of_signal = named(ranker=[1.0, garbage, 0.0])
        assert math.isnan(found["leg.value"][1])
        assert np.isnan(found["leg.gap"]).all()
        assert all(math.isnan(values[1]) for values in of_signal.values())


def named(**signals: list[float]) -> dict[str, list[float]]:
    """Every feature of some named signals, by its name."""
    names = named_features(signals)
    arrays = {name: np.array(values) for name, values in signals.items()}
    return dict(zip(names, features({}, arrays, names).tolist(), strict=True))


class TestNamedSignals:
    def test_by_hand(self) -> None:
        found = named(ranker=[1.0, 3.0, 2.0, 2.0], vector_redundancy=[0.5, 0.0, 1.0, 0.25])
        # The mean is 2 and the variance 1/2; equal values share the better rank.
        assert found == {
            "vector_redundancy": [0.5, 0.0, 1.0, 0.25],
            "ranker": [1.0, 3.0, 2.0, 2.0],
            "ranker.z": pytest.approx([-math.sqrt(2), math.sqrt(2), 0.0, 0.0]),
            "ranker.gap": [-2.0, 0.0, -1.0, -1.0],
            "ranker.log_rank": pytest.approx([math.log(4), 0.0, math.log(2), math.log(2)]),
        }

    def test_table_names_the_features(self) -> None:
        """Those outside it have their value, z-score and gap, and the ranker's inputs none."""
        assert named_features(["freshness"]) == ("freshness", "freshness.z", "freshness.gap")
        assert named_features(["redundancy", "similarity_10"]) == ()
        assert len(named_features(TRANSFORMS)) == 22
        assert {signal_of(feature) for feature in named_features(TRANSFORMS)} <= set(TRANSFORMS)

    def test_named_signals_follow_the_legs(self) -> None:
        legs, wanted = {"dense": leg(0.9, 0.5)}, ("b.gap", "a")
        signals = {"a": np.array([1.0, 2.0]), "b": np.array([3.0, 4.0])}
        found = features(legs, signals, wanted)
        assert feature_names(legs, wanted)[len(PER_LEG) :] == wanted
        assert np.array_equal(found[: len(PER_LEG)], features(legs))
        assert found[len(PER_LEG) :].tolist() == [[-1.0, 0.0], [1.0, 2.0]]

    @given(finite_scores, st.data())
    def test_they_follow_their_candidate(self, values: list[float], data: st.DataObject) -> None:
        order = data.draw(st.permutations(range(len(values))))
        in_order = [values[i] for i in order]
        moved, found = (
            {**named(ranker=each), **by_name({"dense": leg(*each)})} for each in (in_order, values)
        )
        for name, own in found.items():
            assert moved[name] == pytest.approx([own[i] for i in order], abs=1e-6)

    @pytest.mark.parametrize("name", ["ranker.top", "ranker.", ".z", "", "a.b.z"])
    def test_unknown_feature_name_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match="is not a feature"):
            features({}, {}, [name])


class TestLegsOf:
    def test_ranking_without_legs_is_one(self) -> None:
        ranking = Ranking.from_hits([Hit("a", 0.2), Hit("b", 0.9)], ScoreKind.COSINE)
        (name, own), *others = legs_of(ranking, [1, 0]).items()
        assert (name, own.scores.tolist(), own.kind) == (RANKING, [0.2, 0.9], ScoreKind.COSINE)
        assert not others

    def test_order_only_scores_count_by_log_rank(self) -> None:
        """Scores that carry only order count by the logarithm of their rank."""
        ranking = Ranking.from_hits([Hit("a"), Hit("b")], ScoreKind.RANK)
        own = legs_of(ranking, [1, 0])[RANKING]
        assert own.scores.tolist() == pytest.approx([-math.log(2), 0.0])
