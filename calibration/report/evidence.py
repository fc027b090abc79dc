"""The evidence of a calibration: from its pools and labels to ``ReportData``.

Pure, except that it looks up the passages shown as examples. Figures are of queries that had no
part in the choice: held out, or left out of it in turn.
"""

from collections import Counter
from typing import Any

import numpy as np

from calibration.calibrate import Calibration
from calibration.calibrate_route import ORDERING_SHARE, RouteOutcome, Settings
from calibration.certify import Certification
from calibration.curve import curve
from calibration.evaluate import (
    CONFIDENCE,
    bootstrap_interval,
    bootstrap_ratio,
    per_query,
)
from calibration.fit import fit_temperature
from calibration.pool_labels import judged_share, label
from calibration.report.data import Reliability, ReportData, RouteReport
from calibration.report.dial import dial
from calibration.report.dropped import dropped_passages
from calibration.report.passages import PassageOf
from calibration.report.reliability import expected_calibration_error, reliability_bins
from calibration.report.summary import summarise
from calibration.results import COMPARED
from calibration.sufficiency import sufficiency_words
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.scores import is_relative
from ctxguard.core.types import Route
from ctxguard.profile.describe import describe_policy

SEED_RULE_K, SEED_RULE_RATIO = 3, 0.7
SEED_RULE = "3 and 70%"
"""At most 3 passages, each with at least 70% of the best score: a rule that needs no labels."""

_COMPARED = (*COMPARED, "pooled_recall", "served_mrr", "recall_loss")
_JUDGED_AT = (1, 10)


def report(
    calibration: Calibration,
    passages: PassageOf | None = None,
) -> ReportData:
    """Gather what a person needs to check a calibration.

    Args:
        calibration: Result of ``calibration.calibrate.calibrate``.
        passages: Returns a passage by its id, such as ``HybridRetriever.passage``, for the
            examples, or raises KeyError. Without it, or on KeyError, only the id is shown.

    Returns:
        The data for ``write_html`` and ``write_json``; equal calibrations give equal data.
    """
    profile, settings = calibration.profile, calibration.settings
    routes = tuple(
        _route(calibration, route, passages) for route in Route if route in calibration.outcomes
    )
    first = routes[0]
    return ReportData(
        profile_id=profile.profile_id,
        dataset=calibration.dataset.name,
        serving_k=settings.serving_k,
        confidence=CONFIDENCE,
        routes=routes,
        dial=dial(
            calibration.outcomes[first.route],
            first.summary.by_size,
            calibration.dataset,
            passages,
            serving_k=settings.serving_k,
        ),
        labels=_label_counts(calibration),
        utilities=profile.utilities,
        fusion=profile.fusion,
        fingerprint=profile.fingerprint,
        provenance=profile.provenance,
    )


def certificate_words(outcome: RouteOutcome, settings: Settings) -> str:
    """Put a route's certificate in words, or why it has none and what would give it one."""
    certificate, test, promise = (
        outcome.profile.certificate,
        outcome.certification,
        settings.promise,
    )
    if certificate is not None:
        return certificate.statement
    k = settings.serving_k
    if test is not None and promise is not None:
        return (
            f"None: none of {test.tested} policies that gain utility over the first {k} could be "
            f"shown to keep mean recall loss ≤ {promise.alpha:g} with probability "
            f"{1 - promise.delta:g} on {test.n_recall} answerable test queries. "
            f"{_labels_needed(test)} The first {k} are kept."
        )
    if outcome.profile.policy == outcome.today.policy:
        return f"None is needed: the first {k} passages are kept, as today."
    evidence = outcome.profile.evidence
    if evidence is None or evidence.shown_by == "folds":
        return (
            "None: the verdict is by queries left out of the choice in turn, which is evidence "
            "and no proof. The key held-out = 0.5 holds out half of them, to certify the cost."
        )
    return (
        f"None: no held-out query has a relevant passage among the first {k}, so recall loss is "
        "undefined. Label more queries."
    )


def _labels_needed(test: Certification) -> str:
    if test.labels_needed is None:
        return "No number of labels would be enough on queries like these: relax the promise."
    defined = test.n_recall / test.n_queries
    total = int(np.ceil(test.labels_needed / defined / (1.0 - ORDERING_SHARE)))
    return (
        f"About {test.labels_needed} test queries with a defined recall loss would be enough if "
        f"they are like these, of which {test.n_recall} of {test.n_queries} define it: about "
        f"{total} labelled queries to choose on in all, of which a share of {ORDERING_SHARE:g} "
        "orders the policies."
    )


