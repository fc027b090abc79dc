"""Calibrate from a judge's verdicts on unlabelled questions, with some that people graded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibration.calibrate import (
    MultiRoute,
    Passes,
    default_fusion,
    provenance,
    replay_system,
    sketch_of,
)
from calibration.calibrate_route import Settings, reference_deciles
from calibration.data.dataset import Dataset
from calibration.judge_mixture import DEFAULT_RATES, JudgeRates
from calibration.judged_questions import graded_whole
from calibration.judged_route import ByQuestion, JudgedRoute, JudgedSettings, judged_route
from calibration.replay import Pools
from calibration.retrievers import RankingSource
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route, ScoreKind, ScoreKindName
from ctxguard.profile.schema import Profile, RouteProfile, RouteVerdict

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import AnyRetriever


@dataclass(frozen=True)
class JudgedCalibration:
    """A profile from verdicts, and what is known of each route.

    Attributes:
        profile: The file that the guard loads. Its verdict is ``shadow``: a judge's verdicts do not
            show that recall is kept.
        routes: By route, what the policy gains, and how the judge errs.
    """

    profile: Profile
    routes: Mapping[Route, JudgedRoute]


def calibrate_from_verdicts(
    retriever: "AnyRetriever | MultiRoute | RankingSource",
    dataset: Dataset,
    verdicts: ByQuestion,
    settings: Settings | None = None,
    *,
    rates: JudgeRates = DEFAULT_RATES,
    score_kind: ScoreKind | ScoreKindName | None = None,
    fingerprint: Mapping[str, str] | None = None,
    passes: Passes | None = None,
    cache: Path | None = None,
) -> JudgedCalibration:
    """Fit a policy of highest expected utility for every route of a retriever.

    Args:
        retriever: As for `calibrate`.
        dataset: The questions, with what people graded of them. Questions of which they graded all
            that was judged teach how the judge errs; 20 of them are worth more than any number of
            verdicts.
        verdicts: Of the first candidates of each question (`calibration.judged_questions`).
        settings: ``serving_k``, ``depth``, ``min_keep``, ``utilities`` and ``seed`` are used.
        rates: What is assumed of the judge where people graded nothing; by default it finds 0.85 of
            the relevant passages, and says yes to 0.10 of the others.
        score_kind: As for `calibrate`.
        fingerprint: As for `calibrate`.
        passes: Reports progress.
        cache: As for `calibrate`.

    Raises:
        CalibrationError: there are no verdicts on the candidates, or all are alike.
    """
    settings = Settings() if settings is None else settings
    dataset = dataset.subset(verdicts.keys() & {query.query_id for query in dataset.queries})
    system = replay_system(
        retriever,
        dataset,
        settings.depth,
        fusion=lambda several, _: default_fusion(several),
        score_kind=score_kind,
        fingerprint=fingerprint,
        passes=passes,
        cache=cache,
    )
    grades = graded_whole(dataset, verdicts)
    routes = {
        route: judged_route(
            pools,
            verdicts,
            grades,
            JudgedSettings(
                settings.serving_k,
                cost=max(-settings.utilities.irrelevant, 0.0),
                min_keep=settings.min_keep,
                rates=rates,
            ),
        )
        for route, pools in system.pools.items()
    }
    identity = system.source.fingerprint()
    main = next(iter(routes.values()))
    profile = Profile(
        routes={
            route: _route_profile(result, system.pools[route], settings)
            for route, result in routes.items()
        },
        fusion=system.fusion,
        utilities=settings.utilities,
        fingerprint=dict(identity),
        corpus=sketch_of(retriever),
        provenance=provenance(dataset, settings, system.pools, identity, notes=[main.in_words]),
    )
    return JudgedCalibration(profile, routes)


def _route_profile(result: JudgedRoute, pools: Pools, settings: Settings) -> RouteProfile:
    return RouteProfile(
        policy=result.policy,
        score_kind=pools.kind,
        why=result.in_words,
        verdict=RouteVerdict(
            decision="shadow",
            n=0,
            serving_k=settings.serving_k,
            tolerance=settings.tolerance,
            max_loss=settings.max_loss,
        ),
        reference=reference_deciles(pools, np.ones(len(pools)), result.policy),
        safe_policy=RatioPolicy(k=settings.serving_k),
    )
