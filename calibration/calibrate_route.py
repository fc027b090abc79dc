"""Calibrate one route: the family of policies, the choice, its certificate, its evidence."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from calibration import risk
from calibration.certify import Certification, Promise, certify
from calibration.data.dataset import Dataset, split_by_query
from calibration.evaluate import PROFILE_METRICS, QueryMetrics, per_query
from calibration.fit import (
    fit_relevance,
    fit_temperature,
    out_of_fold,
    pool_signals,
    probabilities,
)
from calibration.grid import Grid, ratio_grid, utility_grid
from calibration.pool_labels import IntArray, PoolLabels, label
from calibration.replay import Pools
from ctxguard.core.decision import decide
from ctxguard.core.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.core.policies import Policy, RatioPolicy
from ctxguard.core.types import DEFAULT_DEPTH, FloatArray
from ctxguard.errors import CalibrationError, ConfigurationError
from ctxguard.profile.schema import Certificate, Evidence, RouteProfile, SegmentProfile

FEWEST_LABELS = 20
"""With fewer answerable queries to choose on, no probability is fitted (DESIGN.md §5)."""

BASELINE_K = 10

ORDERING_SHARE = 0.4
"""With a promise: share of the choosing queries that fits and orders; the rest tests."""

Family = Literal["auto", "ratio", "expected_utility"]


@dataclass(frozen=True)
class Settings:
    """How to choose and certify.

    Attributes:
        policy: The family of policies; ``auto`` takes the one that the labels support.
        promise: What the certificate must say of the chosen policy. None chooses the policy of
            highest strict UDCG, and the certificate bounds what it costs in recall.
        delta: Without a promise, the probability that the certificate is false, in (0, 1).
        baseline_k: Recall loss is relative to the retriever's first ``baseline_k`` passages;
            None for the whole pool.
        allow_uncertified: Take the best policy if nothing can be certified.
        segment_by: Metadata column of the queries; its values get policies of their own.
        held_out: Share of the queries that takes no part in any choice, in [0, 1).
        depth: Candidates per query.
        min_keep: The fewest passages that every policy keeps.
        utilities: What a passage is worth.
        seed: Random seed of the splits, the order of tests, and the bootstrap.
    """

    policy: Family = "auto"
    promise: Promise | None = None
    delta: float = risk.DEFAULT_DELTA
    baseline_k: int | None = BASELINE_K
    allow_uncertified: bool = False
    segment_by: str | None = None
    held_out: float = 0.5
    depth: int = DEFAULT_DEPTH
    min_keep: int = 1
    utilities: Utilities = DEFAULT_UTILITIES
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.held_out < 1.0:
            raise ConfigurationError(f"held_out {self.held_out!r} must lie in [0, 1): a share")
        if not 0.0 < self.delta < 1.0:
            raise ConfigurationError(f"delta {self.delta!r} must lie strictly between 0 and 1")
        if self.depth < 1:
            raise ConfigurationError(f"depth {self.depth!r} must be at least 1")
        if self.baseline_k is not None and self.baseline_k < 1:
            raise ConfigurationError(f"baseline_k {self.baseline_k!r} must be at least 1")
        if self.policy not in ("auto", "ratio", "expected_utility"):
            raise ConfigurationError(
                f"policy {self.policy!r} is unknown; use 'auto', 'ratio' or 'expected_utility'"
            )

    @property
    def baseline(self) -> str:
        return "pool" if self.baseline_k is None else f"k={self.baseline_k}"


@dataclass(frozen=True)
class RouteOutcome:
    """One route's choice and the alternatives.

    Attributes:
        profile: The route's part of the profile.
        chosen_grid: Every policy of the family over the choosing queries.
        certification: The outcome of the test; None without a promise.
        uncertified: The policy of highest strict UDCG.
    """

    profile: RouteProfile
    chosen_grid: Grid
    certification: Certification | None
    uncertified: Policy


@dataclass(frozen=True)
class _Candidates:
    """Every policy of a family, over the queries that it is fitted to and over any others."""

    own: Grid
    over: Callable[[Pools, PoolLabels], Grid]


def calibrate_route(
    pools: Pools,
    dataset: Dataset,
    chosen_on: Dataset,
    held_out: Dataset | None,
    settings: Settings,
) -> RouteOutcome:
    """Choose one route's policy on ``chosen_on``, certify it, and measure it on ``held_out``.

    Without a promise all choosing queries fit and choose, and the held-out queries bound the
    recall loss of the chosen policy. With a promise the choosing queries are split into those
    that fit and order the policies and those that test them, and the held-out queries only
    measure.

    Raises:
        CalibrationError: the labels do not support a choice, or nothing could be certified and
            uncertified policies are not allowed; the message says how many labels would do.
    """

    def part(queries: Dataset) -> tuple[Pools, PoolLabels]:
        own = pools.subset([query.query_id for query in queries.queries])
        return own, label(own, dataset, settings.utilities, baseline_k=settings.baseline_k)

    family, why = _family(pools, chosen_on, settings)
    make = _ratio_candidates if family == "ratio" else _utility_candidates
    chosen_pools, chosen_labels = part(chosen_on)
    chosen_grid = make(chosen_pools, chosen_labels, settings).own
    policy = uncertified = chosen_grid.policy(chosen_grid.means.best())
    certification, certificate = None, None
    segments: dict[str, SegmentProfile] = {}
    if settings.promise is not None:
        fit_part, test_part = ordering_and_test_parts(chosen_on, settings.seed)
        (fit_pools, fit_labels), (test_pools, test_labels) = part(fit_part), part(test_part)
        candidates = make(fit_pools, fit_labels, settings)
        testing = candidates.over(test_pools, test_labels)
        certification = certify(candidates.own, testing, settings.promise, seed=settings.seed)
        if certification.grid_index is not None:
            policy = testing.policy(certification.grid_index)
            certificate = _certificate(certification, settings.promise, settings)
        elif settings.allow_uncertified:
            why += "; uncertified: chosen by strict UDCG alone"
        else:
            raise CalibrationError(_nothing_certified(pools, certification, settings.promise))
        if settings.segment_by is not None:
            segments = _segments(
                (candidates.own, _segment_rows(fit_part, fit_pools, settings.segment_by)),
                (testing, _segment_rows(test_part, test_pools, settings.segment_by)),
                settings.promise,
                settings,
            )
    held_out_metrics = None
    if held_out is not None:
        held_out_metrics = per_query(*part(held_out), policy, settings.utilities)
        if settings.promise is None:
            certificate = _cost_certificate(held_out_metrics, settings)
    if certificate is None and not settings.allow_uncertified:
        raise CalibrationError(
            f"route {pools.route.value}: no query with a relevant passage is held out, so what "
            "the policy costs cannot be certified; raise --held-out, label more queries, or "
            "accept an uncertified profile with --allow-uncertified"
        )
    profile = RouteProfile(
        policy=policy,
        score_kind=pools.kind,
        why=why,
        certificate=certificate,
        segments=segments,
        chosen_on=_evidence(
            per_query(chosen_pools, chosen_labels, policy, settings.utilities), settings
        ),
        held_out=None if held_out_metrics is None else _evidence(held_out_metrics, settings),
        reference=_reference(chosen_pools, policy),
        safe_policy=_safe_policy(chosen_grid, settings),
    )
    return RouteOutcome(profile, chosen_grid, certification, uncertified)


def ordering_and_test_parts(chosen_on: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """With a promise: the queries that fit and order the policies, and those that test them."""
    ordering, testing = split_by_query(
        chosen_on, (ORDERING_SHARE, 1.0 - ORDERING_SHARE), seed=seed + 1
    )
    return ordering, testing


def _family(
    pools: Pools, chosen_on: Dataset, settings: Settings
) -> tuple[Literal["ratio", "expected_utility"], str]:
    """The family of policies, and why, in words."""
    labelled, legs = len(chosen_on.answerable), len(pools.legs)
    if settings.policy != "auto":
        return settings.policy, f"{settings.policy} was asked for"
    if labelled < FEWEST_LABELS:
        return "ratio", (
            f"ratio: {labelled} answerable queries to choose on, and a probability needs "
            f"{FEWEST_LABELS}"
        )
    if legs < 2:
        return "ratio", "ratio: a single scorer, whose probability would keep the same order"
    return "expected_utility", (
        f"expected_utility: {labelled} answerable queries to choose on, and {legs} scorers"
    )


def _ratio_candidates(pools: Pools, labels: PoolLabels, settings: Settings) -> _Candidates:
    temperature = fit_temperature(pools)

    def over(pools: Pools, labels: PoolLabels) -> Grid:
        return ratio_grid(pools, labels, temperature=temperature, min_keep=settings.min_keep)

    return _Candidates(over(pools, labels), over)


def _utility_candidates(pools: Pools, labels: PoolLabels, settings: Settings) -> _Candidates:
    if not pools.legs:
        raise CalibrationError(
            f"route {pools.route.value}: the retriever gives no leg's scores, so there is no "
            "signal for a probability; use --policy ratio"
        )
    table = pool_signals(pools)
    model = fit_relevance(pools, labels, table)

    def grid(pools: Pools, labels: PoolLabels, values: FloatArray) -> Grid:
        return utility_grid(pools, labels, values, model, min_keep=settings.min_keep)

    return _Candidates(
        grid(pools, labels, out_of_fold(pools, labels, table)),
        lambda pools, labels: grid(pools, labels, probabilities(model, pools, pool_signals(pools))),
    )


def _certificate(certification: Certification, promise: Promise, settings: Settings) -> Certificate:
    return Certificate(
        alpha=promise.alpha,
        beta=promise.beta,
        delta=promise.delta,
        baseline=settings.baseline,
        test="betting p-values, fixed sequence",
        p_value=_rounded(certification.p_value or 0.0),
        recall_loss=_rounded(certification.recall_loss or 0.0),
        harm=_rounded(certification.harm or 0.0),
        n_recall=certification.n_recall,
        n_queries=certification.n_harm,
    )


def _cost_certificate(held_out: QueryMetrics, settings: Settings) -> Certificate | None:
    """A bound of what the chosen policy costs in recall, from queries that did not choose it."""
    losses, harm = held_out.values["recall_loss"], held_out.values["harm"]
    losses = losses[~np.isnan(losses)]
    if losses.size == 0:
        return None
    # Betting needs an order fixed beforehand, and a file may be sorted by topic.
    order = np.random.default_rng(settings.seed).permutation(losses.size)
    return Certificate(
        alpha=math.ceil(risk.betting_upper_bound(losses[order], settings.delta) * 1e4) / 1e4,
        beta=None,
        delta=settings.delta,
        baseline=settings.baseline,
        test="betting upper bound",
        p_value=settings.delta,
        recall_loss=_rounded(float(losses.mean())),
        harm=_rounded(float(harm.mean())),
        n_recall=int(losses.size),
        n_queries=len(held_out.query_ids),
    )


def _evidence(metrics: QueryMetrics, settings: Settings) -> Evidence:
    return metrics.evidence(settings.seed, PROFILE_METRICS)


def _safe_policy(grid: Grid, settings: Settings) -> RatioPolicy:
    """The retriever's own first passages, without a threshold, as many as the baseline has.

    Against ``k=…`` it loses no recall. Against the whole pool it is the largest context of the
    grid, since no context holds a pool.
    """
    return RatioPolicy(k=settings.baseline_k or int(grid.keep_table.ks[-1]))


def _nothing_certified(pools: Pools, certification: Certification, promise: Promise) -> str:
    harm = "" if promise.beta is None else f" and harm ≤ {promise.beta:g}"
    if certification.labels_needed is None:
        needed = "no number of labels would certify it on queries like these: relax the promise"
    else:
        total = math.ceil(certification.labels_needed / (1.0 - ORDERING_SHARE))
        needed = f"about {total} answerable queries like these to choose on would do"
    return (
        f"route {pools.route.value}: no policy could be certified for recall loss ≤ "
        f"{promise.alpha:g}{harm} with probability {1 - promise.delta:g} from "
        f"{certification.n_recall} answerable test queries; {needed}. Label more, relax --alpha "
        "or --delta, or accept an uncertified profile with --allow-uncertified"
    )


def _segment_rows(part: Dataset, pools: Pools, column: str) -> dict[str, IntArray]:
    """Rows of the pools by the value of a column of the queries."""
    values = {query.query_id: (query.metadata or {}).get(column) for query in part.queries}
    if all(value is None for value in values.values()):
        raise CalibrationError(
            f"no query has the column {column!r} in its metadata, so there are no segments"
        )
    rows: dict[str, list[int]] = {}
    for row, query_id in enumerate(pools.query_ids):
        if values[query_id] is not None:
            rows.setdefault(str(values[query_id]), []).append(row)
    return {value: np.array(own, dtype=np.int64) for value, own in sorted(rows.items())}


def _segments(
    ordering: tuple[Grid, dict[str, IntArray]],
    testing: tuple[Grid, dict[str, IntArray]],
    promise: Promise,
    settings: Settings,
) -> dict[str, SegmentProfile]:
    """The segments that can be certified by themselves, each tested at delta / n segments."""
    names = sorted(ordering[1].keys() & testing[1].keys())
    if not names:
        return {}
    each = replace(promise, delta=promise.delta / len(names))
    certified = {}
    for name in names:
        try:
            certification = certify(
                ordering[0].rows(ordering[1][name]),
                testing[0].rows(testing[1][name]),
                each,
                seed=settings.seed,
            )
        except CalibrationError:
            continue  # no answerable query in it: the route's policy serves it
        if certification.grid_index is not None:
            certified[name] = SegmentProfile(
                policy=testing[0].policy(certification.grid_index),
                certificate=_certificate(certification, each, settings),
            )
    return certified


def _reference(pools: Pools, policy: Policy) -> dict[str, tuple[float, ...]]:
    """Deciles of what needs no label, for drift: top score, its gap to the second, kept count."""
    deciles = np.linspace(0.0, 1.0, 11)
    answered = pools.lengths > 0
    signals = {"top_score": pools.scores[answered, 0]}
    if pools.scores.shape[1] > 1:
        gap = pools.scores[answered, 0] - pools.scores[answered, 1]
        signals["score_gap"] = gap[~np.isnan(gap)]
    signals["kept"] = np.array(
        [decide(ranking, policy).n_kept for ranking in pools.rankings()], dtype=np.float64
    )
    return {
        name: tuple(_rounded(value) for value in np.quantile(values, deciles).tolist())
        for name, values in signals.items()
        if values.size
    }


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
