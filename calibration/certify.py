"""One route's calibration: which family of policies, the choice, its certificate, its evidence."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from calibration import risk
from calibration.evaluate import QueryMetrics, per_query
from calibration.fit import (
    fit_relevance,
    fit_temperature,
    out_of_fold,
    pool_signals,
    probabilities,
)
from calibration.labelling.datasets import Dataset, split_by_query
from calibration.losses import IntArray, Labels, label
from calibration.replay import Pools
from calibration.select import (
    Certification,
    Grid,
    Promise,
    certify,
    ratio_grid,
    utility_grid,
)
from ctxguard.errors import CalibrationError, ConfigurationError
from ctxguard.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.policy import Policy, RatioPolicy, decide
from ctxguard.profile import Certificate, RouteProfile, SegmentProfile
from ctxguard.types import DEFAULT_DEPTH, FloatArray

FEWEST_LABELS = 20
"""Labelled queries below which a probability is not fitted (DESIGN.md §5)."""

BASELINE_K = 10

ORDERING_SHARE = 0.4
"""Share of the choosing queries that fits and orders the candidates; the rest tests them."""

Family = Literal["auto", "ratio", "expected_utility"]


@dataclass(frozen=True)
class Settings:
    """What is asked of a calibration.

    Attributes:
        policy: The family of policies; ``auto`` takes what the labels support.
        promise: What a certificate must say for a policy to be taken; None takes the policy of
            highest strict UDCG, and the certificate says what it costs in recall.
        delta: The probability that the certificate of a policy's cost may be false, in (0, 1).
        baseline_k: Recall loss is relative to the retriever's first this many; None: the pool.
        allow_uncertified: Take the best policy where nothing can be certified.
        segment_by: Column of the queries whose values get policies of their own.
        held_out: Share of the queries that takes no part in any choice, in [0, 1).
        depth: Candidates per query.
        min_keep: The fewest passages that every policy keeps.
        utilities: What a passage is worth.
        seed: Of the splits, the order of tests, and the bootstrap.
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
    """One route's choice with everything that was weighed.

    Attributes:
        profile: What the profile says of the route.
        chosen_grid: Every policy of the family over the choosing queries.
        certification: The outcome of the test; None where no promise was asked for.
        uncertified: What would be chosen by strict UDCG alone.
    """

    profile: RouteProfile
    chosen_grid: Grid
    certification: Certification | None
    uncertified: Policy


@dataclass(frozen=True)
class _Candidates:
    """Every policy of a family, over the queries that it was fitted on and over any others."""

    own: Grid
    over: Callable[[Pools, Labels], Grid]


def calibrate_route(
    pools: Pools,
    dataset: Dataset,
    chosen_on: Dataset,
    held_out: Dataset | None,
    settings: Settings,
) -> RouteOutcome:
    """Choose one route's policy on ``chosen_on``, certify it, and measure it on ``held_out``.

    Without a promise every choosing query fits and chooses, and the held-out queries, which
    played no part in that, bound the recall loss of the one policy chosen. With a promise the
    choosing queries are split once more, into those that fit and order the candidates and those
    that test them; the held-out ones stay untouched.

    Raises:
        CalibrationError: the labels cannot support the choice, or nothing could be certified
            and uncertified policies are not allowed; the message says how many labels would do.
    """

    def part(queries: Dataset) -> tuple[Pools, Labels]:
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
        fit_part, test_part = split_by_query(
            chosen_on, (ORDERING_SHARE, 1.0 - ORDERING_SHARE), seed=settings.seed + 1
        )
        (fit_pools, fit_labels), (test_pools, test_labels) = part(fit_part), part(test_part)
        candidates = make(fit_pools, fit_labels, settings)
        testing = candidates.over(test_pools, test_labels)
        certification = certify(candidates.own, testing, settings.promise, seed=settings.seed)
        if certification.cell is not None:
            policy = testing.policy(certification.cell)
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
        chosen_on=per_query(chosen_pools, chosen_labels, policy, settings.utilities).evidence(
            settings.seed
        ),
        held_out=None if held_out_metrics is None else held_out_metrics.evidence(settings.seed),
        reference=_reference(chosen_pools, policy),
        safe_policy=_safe_policy(chosen_grid, settings),
    )
    return RouteOutcome(profile, chosen_grid, certification, uncertified)


def _family(
    pools: Pools, chosen_on: Dataset, settings: Settings
) -> tuple[Literal["ratio", "expected_utility"], str]:
    """Which family of policies, and why in words."""
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


def _ratio_candidates(pools: Pools, labels: Labels, settings: Settings) -> _Candidates:
    temperature = fit_temperature(pools)

    def over(pools: Pools, labels: Labels) -> Grid:
        return ratio_grid(pools, labels, temperature=temperature, min_keep=settings.min_keep)

    return _Candidates(over(pools, labels), over)


