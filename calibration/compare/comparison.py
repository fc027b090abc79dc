"""Compares candidates on the same queries: metrics, utility by k, a risk, differences.

Differences are paired by query, so that a difference within noise is recognised (DESIGN.md §9).
Calls the retriever, and reads the clock to time it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from calibration.compare.candidates import Candidate
from calibration.data.dataset import Dataset
from calibration.evaluate import Measured, contexts, per_query
from calibration.pools import LabelledPools, Pools, label, notes_on_themselves, unlabelled_note
from calibration.replay import Passes, replay, silent
from calibration.results import COMPARED, Results, tabulate
from calibration.retrievers import RankingSource, wrapped
from ctxguard.core.columns import SignalColumn
from ctxguard.core.policies import Policy
from ctxguard.core.types import DEFAULT_DEPTH, Passage, Ranking, ScoreKind
from ctxguard.errors import CalibrationError, ConfigurationError, CtxguardError
from ctxguard.measure.interval import (
    CONFIDENCE,
    Interval,
    bootstrap_intervals,
    bootstrap_ratio,
    interval_bounds,
    resampled_means,
)
from ctxguard.measure.metrics import discounted
from ctxguard.measure.worth import READERS, Utilities

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import AnyRetriever


Risk = Literal["SAFE", "RISKY", "DANGEROUS"]


SAFE, DANGEROUS = 0.33, 0.5
"""Shares of harm, mean harm / (mean gain + mean harm) in UDCG. They depend on labels and
ranks alone, so no scale of scores can make a candidate look safe."""

FEWEST = 20
"""With fewer queries, bootstrap intervals are too narrow to name a risk."""

_INTERVAL = f"the {CONFIDENCE:.0%} interval of the share of harm"
RULE = (
    f"SAFE: {_INTERVAL} ends at {SAFE:g} or below.",
    f"DANGEROUS: {_INTERVAL} begins at {DANGEROUS:g} or above (an empty context is as good).",
    f"RISKY: anything else, and everything measured on fewer than {FEWEST} queries.",
)
"""The meaning of each risk, in a sentence."""


def risk_of(share: Interval) -> Risk | None:
    """Classify the risk from a share of harm; None without an interval."""
    if share.bounds is None:
        return None
    lower, upper = share.bounds
    if share.n < FEWEST:
        return "RISKY"
    if upper <= SAFE:
        return "SAFE"
    return "DANGEROUS" if lower >= DANGEROUS else "RISKY"


SHOWN_SIZES = 20
"""The largest context size for which results are shown."""


def curve(
    pools: LabelledPools, policy: Policy
) -> tuple[tuple[Interval, ...], int, tuple[int, ...]]:
    """Measure contexts of at most k passages under a policy, for k from 1 to 20, or to its own k.

    The threshold of the policy applies, so the curve is flat if it, not k, ends the context.
    Returns ``udcg_by_k``, ``optimal_k`` and ``within_noise`` of `Compared`.
    """
    most = min(max(SHOWN_SIZES, policy.k), pools.scores.shape[1])
    order, kept = contexts(pools, replace(policy, k=most, min_keep=min(policy.min_keep, most)))
    utility = np.where(kept, np.take_along_axis(pools.utilities, order, axis=1), 0.0)[:, :most]
    total = discounted(utility).cumsum(axis=1)
    # Rounded, so that the order of summation cannot make a larger k look better.
    best = int(np.argmax(np.round(total.mean(axis=0), 12)))
    samples = resampled_means(total)
    behind = interval_bounds(samples - samples[:, [best]])[1]
    within_noise = tuple(k + 1 for k in range(most) if behind[k] >= 0.0)
    return tuple(bootstrap_intervals(total.T)), best + 1, within_noise


@dataclass(frozen=True)
class Compared:
    """One candidate's figures, apart from those in the table of results.

    Attributes:
        kind: The kind of its scores.
        per_query: The metrics ``COMPARED``, query by query.
        udcg_by_k: UDCG of contexts of at most k passages, for k = 1, 2, …
        optimal_k: The k of highest mean UDCG; the smallest if several are equal.
        within_noise: Every k that is not worse than the optimal one by more than noise, paired
            by query.
        harm_share: Mean harm / (mean gain + mean harm) of UDCG over the queries with either,
            in [0, 1]; no value if there is none.
        latency_ms: Median time of a retrieval with reranking and signals, in milliseconds; without
            encoding the query if query vectors were given.
    """

    candidate: Candidate
    kind: ScoreKind
    per_query: Measured
    udcg_by_k: tuple[Interval, ...]
    optimal_k: int
    within_noise: tuple[int, ...]
    harm_share: Interval
    latency_ms: float

    @property
    def risk(self) -> Risk | None:
        """The risk according to ``RULE``; None without an interval."""
        return risk_of(self.harm_share)


@dataclass(frozen=True)
class Comparison:
    """Candidates side by side.

    Attributes:
        candidates: In the order given.
        results: Their metrics ``COMPARED``, with differences from the baseline.
        unlabelled: How a passage without a label counts, in words.
        query_ids: The queries that every candidate answered.
        skipped: Queries left out, with the candidate and the reason.
        notes: Anything else a reader should know about the candidates.
    """

    candidates: tuple[Compared, ...]
    results: Results
    utilities: Utilities
    unlabelled: str
    query_ids: tuple[str, ...]
    skipped: tuple[str, ...]
    notes: tuple[str, ...] = ()


def compare(
    candidates: Sequence[Candidate],
    view: "Callable[[Candidate], AnyRetriever | RankingSource]",
    dataset: Dataset,
    *,
    baseline: str | None = None,
    utilities: Utilities = READERS,
    depth: int = DEFAULT_DEPTH,
    vectors: Mapping[str, Any] | None = None,
    passes: Passes = silent,
    clock: Callable[[], float] = time.perf_counter,
    columns: Sequence[SignalColumn] = (),
) -> Comparison:
    """Replay every candidate on the same queries and measure the contexts it would serve.

    Args:
        view: Returns the retriever of a candidate, anything that ``ContextGuard`` takes, or a
            ``RankingSource``, which says what plain hits' scores mean. Called once for candidates
            that rank alike.
        baseline: Name of the candidate that differences are taken from; the first unless given.
        depth: Number of candidates per query, at least as many as every k.
        vectors: Query vectors by query id, so that latency leaves encoding out.
        clock: Returns seconds; measures latency.
        columns: Columns of the passages' metadata whose signals the candidates need.

    Raises:
        ConfigurationError: as ``check_candidates``.
        CalibrationError: no query was answered by every candidate, or none has a relevant
            passage.
    """
    baseline = check_candidates(candidates, baseline, depth)
    replayed: dict[object, tuple[Pools, float]] = {}
    skipped: list[str] = []
    for candidate in candidates:
        if candidate.stages in replayed:
            continue
        source, seconds = wrapped(view(candidate)), list[float]()
        first = dataset.queries[0]
        # The first answer is not timed: it loads models and compiles code. If it is refused, the
        # replay refuses it again and records why.
        with suppress(CtxguardError):
            vector = (vectors or {}).get(first.query_id)
            source.retrieve(first.text, depth=depth, query_vector=vector)
        pools = replay(
            _Timed(source, seconds, clock),
            dataset.queries,
            depth=depth,
            vectors=vectors,
            progress=passes(f"replaying {candidate.name}", len(dataset)),
            columns=columns,
            labels=dataset,
        )
        replayed[candidate.stages] = pools, float(np.median(seconds)) * 1000.0
        skipped += [f"{candidate.name}: {line}" for line in pools.skipped]
    answered = [set(pools.query_ids) for pools, _ in replayed.values()]
    common = [q.query_id for q in dataset.queries if all(q.query_id in ids for ids in answered)]
    if not common:
        raise CalibrationError(
            f"{dataset.name}: no query was answered by every candidate; the first left "
            f"out: {skipped[0]}"
        )
    labelled = {}
    for stages, (pools, latency_ms) in replayed.items():
        labelled[stages] = label(pools.subset(common), dataset, utilities), latency_ms
    compared = []
    for candidate in candidates:
        own, latency_ms = labelled[candidate.stages]
        measured = per_query(own, candidate.policy)
        both = measured["udcg"] + 2 * measured["harm"]
        udcg_by_k, optimal_k, within_noise = curve(own, candidate.policy)
        compared.append(
            Compared(
                candidate=candidate,
                kind=own.kind,
                per_query={name: measured[name] for name in COMPARED},
                udcg_by_k=udcg_by_k,
                optimal_k=optimal_k,
                within_noise=within_noise,
                harm_share=bootstrap_ratio(measured["harm"], both),
                latency_ms=latency_ms,
            )
        )
    by_name = {each.candidate.name: each.per_query for each in compared}
    return Comparison(
        candidates=tuple(compared),
        results=tabulate(by_name, reference=baseline),
        utilities=utilities,
        unlabelled=unlabelled_note(dataset, utilities),
        query_ids=tuple(common),
        skipped=tuple(skipped),
        notes=notes_on_themselves(pools for pools, _ in replayed.values()),
    )


def check_candidates(
    candidates: Sequence[Candidate], baseline: str | None = None, depth: int = DEFAULT_DEPTH
) -> str:
    """Refuse candidates that ``compare`` would refuse, and return the name of the baseline.

    Raises:
        ConfigurationError: there is no candidate, names repeat, the baseline is unknown, or a k
            exceeds the depth.
    """
    names = [candidate.name for candidate in candidates]
    if not names:
        raise ConfigurationError("there are no candidates to compare")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigurationError(
            f"two candidates are named {repeated[0]!r}; give each a different name"
        )
    if baseline is not None and baseline not in names:
        raise ConfigurationError(
            f"the baseline {baseline!r} is not a candidate; choose from {', '.join(names)}"
        )
    for candidate in candidates:
        if candidate.policy.k > depth:
            raise ConfigurationError(
                f"{candidate.name}: k = {candidate.policy.k} is more than the depth {depth}"
            )
    return names[0] if baseline is None else baseline


@dataclass
class _Timed:
    """A retriever that appends the time each answer took to ``seconds``."""

    source: RankingSource
    seconds: list[float]
    clock: Callable[[], float]

    def retrieve(
        self, query: str, *, depth: int = DEFAULT_DEPTH, query_vector: object = None
    ) -> Ranking:
        begun = self.clock()
        ranking = self.source.retrieve(query, depth=depth, query_vector=query_vector)
        self.seconds.append(self.clock() - begun)
        return ranking

    def passage(self, passage_id: str) -> Passage:
        return self.source.passage(passage_id)
