"""A guard without a mode does what its profile's verdict says; a mode given by hand wins."""

import logging
from dataclasses import replace
from typing import Literal

import pytest

from ctxguard import (
    Context,
    ContextGuard,
    Hit,
    Mode,
    Profile,
    Ranking,
    RatioPolicy,
    Route,
    ScoreKind,
)
from ctxguard.profile.comparison import ProfileCheck
from ctxguard.profile.schema import RouteProfile, RouteVerdict
from tests.profiles import profile_with

HITS = [Hit(f"p{n}", 1.0 - n / 10, f"text {n}") for n in range(9)]
SEVENTY = RatioPolicy(k=5, min_ratio=0.7)
BY_HAND = "mode 'enforce' was set by hand; the profile's verdict is 'shadow'"

Decision = Literal["enforce", "shadow", "keep"]


def route_with(decision: Decision | None, policy: RatioPolicy = SEVENTY) -> RouteProfile:
    verdict = None
    if decision is not None:
        verdict = RouteVerdict(decision=decision, n=40, serving_k=6, tolerance=0.01, max_loss=0.05)
    return RouteProfile(
        policy=policy, score_kind=ScoreKind.RATIO, verdict=verdict, safe_policy=RatioPolicy(k=6)
    )


def profile_of(**decisions: Decision | None) -> Profile:
    """A profile whose routes have these verdicts."""
    return profile_with(
        {Route(route): route_with(decision) for route, decision in decisions.items()}
    )


def guard_of(profile: Profile | None, **settings: object) -> ContextGuard:
    return ContextGuard(profile=profile, **settings)  # type: ignore[arg-type]


ON_HYBRID = Ranking.from_hits(HITS, "ratio", "hybrid")


def asked(guard: ContextGuard, route: Route = Route.HYBRID) -> Context:
    return guard.filter("q?", replace(ON_HYBRID, route=route))


def served(context: Context) -> int:
    return len(context.passages)


@pytest.mark.parametrize(
    ("decision", "settings", "mode", "n"),
    [
        ("enforce", {}, Mode.ENFORCE, 4),
        # As many as the profile was compared with.
        ("shadow", {}, Mode.SHADOW, 6),
        (None, {}, Mode.ENFORCE, 4),
        # A mode given by hand wins, and so does a number of passages.
        ("shadow", {"mode": "enforce"}, Mode.ENFORCE, 4),
        ("enforce", {"mode": "shadow"}, Mode.SHADOW, 6),
        ("enforce", {"mode": "off"}, Mode.OFF, 6),
        ("enforce", {"mode": "shadow", "k": 2}, Mode.SHADOW, 2),
        ("enforce", {"mode": "off", "k": 2}, Mode.OFF, 2),
    ],
)
def test_verdict_decides_unless_mode_is_given(
    decision: Decision | None, settings: dict[str, object], mode: Mode, n: int
) -> None:
    guard = guard_of(profile_of(hybrid=decision), **settings)
    context = asked(guard)
    assert guard.mode is context.mode is mode
    assert (served(context), context.decision.n_kept) == (n, 4 if mode is not Mode.OFF else n)


class TestTheVerdictDecides:
    def test_keep_serves_todays_policy(self) -> None:
        profile = profile_with({Route.HYBRID: route_with("keep", RatioPolicy(k=6))})
        context = asked(guard_of(profile))
        assert (context.mode, served(context)) == (Mode.ENFORCE, 6)

    def test_each_route_has_its_own(self) -> None:
        guard = guard_of(profile_of(lexical="shadow", hybrid="enforce"))
        assert guard.mode is Mode.ENFORCE
        assert asked(guard, Route.HYBRID).mode is Mode.ENFORCE
        assert asked(guard, Route.LEXICAL).mode is Mode.SHADOW
        assert served(asked(guard, Route.LEXICAL)) == 6

    def test_shadow_profiles_safe_policies_are_served(self) -> None:
        context = asked(guard_of(profile_of(hybrid="shadow").safe()))
        assert (context.mode, served(context)) == (Mode.ENFORCE, 6)

    def test_foreign_shadow_profile_changes_nothing(self) -> None:
        """A profile of another system in shadow changes nothing that is served."""
        profile = profile_of(hybrid="shadow").model_copy(update={"fingerprint": {"embedder": "a"}})
        guard = ContextGuard(
            lambda query, depth: HITS,
            profile=profile,
            score_kind="ratio",
            check=ProfileCheck(fingerprint={"embedder": "b"}),
        )
        assert served(asked(guard)) == 6


class TestAModeGivenByHandWins:
    @pytest.mark.parametrize(
        ("decision", "mode", "said"),
        [
            ("shadow", "enforce", [BY_HAND]),
            (
                "enforce",
                "shadow",
                ["mode 'shadow' was set by hand; the profile's verdict is 'enforce'"],
            ),
            ("enforce", "enforce", []),
        ],
    )
    def test_unproven_policy_by_hand_is_logged(
        self, decision: Decision, mode: str, said: list[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            context = asked(guard_of(profile_of(hybrid=decision), mode=mode))
        assert (caplog.messages, BY_HAND in context.differences) == (said, said == [BY_HAND])

    def test_none_returns_the_word_to_verdict(self) -> None:
        guard = guard_of(profile_of(hybrid="shadow"), mode="enforce")
        guard.mode = None
        assert guard.mode is asked(guard).mode is Mode.SHADOW
        guard.use_profile(profile_of(hybrid="enforce"))
        assert guard.mode is asked(guard).mode is Mode.ENFORCE
