"""Ranking profiles side by side on the same queries: figures, the dynamic-k curve, a verdict.

Differences are paired by query, so that one inside the noise is called so (DESIGN.md §9).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from calibration.comparing.candidates import Candidate
from calibration.comparing.differences import BETTER_WHEN, Difference, differences
from calibration.comparing.verdict import (
    DEFAULT_RULE,
    Verdict,
    VerdictRule,
    harm_share,
    interval_bounds,
)
from calibration.evaluate import QueryMetrics, per_query, resampled_means
from calibration.labelling.datasets import Dataset
from calibration.losses import Labels, discounts, label
from calibration.replay import Pools, Progress, Replayable, replay
from ctxguard.errors import CalibrationError, ConfigurationError, CtxguardError
from ctxguard.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.policy import Policy, decide
from ctxguard.profile import Interval
from ctxguard.types import DEFAULT_DEPTH, Ranking, ScoreKind

MAX_K = 20


@dataclass(frozen=True)
class CurvePoint:
    """A candidate whose context may hold at most ``k`` passages, all else as it is."""

    k: int
    udcg_strict: Interval
    gain: Interval
    harm: Interval


@dataclass(frozen=True)
class Curve:
    """Cumulative gain, harm and utility by k (strict UDCG).

    Attributes:
        points: For k = 1, 2, …
        optimal_k: Of the highest mean strict UDCG; the smallest of equal ones.
        within_noise: Every k whose paired difference to the optimal one is not below noise.
    """

    points: tuple[CurvePoint, ...]
    optimal_k: int
    within_noise: tuple[int, ...]


@dataclass(frozen=True)
class Compared:
    """One candidate's figures.

    Attributes:
        kind: What its scores mean.
        metrics: Means with intervals, for the names in ``BETTER_WHEN``.
        per_query: The same, query by query.
        harm_share: Mean harm / (mean gain + mean harm), in [0, 1]; None where both are 0.
        verdict: By the rule; None where there is no interval.
        latency_ms: Median time of a retrieval with its reranking, without encoding the query
            where vectors were given.
    """

    candidate: Candidate
    kind: ScoreKind
    metrics: Mapping[str, Interval]
    per_query: QueryMetrics
    curve: Curve
    harm_share: Interval
    verdict: Verdict | None
    latency_ms: float


@dataclass(frozen=True)
class Comparison:
    """Candidates side by side.

    Attributes:
        candidates: In the order given.
        baseline: The name that differences are taken from.
        differences: By name of the other candidates, then by metric.
        rule: Of the verdicts.
        utilities: What a passage was taken to be worth.
        query_ids: Those that every candidate answered.
        skipped: Queries left out, with the candidate and the reason.
    """

    candidates: tuple[Compared, ...]
    baseline: str
    differences: Mapping[str, Mapping[str, Difference]]
    rule: VerdictRule
    utilities: Utilities
    query_ids: tuple[str, ...]
    skipped: tuple[str, ...]


def compare(
    candidates: Sequence[Candidate],
    view: Callable[[Candidate], Replayable],
    dataset: Dataset,
    *,
    baseline: str | None = None,
    utilities: Utilities = DEFAULT_UTILITIES,
    rule: VerdictRule = DEFAULT_RULE,
    depth: int = DEFAULT_DEPTH,
    vectors: Mapping[str, Any] | None = None,
    seed: int = 0,
    passes: Callable[[str, int], Progress] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Replay every candidate on the same queries and measure what it would serve.

    Args:
        candidates: With distinct names.
        view: The retriever of a candidate; asked once for candidates that rank alike.
        dataset: Labelled queries; those without a relevant passage count as harm.
        baseline: Whose figures differences are taken from; the first unless named.
        utilities: What a passage is worth, the same for all.
        rule: Of the verdicts.
        depth: Candidates per query, at least every k.
        vectors: Query vectors by query id, so that latency leaves encoding out.
        seed: Of every bootstrap.
        passes: Shown what is under way.
        clock: Seconds, for latency.

    Raises:
        ConfigurationError: names that repeat, an unknown baseline, a k beyond the depth.
        CalibrationError: no query that every candidate answered, or no relevant passage.
    """
    baseline = check_candidates(candidates, baseline, depth)
    replayed: dict[object, tuple[Pools, float]] = {}
    skipped: list[str] = []
    for candidate in candidates:
        if candidate.stages in replayed:
            continue
        timed = _Timed(view(candidate), clock)
        timed.warm_up(dataset, depth, vectors)
        advance = (
            _nothing if passes is None else passes(f"replaying {candidate.name}", len(dataset))
        )
        pools = replay(timed, dataset.queries, depth=depth, vectors=vectors, progress=advance)
        replayed[candidate.stages] = pools, float(np.median(timed.seconds)) * 1000.0
        skipped += [f"{candidate.name}: {line}" for line in pools.skipped]
    answered = [set(pools.query_ids) for pools, _ in replayed.values()]
    common = [q.query_id for q in dataset.queries if all(q.query_id in ids for ids in answered)]
    if not common:
        raise CalibrationError(
            f"{dataset.name}: no query was answered by every candidate; the first left "
            f"out: {skipped[0]}"
        )
    labelled = {}
    for stages, (pools, _) in replayed.items():
        own = pools.subset(common)
        labelled[stages] = own, label(own, dataset, utilities)
    compared = []
    for candidate in candidates:
        own, labels = labelled[candidate.stages]
        latency_ms = replayed[candidate.stages][1]
        compared.append(
            _compared(
                candidate,
                own,
                labels,
                utilities=utilities,
                rule=rule,
                latency_ms=latency_ms,
                seed=seed,
            )
        )
    reference = next(each for each in compared if each.candidate.name == baseline)
    return Comparison(
        candidates=tuple(compared),
        baseline=baseline,
        differences={
            each.candidate.name: differences(each.per_query, reference.per_query, seed=seed)
            for each in compared
            if each is not reference
        },
        rule=rule,
        utilities=utilities,
        query_ids=tuple(common),
        skipped=tuple(skipped),
    )


