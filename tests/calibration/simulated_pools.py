"""A retriever and labelled queries whose truth is known, made from a seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from calibration.calibrate import Calibration, calibrate
from calibration.calibrate_route import RouteOutcome
from calibration.data.dataset import Dataset, Query
from calibration.grid import Grid
from calibration.pools import LabelledPools, Pools, label
from calibration.replay import replay
from calibration.settings import Settings
from ctxguard.core.scores import discounts
from ctxguard.core.types import FloatArray, Hit, Leg, Passage, Ranking, Route, ScoreKind
from ctxguard.errors import QueryError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry
from ctxguard.measure.rows import IntArray
from ctxguard.measure.worth import READERS, Utilities
from ctxguard.profile.schema import Profile

DEPTH = 20


@dataclass
class Recorded:
    """Answers each query's text with a ranking written down beforehand."""

    rankings: Mapping[str, Ranking]
    identity: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def retrieve(self, query: str, *, depth: int = 100) -> Ranking:
        self.asked.append(query)
        if query not in self.rankings:
            raise QueryError(f"{query!r} cannot be searched")
        return self.rankings[query]

    def fingerprint(self) -> dict[str, str]:
        return self.identity


def ranking_of(
    scores: Sequence[float | None],
    *,
    ids: Sequence[str] | None = None,
    kind: ScoreKind = ScoreKind.RATIO,
    route: Route = Route.HYBRID,
    ranks: Sequence[int | None] | None = None,
    legs: Mapping[str, Leg] | None = None,
) -> Ranking:
    """Passages p0, p1, … with these scores, in no engine's order."""
    ids = [f"p{i}" for i in range(len(scores))] if ids is None else ids
    hits = [Hit(passage_id, score) for passage_id, score in zip(ids, scores, strict=True)]
    ranking = Ranking.from_hits(hits, kind, route)
    return replace(ranking, ranks=ranks, legs={} if legs is None else legs, contradicted=False)


def labelled(
    rankings: Sequence[Ranking],
    qrels: Sequence[Mapping[str, int]],
    *,
    depth: int = 10,
    distractors: Sequence[Mapping[str, str]] = (),
    baseline_k: int | None = None,
    utilities: Utilities = READERS,
) -> LabelledPools:
    """Queries q0, q1, … answered by these rankings and labelled so, replayed and looked up."""
    queries = tuple(Query(f"q{i}", f"question {i}") for i in range(len(rankings)))
    retriever = Recorded({q.text: r for q, r in zip(queries, rankings, strict=True)})
    dataset = Dataset(
        "written down",
        queries,
        {f"q{i}": grades for i, grades in enumerate(qrels) if grades},
        {f"q{i}": kinds for i, kinds in enumerate(distractors)},  # type: ignore[misc]
    )
    pools = replay(retriever, queries, depth=depth)
    return label(pools, dataset, utilities, baseline_k=baseline_k)


def simulate(
    n_queries: int,
    *,
    seed: int = 0,
    depth: int = DEPTH,
    relevant: int = 2,
    noise: float = 0.15,
    unanswerable: float = 0.0,
) -> tuple[Recorded, Dataset]:
    """A hybrid retriever of two noisy scorers, and the truth about every candidate.

    The scores spread by ``noise`` around 0.7 for a relevant candidate and 0.3 for others; for a
    share ``unanswerable`` of the queries nothing is relevant.
    """
    random = np.random.default_rng(seed)
    rankings, queries, qrels = {}, [], {}
    for number in range(n_queries):
        query = Query(f"q{number:05d}", f"question {number}")
        truth = np.zeros(depth, dtype=bool)
        if random.random() >= unanswerable:
            truth[random.choice(depth, relevant, replace=False)] = True
        dense, lexical = (
            np.clip(random.normal(np.where(truth, 0.7, 0.3), noise), 0.0, 1.0) for _ in range(2)
        )
        fused = (dense + lexical) / 2.0
        order = np.argsort(-fused, kind="stable")
        rankings[query.text] = ranking_of(
            fused[order].tolist(),
            ids=[f"{query.query_id}-{position}" for position in order],
            legs={
                "dense": Leg(dense[order], ScoreKind.COSINE),
                "lexical": Leg(10.0 * lexical[order], ScoreKind.RATIO),
            },
        )
        queries.append(query)
        qrels[query.query_id] = {
            f"{query.query_id}-{position}": 1 for position in np.flatnonzero(truth)
        }
    return Recorded(rankings, {"simulated": str(seed)}), Dataset("simulated", tuple(queries), qrels)


def with_texts(retriever: Recorded, text: Callable[[str], str]) -> Recorded:
    """The same passages with the texts that a function gives to their ids."""
    rankings = {
        query: replace(own, passages=[Passage(each, text(each)) for each in own.passage_ids])
        for query, own in retriever.rankings.items()
    }
    return Recorded(rankings, {"simulated": "0"})


