"""P(sufficient): P(relevant) of the best kept passage, and the answer at a threshold."""

from dataclasses import replace

import numpy as np
import pytest

from ctxguard.core.decision import Decision, decide, sufficiency_of
from ctxguard.core.policies import ExpectedUtilityPolicy, RatioPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.signals import feature_names
from ctxguard.core.types import Flag, Hit, Leg, Ranking, Route, ScoreKind

NAMES = feature_names(("dense",))
BY_COSINE = RelevanceModel(
    ("dense",),
    tuple([4.0 if name == "dense.value" else 0.0 for name in NAMES]),
    (0.0,) * len(NAMES),
    (1.0,) * len(NAMES),
    -2.0,
)


def decision(cosines: list[float], **policy: object) -> Decision:
    hits = [Hit(f"p{number}", -float(number)) for number in range(len(cosines))]
    ranking = Ranking.from_hits(hits, ScoreKind.LOGIT, Route.HYBRID)
    legs = {"dense": Leg(np.array(cosines), ScoreKind.COSINE)} if cosines else {}
    return decide(
        replace(ranking, legs=legs),
        ExpectedUtilityPolicy(BY_COSINE, **{"k": 3, **policy}),  # type: ignore[arg-type]
    )


def p_sufficient(decision: Decision, model: RelevanceModel | None = None) -> float | None:
    return sufficiency_of(decision, None, model)[0]


def test_probability_of_best_kept_passage() -> None:
    """It is the probability of the best kept passage wherever it ranked."""
    expected = 1 / (1 + np.exp(2.0 - 3.6))
    assert p_sufficient(decision([0.1, 0.9, 0.5])) == pytest.approx(expected)


def test_nothing_kept_is_0_and_insufficient() -> None:
    assert sufficiency_of(decision([]), 0.0) == (0.0, False)


@pytest.mark.parametrize("flag", [Flag.DOMAIN_VIOLATION, Flag.MISSING_SIGNALS])
def test_policy_not_applied_has_none(flag: Flag) -> None:
    assert sufficiency_of(replace(decision([0.9]), flags=(flag,)), 0.5) == (None, None)


def test_policy_without_probabilities_takes_the_model() -> None:
    ranking = decision([0.1, 0.9, 0.5]).ranking
    first_two = decide(ranking, RatioPolicy(k=2, min_ratio=0.0))
    assert p_sufficient(first_two) is None
    assert p_sufficient(first_two, BY_COSINE) == p_sufficient(decision([0.1, 0.9, 0.5]))
    other_legs = decide(replace(ranking, legs={}), RatioPolicy(k=2, min_ratio=0.0))
    assert p_sufficient(other_legs, BY_COSINE) is None


@pytest.mark.parametrize(
    ("threshold", "is_sufficient"), [(0.5, True), (0.50001, False), (None, None)]
)
def test_context_suffices_from_the_threshold(
    threshold: float | None, is_sufficient: bool | None
) -> None:
    assert sufficiency_of(decision([0.5]), threshold) == (0.5, is_sufficient)
