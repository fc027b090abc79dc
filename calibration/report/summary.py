"""What a person should see before they believe a calibration: today beside the choice.

Pure: a route's outcome in, rows with intervals and warnings out. The command line prints it and
the report begins with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from calibration.calibrate_route import SIZES, Option, RouteOutcome, Settings
from calibration.evaluate import QueryMetrics, bootstrap_interval
from calibration.results import Results, differences, tabulate
from ctxguard._support.words import count
from ctxguard.core.interval import Interval
from ctxguard.profile.describe import describe_policy

SUMMARY_METRICS = ("recall", "precision", "udcg", "misleading", "kept", "tokens")

LEAST_JUDGED = 0.5
"""Below this share of labels among the passages served today, their figures are mostly guesses."""

NOTABLE_LOSS = 0.01
"""A measured decrease in mean recall that is pointed out."""


@dataclass(frozen=True)
class Summary:
    """What a person should see first.

    Attributes:
        verdict: Whether the choice may be served, in words.
        serving_k: How many passages are served today.
        queries: Number of queries measured on.
        shown_by: ``held_out`` if the queries took no part in anything, ``folds`` if each fifth was
            measured by what the others choose.
        results: Today, the choice, and what leaner and richer contexts would give.
        missing: Sizes of context for which nothing but today's is shown to be better.
        by_size: Names of the policies of ``results`` by what they cost: today's, then each size of
            context that is at hand, from the least, and after it the first k of equal tokens.
        keeps: What each of these policies keeps, in words.
        judged: Share of the first ``serving_k`` that has a label.
        warnings: What to beware of, one line each.
    """

    verdict: str
    serving_k: int
    queries: int
    shown_by: str
    results: Results
    missing: tuple[str, ...]
    by_size: Mapping[str, str]
    keeps: Mapping[str, str]
    judged: Interval
    warnings: tuple[str, ...]


def summarise(
    outcome: RouteOutcome,
    settings: Settings,
    *,
    metrics: tuple[str, ...] = SUMMARY_METRICS,
    others: Mapping[str, tuple[str, QueryMetrics]] | None = None,
) -> Summary:
    """Put today's first k beside the choice and what else could be chosen.

    Args:
        outcome: One route's choice.
        settings: Of the calibration.
        metrics: The metrics of the table.
        others: Policies beside or instead of the options, by name: what they keep, in words, and
            their metrics on the same queries.
    """
    by_size = _by_size(outcome, settings)
    options = {
        each.name: (describe_policy(each.policy), each.metrics)
        for each in (*outcome.options, *by_size.values())
    }
    options |= others or {}
    measured = {name: own for name, (_, own) in options.items()}
    today, chosen, seed = outcome.today.metrics, outcome.chosen.metrics, settings.seed
    judged = bootstrap_interval(today.values["judged"], seed=seed)
    recall = differences(chosen, today, ("recall",), seed=seed)["recall"]
    verdict, evidence = outcome.profile.verdict, outcome.profile.evidence
    shown_by = "folds" if evidence is None else evidence.shown_by
    return Summary(
        verdict="" if verdict is None else verdict.statement,
        serving_k=settings.serving_k,
        queries=len(today.query_ids),
        shown_by=shown_by,
        results=tabulate(measured, metrics, seed=seed),
        missing=_missing(outcome, settings),
        by_size={size: each.name for size, each in by_size.items()},
        keeps={name: words for name, (words, _) in options.items()},
        judged=judged,
        warnings=tuple(_warnings(outcome, recall, judged, settings)),
    )


def _missing(outcome: RouteOutcome, settings: Settings) -> tuple[str, ...]:
    if settings.promise is not None or settings.context == "utility":
        return ()
    asked = outcome.chosen.policy != outcome.today.policy
    return tuple(
        size
        for size in SIZES
        if size not in outcome.others and not (size == settings.context and asked)
    )


def _by_size(outcome: RouteOutcome, settings: Settings) -> dict[str, Option]:
    """Return what is served by what it costs; sizes that would serve the same share a row."""
    offered = {str(size): option for size, option in outcome.others.items()}
    if outcome.chosen.policy != outcome.today.policy:
        wanted = settings.context if settings.promise is None else "utility"
        offered["chosen" if wanted == "utility" else wanted] = outcome.chosen
    found = {"today": outcome.today}
    for size in ("chosen", *SIZES):
        option = offered.pop(size, None)
        if option is None:
            continue
        same = [other for other, each in offered.items() if each.policy == option.policy]
        if any(each is outcome.chosen for each in (offered[other] for other in same)):
            option = outcome.chosen
        found[", ".join((size, *same))] = option
        for other in same:
            del offered[other]
        first = outcome.route.of_equal_tokens(option)
        if first is not None:
            found[first.name] = first
    return found


def _warnings(
    outcome: RouteOutcome, recall: Interval, judged: Interval, settings: Settings
) -> list[str]:
    lines = []
    k, certificate = settings.serving_k, outcome.profile.certificate
    if judged.value is not None and judged.value < LEAST_JUDGED:
        lacking = round((1.0 - judged.value) * k * judged.n)
        lines.append(
            f"only {judged.value:.0%} of the first {k} passages were ever labelled: harm and "
            "precision are mostly a guess; `ctxguard label --questions DATA --out labels.jsonl` on "
            f"this system asks for the others, about {lacking:,} of {count(judged.n, 'question')}"
        )
    if recall.value is not None and recall.value < -NOTABLE_LOSS:
        noise = recall.upper is None or recall.upper >= 0.0
        lines.append(
            f"mean recall is {-recall.value:.3f} lower than that of the first {k}"
            + (", which may be noise" if noise else "")
        )
    if certificate is not None and certificate.promises_nothing:
        lines.append(
            f"the certificate promises nothing: {certificate.n_recall} held-out queries allow a "
            "loss of more than half of the recall"
        )
    return lines
