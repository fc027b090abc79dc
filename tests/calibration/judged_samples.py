"""Simulated queries as live traffic: served by a guard, sampled, and judged by their own labels."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry
from simulated_pools import DEPTH, Recorded, simulate
from watching import Watching

from calibration.data.dataset import Dataset
from ctxguard.core.context import Context
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route
from ctxguard.guard import ContextGuard
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.sampling.inclusion import JudgingRates
from ctxguard.profile.schema import Profile, RouteProfile
from ctxguard.request.telemetry import Telemetry

SERIES = "labels 1"
WHOLE = JudgingRates(
    dropped_rate=0.0, full_pool_rate=1.0, full_pool_rate_if_no_hit=1.0, baseline_rate=0.0
)


def truth_of(dataset: Dataset) -> LabelJudge:
    """The labels, as a judge."""
    return LabelJudge({query.text: dataset.qrels[query.query_id] for query in dataset.queries})


def serve(retriever: Recorded, queries: Sequence[str], *, k: int = 3) -> list[Context]:
    """The contexts that a guard gives, of the first k."""
    guard = ContextGuard(retriever, k=k, depth=DEPTH, telemetry=Telemetry(CollectorRegistry()))
    # Choices hash the ids, and tests should choose the same each time.
    return [guard.retrieve(query, request_id=f"r{place}") for place, query in enumerate(queries)]


def watched(n: int, *, rates: JudgingRates = WHOLE, url: str = "sqlite://") -> Watching:
    """A store with n judged requests."""
    retriever, dataset = simulate(n)
    live = Watching(truth_of(dataset), rates=rates, url=url)
    live.watch(*serve(retriever, [query.text for query in dataset.queries]))
    return live


def spoilt(profile: Profile) -> Profile:
    """The profile with a policy that serves far too little."""
    bad = profile.routes[Route.HYBRID].model_copy(update={"policy": RatioPolicy(k=1)})
    other = RouteProfile(policy=RatioPolicy(k=2), score_kind=bad.score_kind)
    return profile.model_copy(update={"routes": {Route.HYBRID: bad, Route.LEXICAL: other}})
