"""`enforce_share`: a share of requests is enforced, the others are in shadow, dealt by a hash."""

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ctxguard import Context, ContextGuard, Hit, Mode, Ranking, RatioPolicy, Route, ScoreKind
from ctxguard.errors import ConfigurationError
from ctxguard.profile.schema import RouteProfile, RouteVerdict
from ctxguard.request.telemetry import Telemetry
from tests.profiles import profile_with

HITS = [Hit(f"p{n}", 1.0 - n / 10, f"text {n}") for n in range(9)]
IN_SHADOW = profile_with(
    {
        Route.HYBRID: RouteProfile(
            policy=RatioPolicy(k=5, min_ratio=0.7),
            score_kind=ScoreKind.RATIO,
            verdict=RouteVerdict(
                decision="shadow", n=40, serving_k=6, tolerance=0.01, max_loss=0.05
            ),
            safe_policy=RatioPolicy(k=6),
        )
    }
)
IDS = [f"request-{n}" for n in range(400)]


def guard_of(**settings: object) -> ContextGuard:
    registry = CollectorRegistry()
    return ContextGuard(profile=IN_SHADOW, telemetry=Telemetry(registry), **settings)  # type: ignore[arg-type]


def asked(guard: ContextGuard, request_id: str, session_id: str | None = None) -> Context:
    ranking = replace(Ranking.from_hits(HITS, ScoreKind.RATIO), route=Route.HYBRID)
    return guard.filter("q?", ranking, request_id=request_id, session_id=session_id)


def enforced(share: float) -> set[str]:
    guard = guard_of(enforce_share=share)
    return {name for name in IDS if asked(guard, name).mode is Mode.ENFORCE}


def test_about_that_share_is_enforced_and_a_request_always_has_the_same_arm() -> None:
    assert 60 <= len(enforced(0.2)) <= 100
    assert enforced(0.2) == enforced(0.2)


def test_a_larger_share_enforces_the_same_requests_and_more() -> None:
    assert enforced(0.0) == set()
    assert enforced(0.2) < enforced(0.6) < enforced(1.0) == set(IDS)


def test_an_enforced_request_is_served_what_the_policy_keeps_and_the_others_as_today() -> None:
    guard = guard_of(enforce_share=0.25)
    served = {asked(guard, name).mode: len(asked(guard, name).passages) for name in IDS}
    assert served == {Mode.ENFORCE: 4, Mode.SHADOW: 6}


def test_a_context_holds_the_probability_of_its_mode_and_no_remark_on_a_mode_set_by_hand() -> None:
    contexts = [asked(guard_of(enforce_share=0.25), name) for name in IDS[:50]]
    assert {(each.mode, each.arm_probability) for each in contexts} == {
        (Mode.ENFORCE, 0.25),
        (Mode.SHADOW, 0.75),
    }
    assert all("by hand" not in line for each in contexts for line in each.differences)


def test_all_requests_of_a_session_have_the_same_arm() -> None:
    guard = guard_of(enforce_share=0.5)
    modes = {name: {asked(guard, each, name).mode for each in IDS[:10]} for name in IDS[:40]}
    assert {len(each) for each in modes.values()} == {1}
    assert len(set.union(*modes.values())) == 2


def test_without_a_share_the_verdict_holds_for_all() -> None:
    contexts = [asked(guard_of(), name) for name in IDS[:20]]
    assert {(each.mode, each.arm_probability) for each in contexts} == {(Mode.SHADOW, None)}


def test_a_mode_set_while_serving_comes_before_the_share() -> None:
    guard = guard_of(enforce_share=1.0)
    guard.mode = Mode.OFF
    assert asked(guard, "r").mode is Mode.OFF
    assert asked(guard, "r").arm_probability is None
    guard.mode = None
    assert asked(guard, "r").mode is Mode.ENFORCE


def test_a_mode_and_a_share_contradict_each_other() -> None:
    with pytest.raises(ConfigurationError, match="a mode or an enforce_share, not both"):
        guard_of(mode="enforce", enforce_share=0.5)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), "half"])
def test_a_share_lies_between_0_and_1(share: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"enforce_share .* must lie in"):
        guard_of(enforce_share=share)
