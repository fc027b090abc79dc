"""Signals that need no label, counted against their distribution at calibration."""

from collections.abc import Iterable

import numpy as np
import pytest

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route, ScoreKind
from ctxguard.errors import ConfigurationError
from ctxguard.monitor.alarms import AlarmState, Signal, SignalCounts, signals_of
from ctxguard.profile.schema import Profile, RouteEvidence, RouteProfile
from tests.profiles import profile_with

LEVELS = np.linspace(0.0, 1.0, 11)


def deciles_of(values: np.ndarray) -> tuple[float, ...]:
    return tuple(np.quantile(values, LEVELS).tolist())


def profile_of(**reference: tuple[float, ...]) -> Profile:
    route = RouteProfile(
        policy=RatioPolicy(k=3),
        score_kind=ScoreKind.RATIO,
        evidence=RouteEvidence(queries=400, metrics={}),
        reference=reference,
    )
    return profile_with({Route.HYBRID: route})


def counted(
    profile: Profile, signal: Signal, values: Iterable[float], route: Route = Route.HYBRID
) -> SignalCounts:
    state = AlarmState(profile)
    for value in values:
        state.add_signals(route, {signal: value})
    (found,) = state.report().signals
    return found


def distance(found: SignalCounts) -> float:
    """The distance that the rule of Prometheus takes."""
    below, above = np.array(found.below) / found.n, np.array(found.above) / found.n
    return float(max((below - LEVELS).max(), (above - (1.0 - LEVELS)).max()))


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1.0, 4.0, 2.5], {"top_score": 4.0, "score_gap": 1.5}),
        ([None, float("nan"), 1e38, 3.0], {"top_score": 3.0}),
        ([], {}),
    ],
    ids=["in any order", "garbage", "no candidates"],
)
def test_signals_are_the_best_score_and_its_gap(
    scores: list[float | None], expected: dict[str, float]
) -> None:
    assert signals_of(scores, kept=2) == {"kept": 2, **expected}


class TestCounts:
    PROFILE = profile_of(top_score=tuple(range(11)))

    def test_they_say_how_many_requests_lie_beyond_each_quantile(self) -> None:
        found = counted(self.PROFILE, Signal.TOP_SCORE, (2.5, 2.5, 9.0, 42.0))
        assert (found.signal, found.n, found.n_reference) == (Signal.TOP_SCORE, 4, 400)
        assert found.below == (0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 3)
        assert found.above == (4, 4, 4, 2, 2, 2, 2, 2, 2, 1, 1)

    def test_what_has_no_reference_counts_nothing(self) -> None:
        assert counted(self.PROFILE, Signal.KEPT, [1.0]).n == 0
        assert counted(self.PROFILE, Signal.TOP_SCORE, [1.0], Route.DENSE).n == 0

    @pytest.mark.parametrize("deciles", [(1.0,) * 10, tuple(range(10, -1, -1))])
    def test_a_reference_that_is_not_eleven_ascending_deciles_is_refused(
        self, deciles: tuple[float, ...]
    ) -> None:
        with pytest.raises(ConfigurationError, match="11 ascending deciles"):
            AlarmState(profile_of(top_score=deciles))


class TestDistance:
    def test_repeated_values_of_the_same_distribution_are_not_far(self) -> None:
        rng = np.random.default_rng(6)
        profile = profile_of(kept=deciles_of(1.0 + rng.binomial(4, 0.4, 2_000)))
        live = 1.0 + rng.binomial(4, 0.4, 500)
        assert distance(counted(profile, Signal.KEPT, live)) < 0.06

    def test_a_shift_is_seen_and_the_same_distribution_seldom_beyond_smirnovs_bound(self) -> None:
        rng = np.random.default_rng(5)
        n, m, far = 500, 150, 0
        bound = np.sqrt(4.35 * (1 / n + 1 / m))
        for _ in range(100):
            profile = profile_of(top_score=deciles_of(rng.gamma(2.0, 1.0, m)))
            same, moved = (
                counted(profile, Signal.TOP_SCORE, rng.gamma(shape, 1.0, n)) for shape in (2.0, 4.0)
            )
            far += distance(same) > bound
            assert distance(moved) > bound
        assert far <= 1
