"""P(relevant) from plain coefficients."""

import math
from typing import Any

import numpy as np
import pytest

from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.signals import feature_names, features
from ctxguard.core.types import FloatArray, Leg, ScoreKind
from ctxguard.errors import ConfigurationError

WANTED = ("freshness", "freshness.gap")


def leg(*scores: float, kind: ScoreKind = ScoreKind.COSINE) -> Leg:
    return Leg(np.array(scores, dtype=np.float64), kind)


def model_of(*coefficients: float, legs: tuple[str, ...] = ("dense",)) -> RelevanceModel:
    n = len(feature_names(legs))
    given = (*coefficients, *[0.0] * (n - len(coefficients)))
    return RelevanceModel(legs, given, (0.0,) * n, (1.0,) * n, 0.0)


class TestRelevanceModel:
    def test_agrees_with_the_formula(self) -> None:
        random = np.random.default_rng(0)
        legs = {
            "dense": Leg(random.uniform(-1, 1, 40), ScoreKind.COSINE),
            "lexical": Leg(random.exponential(5.0, 40), ScoreKind.RATIO),
        }
        table: FloatArray = features(legs)
        means, scales, coefficients = random.uniform(0.5, 2.0, (3, len(table)))
        model = RelevanceModel(
            ("dense", "lexical"),
            *(tuple(each.tolist()) for each in (coefficients, means, scales)),
            intercept=-0.3,
        )
        found = model.probabilities(legs)
        log_odds = coefficients @ ((table - means[:, None]) / scales[:, None]) - 0.3
        assert found == pytest.approx(1.0 / (1.0 + np.exp(-log_odds)), abs=1e-12)

    def test_extreme_log_odds_saturate_silently(self) -> None:
        found = model_of(1e6).probabilities({"dense": leg(1.0, -1.0)})
        assert found is not None
        assert found.tolist() == [1.0, 0.0]

    @pytest.mark.parametrize(
        "scores",
        [
            np.array([0.9, 0.1], np.float32),
            np.array([[0.9, 0.0], [0.1, 0.0]])[:, 0],
            np.array([1, 0]),
            [0.9, 0.1],
        ],
    )
    def test_adapters_arrays_may_differ_in_type(self, scores: Any) -> None:
        found = model_of(1.0).probabilities({"dense": Leg(scores, ScoreKind.COSINE)})
        plain = model_of(1.0).probabilities({"dense": leg(*scores)})
        assert found == pytest.approx(plain, abs=1e-12)

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
            ({"features": ("freshness",)}, "coefficients has 5 numbers for 6 features"),
            ({"features": ("freshness", "freshness")}, "distinct"),
            ({"features": ("freshness.top",)}, "is not a feature"),
            ({"clip": 0.0}, "clip 0.0"),
            ({"clip": math.inf}, "clip inf"),
        ],
    )
    def test_unworkable_model_is_refused(self, change: dict[str, object], message: str) -> None:
        settings: dict[str, object] = {
            "legs": ("dense",),
            "coefficients": (0.0,) * 5,
            "means": (0.0,) * 5,
            "scales": (1.0,) * 5,
            "intercept": 0.0,
        }
        with pytest.raises(ConfigurationError, match=message):
            RelevanceModel(**{**settings, **change})  # type: ignore[arg-type]


def with_freshness(**more: object) -> RelevanceModel:
    """Log-odds are the freshness, whatever the cosine."""
    return RelevanceModel(
        ("dense",),
        (0.0,) * 5 + (1.0, 0.0),
        (0.0,) * 7,
        (1.0,) * 7,
        0.0,
        features=WANTED,
        **more,  # type: ignore[arg-type]
    )


def odds(model: RelevanceModel, *freshness: float) -> list[float]:
    found = model.probabilities(
        {"dense": leg(*np.linspace(0.9, 0.1, len(freshness)))}, {"freshness": np.array(freshness)}
    )
    assert found is not None
    return np.log(found / (1.0 - found)).tolist()  # type: ignore[no-any-return]


class TestNamedSignals:
    def test_they_count_beside_the_legs(self) -> None:
        assert with_freshness().signals == ("freshness",)
        assert odds(with_freshness(), 1.0, -2.0) == pytest.approx([1.0, -2.0])

    def test_far_inputs_count_as_the_limit(self) -> None:
        assert odds(with_freshness(clip=4.0), 5.0, -9.0, 3.0) == pytest.approx([4.0, -4.0, 3.0])

    @pytest.mark.parametrize(
        "signals",
        [
            {},
            {"age": np.zeros(2)},
            {"freshness": np.array([1.0, math.nan])},
            {"freshness": np.array([1.0, math.inf])},
            {"freshness": np.zeros(3)},
        ],
    )
    def test_a_missing_signal_gives_no_probability(self, signals: dict[str, FloatArray]) -> None:
        model = with_freshness(clip=8.0)
        assert model.probabilities({"dense": leg(0.9, 0.1)}, signals) is None

    def test_signals_it_lacks_change_nothing(self) -> None:
        model = model_of(1.0)
        legs, extra = {"dense": leg(0.9, 0.1)}, {"freshness": np.array([math.nan, 1.0])}
        assert model.probabilities(legs, extra) == pytest.approx(model.probabilities(legs))
