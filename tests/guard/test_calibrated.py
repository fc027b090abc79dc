"""A guard with a profile: when its policy applies, and when the first k are served instead."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import ExpectedUtilityPolicy, RatioPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.signals import feature_names
from ctxguard.core.types import Flag, Leg, Route, ScoreKind
from ctxguard.errors import ProfileFormatError
from ctxguard.profile.comparison import ProfileCheck
from ctxguard.profile.schema import RouteProfile
from tests.counted import Counted
from tests.guard.guards import (
    OWN,
    RANKING,
    SEVENTY,
    Answering,
    Identified,
    guard_of,
    profile_of,
    served,
)
from tests.profiles import profile_with

STRICT = ProfileCheck(strict=True)


class TestCalibration:
    @pytest.mark.parametrize(
        ("retriever", "settings", "flags"),
        [
            (Answering, {"k": 3}, (Flag.UNCALIBRATED,)),
            (Answering, {"policy": SEVENTY}, (Flag.UNCALIBRATED,)),
            (Identified, {"profile": profile_of(fingerprint=OWN), "check": STRICT}, ()),
            (
                Answering,
                {"profile": profile_of(fingerprint=OWN), "check": replace(STRICT, fingerprint=OWN)},
                (),
            ),
        ],
        ids=["top k", "by hand", "identifies itself", "identified by hand"],
    )
    def test_only_own_profile_applies_unflagged(
        self, retriever: type[Answering], settings: dict[str, Any], flags: tuple[Flag, ...]
    ) -> None:
        context = guard_of(retriever(), **settings).retrieve("q?")
        assert (served(context), context.flags) == (["a", "b", "c"], flags)

    def test_foreign_profile_gives_k_and_flag(self, counted: Counted) -> None:
        profile = profile_of(
            RatioPolicy(k=4, min_ratio=0.9), fingerprint={"embedder": "large", "corpus_size": "6"}
        )
        guard = guard_of(Identified(), profile=profile, telemetry=counted.telemetry)
        for _ in range(2):
            context = guard.retrieve("q?")
            assert served(context) == ["a", "b", "c", "d"]
            assert context.flags == (Flag.PROFILE_MISMATCH,)
        assert counted.by_label("flags") == {("profile_mismatch",): 2}

    def test_uncalibrated_route_gets_top_k(self) -> None:
        guard = guard_of(profile=profile_of(route=Route.HYBRID), k=2)
        context = guard.retrieve("q?")
        assert served(context) == ["a", "b"]
        assert context.flags == (Flag.UNVERIFIED, Flag.ROUTE_UNCALIBRATED)
        line = "the profile has no policy for the route external; it has hybrid"
        assert line in context.differences

    def test_each_route_has_its_own_policy(self) -> None:
        routes = {
            Route.HYBRID: RouteProfile(policy=SEVENTY, score_kind=ScoreKind.RATIO),
            Route.LEXICAL: RouteProfile(policy=RatioPolicy(k=1), score_kind=ScoreKind.RATIO),
        }
        guard = guard_of(profile=profile_with(routes))
        assert served(guard.filter("q?", replace(RANKING, route=Route.HYBRID))) == ["a", "b", "c"]
        assert served(guard.filter("q?", replace(RANKING, route=Route.LEXICAL))) == ["a"]

    def test_other_score_kinds_are_never_compared(self) -> None:
        profile = profile_of(RatioPolicy(k=4, min_ratio=0.7), kind=ScoreKind.LOGIT)
        context = guard_of(profile=profile).retrieve("q?")
        assert served(context) == ["a", "b", "c", "d"]
        assert context.flags == (Flag.UNVERIFIED, Flag.PROFILE_MISMATCH)
        assert "score kind of the route external is 'ratio'; it was 'logit'" in context.differences

    def test_profiles_fusion_is_set(self) -> None:
        @dataclass
        class Fusing(Answering):
            fusion: Fusion = field(default_factory=Fusion)

            def with_fusion(self, fusion: Fusion) -> "Fusing":
                return replace(self, fusion=fusion)

        original = Fusing()
        guard = guard_of(original, profile=profile_of(fusion=Fusion("convex", 0.3)))
        assert isinstance(guard.retriever, Fusing)
        assert (guard.retriever.fusion, original.fusion) == (Fusion("convex", 0.3), Fusion())

    def test_profile_is_read_from_path(self, tmp_path: object) -> None:
        file = f"{tmp_path}/profile.json"
        profile_of().save(file)
        assert served(guard_of(profile=file).retrieve("q?")) == ["a", "b", "c"]
        with pytest.raises(ProfileFormatError, match="absent"):
            guard_of(profile=f"{tmp_path}/absent.json")

    def test_expected_utility_through_the_guard(self) -> None:
        names = feature_names(["dense"])
        model = RelevanceModel(("dense",), (10.0, 0, 0, 0, 0), (0.0,) * 5, (1.0,) * 5, -7.0)
        assert names[0] == "dense.value"
        cosines = np.array([0.2, 0.9, 0.8, 0.1, 0.3, 0.0])
        ranking = replace(RANKING, legs={"dense": Leg(cosines, ScoreKind.COSINE)})
        profile = profile_of(ExpectedUtilityPolicy(model=model, k=5))
        context = guard_of(Answering(ranking), profile=profile).retrieve("q?")
        assert served(context) == ["b", "c"]
        missing = guard_of(profile=profile).retrieve("q?")
        assert served(missing) == ["a", "b", "c", "d", "e"]
        assert missing.flags == (Flag.UNVERIFIED, Flag.MISSING_SIGNALS)
        line = "the policy requires scores from dense, but the answer has those from none"
        assert line in missing.differences
