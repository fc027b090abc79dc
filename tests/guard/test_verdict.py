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


class TestTheVerdictDecides:
    def test_enforce_serves_what_the_policy_keeps(self) -> None:
        context = asked(guard_of(profile_of(hybrid="enforce")))
        assert (context.mode, served(context)) == (Mode.ENFORCE, 4)

    def test_shadow_serves_as_many_as_the_profile_was_compared_with_and_records(self) -> None:
        guard = guard_of(profile_of(hybrid="shadow"))
        context = asked(guard)
        assert guard.mode is context.mode is Mode.SHADOW
        assert served(context) == 6
        assert context.decision.n_kept == 4

    def test_keep_serves_its_policy_which_is_that_of_today(self) -> None:
        profile = profile_with({Route.HYBRID: route_with("keep", RatioPolicy(k=6))})
        context = asked(guard_of(profile))
        assert (context.mode, served(context)) == (Mode.ENFORCE, 6)

    def test_a_profile_without_a_verdict_is_enforced(self) -> None:
        assert asked(guard_of(profile_of(hybrid=None))).mode is Mode.ENFORCE
        assert guard_of(None).mode is Mode.ENFORCE

    def test_each_route_has_its_own(self) -> None:
        guard = guard_of(profile_of(lexical="shadow", hybrid="enforce"))
        assert guard.mode is Mode.ENFORCE
        assert asked(guard, Route.HYBRID).mode is Mode.ENFORCE
        assert asked(guard, Route.LEXICAL).mode is Mode.SHADOW
        assert served(asked(guard, Route.LEXICAL)) == 6

    def test_the_safe_policies_of_a_profile_in_shadow_are_served(self) -> None:
        context = asked(guard_of(profile_of(hybrid="shadow").safe()))
        assert (context.mode, served(context)) == (Mode.ENFORCE, 6)

    def test_another_profile_brings_its_own(self) -> None:
        guard = guard_of(profile_of(hybrid="shadow"))
        guard.use_profile(profile_of(hybrid="enforce"))
        assert guard.mode is asked(guard).mode is Mode.ENFORCE

    def test_a_profile_of_another_system_in_shadow_changes_nothing_that_is_served(self) -> None:
        profile = profile_of(hybrid="shadow").model_copy(update={"fingerprint": {"embedder": "a"}})
        guard = ContextGuard(
            lambda query, depth: HITS,
            profile=profile,
            score_kind="ratio",
            check=ProfileCheck(fingerprint={"embedder": "b"}),
        )
        assert served(asked(guard)) == 6


class TestAModeGivenByHandWins:
    def test_it_is_said_on_every_answer_that_an_unproven_policy_serves(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            context = asked(guard_of(profile_of(hybrid="shadow"), mode="enforce"))
        assert (context.mode, served(context)) == (Mode.ENFORCE, 4)
        assert context.differences[-1] == BY_HAND
        assert caplog.messages == [BY_HAND]

    def test_it_is_logged_where_it_holds_a_proven_policy_back(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            context = asked(guard_of(profile_of(hybrid="enforce"), mode="shadow"))
        assert served(context) == 6
        assert caplog.messages == [
            "mode 'shadow' was set by hand; the profile's verdict is 'enforce'"
        ]

    def test_without_a_contradiction_nothing_is_said(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            context = asked(guard_of(profile_of(hybrid="enforce"), mode="enforce"))
        assert BY_HAND not in context.differences
        assert caplog.messages == []

    def test_none_gives_the_word_back_to_the_verdict(self) -> None:
        guard = guard_of(profile_of(hybrid="shadow"), mode="enforce")
        guard.mode = None
        assert guard.mode is asked(guard).mode is Mode.SHADOW

    @pytest.mark.parametrize("mode", ["shadow", "off"])
    def test_so_does_a_number_of_passages(self, mode: Literal["shadow", "off"]) -> None:
        profile = profile_of(hybrid="enforce")
        assert served(asked(guard_of(profile, mode=mode))) == 6
        assert served(asked(guard_of(profile, mode=mode, k=2))) == 2
