"""Enforce, shadow or keep: what labels must show before a policy is served."""

from collections.abc import Callable

import numpy as np
import pytest

from calibration.verdict import FEWEST_MEASURED, verdict
from ctxguard.core.types import FloatArray, Mode
from ctxguard.profile.schema import RouteVerdict

Draw = Callable[[np.random.Generator, int], FloatArray]


def judged(differences: object, **settings: object) -> RouteVerdict:
    values = np.array(differences, dtype=float)
    return verdict(values, **{"serving_k": 5, "tolerance": 0.01, **settings})


@pytest.mark.parametrize("n", [0, 1, FEWEST_MEASURED - 1])
def test_too_few_queries_prove_neither_gain_nor_loss(n: int) -> None:
    for difference in (0.3, -0.5):
        found = judged(np.full(n, difference))
        assert (found.decision, found.value, found.n) == ("shadow", None, n)


def test_a_mean_below_the_tolerance_is_never_served() -> None:
    differences = np.zeros(1_000)
    differences[:15] = -1.0
    found = judged(differences, max_loss=0.5)
    assert found.lower > -0.05
    assert found.decision != "enforce"


def test_a_loss_that_is_shown_is_refuted_and_one_that_may_be_noise_stays_in_shadow() -> None:
    lost = np.zeros(40)
    lost[:2] = -1.0
    assert judged(lost).decision == "shadow"
    lost[:8] = -1.0
    assert judged(lost).decision == "keep"


def test_a_loss_that_was_accepted_is_not_refuted() -> None:
    assert judged(np.full(40, -0.2), refutable=False).decision == "shadow"


def test_a_shadow_verdict_puts_a_guard_in_shadow_and_no_other_does() -> None:
    modes = [judged(values).mode for values in (np.zeros(40), np.zeros(20), np.full(40, -0.5))]
    assert modes == [Mode.ENFORCE, Mode.SHADOW, Mode.ENFORCE]


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        (np.zeros(5), "5 labelled queries with a relevant passage are too few"),
        (np.zeros(40), "enforce: mean recall differs by +0.000 from that of the first 5, on 40"),
        (np.zeros(20), "shadow: mean recall differs by +0.000"),
        (np.full(40, -0.5), "by -0.5 at most (90%), so the first 5 stay"),
        (np.zeros(20), "about 28 such queries would probably decide"),
    ],
)
def test_the_words_say_what_was_seen_and_what_follows(differences: object, words: str) -> None:
    assert words in judged(differences).statement


def test_it_says_how_many_queries_would_decide_and_nothing_where_none_would() -> None:
    found = judged([*np.zeros(38), -0.1, -0.1], max_loss=0.03)
    assert found.decision == "shadow"
    assert found.n_needed is not None
    more = np.tile([*np.zeros(38), -0.1, -0.1], -(-found.n_needed // 40))[: found.n_needed]
    assert judged(more, max_loss=0.03).decision == "enforce"
    assert judged([*np.zeros(38), -0.4, -0.4]).n_needed is None


def test_keep_says_how_many_queries_would_decide_where_they_are_few() -> None:
    kept = judged(np.zeros(20)).model_copy(update={"decision": "keep", "value": None})
    assert "20 labelled queries" in kept.statement
    assert "about 28 would probably decide" in kept.statement
    many = kept.model_copy(update={"n_needed": None})
    assert many.statement.endswith("which stay")


def test_shadow_that_no_number_of_queries_ends_says_that_judged_requests_may() -> None:
    found = judged([*np.zeros(38), -0.4, -0.4])
    assert (found.decision, found.n_needed) == ("shadow", None)
    assert "more queries like these would not enforce it" in found.statement


def _shares(losses: float, share: float, gains: float = 0.0) -> Draw:
    """Some queries lose a share of their relevant passages, some gain as much, others nothing."""

    def draw(rng: np.random.Generator, n: int) -> FloatArray:
        return share * rng.choice([-1.0, 1.0, 0.0], n, p=[losses, gains, 1.0 - losses - gains])

    return draw


@pytest.mark.parametrize("n", [20, 35, 50, 100, 200])
@pytest.mark.parametrize(
    "draw", [_shares(0.1, 0.5), _shares(0.15, 0.5, 0.05), _shares(0.2, 0.25), _shares(0.1, 1, 0.05)]
)
def test_a_policy_at_the_limit_is_served_in_a_tenth_of_calibrations_at_most(
    draw: Draw, n: int
) -> None:
    rng = np.random.default_rng(n)
    assert abs(draw(rng, 200_000).mean() + 0.05) < 0.01
    served = [judged(draw(rng, n)).decision == "enforce" for _ in range(1_000)]
    assert np.mean(served) <= 0.1


def test_losses_of_everything_on_very_few_queries_escape_more_often() -> None:
    """The bound is approximate: with one query in twenty lost as a whole, 30 may show none."""
    rng = np.random.default_rng(1)
    draw = _shares(0.05, 1.0)
    for n, at_most in ((20, 0.0), (30, 0.25), (50, 0.1), (100, 0.1)):
        served = [judged(draw(rng, n)).decision == "enforce" for _ in range(1_000)]
        assert np.mean(served) <= at_most


def test_a_policy_that_loses_as_little_as_it_gains_is_served_more_often_with_more_queries() -> None:
    rng, draw = np.random.default_rng(2), _shares(0.04, 0.5, 0.04)
    shares = [
        np.mean([judged(draw(rng, n)).decision == "enforce" for _ in range(500)])
        for n in (20, 100, 400)
    ]
    assert shares == sorted(shares)
    assert shares[-1] > 0.8
