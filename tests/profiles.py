"""Small profiles made by hand: whatever a test does not say is valid and of no consequence."""

from collections.abc import Mapping
from typing import Literal

from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route, ScoreKind
from ctxguard.profile.schema import (
    Certificate,
    Profile,
    Provenance,
    RouteProfile,
    RouteVerdict,
    SufficiencyProfile,
)

CERTIFICATE = Certificate(
    alpha=0.12, delta=0.1, baseline_k=5, test="betting upper bound", recall_loss=0.1, n_recall=200
)


def sufficiency_with(*, threshold: float | None) -> SufficiencyProfile:
    """A certificate of sufficiency with this threshold."""
    return SufficiencyProfile(
        threshold=threshold,
        alpha=0.05,
        delta=0.1,
        n_sufficient=100,
        n_insufficient=50,
        false_alarms=None if threshold is None else 2,
        detected=None if threshold is None else 20,
        auroc=0.8,
        needed=45,
    )


def unenforced(decision: Literal["keep", "shadow"], kind: ScoreKind) -> RouteProfile:
    """A route whose verdict keeps today's first five, or decides in shadow."""
    return RouteProfile(
        policy=RatioPolicy(k=5) if decision == "keep" else RatioPolicy(k=2, min_ratio=0.9),
        score_kind=kind,
        verdict=RouteVerdict(decision=decision, n=40, serving_k=5, tolerance=0.01, max_loss=0.05),
        safe_policy=RatioPolicy(k=5),
    )


def profile_with(
    routes: Mapping[Route, RouteProfile],
    *,
    fusion: Fusion | None = None,
    fingerprint: Mapping[str, str] | None = None,
    depth: int = 100,
) -> Profile:
    """A profile of these routes, by default of a system that says nothing of itself."""
    return Profile(
        routes=dict(routes),
        fusion=Fusion() if fusion is None else fusion,
        fingerprint={} if fingerprint is None else dict(fingerprint),
        provenance=Provenance(
            ctxguard_version="0", seed=0, dataset="d", dataset_digest="0" * 64, depth=depth
        ),
    )
