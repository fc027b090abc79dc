"""The evidence for a calibration, gathered: from its pools and labels to ``ReportData``.

Pure, but for the look-up of the passages that stand as examples. Everything is measured on the
queries held out, where there are any: they took no part in any choice.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibration.calibrate import Calibration
from calibration.certify import ORDERING_SHARE, RouteOutcome
from calibration.comparing.differences import BETTER_WHEN
from calibration.evaluate import (
    CONFIDENCE,
    DESCRIPTIONS,
    QueryMetrics,
    bootstrap_interval,
    per_query,
)
from calibration.fit import fit_temperature, pool_signals, probabilities
from calibration.labelling.labels import Dataset, Query
from calibration.losses import Labels, label
from calibration.replay import Pools
from calibration.report.data import (
    JudgedShare,
    LabelCounts,
    MetricComparison,
    Reliability,
    ReportData,
    RouteReport,
    SegmentRow,
    Segments,
)
from calibration.report.dropped import PassageOf, dropped_passages
from calibration.report.reliability import (
    expected_calibration_error,
    ratio_interval,
    reliability_bins,
)
from calibration.report.tradeoffs import by_k, frontier, price, settings_of
from calibration.risk import DEFAULT_DELTA
from calibration.select import Certification, Promise
from ctxguard.metrics import Utilities
from ctxguard.policy import ExpectedUtilityPolicy, Policy, RatioPolicy, decide
from ctxguard.profile import RouteProfile
from ctxguard.scores import is_relative
from ctxguard.types import DEFAULT_K, FloatArray, Route

BARE_K = DEFAULT_K
"""The fixed context that the chosen policy is compared with."""

SEED_RULE_K, SEED_RULE_RATIO = 3, 0.7
SMALLEST_SEGMENT = 5
NO_SEGMENT = "(none)"
TOPIC = "topic"
"""The column that tells segments where the calibration had none."""

_COMPARED = (*BETTER_WHEN, "recall_loss")
_JUDGED_AT = (1, 5, 10)
_DIGITS = 6


@dataclass(frozen=True)
class _Measured:
    """Recorded queries with their labels, and three policies applied to them."""

    pools: Pools
    labels: Labels
    first_k: QueryMetrics
    seed_rule: QueryMetrics
    chosen: QueryMetrics


def report(
    calibration: Calibration,
    passages: PassageOf | None = None,
    *,
    promise: Promise | None = None,
) -> ReportData:
    """Everything that a person needs to check a calibration.

    Args:
        calibration: What ``calibration.calibrate.calibrate`` returned.
        passages: A passage by its id, such as ``HybridRetriever.passage``, for the examples;
            a KeyError, or None, shows ids alone.
        promise: What was asked for. A certificate says it already; where none was possible,
            this is what the report says could not be certified.

    Returns:
        The data of ``write_html`` and ``write_json``; the same calibration gives the same.
    """
    outcomes = calibration.outcomes
    fullest = sorted(outcomes, key=lambda route: list(Route).index(route))
    data = ReportData(
        profile_id=calibration.profile.profile_id,
        dataset=calibration.dataset.name,
        baseline=_baseline(calibration),
        confidence=CONFIDENCE,
        routes=tuple(_route(calibration, route, passages, promise) for route in fullest),
        labels=_label_counts(calibration),
        utilities=calibration.profile.utilities,
        fusion=calibration.profile.fusion,
        fingerprint=calibration.profile.fingerprint,
        provenance=calibration.profile.provenance,
    )
    return ReportData.model_validate(_rounded(data.model_dump()))


def _baseline(calibration: Calibration) -> str:
    """What recall loss was relative to, as the labels of the choice have it."""
    baselines = {
        outcome.profile.certificate.baseline
        for outcome in calibration.outcomes.values()
        if outcome.profile.certificate is not None
    }
    if baselines:
        return baselines.pop()
    k = _baseline_k(calibration)
    return "pool" if k is None else f"k={k}"


def _baseline_k(calibration: Calibration) -> int | None:
    counted = depth = 0
    for outcome in calibration.outcomes.values():
        labels = outcome.chosen_grid.labels
        counted = max(counted, int(labels.in_baseline.sum(axis=1).max()))
        depth = max(depth, int((outcome.chosen_grid.survival.reach >= 0).sum(axis=1).max()))
    return None if counted == depth else counted


def _route(
    calibration: Calibration, route: Route, passages: PassageOf | None, promise: Promise | None
) -> RouteReport:
    outcome, profile = calibration.outcomes[route], calibration.profile
    chosen, seed = outcome.profile, profile.provenance.seed
    utilities, baseline_k = profile.utilities, _baseline_k(calibration)
    part = calibration.chosen_on if calibration.held_out is None else calibration.held_out
    pools = calibration.pools[route].subset([query.query_id for query in part.queries])
    labels = label(pools, calibration.dataset, utilities, baseline_k=baseline_k)
    column = _segment_column(calibration)
    segment_of = {
        query.query_id: NO_SEGMENT if column is None else _segment(query, column)
        for query in part.queries
    }

    def policy_of(query_id: str) -> Policy:
        own = chosen.segments.get(segment_of[query_id])
        return chosen.policy if own is None else own.policy

    measured = _measured(calibration, outcome, pools, labels, policy_of)
    reliability, no_reliability = _reliability(
        chosen, pools, labels, held_out=calibration.held_out is not None, seed=seed
    )
    segments, no_segments = _segments(measured, chosen, column, segment_of, seed=seed)
    irrelevant, relevant = dropped_passages(
        pools, labels, part, policy_of, passages, bare_k=BARE_K, seed=seed
    )
    delta = _delta(outcome, promise)
    return RouteReport(
        route=route,
        score_kind=chosen.score_kind,
        policy=settings_of(chosen.policy),
        without_promise=settings_of(outcome.uncertified),
        why=chosen.why,
        certificate=chosen.certificate,
        no_certificate=_no_certificate(calibration, outcome, promise),
        held_out=calibration.held_out is not None,
        queries=len(pools),
        answerable=labels.n_answerable,
        comparison=_comparison(measured, seed),
        by_k=by_k(pools, labels, chosen.policy, seed=seed),
        frontier=frontier(outcome, seed=seed),
        reliability=reliability,
        no_reliability=no_reliability,
        price=price(outcome, pools, labels, utilities, delta=delta, seed=seed)
        if calibration.held_out is not None
        else None,
        segments=segments,
        no_segments=no_segments,
        dropped_irrelevant=irrelevant,
        dropped_relevant=relevant,
        **_retrieved(calibration, route, utilities, seed),
    )


def _measured(
    calibration: Calibration,
    outcome: RouteOutcome,
    pools: Pools,
    labels: Labels,
    policy_of: Callable[[str], Policy],
) -> _Measured:
    utilities = calibration.profile.utilities
    seed_rule = RatioPolicy(k=SEED_RULE_K)
    if is_relative(pools.kind):
        temperature = fit_temperature(calibration.pools[pools.route])
        seed_rule = RatioPolicy(k=SEED_RULE_K, min_ratio=SEED_RULE_RATIO, temperature=temperature)
    chosen = per_query(pools, labels, outcome.profile.policy, utilities)
    values = {name: column.copy() for name, column in chosen.values.items()}
    for row, query_id in enumerate(pools.query_ids):
        own = policy_of(query_id)
        if own is not outcome.profile.policy:
            alone = np.array([row])
            served = per_query(pools.subset([query_id]), labels.rows(alone), own, utilities)
            for name, column in served.values.items():
                values[name][row] = column[0]
    return _Measured(
        pools,
        labels,
        per_query(pools, labels, RatioPolicy(k=BARE_K), utilities),
        per_query(pools, labels, seed_rule, utilities),
        QueryMetrics(chosen.query_ids, values),
    )


def _comparison(measured: _Measured, seed: int) -> tuple[MetricComparison, ...]:
    first_k, seed_rule = measured.first_k.values, measured.seed_rule.values
    chosen = measured.chosen.values
    return tuple(
        MetricComparison(
            metric=name,
            description=DESCRIPTIONS[name],
            better_when="lower" if name == "recall_loss" else BETTER_WHEN[name],
            first_k=bootstrap_interval(first_k[name], seed=seed),
            seed_rule=bootstrap_interval(seed_rule[name], seed=seed),
            chosen=bootstrap_interval(chosen[name], seed=seed),
            against_first_k=bootstrap_interval(chosen[name] - first_k[name], seed=seed),
            against_seed_rule=bootstrap_interval(chosen[name] - seed_rule[name], seed=seed),
        )
        for name in _COMPARED
    )


def _delta(outcome: RouteOutcome, promise: Promise | None) -> float:
    if outcome.profile.certificate is not None:
        return outcome.profile.certificate.delta
    return DEFAULT_DELTA if promise is None else promise.delta


def _no_certificate(
    calibration: Calibration, outcome: RouteOutcome, promise: Promise | None
) -> str | None:
    """Why a route has no certificate; None where it has one."""
    if outcome.profile.certificate is not None:
        return None
    test = outcome.certification
    if test is None:
        if calibration.held_out is None:
            return (
                "None: no promise was asked for and no query was held out. Hold a share of the "
                "queries out, and what the policy costs in recall can be certified."
            )
        return (
            "None: no query held out has a relevant passage in the baseline, so recall loss is "
            "undefined. Label more queries, or deepen the retrieval."
        )
    what = "the promise"
    if promise is not None:
        harm = "" if promise.beta is None else f" and mean harm ≤ {promise.beta:g}"
        what = f"mean recall loss ≤ {promise.alpha:g}{harm} with probability {1 - promise.delta:g}"
    return (
        f"None: of {test.tested} policies in the sequence none could be shown to keep {what} on "
        f"{test.n_recall} answerable test queries. {_labels_needed(test)} This policy is the one "
        "of highest strict UDCG, taken because an uncertified one was allowed."
    )


def _labels_needed(test: Certification) -> str:
    if test.labels_needed is None:
        return "No number of labels would do on queries like these: relax the promise."
    total = int(np.ceil(test.labels_needed / (1.0 - ORDERING_SHARE)))
    return (
        f"About {test.labels_needed} answerable test queries would do, were the others like these: "
        f"{total} to choose on in all, a share of {ORDERING_SHARE:g} of which orders the policies."
    )


def _reliability(
    chosen: RouteProfile, pools: Pools, labels: Labels, *, held_out: bool, seed: int
) -> tuple[Reliability | None, str | None]:
    policy = chosen.policy
    if not isinstance(policy, ExpectedUtilityPolicy):
        return None, "This policy compares scores with the best one and has no probability."
    if not held_out:
        return None, "No query was held out, and on its own queries a model looks too good."
    values = probabilities(policy.model, pools, pool_signals(pools))
    relevant = labels.relevant
    kept = np.zeros((len(pools), 3))
    for row, ranking in enumerate(pools.rankings()):
        decision = decide(ranking, policy)
        columns = list(decision.kept)
        kept[row] = (len(columns), values[row, columns].sum(), relevant[row, columns].sum())
    total = float(kept[:, 0].sum())
    return (
        Reliability(
            bins=reliability_bins(values, relevant),
            expected_calibration_error=expected_calibration_error(values, relevant, seed=seed),
            candidates=int((~np.isnan(values)).sum()),
            kept_probability=float(kept[:, 1].sum()) / total if total else None,
            kept_relevant=ratio_interval(kept[:, 2], kept[:, 0], seed=seed),
        ),
        None,
    )


def _segment_column(calibration: Calibration) -> str | None:
    if calibration.profile.segment_by is not None:
        return calibration.profile.segment_by
    known = any(TOPIC in (query.metadata or {}) for query in calibration.dataset.queries)
    return TOPIC if known else None


def _segment(query: Query, column: str) -> str:
    value = (query.metadata or {}).get(column)
    return NO_SEGMENT if value is None else str(value)


def _segments(
    measured: _Measured,
    chosen: RouteProfile,
    column: str | None,
    segment_of: dict[str, str],
    *,
    seed: int,
) -> tuple[Segments | None, str | None]:
    if column is None:
        return None, (
            f"The queries have no segments: no column was named, and none is called {TOPIC!r}."
        )
    rows: dict[str, list[int]] = {}
    for row, query_id in enumerate(measured.pools.query_ids):
        rows.setdefault(segment_of[query_id], []).append(row)
    large = {name: found for name, found in rows.items() if len(found) >= SMALLEST_SEGMENT}
    small = sorted(rows.keys() - large.keys())
    table = [
        _segment_row(name, large[name], measured, own=name in chosen.segments, seed=seed)
        for name in sorted(large, key=lambda name: (-len(large[name]), name))
    ]
    if small:
        rest = sorted(row for name in small for row in rows[name])
        own = any(name in chosen.segments for name in small)
        name = f"{len(small)} with fewer than {SMALLEST_SEGMENT} queries each"
        table.append(_segment_row(name, rest, measured, own=own, seed=seed))
    return Segments(column=column, rows=tuple(table), gathered=len(small)), None


def _segment_row(
    name: str, rows: list[int], measured: _Measured, *, own: bool, seed: int
) -> SegmentRow:
    chosen, first_k = measured.chosen.values, measured.first_k.values
    gain: FloatArray = chosen["udcg_strict"] - first_k["udcg_strict"]
    return SegmentRow(
        segment=name,
        queries=len(rows),
        own_policy=own,
        udcg_strict=bootstrap_interval(chosen["udcg_strict"][rows], seed=seed),
        against_first_k=bootstrap_interval(gain[rows], seed=seed),
        recall=bootstrap_interval(chosen["recall"][rows], seed=seed),
        kept=bootstrap_interval(chosen["kept"][rows], seed=seed),
    )


def _retrieved(
    calibration: Calibration, route: Route, utilities: Utilities, seed: int
) -> dict[str, Any]:
    """What is known of the retriever's own order over all queries, before any policy."""
    pools = calibration.pools[route]
    labels = label(pools, calibration.dataset, utilities)
    judged, present = labels.judged, ~np.isnan(pools.scores)
    depth = pools.scores.shape[1]
    ks = [k for k in _JUDGED_AT if k < depth] + [depth]
    relevant_known = np.array([sum(g > 0 for g in grades) for grades in labels.query_grades])
    with np.errstate(invalid="ignore", divide="ignore"):
        recall = np.where(relevant_known > 0, labels.relevant.sum(axis=1) / relevant_known, np.nan)
        shares = {k: judged[:, :k].sum(axis=1) / present[:, :k].sum(axis=1) for k in ks}
    return {
        "judged": tuple(
            JudgedShare(k=k, share=bootstrap_interval(share, seed=seed))
            for k, share in shares.items()
        ),
        "recall_at_depth": bootstrap_interval(recall, seed=seed),
    }


def _label_counts(calibration: Calibration) -> LabelCounts:
    dataset = calibration.dataset
    grades = Counter(grade for judged in dataset.qrels.values() for grade in judged.values())
    kinds = Counter(kind for known in dataset.distractors.values() for kind in known.values())

    def sizes(part: Dataset | None) -> tuple[int, int]:
        return (0, 0) if part is None else (len(part), len(part.answerable))

    return LabelCounts(
        queries=len(dataset),
        answerable=len(dataset.answerable),
        unanswerable=len(dataset) - len(dataset.answerable),
        chosen_on=sizes(calibration.chosen_on),
        held_out=sizes(calibration.held_out),
        grades={str(grade): grades[grade] for grade in sorted(grades)},
        negatives={kind: kinds[kind] for kind in sorted(kinds)},
    )


def _rounded(value: Any) -> Any:
    """Six significant digits: more than any interval here supports, and stable as text."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_rounded(item) for item in value)
    return value