def _utility_candidates(pools: Pools, labels: Labels, settings: Settings) -> _Candidates:
    if not pools.legs:
        raise CalibrationError(
            f"route {pools.route.value}: the retriever hands over no leg's scores, so there is "
            "no signal for a probability; use --policy ratio"
        )
    table = pool_signals(pools)
    model = fit_relevance(pools, labels, table)

    def grid(pools: Pools, labels: Labels, values: FloatArray) -> Grid:
        return utility_grid(pools, labels, values, model, min_keep=settings.min_keep)

    return _Candidates(
        grid(pools, labels, out_of_fold(pools, labels, table)),
        lambda pools, labels: grid(pools, labels, probabilities(model, pools, pool_signals(pools))),
    )


def _certificate(found: Certification, promise: Promise, settings: Settings) -> Certificate:
    return Certificate(
        alpha=promise.alpha,
        beta=promise.beta,
        delta=promise.delta,
        baseline=settings.baseline,
        test="betting p-values, fixed sequence",
        p_value=_tidy(found.p_value or 0.0),
        recall_loss=_tidy(found.recall_loss or 0.0),
        harm=_tidy(found.harm or 0.0),
        n_recall=found.n_recall,
        n_queries=found.n_harm,
    )


def _cost_certificate(held_out: QueryMetrics, settings: Settings) -> Certificate | None:
    """What the chosen policy costs in recall, from queries that took no part in its choice."""
    losses, harm = held_out.values["recall_loss"], held_out.values["harm"]
    losses = losses[~np.isnan(losses)]
    if losses.size == 0:
        return None
    # Betting needs an order that is fixed beforehand; the file's may be sorted by topic.
    order = np.random.default_rng(settings.seed).permutation(losses.size)
    return Certificate(
        alpha=math.ceil(risk.betting_upper_bound(losses[order], settings.delta) * 1e4) / 1e4,
        beta=None,
        delta=settings.delta,
        baseline=settings.baseline,
        test="betting upper bound",
        p_value=settings.delta,
        recall_loss=_tidy(float(losses.mean())),
        harm=_tidy(float(harm.mean())),
        n_recall=int(losses.size),
        n_queries=len(held_out.query_ids),
    )


def _safe_policy(grid: Grid, settings: Settings) -> RatioPolicy:
    """The retriever's own order without a threshold, as far as the baseline goes.

    Against ``k=…`` it loses no recall. Against the whole pool it is the largest context that was
    weighed, since nobody reads a pool.
    """
    return RatioPolicy(k=settings.baseline_k or int(grid.survival.ks[-1]))


def _nothing_certified(pools: Pools, found: Certification, promise: Promise) -> str:
    harm = "" if promise.beta is None else f" and harm ≤ {promise.beta:g}"
    if found.labels_needed is None:
        needed = "no number of labels would certify it on queries like these: relax the promise"
    else:
        total = math.ceil(found.labels_needed / (1.0 - ORDERING_SHARE))
        needed = (
            f"about {total} answerable queries to choose on would do, were the others like these"
        )
    return (
        f"route {pools.route.value}: no policy could be certified for recall loss ≤ "
        f"{promise.alpha:g}{harm} with probability {1 - promise.delta:g} from {found.n_recall} "
        f"answerable test queries; {needed}. Label more, relax --alpha or --delta, or accept an "
        "uncertified profile with --allow-uncertified"
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
    return {value: np.array(found, dtype=np.int64) for value, found in sorted(rows.items())}


def _segments(
    ordering: tuple[Grid, dict[str, IntArray]],
    testing: tuple[Grid, dict[str, IntArray]],
    promise: Promise,
    settings: Settings,
) -> dict[str, SegmentProfile]:
    """The segments that can be certified by themselves, each tested at delta / S."""
    names = sorted(ordering[1].keys() & testing[1].keys())
    if not names:
        return {}
    each = replace(promise, delta=promise.delta / len(names))
    certified = {}
    for name in names:
        try:
            found = certify(
                ordering[0].rows(ordering[1][name]),
                testing[0].rows(testing[1][name]),
                each,
                seed=settings.seed,
            )
        except CalibrationError:
            continue  # nothing answerable in it: the route's policy serves it
        if found.cell is not None:
            certified[name] = SegmentProfile(
                policy=testing[0].policy(found.cell),
                certificate=_certificate(found, each, settings),
            )
    return certified


def _reference(pools: Pools, policy: Policy) -> dict[str, tuple[float, ...]]:
    """Deciles of what needs no label, for drift: top score, lead of the best, kept count."""
    deciles = np.linspace(0.0, 1.0, 11)
    found = pools.lengths > 0
    signals = {"top_score": pools.scores[found, 0]}
    if pools.scores.shape[1] > 1:
        lead = pools.scores[found, 0] - pools.scores[found, 1]
        signals["lead"] = lead[~np.isnan(lead)]
    signals["kept"] = np.array(
        [decide(ranking, policy).n_kept for ranking in pools.rankings()], dtype=np.float64
    )
    return {
        name: tuple(_tidy(value) for value in np.quantile(values, deciles).tolist())
        for name, values in signals.items()
        if values.size
    }


def _tidy(value: float) -> float:
    return float(f"{value:.6g}")