def _route(
    calibration: Calibration,
    route: Route,
    passages: PassageOf | None,
) -> RouteReport:
    outcome, settings = calibration.outcomes[route], calibration.settings
    chosen, seed, (pools, labels) = outcome.profile, settings.seed, outcome.route.measured
    plain = RatioPolicy(k=SEED_RULE_K)
    if is_relative(pools.kind):
        temperature = fit_temperature(calibration.pools[route])
        plain = RatioPolicy(k=SEED_RULE_K, min_ratio=SEED_RULE_RATIO, temperature=temperature)
    rule = {SEED_RULE: (describe_policy(plain), per_query(pools, labels, plain))}
    irrelevant, relevant = dropped_passages(
        outcome, calibration.dataset, passages, bare_k=settings.serving_k, seed=seed
    )
    most = max(chosen.policy.k, settings.serving_k)
    return RouteReport(
        route=route,
        score_kind=chosen.score_kind,
        summary=summarise(outcome, settings, metrics=_COMPARED, others=rule),
        why=chosen.why,
        certificate=chosen.certificate,
        certificate_words=certificate_words(outcome, settings),
        sufficiency=sufficiency_words(chosen.sufficiency),
        asking=chosen.asking,
        assessor=chosen.assessor,
        answerable=labels.n_answerable,
        today=curve(pools, labels, RatioPolicy(k=most), seed=seed),
        reliability=_reliability(outcome, seed=seed),
        dropped_irrelevant=irrelevant,
        dropped_relevant=relevant,
        **_retrieved(calibration, route),
    )


def _reliability(outcome: RouteOutcome, *, seed: int) -> Reliability | str:
    (_, labels), values = outcome.route.measured, outcome.route.chances
    if values is None:
        return "This policy compares scores with the best one and has no probability."
    kept = np.zeros(values.shape, dtype=bool)
    np.put_along_axis(kept, outcome.chosen.order, outcome.chosen.kept, axis=1)
    relevant, own = labels.relevant, np.nan_to_num(values)
    total = float(kept.sum())
    return Reliability(
        bins=reliability_bins(values, relevant),
        expected_calibration_error=expected_calibration_error(values, relevant, seed=seed),
        candidates=int((~np.isnan(values)).sum()),
        kept_probability=float((own * kept).sum()) / total if total else None,
        kept_relevant=bootstrap_ratio(
            (relevant & kept).sum(axis=1).astype(float), kept.sum(axis=1).astype(float), seed=seed
        ),
    )


def _retrieved(calibration: Calibration, route: Route) -> dict[str, Any]:
    """Measure shares judged and recall of the retriever's own order, over all queries."""
    utilities, seed = calibration.profile.utilities, calibration.settings.seed
    pools = calibration.pools[route]
    labels = label(pools, calibration.dataset, utilities)
    depth = pools.scores.shape[1]
    ks = sorted({*(k for k in _JUDGED_AT if k < depth), calibration.settings.serving_k, depth})
    n_relevant = np.where(labels.n_relevant > 0, labels.n_relevant, np.nan)
    recall = labels.relevant.sum(axis=1) / n_relevant
    return {
        "judged": {k: bootstrap_interval(judged_share(labels, k), seed=seed) for k in ks},
        "recall_at_depth": bootstrap_interval(recall, seed=seed),
    }


def _label_counts(calibration: Calibration) -> dict[str, Any]:
    dataset = calibration.dataset
    grades = Counter(grade for judged in dataset.qrels.values() for grade in judged.values())
    kinds = Counter(kind for kinds in dataset.distractors.values() for kind in kinds.values())
    parts = {"chosen_on": calibration.chosen_on, "held_out": calibration.held_out}
    return {
        "queries": len(dataset),
        "answerable": len(dataset.answerable),
        "unanswerable": len(dataset) - len(dataset.answerable),
        **{
            name: (0, 0) if part is None else (len(part), len(part.answerable))
            for name, part in parts.items()
        },
        "grades": {str(grade): grades[grade] for grade in sorted(grades)},
        "negatives": {kind: kinds[kind] for kind in sorted(kinds)},
    }
