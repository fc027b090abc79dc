"""Simulated queries as live traffic: served by a guard, sampled, and judged by their own labels."""

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from simulated_pools import DEPTH, Recorded, simulate
from watching import Watching

from calibration.data.dataset import Dataset
from ctxguard.core.context import Context
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Passage, Route
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry
from ctxguard.monitor.judges import Judgment, LabelJudge
from ctxguard.monitor.sampling.sampler import JudgingRates
from ctxguard.profile.schema import Profile, RouteProfile

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


def watching(
    retriever: Recorded,
    dataset: Dataset,
    texts: Sequence[str] = (),
    *,
    judge: object = None,
    url: str = "sqlite://",
    **settings: Any,
) -> Watching:
    """A store with the judged requests of these texts, or of all queries once."""
    live = Watching(judge or truth_of(dataset), url=url, **{"rates": WHOLE, **settings})
    live.watch(*serve(retriever, texts or [query.text for query in dataset.queries]))
    return live


def watched(n: int, **settings: Any) -> Watching:
    """A store with n judged requests."""
    return watching(*simulate(n), **settings)


class GradedBy:
    """A judge whose grade of a passage a function of the query and the passage's id gives."""

    name, version, max_grade, reads_text = "labels", "1", 1, False

    def __init__(self, grade: Callable[[str, str], int | None]) -> None:
        self.grade = grade

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        grades = [(each.passage_id, self.grade(query, each.passage_id)) for each in passages]
        return [None if grade is None else Judgment(name, grade) for name, grade in grades]


def spoilt(profile: Profile) -> Profile:
    """The profile with a policy that serves far too little."""
    bad = profile.routes[Route.HYBRID].model_copy(update={"policy": RatioPolicy(k=1)})
    other = RouteProfile(policy=RatioPolicy(k=2), score_kind=bad.score_kind)
    return profile.model_copy(update={"routes": {Route.HYBRID: bad, Route.LEXICAL: other}})