def check_candidates(
    candidates: Sequence[Candidate], baseline: str | None = None, depth: int = DEFAULT_DEPTH
) -> str:
    """Refuse what ``compare`` would refuse, before any work.

    Returns:
        The baseline's name: the first candidate's unless given.

    Raises:
        ConfigurationError: no candidate, names that repeat, an unknown baseline, or a k beyond
            the depth.
    """
    names = [candidate.name for candidate in candidates]
    if not names:
        raise ConfigurationError("there are no candidates to compare")
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ConfigurationError(
            f"two candidates are named {repeated[0]!r}; give each a name of its own"
        )
    if baseline is not None and baseline not in names:
        raise ConfigurationError(
            f"the baseline {baseline!r} is no candidate; they are {', '.join(names)}"
        )
    for candidate in candidates:
        if candidate.policy.k > depth:
            raise ConfigurationError(
                f"{candidate.name}: k = {candidate.policy.k} is more than the depth {depth}"
            )
    return names[0] if baseline is None else baseline


def _nothing(_done: int) -> None:
    pass


class _Timed:
    """A retriever whose every answer is timed."""

    def __init__(self, retriever: Replayable, clock: Callable[[], float]) -> None:
        self.seconds: list[float] = []
        self._retriever = retriever
        self._clock = clock

    def retrieve(
        self, query: str, *, depth: int = DEFAULT_DEPTH, query_vector: object = None
    ) -> Ranking:
        begun = self._clock()
        if query_vector is None:
            ranking = self._retriever.retrieve(query, depth=depth)
        else:
            ranking = cast(Any, self._retriever).retrieve(
                query, depth=depth, query_vector=query_vector
            )
        self.seconds.append(self._clock() - begun)
        return ranking

    def warm_up(self, dataset: Dataset, depth: int, vectors: Mapping[str, Any] | None) -> None:
        """Answer one query untimed: the first one loads models and compiles loops."""
        first = dataset.queries[0]
        # A query that is refused here is met again by the replay, which records why.
        with suppress(CtxguardError):
            self.retrieve(first.text, depth=depth, query_vector=(vectors or {}).get(first.query_id))
        self.seconds.clear()


def _compared(
    candidate: Candidate,
    pools: Pools,
    labels: Labels,
    *,
    utilities: Utilities,
    rule: VerdictRule,
    latency_ms: float,
    seed: int,
) -> Compared:
    measured = per_query(pools, labels, candidate.policy, utilities)
    chosen = QueryMetrics(measured.query_ids, {name: measured.values[name] for name in BETTER_WHEN})
    harm = chosen.values["harm"]
    share = harm_share(chosen.values["udcg_strict"] + harm, harm, seed=seed)
    return Compared(
        candidate=candidate,
        kind=pools.kind,
        metrics=chosen.evidence(seed).metrics,
        per_query=chosen,
        curve=dynamic_k(pools, labels, candidate.policy, seed=seed),
        harm_share=share,
        verdict=rule.verdict(share),
        latency_ms=latency_ms,
    )


def dynamic_k(pools: Pools, labels: Labels, policy: Policy, *, seed: int = 0) -> Curve:
    """What each size of context would gain and harm under a policy, for k = 1 … 20.

    The policy's threshold stays in force, so a curve that ends flat shows that the threshold,
    not k, ends the context.
    """
    most = min(MAX_K, pools.scores.shape[1])
    widest = replace(policy, k=most, min_keep=min(policy.min_keep, most))
    worth = np.zeros((len(pools), most))
    for row, ranking in enumerate(pools.rankings()):
        kept = list(decide(ranking, widest).kept)
        worth[row, : len(kept)] = labels.utilities[row, kept]
    worth *= discounts(most)
    gain, harm = np.maximum(worth, 0.0).cumsum(axis=1), np.maximum(-worth, 0.0).cumsum(axis=1)
    utility = gain - harm
    columns = np.concatenate([utility, gain, harm], axis=1)
    means = resampled_means(columns, seed=seed)
    several = len(pools) > 1
    intervals = [
        Interval(
            value=value,
            lower=lower if several else None,
            upper=upper if several else None,
            n=len(pools),
        )
        for value, lower, upper in zip(
            columns.mean(axis=0).tolist(), *interval_bounds(means).tolist(), strict=True
        )
    ]
    # Rounded, so that sums of the same figures in another order do not make a larger k better.
    best = int(np.argmax(np.round(utility.mean(axis=0), 12)))
    behind = interval_bounds(means[:, :most] - means[:, [best]])[1]
    return Curve(
        points=tuple(
            [
                CurvePoint(k + 1, intervals[k], intervals[most + k], intervals[2 * most + k])
                for k in range(most)
            ]
        ),
        optimal_k=best + 1,
        within_noise=tuple([k + 1 for k in range(most) if behind[k] >= 0.0]),
    )
