"""Collects the contents of a calibration's report.

Pure, except that it looks up the passages shown as examples. Figures are of queries that had no
part in the choice: held out, or left out of it in turn.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibration.calibrate import Calibration
from calibration.calibrate_route import ORDERING_SHARE, RouteOutcome
from calibration.certify import Certification, sufficiency_words
from calibration.replay import PassageOf
from calibration.report.dial import Dial, dial
from calibration.report.dropped import Dropped, dropped_passages
from calibration.report.summary import Summary, summarise
from calibration.results import COMPARED
from ctxguard.core.types import Passage, Route
from ctxguard.measure.interval import Interval, bootstrap_ratio
from ctxguard.profile.schema import Profile

_COMPARED = (*COMPARED, "pooled_recall", "served_mrr", "recall_loss", "judged", "recall_at_depth")


@dataclass(frozen=True)
class RouteReport:
    """The effects of one route's policy.

    Attributes:
        summary: The table of results, and what to beware of.
        certificate: The certificate in words, or why there is none.
        sufficiency: Whether contexts can be called insufficient, and on what evidence, in words.
        answerable: Number of measured queries with a relevant passage.
        recall_of_first: Mean recall of the retriever's first k passages, for k = 1, 2, …; empty
            where no measured query is answerable.
        tokens_of_first: Their mean tokens, likewise; empty where texts are not known.
        expected: Mean P(relevant) of the passages that the policy keeps, by models that did not
            see their labels; None without probabilities.
        found: Share of those passages that is labelled relevant; its n counts queries.
        dropped: Relevant passages among those served today.
    """

    route: Route
    summary: Summary
    certificate: str
    sufficiency: str
    answerable: int
    recall_of_first: tuple[float, ...]
    tokens_of_first: tuple[float, ...]
    expected: float | None
    found: Interval
    dropped: Dropped


@dataclass(frozen=True)
class ReportData:
    """The evidence of a calibration; it holds no labels, and no passages except the examples shown.

    Attributes:
        profile: The calibrated profile; it has no date, so equal calibrations give equal bytes.
        serving_k: How many passages are served today; recall loss is relative to them.
        routes: The first answers while every stage works.
        dial: Contexts of the first route from the leanest to the richest; None where there is only
            today's.
        labels: Numbers of queries: all, those with a relevant passage (``answerable``) and those
            without one, for which every passage kept is harm; queries and answerable ones that
            were chosen on and held out; judged passages by grade; misleading ones by kind.
    """

    profile: Profile
    dataset: str
    serving_k: int
    routes: tuple[RouteReport, ...]
    dial: Dial | None
    labels: Mapping[str, Any]


def report(calibration: Calibration, passages: PassageOf | None = None) -> ReportData:
    """Gather what a person needs to check a calibration; equal calibrations give equal data.

    Args:
        passages: Returns a passage by its id, such as ``HybridRetriever.passage``, for the
            examples, or raises KeyError. Without it, or on KeyError, only the id is shown.
    """
    dataset = calibration.dataset
    passage_of = dict[str, Passage]().__getitem__ if passages is None else passages
    routes = tuple(
        _route(calibration, route, passage_of) for route in Route if route in calibration.outcomes
    )
    first, summary = calibration.outcomes[routes[0].route], routes[0].summary
    return ReportData(
        profile=calibration.profile,
        dataset=dataset.name,
        serving_k=calibration.settings.serving_k,
        routes=routes,
        dial=dial(first, summary, dataset, passage_of),
        labels=_label_counts(calibration),
    )


def certificate_words(outcome: RouteOutcome) -> str:
    """Put a route's certificate in words, or say why it has none and how to get one."""
    settings, certificate = outcome.route.settings, outcome.profile.certificate
    test, alpha = outcome.certification, settings.alpha
    if certificate is not None:
        return certificate.statement
    k = settings.serving_k
    if test is not None and alpha is not None:
        return (
            f"None: none of {test.tested} policies that gain utility over the first {k} could be "
            f"shown to keep mean recall loss ≤ {alpha:g} with probability "
            f"{1 - settings.delta:g} on {test.n_recall} answerable test queries. "
            f"{_labels_needed(test)} The first {k} are kept."
        )
    if outcome.profile.policy == outcome.today.policy:
        return f"None is needed: the first {k} passages are kept, as today."
    evidence = outcome.profile.evidence
    if evidence is None or evidence.shown_by == "folds":
        return (
            "None: the verdict rests on queries left out of the choice in turn, which is evidence "
            "but not proof. The key held-out = 0.5 holds out half of them, to certify the cost."
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


def _route(calibration: Calibration, route: Route, passage_of: PassageOf) -> RouteReport:
    outcome = calibration.outcomes[route]
    pools, probabilities = outcome.route.measured, outcome.route.measured.probabilities
    some = pools.n_relevant > 0
    recall = pools.relevant[some].cumsum(axis=1) / pools.n_relevant[some, None]
    kept = np.zeros(pools.grades.shape, dtype=bool)
    np.put_along_axis(kept, outcome.chosen.order, outcome.chosen.kept, axis=1)
    expected = None
    if probabilities is not None and kept.any():
        expected = float(np.nan_to_num(probabilities)[kept].sum() / kept.sum())
    found = (pools.relevant & kept).sum(axis=1, dtype=np.float64)
    tokens: list[float] = []
    if pools.tokens is not None:
        tokens = np.nan_to_num(pools.tokens).cumsum(axis=1).mean(axis=0).tolist()
    return RouteReport(
        route=route,
        summary=summarise(outcome, metrics=_COMPARED),
        certificate=certificate_words(outcome),
        sufficiency=sufficiency_words(outcome.profile.sufficiency),
        answerable=pools.n_answerable,
        recall_of_first=tuple(recall.mean(axis=0).tolist()) if some.any() else (),
        tokens_of_first=tuple(tokens),
        expected=expected,
        found=bootstrap_ratio(
            found, kept.sum(axis=1, dtype=np.float64), seed=calibration.settings.seed
        ),
        dropped=dropped_passages(outcome, calibration.dataset, passage_of),
    )


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