def part_of(grid: Grid, rows: IntArray) -> Grid:
    """The same policies over some of the queries."""
    tables = {"reached": grid.reached[rows], "order": grid.order[rows]}
    places = None if grid.places is None else grid.places[rows]
    return replace(grid, pools=grid.pools.rows(rows), places=places, **tables)


def served_today(pools: LabelledPools) -> FloatArray:
    """Strict UDCG of the baseline of each query."""
    worth = np.where(pools.in_baseline, pools.utilities, 0.0)
    return np.asarray(worth @ discounts(worth.shape[1]))


def indistinct(n_queries: int) -> tuple[Recorded, Dataset]:
    """Every candidate scores the same, all are labelled, and the fifth is the relevant one."""
    queries = tuple(Query(f"q{i}", f"question {i}") for i in range(n_queries))
    grades = {f"p{rank}": int(rank == 4) for rank in range(DEPTH)}
    ranking = ranking_of([1.0] * DEPTH)
    return (
        Recorded({query.text: ranking for query in queries}),
        Dataset("indistinct", queries, {query.query_id: grades for query in queries}),
    )


@cache
def calibrated(
    n: int, *, noise: float = 0.15, unanswerable: float = 0.0, relevant: int = 2, **asked: Any
) -> Calibration:
    """A calibration of simulated queries; made once for the same question."""
    retriever, dataset = simulate(n, noise=noise, unanswerable=unanswerable, relevant=relevant)
    return calibrate(retriever, dataset, Settings(depth=DEPTH, **asked))


def outcome_of(result: Calibration) -> RouteOutcome:
    return result.outcomes[Route.HYBRID]


def guard_of(retriever: Any, profile: Profile, **settings: Any) -> ContextGuard:
    """A guard that counts apart from all others."""
    settings = {"telemetry": Telemetry(CollectorRegistry()), **settings}
    return ContextGuard(retriever, profile=profile, **settings)


RANGES = {
    ScoreKind.RATIO: (0.0, 16.0),
    ScoreKind.COSINE: (-1.0, 1.0),
    ScoreKind.INNER_PRODUCT: (-16.0, 16.0),
    ScoreKind.LOGIT: (-8.0, 8.0),
    ScoreKind.DISTANCE: (-16.0, 0.0),
    ScoreKind.PROBABILITY: (0.0, 1.0),
    ScoreKind.RANK: (0.0, 1.0),
}
_DEPTH = 8


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    kinds: Sequence[ScoreKind] = tuple(RANGES),
    legs: bool = False,
    strangers: bool = True,
    rules: Sequence[Utilities] = (READERS,),
) -> LabelledPools:
    """Random pools with many ties, labelled at random; some outside their kind's domain."""
    kind = draw(st.sampled_from(kinds))
    low, high = RANGES[kind]
    coarse = st.integers(0, 4).map(lambda step: low + (high - low) * step / 4)
    score = st.one_of(coarse, st.floats(low, high))
    if strangers:
        score = st.one_of(score, score, st.just(-40.0))
    rankings, qrels, distractors = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        scores = draw(st.lists(score, max_size=_DEPTH))
        own = {
            "dense": Leg(np.array([draw(st.integers(-4, 4)) / 4 for _ in scores]), ScoreKind.COSINE)
        }
        rankings.append(ranking_of(scores, kind=kind, legs=own if legs else None))
        ids = st.sampled_from([f"p{i}" for i in range(_DEPTH + 2)])
        qrels.append(draw(st.dictionaries(ids, st.integers(0, 2), max_size=5)))
        misleading = st.sampled_from(["hard_negative", "distractor"])
        distractors.append(draw(st.dictionaries(ids, misleading, max_size=2)))
    qrels[0]["p0"] = 2  # the labels hold a relevant passage, retrieved or not
    baseline_k = draw(st.sampled_from([None, 1, 3]))
    made: dict[str, Any] = {"baseline_k": baseline_k, "utilities": draw(st.sampled_from(rules))}
    return labelled(rankings, qrels, depth=_DEPTH, distractors=distractors, **made)


def pools_of(
    candidates: str | Mapping[str, str],
    *,
    scores: Sequence[float] = (),
    kind: ScoreKind = ScoreKind.RATIO,
) -> Pools:
    """Queries whose candidates are single letters; those of the query ``q`` unless named."""
    rows = {"q": candidates} if isinstance(candidates, str) else candidates
    depth = max(map(len, rows.values()))
    own = scores or [1.0 - 0.1 * rank for rank in range(depth)]
    return Pools(
        route=Route.HYBRID,
        kind=kind,
        query_ids=tuple(rows),
        passage_ids=tuple(map(tuple, rows.values())),
        scores=np.array([own] * len(rows)),
        legs={},
        leg_kinds={},
    )
