"""What a person should see before they believe a calibration: today beside the choice.

Pure: a route's outcome in, rows with intervals and warnings out. The command line prints it and
the report begins with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from calibration.calibrate_route import FEWEST_TO_CHOOSE, TIGHT, RouteOutcome, Settings
from calibration.evaluate import QueryMetrics, bootstrap_interval
from calibration.results import Results, differences, tabulate
from calibration.verdict import FEWEST_HELD_OUT
from ctxguard.core.interval import Interval
from ctxguard.profile.describe import describe_policy

SUMMARY_METRICS = ("recall", "precision", "harm", "udcg_strict", "kept", "tokens")

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
        held_out: Whether they took no part in the choice. Otherwise differences have no value,
            since a gain is the luck of the choice, and the means are optimistic.
        results: Today, the choice, and what other objectives would give.
        keeps: What each of these policies keeps, in words.
        judged: Share of the first ``serving_k`` that has a label.
        warnings: What to beware of, one line each.
    """

    verdict: str
    serving_k: int
    queries: int
    held_out: bool
    results: Results
    keeps: Mapping[str, str]
    judged: Interval
    warnings: tuple[str, ...]


def summarise(
    outcome: RouteOutcome,
    settings: Settings,
    *,
    held_out: bool,
    metrics: tuple[str, ...] = SUMMARY_METRICS,
    others: Mapping[str, tuple[str, QueryMetrics]] | None = None,
) -> Summary:
    """Put today's first k beside the choice and what else could be chosen.

    Args:
        outcome: One route's choice.
        settings: Of the calibration.
        held_out: Whether the options were measured on queries that took no part in the choice.
        metrics: The metrics of the table.
        others: Policies beside or instead of the options, by name: what they keep, in words, and
            their metrics on the same queries.
    """
    options = {each.name: (describe_policy(each.policy), each.metrics) for each in outcome.options}
    options |= others or {}
    measured = {name: own for name, (_, own) in options.items()}
    today, chosen, seed = outcome.today.metrics, outcome.chosen.metrics, settings.seed
    judged = bootstrap_interval(today.values["judged"], seed=seed)
    recall = differences(chosen, today, ("recall",), seed=seed)["recall"]
    verdict = outcome.profile.verdict
    return Summary(
        verdict="" if verdict is None else verdict.statement,
        serving_k=settings.serving_k,
        queries=len(today.query_ids),
        held_out=held_out,
        results=tabulate(measured, metrics, proven=held_out, seed=seed),
        keeps={name: words for name, (words, _) in options.items()},
        judged=judged,
        warnings=tuple(_warnings(outcome, recall, judged, settings, held_out=held_out)),
    )


def _warnings(
    outcome: RouteOutcome, recall: Interval, judged: Interval, settings: Settings, *, held_out: bool
) -> list[str]:
    lines = []
    k, certificate = settings.serving_k, outcome.profile.certificate
    is_today = outcome.chosen.policy == outcome.today.policy
    if judged.value is not None and judged.value < LEAST_JUDGED:
        lines.append(
            f"only {judged.value:.0%} of the first {k} passages were ever labelled: harm and "
            "precision are mostly a guess; label the passages that are served today"
        )
    if not held_out and not is_today:
        mend = f"label {FEWEST_TO_CHOOSE + FEWEST_HELD_OUT} answerable queries or more"
        if settings.held_out is not None:
            mend = "hold out a share of them"
        lines.append(
            "no query was held out, so the figures are those of the queries that chose, which is "
            f"optimistic, and nothing is certified by them; {mend}"
        )
    if recall.value is not None and recall.value < -NOTABLE_LOSS:
        noise = recall.upper is None or recall.upper >= 0.0
        lines.append(
            f"mean recall is {-recall.value:.3f} lower than that of the first {k}"
            + (", which may be noise" if noise else "")
        )
    if certificate is not None and not is_today and certificate.promises_nothing:
        lines.append(
            f"the certificate promises nothing: {certificate.n_recall} held-out queries allow a "
            "loss of more than half of the recall"
        )
    if certificate is not None and not is_today and outcome.labels_needed is not None:
        difference = certificate.recall_difference
        if difference is not None and outcome.labels_needed > difference.n:
            lines.append(
                f"about {outcome.labels_needed} held-out queries like these would show that mean "
                f"recall falls by {TIGHT:g} at most; {difference.n} were at hand"
            )
    return lines
