"""Enforce, shadow or keep: what labels must show before a policy is served."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from calibration.verdict import FEWEST_MEASURED, verdict
from ctxguard.core.types import FloatArray, Mode
from ctxguard.profile.schema import RouteVerdict

RNG = np.random.default_rng(0)
NONE, NOISE, MORE = np.zeros(40), RNG.normal(0.0, 1.0, 40), RNG.choice([0.0, 0.5], 40)

Draw = Callable[[np.random.Generator, int], FloatArray]


def judged(differences: object, saved: float = 0.3, **settings: object) -> RouteVerdict:
    """Judge recall and UDCG that differ so, and tokens of which a share is saved."""
    values = np.array(differences, dtype=float)
    tokens = np.full(values.size, -saved)
    return verdict(values, values, tokens, **{"serving_k": 5, "tolerance": 0.01, **settings})


@pytest.mark.parametrize("n", [0, 1, FEWEST_MEASURED - 1])
def test_too_few_queries_prove_nothing(n: int) -> None:
    for difference in (0.3, -0.5):
        found = judged(np.full(n, difference))
        assert (found.decision, found.recall, found.n) == ("shadow", None, n)


def lost(n: int, of: int) -> FloatArray:
    """Queries of which n lose everything, and the others nothing."""
    return np.where(np.arange(of) < n, -1.0, 0.0)


@pytest.mark.parametrize(
    ("recall", "udcg", "tokens", "settings", "decision"),
    [
        # The loss is larger than the tolerance, though surely smaller than the limit.
        (lost(15, 1_000), None, -0.3, {"max_loss": 0.5}, "keep"),
        # A loss that is shown is refuted, and one that may be noise stays in shadow.
        (lost(2, 40), None, -0.3, {}, "shadow"),
        (lost(8, 40), None, -0.3, {}, "keep"),
        (np.full(40, -0.2), None, -0.3, {"refutable": False}, "shadow"),
        # A saving that may be noise is none.
        (NONE, NONE, RNG.normal(-0.06, 1.0, 40), {}, "keep"),
        # More recall is a gain, and so is more value.
        (MORE, NONE, 0.0, {}, "enforce"),
        (NONE, MORE, 0.0, {}, "enforce"),
        # Beside what is served today the same loss of value is small.
        (NONE, NOISE, -0.3, {}, "shadow"),
        (NONE, NOISE, -0.3, {"todays_udcg": 20.0}, "enforce"),
    ],
)
def test_safe_gains_are_enforced(
    recall: FloatArray,
    udcg: FloatArray | None,
    tokens: FloatArray | float,
    settings: dict[str, Any],
    decision: str,
) -> None:
    value = recall if udcg is None else udcg
    spent = np.broadcast_to(tokens, recall.shape)
    found = verdict(recall, value, spent, **{"serving_k": 5, "tolerance": 0.01, **settings})
    assert found.decision == decision


def test_only_shadow_means_shadow() -> None:
    modes = [judged(values).mode for values in (np.zeros(40), np.zeros(20), np.full(40, -0.5))]
    assert modes == [Mode.ENFORCE, Mode.SHADOW, Mode.ENFORCE]


def test_five_for_five_stays_off() -> None:
    """What is safe and saves nothing, or under a twentieth of the tokens, stays as it is today."""
    for saved in (0.0, 0.004, 0.049):
        found = judged(np.zeros(200), saved)
        assert (found.decision, found.n_needed) == ("keep", None)
        assert found.statement.startswith("keep: safe, but no gain is shown: tokens differ by ")
    assert judged(np.zeros(200), 0.051).decision == "enforce"


def test_labels_for_gain_are_said() -> None:
    recall = np.tile([0.5, -0.4, 0.0, 0.0], 15)
    found = verdict(recall, recall * 0.1, np.zeros(60), serving_k=5, tolerance=0.01, max_loss=0.2)
    assert found.decision == "keep"
    more = np.tile([0.5, -0.4, 0.0, 0.0], -(-found.n_needed // 4) + 1)
    assert judged(more, 0.0, max_loss=0.2).decision == "enforce"


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        (np.zeros(5), "5 labelled queries with a relevant passage are too few"),
        (np.zeros(1), "1 labelled query with a relevant passage is too few"),
        (
            np.zeros(40),
            "enforce: safe, with fewer tokens than the first 5: tokens differ by -30%, recall",
        ),
        (np.zeros(20), "shadow: not shown to be safe yet: tokens differ by -30%, recall by +0.000"),
        (np.full(40, -0.5), "keep: worse than the first 5, which stay: tokens differ by -30%"),
        (np.zeros(20), "about 28 such queries would probably decide"),
    ],
)
def test_words_say_seen_and_next(differences: object, words: str) -> None:
    assert words in judged(differences).statement


def test_deciding_queries_are_said() -> None:
    found = judged([*np.zeros(38), -0.1, -0.1], max_loss=0.03)
    assert found.decision == "shadow"
    more = np.tile([*np.zeros(38), -0.1, -0.1], -(-found.n_needed // 40))[: found.n_needed]
    assert judged(more, max_loss=0.03).decision == "enforce"
    assert judged([*np.zeros(38), -0.4, -0.4]).n_needed is None


def test_keep_says_deciding_queries() -> None:
    kept = judged(np.zeros(20)).model_copy(update={"decision": "keep", "recall": None})
    assert "20 labelled queries" in kept.statement
    assert "it takes 28 or more" in kept.statement
    many = kept.model_copy(update={"n_needed": None})
    assert many.statement.endswith("which stay")


def test_endless_shadow_says_so() -> None:
    found = judged([*np.zeros(38), -0.4, -0.4])
    assert (found.decision, found.n_needed) == ("shadow", None)
    assert "more queries like these would not change that" in found.statement


def _shares(losses: float, share: float, gains: float = 0.0) -> Draw:
    """Some queries lose a share of their relevant passages, some gain as much, others nothing."""

    def draw(rng: np.random.Generator, n: int) -> FloatArray:
        return share * rng.choice([-1.0, 1.0, 0.0], n, p=[losses, gains, 1.0 - losses - gains])

    return draw


@pytest.mark.parametrize("n", [20, 35, 50, 100, 200])
@pytest.mark.parametrize(
    "draw", [_shares(0.1, 0.5), _shares(0.15, 0.5, 0.05), _shares(0.2, 0.25), _shares(0.1, 1, 0.05)]
)
def test_limit_policy_serves_a_tenth(draw: Draw, n: int) -> None:
    rng = np.random.default_rng(n)
    assert abs(draw(rng, 200_000).mean() + 0.05) < 0.01
    served = [judged(draw(rng, n)).decision == "enforce" for _ in range(1_000)]
    assert np.mean(served) <= 0.1


def test_total_losses_escape_on_few() -> None:
    """The bound is approximate: with one query in twenty lost as a whole, 30 may show none."""
    rng = np.random.default_rng(1)
    draw = _shares(0.05, 1.0)
    for n, at_most in ((20, 0.0), (30, 0.25), (50, 0.1), (100, 0.1)):
        served = [judged(draw(rng, n)).decision == "enforce" for _ in range(1_000)]
        assert np.mean(served) <= at_most


def test_even_policy_serves_more_later() -> None:
    rng, draw = np.random.default_rng(2), _shares(0.04, 0.5, 0.04)
    shares = [
        np.mean([judged(draw(rng, n)).decision == "enforce" for _ in range(500)])
        for n in (20, 100, 400)
    ]
    assert shares == sorted(shares)
    assert shares[-1] > 0.8
