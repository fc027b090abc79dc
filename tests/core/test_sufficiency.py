"""P(sufficient): the signals of a list, and the model that reads them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ctxguard.core.decision import Decision, decide
from ctxguard.core.policies import ExpectedUtilityPolicy, RatioPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.signals import feature_names
from ctxguard.core.sufficiency import (
    RANKING,
    SufficiencyModel,
    legs_of,
    list_signal_names,
    list_signals,
)
from ctxguard.core.types import Flag, Hit, Leg, Ranking, Route, ScoreKind
from ctxguard.errors import ConfigurationError

DENSE = SufficiencyModel(
    legs=("dense",),
    coefficients=(0.0, 2.0, 0.0, 0.0),
    means=(0.0, 0.5, 0.0, 0.0),
    scales=(1.0, 0.1, 1.0, 1.0),
    intercept=0.0,
    threshold=0.5,
)


def ranking_of(
    scores: Sequence[float],
    legs: dict[str, Leg] | None = None,
    kind: ScoreKind = ScoreKind.RATIO,
) -> Ranking:
    hits = [Hit(f"p{number}", score) for number, score in enumerate(scores)]
    return replace(Ranking.from_hits(hits, kind, Route.HYBRID), legs=legs or {})


class TestSignals:
    def test_they_are_the_count_and_of_each_leg_the_best_the_gap_and_the_first(self) -> None:
        legs = {
            "lexical": Leg(np.array([3.0, 8.0, 0.0, 1.0, 2.0, 0.0]), ScoreKind.RATIO),
            "dense": Leg(np.array([0.7, 0.2, 0.9, 0.5, 0.4, 0.3]), ScoreKind.COSINE),
        }
        ranking = ranking_of([0.9, 0.8, 0.7, 0.6, 0.5, 0.4], legs)
        values = list_signals(decide(ranking, RatioPolicy(k=2)), legs_of(ranking))
        lexical = [math.log1p(8.0), math.log1p(8.0), math.log1p(3.0)]
        assert values == pytest.approx([math.log(2), 0.9, 0.6, 0.7, *lexical])
        assert len(list_signal_names(legs_of(ranking))) == 7

    def test_the_first_passage_is_the_decisions_not_the_rankings(self) -> None:
        names = feature_names(("dense",))
        by_lowest = tuple([-1.0 if name == "dense.value" else 0.0 for name in names])
        zeros, ones = (0.0,) * len(names), (1.0,) * len(names)
        model = RelevanceModel(("dense",), by_lowest, zeros, ones, 5.0)
        ranking = ranking_of([2.0, 1.0], {"dense": Leg(np.array([0.9, 0.2]), ScoreKind.COSINE)})
        decision = decide(ranking, ExpectedUtilityPolicy(model, k=1))
        assert list_signals(decision, ("dense",)) == pytest.approx([0.0, 0.9, 0.7, 0.2])

    def test_a_ranking_without_legs_gives_its_own_scores(self) -> None:
        ranking = ranking_of([0.2, 0.6], kind=ScoreKind.COSINE)
        assert legs_of(ranking) == (RANKING,)
        values = list_signals(decide(ranking, RatioPolicy(k=1)), (RANKING,))
        assert values == pytest.approx([0.0, 0.6, 0.4, 0.6])

    def test_scores_that_carry_rank_only_are_no_signal(self) -> None:
        assert legs_of(ranking_of([0.03, 0.02], kind=ScoreKind.RANK)) == ()
        legs = {"fused": Leg(np.array([0.03]), ScoreKind.RANK)}
        assert legs_of(ranking_of([1.0], legs)) == ()

    @pytest.mark.parametrize("scores", [[np.nan, np.nan], [0.5, 3.4e38], [np.nan, 0.5]])
    def test_a_leg_without_a_valid_best_score_or_a_score_of_the_first_gives_none(
        self, scores: list[float]
    ) -> None:
        legs = {"dense": Leg(np.array(scores), ScoreKind.COSINE)}
        decision = decide(ranking_of([2.0, 1.0], legs), RatioPolicy())
        assert list_signals(decision, ("dense",)) is None

    def test_candidates_that_a_leg_did_not_score_are_passed_over(self) -> None:
        for missing in range(1, 7):
            scores = np.array([0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
            scores[missing] = np.nan
            ranking = ranking_of(
                [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], {"dense": Leg(scores, ScoreKind.COSINE)}
            )
            values = list_signals(decide(ranking, RatioPolicy(k=1)), ("dense",))
            fifth = 0.1 if missing < 5 else 0.2
            assert values == pytest.approx([0.0, 0.6, 0.6 - fifth, 0.6])


class TestModel:
    def decision(self, top: float) -> Decision:
        legs = {"dense": Leg(np.array([top, top - 0.1]), ScoreKind.COSINE)}
        return decide(ranking_of([2.0, 1.0], legs), RatioPolicy(k=2))

    def test_it_is_a_logistic_regression_on_the_signals(self) -> None:
        assert DENSE.probability(self.decision(0.6)) == pytest.approx(1 / (1 + math.exp(-2.0)))
        assert DENSE.probability(self.decision(0.5)) == pytest.approx(0.5)

    def test_below_the_threshold_the_context_is_insufficient(self) -> None:
        assert DENSE.suffices(DENSE.probability(self.decision(0.6))) is True
        assert DENSE.suffices(DENSE.probability(self.decision(0.3))) is False

    def test_without_a_threshold_there_is_a_probability_and_no_verdict(self) -> None:
        model = replace(DENSE, threshold=None)
        probability = model.probability(self.decision(0.3))
        assert probability is not None
        assert model.suffices(probability) is None

    def test_nothing_kept_is_insufficient_whatever_the_threshold(self) -> None:
        nothing = decide(ranking_of([]), RatioPolicy())
        assert DENSE.probability(nothing) == 0.0
        assert replace(DENSE, threshold=0.0).suffices(0.0) is False

    def test_extreme_scores_give_a_probability_all_the_same(self) -> None:
        assert DENSE.probability(self.decision(1e9)) == pytest.approx(1.0)
        assert DENSE.probability(self.decision(-1e9)) == pytest.approx(0.0)

    @pytest.mark.parametrize("flag", [Flag.DOMAIN_VIOLATION, Flag.MISSING_SIGNALS])
    def test_a_policy_that_was_not_applied_as_calibrated_has_none(self, flag: Flag) -> None:
        assert DENSE.probability(replace(self.decision(0.6), flags=(flag,))) is None

    def test_another_set_of_legs_has_none(self) -> None:
        assert DENSE.probability(decide(ranking_of([1.0]), RatioPolicy())) is None

    @pytest.mark.parametrize(
        "change",
        [
            {"legs": ("b", "a")},
            {"legs": ()},
            {"coefficients": (1.0,)},
            {"means": (0.0, math.nan, 0.0, 0.0)},
            {"scales": (1.0, 0.0, 1.0, 1.0)},
            {"intercept": math.inf},
            {"threshold": 1.5},
        ],
    )
    def test_numbers_that_cannot_be_are_refused(self, change: dict[str, object]) -> None:
        with pytest.raises(ConfigurationError):
            replace(DENSE, **change)  # type: ignore[arg-type]
