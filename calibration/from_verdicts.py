"""Calibrate from a judge's verdicts on unlabelled questions, with some that people graded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calibration.calibrate import Passes, default_fusion, replay_system, sketch_of
from calibration.calibrate_route import Settings, reference_deciles, spare_share
from calibration.data.dataset import Dataset, split_by_query
from calibration.evaluate import contexts, per_query
from calibration.judged_questions import graded_by_people, graded_whole
from calibration.judged_route import Judged, JudgedRoute, judged_route
from calibration.judged_table import LEAST_GRADED
from calibration.pool_labels import labelled_part
from calibration.replay import Pools
from calibration.retrievers import MultiRoute, RankingSource
from calibration.verdict import verdict
from ctxguard._support.words import count
from ctxguard.core.policies import Policy, RatioPolicy
from ctxguard.core.types import Route
from ctxguard.errors import CalibrationError
from ctxguard.profile.schema import Profile, RouteProfile

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import AnyRetriever


@dataclass(frozen=True)
class JudgedCalibration:
    """A profile from verdicts, and what is known of each route.

    Attributes:
        profile: The file that the guard loads. Its verdict is ``shadow`` unless people graded so
            many questions that 20 could be held out: a judge's verdicts do not show that recall
            is kept.
        routes: By route, what the policy gains, and how the judge errs. A fallback on whose
            candidates the verdicts are too few is absent, and serves the first ones as today.
        n_graded: Questions that people graded whole, those held out included.
    """

    profile: Profile
    routes: Mapping[Route, JudgedRoute]
    n_graded: int


def calibrate_from_verdicts(
    retriever: "AnyRetriever | MultiRoute | RankingSource",
    dataset: Dataset,
    verdicts: Judged,
    settings: Settings | None = None,
    *,
    passes: Passes | None = None,
) -> JudgedCalibration:
    """Fit a policy of highest expected utility for every route of a retriever.

    Args:
        retriever: As for `calibrate`; a ``RankingSource`` says what plain hits' scores mean.
        dataset: The questions, with what people graded of them. Questions of which they graded all
            that was judged teach how the judge errs; 20 of them are worth more than any number of
            verdicts.
        verdicts: Of the first candidates of each question (`calibration.judged_questions`).
        settings: ``serving_k``, ``depth``, ``min_keep``, ``utilities``, ``tolerance``,
            ``max_loss``, ``held_out``, ``seed`` and ``signal_columns`` are used.

    Raises:
        CalibrationError: people graded fewer than 10 questions whole, there are no verdicts on the
            candidates, or all are alike.
    """
    settings = Settings() if settings is None else settings
    dataset = dataset.subset(verdicts.keys() & {query.query_id for query in dataset.queries})
    grades = graded_by_people(dataset, verdicts)
    whole = graded_whole(grades, verdicts)
    if len(whole) < LEAST_GRADED:
        raise CalibrationError(
            f"people graded {count(len(whole), 'question')} whole, of {LEAST_GRADED} that it takes "
            "to see how the judge errs: a policy from its verdicts alone promises what is not there"
        )
    system = replay_system(
        retriever,
        dataset,
        settings.depth,
        fusion=lambda several, _: default_fusion(several),
        passes=passes,
        columns=settings.signal_columns,
    )
    tested = _held_out(dataset, whole, settings)
    fitted = {name: said for name, said in verdicts.items() if name not in tested}
    routes: dict[Route, JudgedRoute] = {}
    for route, pools in system.pools.items():
        try:
            routes[route] = judged_route(pools, fitted, grades, settings)
        except CalibrationError:
            # The judge saw the first candidates of the main route; a fallback may have others.
            if not routes:
                raise
    main = next(iter(routes.values()))
    by_route = {
        route: _route_profile(routes.get(route), pools, dataset.subset(tested), settings)
        for route, pools in system.pools.items()
    }
    sketch = sketch_of(retriever)
    profile = system.profile(by_route, sketch, dataset, settings, [main.in_words])
    return JudgedCalibration(profile, routes, len(whole))


def _held_out(dataset: Dataset, whole: Sequence[str], settings: Settings) -> list[str]:
    """Choose graded questions that take no part in the fit, to show what the policy costs."""
    answerable = [name for name in whole if any(dataset.qrels.get(name, {}).values())]
    share = spare_share(len(answerable)) if settings.held_out is None else settings.held_out
    if not share:
        return []
    part = split_by_query(dataset.subset(answerable), (share, 1.0 - share), settings.seed)[0]
    return [query.query_id for query in part.queries]


def _route_profile(
    result: JudgedRoute | None, pools: Pools, held_out: Dataset, settings: Settings
) -> RouteProfile:
    today = RatioPolicy(k=settings.serving_k)
    chosen: Policy = today
    why = f"the first {today.k} as today: too few verdicts on this route's candidates"
    judged = None
    if result is not None:
        chosen, why = result.policy, result.in_words
        differences = np.zeros(0)
        if len(held_out):
            utilities = settings.utilities
            part = labelled_part(pools, held_out, held_out, utilities, baseline_k=today.k)
            recall = [per_query(*part, policy).values["recall"] for policy in (today, chosen)]
            differences = (recall[1] - recall[0])[~np.isnan(recall[0])]
        judged = verdict(
            differences,
            serving_k=today.k,
            tolerance=settings.tolerance,
            max_loss=settings.max_loss,
            shown_by="held_out",
        )
    kept = contexts(pools, chosen)[1].sum(axis=1)
    return RouteProfile(
        policy=today if judged is not None and judged.decision == "keep" else chosen,
        score_kind=pools.kind,
        why=why,
        verdict=judged,
        reference=reference_deciles(pools, kept, np.ones(len(pools))),
        safe_policy=today,
    )
