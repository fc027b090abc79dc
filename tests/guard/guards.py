"""Retrievers, samplers and candidates of the guard's tests, and guards over them."""

import math
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from ctxguard.core.assembly import Assembly
from ctxguard.core.context import Context
from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import Policy, RatioPolicy
from ctxguard.core.types import Hit, Ranking, Route, ScoreKind, StageFailure
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry
from ctxguard.profile.schema import Profile, RouteProfile
from tests.profiles import profile_with

HITS = [
    Hit("a", 10.0, "The first."),
    Hit("b", 8.0, "The second."),
    Hit("c", 7.0, "The third."),
    Hit("d", 2.0, "The fourth."),
    Hit("e", 1.0, "The fifth."),
    Hit("f", 0.5, "The sixth."),
]


RANKING = Ranking.from_hits(HITS, ScoreKind.RATIO)


SEVENTY = RatioPolicy(k=5, min_ratio=0.7)


@dataclass
class Answering:
    """A retriever that answers every query with one ranking."""

    answer: object = field(default_factory=lambda: RANKING)
    depths: list[int] = field(default_factory=list)

    def retrieve(self, query: str, *, depth: int = 100) -> object:
        self.depths.append(depth)
        return self.answer


UNREAD = Telemetry(CollectorRegistry())


OWN = {"embedder": "mini", "corpus_size": "6"}


class Identified(Answering):
    def fingerprint(self) -> dict[str, str]:
        return OWN


@dataclass
class Failing:
    error: BaseException

    def retrieve(self, query: str, *, depth: int = 100) -> Ranking:
        raise self.error


@dataclass
class Sampled:
    """A sampler that takes every request, and notes when it was asked what."""

    events: list[str] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    takes: bool = True

    def draw(self, request_id: str, /) -> float:
        self.events.append(f"draw {request_id}")
        return 0.25 if self.takes else 0.0

    def offer(self, context: Context, probability: float, time_seconds: float, /) -> object:
        self.events.append(f"offer {context.request_id}")
        self.contexts.append(context)
        self.probabilities.append(probability)
        return True


def guard_of(retriever: object = None, **settings: object) -> ContextGuard:
    """A guard whose counts nobody reads, unless it is given a telemetry."""
    settings.setdefault("telemetry", UNREAD)
    return ContextGuard(Answering() if retriever is None else retriever, **settings)  # type: ignore[arg-type]


def profile_of(
    policy: Policy = SEVENTY,
    *,
    route: Route = Route.EXTERNAL,
    kind: ScoreKind = ScoreKind.RATIO,
    fingerprint: dict[str, str] | None = None,
    fusion: Fusion | None = None,
) -> Profile:
    routes = {route: RouteProfile(policy=policy, score_kind=kind)}
    return profile_with(routes, fusion=fusion, fingerprint=fingerprint)


def served(context: Context) -> list[str]:
    return [passage.passage_id for passage in context.passages]


GARBAGE = st.sampled_from([None, math.nan, math.inf, -math.inf, 1e37, -3.4e38, "0.9"])


@st.composite
def rankings(draw: st.DrawFn) -> Ranking:
    """Any candidates: garbage scores, repeated ids, repeated and unreadable texts, dead stages."""
    n = draw(st.integers(0, 12))
    scores = st.one_of(st.floats(0.0, 50.0), st.sampled_from([0.0, 1.0, 5.0]), GARBAGE)
    hits = [
        Hit(
            draw(st.sampled_from(["a", "b", "c", "d", "e", "f", "g", "h", "-1"])),
            draw(scores),  # type: ignore[arg-type]
            draw(st.sampled_from(["", "one", "One ", "two words", "three", None])),  # type: ignore[arg-type]
            rank=draw(st.one_of(st.none(), st.integers(1, 9))),
        )
        for _ in range(n)
    ]
    ranking = Ranking.from_hits(hits, draw(st.sampled_from([ScoreKind.RATIO, ScoreKind.LOGIT])))
    failures = draw(st.lists(st.just(StageFailure("dense", "down")), max_size=2))
    return replace(ranking, failures=tuple(failures), route=draw(st.sampled_from(list(Route))))


POLICIES = st.sampled_from(
    [SEVENTY, RatioPolicy(), RatioPolicy(k=2, min_ratio=0.2), RatioPolicy(k=3, min_keep=0)]
)


ASSEMBLIES = st.sampled_from(
    [
        Assembly(),
        Assembly(max_tokens=4),
        Assembly(max_tokens=4, truncate=True),
        Assembly(order="edges", drop_duplicates=False),
    ]
)
